"""Random numbers that depend on what they are for, and on nothing else.

Every stream is keyed by (seed, purpose, …): the same key gives the same numbers on every platform and
numpy version, in whatever order streams are opened, on the server and on a client alike.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024


def random_words(count: int, seed: int, purpose: str, *key: object) -> NDArray[np.uint64]:
    """``count`` random 64-bit words of the stream ``(seed, purpose, *key)``, shape ``(count,)``."""
    name = "\x1f".join([str(seed), purpose, *map(str, key)]).encode()
    digest = hashlib.blake2b(name, digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)


def shuffle(size: int, seed: int, purpose: str, *key: object) -> NDArray[np.int64]:
    """``range(size)`` in random order, shape ``(size,)``."""
    return np.argsort(random_words(size, seed, purpose, *key), kind="stable").astype(np.int64)


def sample(size: int, count: int, seed: int, purpose: str, *key: object) -> NDArray[np.int64]:
    """``count`` of ``range(size)`` without replacement, uniformly, in ascending order, shape ``(count,)``."""
    return np.sort(shuffle(size, seed, purpose, *key)[:count])


def deck(size: int, seed: int, purpose: str, *key: object) -> Iterator[int]:
    """``range(size)`` in random order, one at a time: costs what is taken, whatever the size.

    A Fisher-Yates shuffle that remembers only the places it has touched.
    """
    moved: dict[int, int] = {}
    for block in range(0, size, BLOCK):
        draws = random_words(min(BLOCK, size - block), seed, purpose, *key, block).tolist()
        for place, word in enumerate(draws, block):
            other = place + (word * (size - place) >> 64)
            yield moved.get(other, other)
            moved[other] = moved.pop(place, place)


def uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in (0, 1) from random words, the same on every platform."""
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
