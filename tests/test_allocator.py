"""The C library keeps what a process frees, and threads share one heap: told by the library's own statistics."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left as they are")

LARGE = 2**24
SCRIPT = f"""
import ctypes, json, sys, threading
from fedrolex.core.allocator import keep_memory

kept = keep_memory() if sys.argv[1] == "with" else None
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc.mallinfo.restype = Info
before = libc.mallinfo()
place = libc.malloc({LARGE})
during = libc.mallinfo()
libc.free(place)
after = libc.mallinfo()
own = threading.Thread(target=lambda: places.append(libc.malloc(1000)))
places = [libc.malloc(1000)]
own.start(), own.join()
print(json.dumps({{
    "kept": kept,
    "mapped": during.hblkhd - before.hblkhd,
    "left": after.arena - before.arena,
    "apart": abs(places[1] - places[0]),
    "heap": after.arena,
}}))
"""


@cache
def told(how: str, **variables: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True, env=environment | variables
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_large_blocks_come_from_the_heap_and_stay_there() -> None:
    found, plain = told("with"), told("without")
    assert found["kept"] is True
    assert found["mapped"] == 0
    assert found["left"] > LARGE / 2  # the rest was there already
    assert plain["mapped"] >= LARGE
    assert plain["left"] == 0


def test_threads_share_the_heap() -> None:
    found, plain = told("with"), told("without")
    assert found["apart"] < 2 * found["heap"]
    assert plain["apart"] > 2 * plain["heap"]


def test_a_user_who_set_the_allocator_is_left_alone() -> None:
    found = told("with", MALLOC_ARENA_MAX="4")
    assert found["kept"] is False
    assert found["mapped"] >= LARGE
