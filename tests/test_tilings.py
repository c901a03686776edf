"""How work is divided among programs: only places with a client count."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as some

pytest.importorskip("triton")  # its package does not load without

from fedrolex.engines.gpu.ragged import tilings

CHANNELS = some.lists(some.sampled_from([8, 16, 32, 64, 128, 256, 512]), min_size=1, max_size=10)
PIXELS = some.sampled_from([160, 640, 2560, 10240, 2048, 131072])


@given(CHANNELS, PIXELS, some.sampled_from([1, 3]), some.integers(2, 7))
def test_empty_places_do_not_count(channels: list[int], pixels: int, side: int, times: int) -> None:
    """Places kept for other cohorts made real runs a sixth slower: their programs, which do nothing, were counted."""
    many, share = channels * times, Fraction(1, times)
    assert tilings.product(pixels, many, many, side, share) == tilings.product(pixels, channels, channels, side)
    assert tilings.weights(pixels, many, many, side, share) == tilings.weights(pixels, channels, channels, side)
    assert tilings.pixels(pixels, many, share) == tilings.pixels(pixels, channels)


def test_they_did() -> None:
    assert tilings.product(640, [256] * 4, [256] * 4, 3) != tilings.product(640, [256], [256], 3)


@given(CHANNELS, PIXELS, some.sampled_from([1, 3]), some.sampled_from([2, 4]), some.sampled_from([99, 163, 227]))
def test_what_is_loaded_ahead_fits(channels: list[int], pixels: int, side: int, element: int, room: int) -> None:
    """At batch 128 in TF32 a block of 128 by 256 wanted 288 KiB of the 227 that an H200 has: the run ended."""
    for make in (tilings.product, tilings.weights):
        shape = make(pixels, channels, channels, side)
        found = tilings.fitted(shape, element, room * 1024)
        assert found.stages * found.depth * (found.taps * found.rows + found.columns) * element <= room * 1024
        assert (found.rows, found.columns, found.parts) == (shape.rows, shape.columns, shape.parts)
        assert shape.depth % found.depth == 0


def test_it_did_not_in_tf32() -> None:
    shape = tilings.product(131072, [512], [512], 3)
    assert tilings.fitted(shape, 2, 227 * 1024) == shape
    assert tilings.fitted(shape, 4, 227 * 1024).depth < shape.depth
