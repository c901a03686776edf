"""Writes tf.train.Example messages, as TensorFlow Federated stores them."""

from __future__ import annotations


def block(field: int, content: bytes) -> bytes:
    size, head = len(content), bytearray([field << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes(head) + bytes([size]) + content


def feature(name: str, value: bytes) -> bytes:
    """An entry of the map of features; ``value`` is a Feature."""
    return block(1, block(1, name.encode()) + block(2, value))


def example(tokens: str) -> bytes:
    """A tf.train.Example with all the fields Stack Overflow has."""
    fields = [
        feature("creation_date", block(1, block(1, b"2010-01-01 00:00:00 utc"))),
        feature("score", block(3, block(1, b"\xac\x02"))),
        feature("tokens", block(1, block(1, tokens.encode()))),
        feature("title", block(1, block(1, b"t" * 300))),
    ]
    return block(1, b"".join(fields))
