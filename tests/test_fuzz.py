"""Files and replies that were changed at random: whatever is in them, a FedrolexError or nothing comes out.

``benchmarks/fuzz.py`` does the same for minutes, guided by coverage.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import pytest
from fuzz_targets import TARGETS, Target
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedrolex import FedrolexError

if find_spec("flwr") is not None:
    from fuzz_uploads import TARGETS as UPLOADS
else:
    UPLOADS = {}

ALL = {**TARGETS, **UPLOADS}
FLOWER = ("upload", "edits", "profile", "secure")
Change = tuple[str, int, int, bytes]

CHANGES = st.lists(
    st.tuples(st.sampled_from(["put", "insert", "delete", "repeat", "end"]), st.integers(0, 2**16),
              st.integers(0, 2**6), st.binary(max_size=9)),
    max_size=6,
)  # fmt: skip


@cache
def whole(name: str) -> list[bytes]:
    return list(ALL[name].whole())


def changed(data: bytes, changes: list[Change]) -> bytes:
    """Bytes with others put over them, inserted, deleted, repeated or cut off."""
    for how, place, length, new in changes:
        at = place % (len(data) + 1)
        before, inside, after = data[:at], data[at : at + length], data[at + length :]
        data = {
            "put": before + new + data[at + len(new) :],
            "insert": before + new + data[at:],
            "delete": before + after,
            "repeat": before + inside * (1 + len(new)) + after,
            "end": before,
        }[how]
    return data


@pytest.mark.parametrize("name", [*TARGETS, *FLOWER])
def test_whatever_bytes_say_nothing_but_a_clear_error_comes_of_them(name: str) -> None:
    if name not in ALL:
        pytest.skip("needs fedrolex[flower]")

    @settings(max_examples=60)
    @given(st.integers(0, 99), CHANGES)
    @example(0, [])
    def check(which: int, changes: list[Change]) -> None:
        examples = whole(name)
        ALL[name](changed(examples[which % len(examples)], changes))

    check()


@pytest.mark.parametrize("name", [*TARGETS, *FLOWER])
def test_what_is_changed_can_be_read_before(name: str) -> None:
    if name not in ALL:
        pytest.skip("needs fedrolex[flower]")
    for data in whole(name):
        ALL[name].read(data)


@pytest.mark.parametrize(
    ("after", "at", "new", "says"),
    [(b"table", -9, bytes([255] * 9), "more memory than there is"), (b"CREATE", 6, b"\xff", "can't decode byte 0xff")],
)
def test_a_damaged_sqlite_file_is_one_line(after: bytes, at: int, new: bytes, says: str) -> None:
    """Damaged sizes are a MemoryError of SQLite's, damaged names a UnicodeDecodeError."""
    data = bytearray(whole("sqlite")[0])
    place = data.index(after) + at
    data[place : place + len(new)] = new
    with pytest.raises(FedrolexError, match=says):
        ALL["sqlite"].read(bytes(data))


def test_another_error_would_be_seen() -> None:
    def reads(data: bytes) -> None:
        raise KeyError(data)

    with pytest.raises(KeyError):
        Target(reads, list)(b"")
