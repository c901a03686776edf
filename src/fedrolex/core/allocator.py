"""The C library's allocator, told to keep what threads free."""

import ctypes
import os
import platform

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # as <malloc.h> numbers them


def keep_memory() -> bool:
    """Let freed memory stay with this process, in one heap for all threads; whether that could be arranged.

    glibc gives threads heaps of their own and hands what a step frees back to the system, so that steps begin with
    page faults, hundreds of them, for which the threads of a process wait in line. It helps most before there are
    other threads. Where the user has set glibc's own variables (``MALLOC_ARENA_MAX`` and so on), and with other C
    libraries, nothing is done.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    if not any(mallopt(MMAP_THRESHOLD, size) for size in (2**30, 2**25)):  # old versions take the second at most
        return False  # without it, the others would make things worse
    return all([mallopt(ARENA_MAX, 1), mallopt(TRIM_THRESHOLD, 2**31 - 1)])
