"""How a layer's work is divided among programs. The sizes were found by trying, on an H200 at batch 10 and 128, layers
alone and with those of five other runs beside them.

Of a cohort's places only a ``share`` has a client in a round, and programs of the others have nothing to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

CHUNKS = 64  # most parts of a batch that a norm's moments are taken of
FEWEST = 64  # pixels of a block of a product, at least
BUSY = 132  # programs that give every processor of a GPU one
ENOUGH = 66  # programs from which a product is not split: other clients, and other runs, want processors too


@dataclass(frozen=True)
class Tiling:
    """Of a matrix product: the block of the result a program makes, and how far it goes at a time.

    Attributes:
        rows, columns: of the block.
        depth: summed over at a time.
        parts: programs that share the sum of one block.
        taps: of a filter that a program takes at once, where it makes a filter's gradient.
        warps, stages: threads in groups of 32, and blocks loaded ahead.
    """

    rows: int
    columns: int
    depth: int
    parts: int
    warps: int = 4
    stages: int = 3
    taps: int = 1


@dataclass(frozen=True)
class Pixelwise:
    """Of work on pixels: moments are taken of chunks, ``rows`` at a time; the rest is done in blocks."""

    rows: int
    columns: int
    chunk: int
    block: int


def product(pixels: int, ins: Sequence[int], outs: Sequence[int], side: int, share: Fraction | int = 1) -> Tiling:
    """Of a convolution, or of its gradient with respect to images."""
    widest = max(outs)
    if widest >= 128 and pixels * widest >= 2**20:
        return Tiling(128, min(256, widest), _fit(ins, 64), 1, warps=4 if widest == 128 else 8)
    many = pixels >= 4096
    columns = _fit(outs, 128 if widest >= 512 else 64)
    rows = 256 if many and columns == 16 else 128 if pixels >= 2048 else 64
    tiles = share * _blocks(pixels, rows) * sum(_blocks(out, columns) for out in outs)
    parts = 1
    while parts < side**2 and tiles * parts < ENOUGH:
        parts *= 3
    return Tiling(rows, columns, _fit(ins, 32 if many else 64), parts, stages=4 if many and columns == 64 else 3)


def weights(pixels: int, ins: Sequence[int], outs: Sequence[int], side: int, share: Fraction | int = 1) -> Tiling:
    """Of a convolution's gradient with respect to its filter."""
    wide = min(max(ins), max(outs)) >= 256
    rows, columns = _fit(ins, 128 if wide else 64), _fit(outs, 128 if wide else 64)
    taps = 3 if side == 3 and rows * columns <= 4096 else 1
    blocks = sum(_blocks(i, rows) * _blocks(o, columns) for i, o in zip(ins, outs, strict=True))
    tiles = ceil(share * (side**2 // taps) * blocks)
    most = 32 if pixels >= 65536 else 16
    few = wide and pixels <= 2048
    wanted = 1 if few else min(most, max(1, pixels // 256), _blocks(4 * most, tiles))
    span = _blocks(_blocks(pixels, wanted), 64) * 64
    small = rows * columns <= 1024
    depth, warps, stages = 128 if small else 64, 8 if wide else 4, 2 if small else 3
    return Tiling(rows, columns, depth, _blocks(pixels, span), warps, stages, taps)


def fitted(shape: Tiling, element: int, room: int) -> Tiling:
    """The tiling, no deeper than a processor has room for what is loaded ahead.

    Args:
        element: bytes of a number.
        room: bytes of shared memory that a program may have.
    """
    while shape.depth > 16 and shape.stages * shape.depth * (shape.taps * shape.rows + shape.columns) * element > room:
        shape = replace(shape, depth=shape.depth // 2)
    return shape


def pixels(pixels: int, channels: Sequence[int], share: Fraction | int = 1) -> Pixelwise:
    """Of norms and of what is done pixel by pixel."""
    columns = 16 if max(channels) <= 128 and min(channels) <= 32 else 32
    rows = 256 if columns == 16 and pixels >= 16384 else 128
    blocks = share * sum(_blocks(c, columns) for c in channels)
    while rows > 32 and _blocks(pixels, rows) * blocks < 2 * BUSY:
        rows //= 2
    chunk = _blocks(pixels, rows * CHUNKS) * rows
    return Pixelwise(rows, columns, chunk, 256 if pixels >= 65536 else 128)


def _blocks(size: int, block: int) -> int:
    """How many it takes."""
    return -(-size // block)


def _fit(channels: Sequence[int], most: int) -> int:
    return min(most, max(16, power(max(channels))))


def power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
