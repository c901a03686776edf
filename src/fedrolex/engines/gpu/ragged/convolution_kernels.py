# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Convolutions of ragged cohorts and their gradients, in Triton: one launch does a layer for clients of all widths.

Images are stored pixel by pixel with channels last. A buffer holds one client's part after the other; *tables*
say where a client's part begins and how many channels it has, and *tiles* say which client and which piece of its
work a program does. Clients with fewer images in a batch (``counts``) leave their last programs idle.
Every sum has a fixed order, so results are the same every time.
"""

import triton
import triton.language as tl


@triton.jit
def own(table, tiles, counts, area, WIDTH: tl.constexpr):
    """This program's tile, ``WIDTH`` numbers of which the first is the client; the client's row; its pixels."""
    tile = tiles + WIDTH * tl.program_id(0)
    client = tl.load(tile)
    return tile, table + 8 * client, tl.load(counts + client) * area


@triton.jit
def _places(rows, height, width):
    """Image, line and column of pixel numbers."""
    image = rows // (height * width)
    pixel = rows % (height * width)
    return image, pixel // width, pixel % width


@triton.jit
def _shifted(
    line, column, tap, height, width, SIDE: tl.constexpr, STRIDE: tl.constexpr, BACK: tl.constexpr
):  # fmt: skip
    """Where a tap of a filter reads, and whether that is inside the image: going back, where it was read from."""
    pad: tl.constexpr = (SIDE - 1) // 2
    if BACK:
        y, x = line + pad - tap // SIDE, column + pad - tap % SIDE
        inside = (y >= 0) & (x >= 0) & (y % STRIDE == 0) & (x % STRIDE == 0)
        y, x = y // STRIDE, x // STRIDE
        return y, x, inside & (y < height) & (x < width)
    y, x = line * STRIDE + tap // SIDE - pad, column * STRIDE + tap % SIDE - pad
    return y, x, (y >= 0) & (y < height) & (x >= 0) & (x < width)


@triton.jit
def _reach(
    pixels, inside, height, width, out_height, out_width,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Where a filter's first tap reads for each pixel, inside the image or not; and a bit for every tap that does read.

    How far from there another tap reads is the same for all pixels; going back with a stride, for those it reads at.
    """
    image, line, column = _places(pixels, out_height, out_width)
    pad: tl.constexpr = (SIDE - 1) // 2
    if BACK:
        origin = (image * height + (line + pad) // STRIDE) * width + (column + pad) // STRIDE
    else:
        origin = (image * height + line * STRIDE - pad) * width + column * STRIDE - pad
    reads = tl.zeros_like(pixels)
    for tap in tl.static_range(0, SIDE * SIDE):
        _, _, good = _shifted(line, column, tap, height, width, SIDE, STRIDE, BACK)
        reads |= tl.where(inside & good, 1 << tap, 0)
    return origin, reads


@triton.jit(do_not_specialize=["height", "width", "out_height", "out_width", "chunks"])
def convolve(
    images, weights, out, residual, values, active, statistics, sums, table, tiles, counts,
    height, width, out_height, out_width, chunks,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, BACK: tl.constexpr, TAPS: tl.constexpr, WHOLE: tl.constexpr,
    RESIDUAL: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Convolution, or with ``BACK`` its gradient with respect to the images; ``TAPS`` of the filter a program.

    Table: where images, weights and output begin, channels in and out, distance of one part of the taps' sum
    to the next. Tiles: client, block of pixels, block of output channels.

    With ``WHOLE`` a program has the whole sum and does the work of :func:`finish`, or going back of :func:`deactivate`,
    on its block of pixels, which is a chunk. Table, further: where ``sums`` and ``statistics`` begin.
    """
    part = tl.program_id(1)
    tile, row, total = own(table, tiles, counts, out_height * out_width, 3)
    begin = tl.load(tile + 1) * ROWS
    if begin >= total:
        return
    images += tl.multiple_of(tl.load(row), ALIGN)
    weights += tl.multiple_of(tl.load(row + 1), ALIGN)
    ins = tl.multiple_of(tl.load(row + 3).to(tl.int32), ALIGN)
    outs = tl.multiple_of(tl.load(row + 4).to(tl.int32), ALIGN)
    pixels = begin + tl.arange(0, ROWS)
    inside = pixels < total
    origin, reads = _reach(pixels, inside, height, width, out_height, out_width, SIDE, STRIDE, BACK)
    origin *= ins
    to = tl.load(tile + 2) * COLS + tl.arange(0, COLS)
    apart: tl.constexpr = STRIDE if BACK else 1
    blocks = tl.cdiv(ins, DEPTH)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for i in range(0, TAPS * blocks):
        tap = part * TAPS + i // blocks
        deep = (i % blocks) * DEPTH + tl.arange(0, DEPTH)
        away = (tap // SIDE // apart * width + tap % SIDE // apart) * ins
        at = origin - away if BACK else origin + away
        good = (reads >> tap) & 1 != 0
        a = tl.load(images + at[:, None] + deep[None, :], good[:, None] & (deep < ins)[None, :], other=0.0)
        if BACK:
            place = (tap * outs + to)[None, :] * ins + deep[:, None]
        else:
            place = (tap * ins + deep)[:, None] * outs + to[None, :]
        b = tl.load(weights + place, (deep < ins)[:, None] & (to < outs)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    good = inside[:, None] & (to < outs)[None, :]
    at = pixels[:, None] * outs + to[None, :]
    if WHOLE:
        at += tl.multiple_of(tl.load(row + 2), ALIGN)
        if BACK:
            acc = tl.where(tl.load(active + at, good, other=0.0).to(tl.float32) > 0, acc, 0.0)
        elif RESIDUAL:
            acc += tl.load(residual + at, good, other=0.0).to(tl.float32)
        stored = acc.to(out.dtype.element_ty)
        tl.store(out + at, stored, good)
        value = tl.where(good, stored.to(tl.float32), 0.0)
        first = tl.sum(value, 0)
        if BACK:
            statistics += tl.load(row + 7)
            mean = tl.load(statistics + to, to < outs, other=0.0)
            rstd = tl.load(statistics + outs + to, to < outs, other=0.0)
            normed = (tl.load(values + at, good, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
            second = tl.sum(tl.where(good, value * normed, 0.0), 0)
        else:
            first = first / tl.minimum(ROWS, total - begin).to(tl.float32)
            off = tl.where(good, value - first[None, :], 0.0)
            second = tl.sum(off * off, 0)
        sums += tl.load(row + 6) + (begin // ROWS) * outs
        tl.store(sums + to, first, to < outs)
        tl.store(sums + chunks * outs + to, second, to < outs)
    else:
        tl.store(out + tl.load(row + 2) + part * tl.load(row + 5) + at, acc, good)


@triton.jit(do_not_specialize=["slots", "span"])
def weigh(
    images, gradient, out, squares, table, tiles, counts, slots, span,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A convolution's gradient with respect to its weights, of ``span`` pixels and one or three ``TAPS`` a program.

    Table: as for :func:`convolve` with the gradient in the weights' place. Tiles: client, which taps, block of input
    channels, block of output channels, place among the client's ``slots`` of ``squares``, where the sum of squares
    goes if this is the ``WHOLE`` gradient.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    client, tap = tl.load(tiles + 5 * tile), tl.load(tiles + 5 * tile + 1) * TAPS
    total = tl.load(counts + client) * (OUT_HEIGHT * OUT_WIDTH)
    if total == 0:
        return
    row = table + 8 * client
    images += tl.multiple_of(tl.load(row), ALIGN)
    gradient += tl.multiple_of(tl.load(row + 1), ALIGN)
    ins = tl.multiple_of(tl.load(row + 3).to(tl.int32), ALIGN)
    outs = tl.multiple_of(tl.load(row + 4).to(tl.int32), ALIGN)
    of = tl.load(tiles + 5 * tile + 2) * ROWS + tl.arange(0, ROWS)
    to = tl.load(tiles + 5 * tile + 3) * COLS + tl.arange(0, COLS)
    one = tl.zeros((ROWS, COLS), tl.float32)
    two = tl.zeros((ROWS, COLS), tl.float32)
    three = tl.zeros((ROWS, COLS), tl.float32)
    end = tl.minimum(total, (part + 1) * span)
    for begin in range(part * span, end, DEPTH):
        pixels = begin + tl.arange(0, DEPTH)
        inside = pixels < total
        b = tl.load(gradient + pixels[:, None] * outs + to[None, :], inside[:, None] & (to < outs)[None, :], other=0.0)
        a = _read(images, pixels, inside, tap, of, ins, HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, SIDE, STRIDE)
        one = tl.dot(tl.trans(a), b, one, input_precision=PRECISION)
        if TAPS == 3:
            a = _read(images, pixels, inside, tap + 1, of, ins, HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, SIDE, STRIDE)
            two = tl.dot(tl.trans(a), b, two, input_precision=PRECISION)
            a = _read(images, pixels, inside, tap + 2, of, ins, HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, SIDE, STRIDE)
            three = tl.dot(tl.trans(a), b, three, input_precision=PRECISION)
    out += tl.load(row + 2) + part * tl.load(row + 5)
    place = (tap * ins + of)[:, None] * outs + to[None, :]
    good = (of < ins)[:, None] & (to < outs)[None, :]
    tl.store(out + place, one, good)
    if TAPS == 3:
        tl.store(out + ins * outs + place, two, good)
        tl.store(out + 2 * ins * outs + place, three, good)
    if WHOLE:
        square = tl.sum(tl.sum(one * one + two * two + three * three, 1), 0)
        tl.store(squares + client * slots + tl.load(tiles + 5 * tile + 4), square)


@triton.jit
def _read(
    images, pixels, inside, tap, of, ins, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """What a tap reads for some pixels: those pixels' channels ``of``."""
    image, line, column = _places(pixels, OUT_HEIGHT, OUT_WIDTH)
    y, x, good = _shifted(line, column, tap, HEIGHT, WIDTH, SIDE, STRIDE, False)
    at = ((image * HEIGHT + y) * WIDTH + x) * ins
    return tl.load(images + at[:, None] + of[None, :], (inside & good)[:, None] & (of < ins)[None, :], other=0.0)
