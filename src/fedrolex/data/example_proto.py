"""A strict reader of tf.train.Example, so that reading one needs no TensorFlow.

In the words of its definition: ``Example {1: Features {1: map<string, Feature>}}`` and ``Feature`` is one of
``{1: BytesList {1: repeated bytes}, 2: FloatList, 3: Int64List}``. A message is a row of fields, each a tag
(field number and wire type) and its content; the last of several fields with one meaning counts, lists add up.
"""

from collections.abc import Iterator

from fedrolex.core import FedrolexError

VARINT, EIGHT, BLOCK, FOUR = 0, 1, 2, 5  # wire types


def bytes_features(data: bytes) -> dict[str, list[bytes]]:
    """The features of a serialised tf.train.Example that are lists of bytes, by name."""
    found: dict[str, list[bytes]] = {}
    for features in _blocks(data, 1):
        for entry in _blocks(features, 1):
            name, value = b"", None
            for field, content in _fields(entry):
                if field == 1:
                    name = _block(content)
                elif field == 2:
                    value = _bytes_list(_block(content))
            try:
                key = name.decode()
            except UnicodeDecodeError:
                raise _malformed("a name that is not UTF-8") from None
            found.pop(key, None)
            if value is not None:
                found[key] = value
    return found


def _bytes_list(feature: bytes) -> list[bytes] | None:
    """The strings of a feature, or None if it is of another kind."""
    values: list[bytes] | None = None
    for field, content in _fields(feature):
        if field == 1:
            values = [*(values or []), *_blocks(_block(content), 1)]
        elif field in (2, 3):
            _block(content)
            values = None
    return values


def _blocks(message: bytes, number: int) -> Iterator[bytes]:
    """The contents of all fields of a message with this number."""
    return (_block(content) for field, content in _fields(message) if field == number)


def _block(content: bytes | None) -> bytes:
    if content is None:
        raise _malformed("a number in the place of a block")
    return content


def _fields(message: bytes) -> Iterator[tuple[int, bytes | None]]:
    """Number and content of every field of a message; the content of a number is None, nobody needs it."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        field, wire = tag >> 3, tag & 7
        if not 0 < field < 1 << 29:
            raise _malformed(f"field number {field}")
        start = place
        if wire == VARINT:
            _, place = _varint(message, place)
        elif wire in (EIGHT, FOUR):
            place += 8 if wire == EIGHT else 4
        elif wire == BLOCK:
            size, start = _varint(message, place)
            place = start + size
        else:
            raise _malformed(f"wire type {wire}")
        if place > len(message):
            raise _malformed("an end in the middle of a field")
        yield field, message[start:place] if wire == BLOCK else None


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """A number of at most ten 7-bit groups, lowest first, and the place after it."""
    value = 0
    for count, byte in enumerate(message[place : place + 10]):
        value |= (byte & 127) << 7 * count
        if byte < 128:
            return value, place + count + 1
    raise _malformed("a number without end")


def _malformed(what: str) -> FedrolexError:
    return FedrolexError(f"not a tf.train.Example: {what}")
