"""Reading tf.train.Example: what the format allows, and any bytes at all."""

from __future__ import annotations

import contextlib

import pytest
from example_writer import block, example, feature
from hypothesis import given
from hypothesis import strategies as st
from told import told

from fedrolex import FedrolexError
from fedrolex.data.example_proto import bytes_features


def test_an_example_is_read() -> None:
    found = bytes_features(example("the cat"))
    assert found == {"creation_date": [b"2010-01-01 00:00:00 utc"], "tokens": [b"the cat"], "title": [b"t" * 300]}
    assert bytes_features(b"") == {}


def test_what_the_format_allows_besides() -> None:
    a, b = block(1, b"a"), block(1, b"b")
    assert bytes_features(block(1, feature("x", block(1, a + b) + block(1, a)))) == {"x": [b"a", b"b", b"a"]}
    assert bytes_features(block(1, feature("x", block(1, a))) + block(1, feature("y", block(1, b"")))) == {
        "x": [b"a"],
        "y": [],
    }
    assert bytes_features(block(1, feature("x", block(1, a)) + feature("x", block(1, b)))) == {"x": [b"b"]}, "last wins"
    assert bytes_features(block(1, feature("x", block(1, a) + block(3, b"")))) == {}, "the last kind counts"
    unknown = b"\x48\x01" + b"\x51" + bytes(8) + b"\x55" + bytes(4) + block(9, b"?")
    assert bytes_features(unknown + block(1, unknown + feature("x", block(1, a + unknown)))) == {"x": [b"a"]}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x0a", "a number without end"),
        (b"\x0a\x05abc", "an end in the middle of a field"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "an end in the middle of a field"),
        (b"\xff" * 11, "a number without end"),
        (b"\x80" * 10 + b"\x08", "a number without end"),
        (b"\x08\x01", "a number in the place of a block"),
        (b"\x02\x00", "field number 0"),
        (b"\x0b", "wire type 3"),
        (b"\x49" + bytes(7), "an end in the middle of a field"),
        (block(1, block(1, block(1, b"\xff"))), "a name that is not UTF-8"),
        (block(1, feature("x", block(1, b"\x0a\x02a"))), "an end in the middle of a field"),
    ],
)
def test_malformed_examples(data: bytes, says: str) -> None:
    assert told(lambda: bytes_features(data)) == f"not a tf.train.Example: {says}"


def parses_or_says_why(data: bytes) -> None:
    with contextlib.suppress(FedrolexError):
        assert all(isinstance(name, str) for name in bytes_features(data))


@given(st.binary(max_size=200))
def test_any_bytes_parse_or_are_refused(data: bytes) -> None:
    for whole in (data, block(1, data), block(1, block(1, data)), block(1, feature("x", data))):
        parses_or_says_why(whole)


@given(st.integers(0, 400), st.integers(0, 255), st.integers(0, 400))
def test_any_damage_parses_or_is_refused(place: int, value: int, end: int) -> None:
    data = bytearray(example("the cat sat"))
    data[place % len(data)] = value
    parses_or_says_why(bytes(data))
    parses_or_says_why(bytes(data[: end % len(data)]))


def test_every_cut_of_an_example_is_refused() -> None:
    data = example("the cat sat")
    for end in range(1, len(data)):
        assert "not a tf.train.Example" in told(lambda end=end: bytes_features(data[:end]))  # type: ignore[misc]
