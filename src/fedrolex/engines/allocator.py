"""The C library's allocator, told to keep what threads free."""

from __future__ import annotations

import ctypes
import platform

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # as <malloc.h> numbers them


def keep_memory() -> bool:
    """Let freed memory stay with this process, in one heap for all threads; whether that could be arranged.

    glibc gives threads heaps of their own and hands what a step frees back to the system, so that steps begin with
    page faults, thousands of them, for which the threads of a process wait in line. To be called before there are
    other threads; with other C libraries nothing is done.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    if not any(mallopt(MMAP_THRESHOLD, size) for size in (2**30, 2**25)):  # old versions take the second at most
        return False  # without it, the others would make things worse
    return all([mallopt(ARENA_MAX, 1), mallopt(TRIM_THRESHOLD, 2**31 - 1)])
