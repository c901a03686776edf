# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Triton kernels over ragged cohorts: one launch does a layer's work for every client, whatever its width.

Images are stored pixel by pixel with channels last. A buffer holds one client's part after the other; *tables*
say where a client's part begins and how many channels it has, and *tiles* say which client and which piece of its
work a program does. Clients with fewer images in a batch (``counts``) leave their last programs idle.
Every sum has a fixed order, so results are the same every time.
"""

from __future__ import annotations

import triton
import triton.language as tl


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


@triton.jit(do_not_specialize=["batch", "room", "image"])
def fetch(
    x, y, sizes, counter, images, targets, counts, done, batch, room, image, SIZE: tl.constexpr, BATCH: tl.constexpr
):
    """The next batch: inputs, targets, how many each client has, and how many steps it has done with this one.

    ``image``: numbers an image. Inputs are stored image by image, so a batch is one stretch of memory.
    """
    client, block = tl.program_id(0), tl.program_id(1)
    begin = tl.load(counter) * batch
    at = block * SIZE + tl.arange(0, SIZE)
    real = at < batch * image
    tl.store(images + client * batch * image + at, tl.load(x + (client * room + begin) * image + at, real), real)
    if block == 0:
        row = tl.arange(0, BATCH)
        tl.store(targets + client * batch + row, tl.load(y + client * room + begin + row, row < batch), row < batch)
        count = tl.minimum(tl.maximum(tl.load(sizes + client) - begin, 0), batch).to(tl.int32)
        tl.store(counts + client, count)
        tl.store(done + client, tl.load(done + client) + (count > 0).to(tl.int32))


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
    tile, part = tl.program_id(0), tl.program_id(1)
    client = tl.load(tiles + 3 * tile)
    begin = tl.load(tiles + 3 * tile + 1) * ROWS
    total = tl.load(counts + client) * (out_height * out_width)
    if begin >= total:
        return
    row = table + 8 * client
    images += tl.multiple_of(tl.load(row), ALIGN)
    weights += tl.multiple_of(tl.load(row + 1), ALIGN)
    ins = tl.multiple_of(tl.load(row + 3).to(tl.int32), ALIGN)
    outs = tl.multiple_of(tl.load(row + 4).to(tl.int32), ALIGN)
    pixels = begin + tl.arange(0, ROWS)
    image, line, column = _places(pixels, out_height, out_width)
    inside = pixels < total
    to = tl.load(tiles + 3 * tile + 2) * COLS + tl.arange(0, COLS)
    blocks = tl.cdiv(ins, DEPTH)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for i in range(0, TAPS * blocks):
        tap = part * TAPS + i // blocks
        deep = (i % blocks) * DEPTH + tl.arange(0, DEPTH)
        y, x, good = _shifted(line, column, tap, height, width, SIDE, STRIDE, BACK)
        at = ((image * height + y) * width + x) * ins
        a = tl.load(images + at[:, None] + deep[None, :], (inside & good)[:, None] & (deep < ins)[None, :], other=0.0)
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


@triton.jit(do_not_specialize=["slots", "height", "width", "out_height", "out_width", "span"])
def weigh(
    images, gradient, out, squares, table, tiles, counts, slots, height, width, out_height, out_width,
    span, SIDE: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A convolution's gradient with respect to its weights, of ``span`` pixels and one or three ``TAPS`` a program.

    Table: as for :func:`convolve` with the gradient in the weights' place. Tiles: client, which taps, block of input
    channels, block of output channels, place among the client's ``slots`` of ``squares``, where the sum of squares
    goes if this is the ``WHOLE`` gradient.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    client, tap = tl.load(tiles + 5 * tile), tl.load(tiles + 5 * tile + 1) * TAPS
    total = tl.load(counts + client) * (out_height * out_width)
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
        a = _read(images, pixels, inside, tap, of, ins, height, width, out_height, out_width, SIDE, STRIDE)
        one = tl.dot(tl.trans(a), b, one, input_precision=PRECISION)
        if TAPS == 3:
            a = _read(images, pixels, inside, tap + 1, of, ins, height, width, out_height, out_width, SIDE, STRIDE)
            two = tl.dot(tl.trans(a), b, two, input_precision=PRECISION)
            a = _read(images, pixels, inside, tap + 2, of, ins, height, width, out_height, out_width, SIDE, STRIDE)
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
    images, pixels, inside, tap, of, ins, height, width, out_height, out_width,
    SIDE: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """What a tap reads for some pixels: those pixels' channels ``of``."""
    image, line, column = _places(pixels, out_height, out_width)
    y, x, good = _shifted(line, column, tap, height, width, SIDE, STRIDE, False)
    at = ((image * height + y) * width + x) * ins
    return tl.load(images + at[:, None] + of[None, :], (inside & good)[:, None] & (of < ins)[None, :], other=0.0)


@triton.jit(do_not_specialize=["area", "steps", "chunks"])
def finish(
    parts, residual, out, moments, table, tiles, counts, area, steps, chunks,
    PARTS: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Add up the parts of a convolution and the residual; mean and squared deviations of every chunk of pixels.

    Table: where parts, values (and residual), moments begin, channels, distance of the parts.
    Tiles: client, chunk (``steps`` blocks of ``ROWS`` pixels), block of channels. Moments: mean and sum of
    squared deviations, ``(2, chunks, channels)`` a client.
    """
    tile = tl.program_id(0)
    client, chunk = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    total = tl.load(counts + client) * area
    if chunk * ROWS * steps >= total:
        return
    row = table + 8 * client
    parts += tl.multiple_of(tl.load(row), ALIGN)
    begin = tl.multiple_of(tl.load(row + 1), ALIGN)
    moments += tl.load(row + 2)
    channels = tl.multiple_of(tl.load(row + 3).to(tl.int32), ALIGN)
    apart = tl.multiple_of(tl.load(row + 4), ALIGN)
    channel = tl.load(tiles + 3 * tile + 2) * COLS + tl.arange(0, COLS)
    count = tl.zeros((COLS,), tl.float32)
    mean = tl.zeros((COLS,), tl.float32)
    square = tl.zeros((COLS,), tl.float32)
    for step in range(0, steps):
        pixels = (chunk * steps + step) * ROWS + tl.arange(0, ROWS)
        good = (pixels < total)[:, None] & (channel < channels)[None, :]
        at = pixels[:, None] * channels + channel[None, :]
        value = tl.load(parts + at, good, other=0.0)
        for part in tl.static_range(1, PARTS):
            value += tl.load(parts + part * apart + at, good, other=0.0)
        if RESIDUAL:
            value += tl.load(residual + begin + at, good, other=0.0).to(tl.float32)
        stored = value.to(out.dtype.element_ty)
        tl.store(out + begin + at, stored, good)
        value = stored.to(tl.float32)
        more = tl.maximum(0, tl.minimum(ROWS, total - (chunk * steps + step) * ROWS)).to(tl.float32)
        here = tl.sum(tl.where(good, value, 0.0), 0) / tl.maximum(more, 1.0)
        off = tl.where(good, value - here[None, :], 0.0)
        both = tl.maximum(count + more, 1.0)
        square += tl.sum(off * off, 0) + (here - mean) * (here - mean) * count * more / both
        mean += (here - mean) * more / both
        count += more
    tl.store(moments + chunk * channels + channel, mean, channel < channels)
    tl.store(moments + (chunks + chunk) * channels + channel, square, channel < channels)


@triton.jit(do_not_specialize=["area", "length", "chunks"])
def describe(
    moments, statistics, table, tiles, counts, area, length, chunks, epsilon,
    CHUNKS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Mean and 1 / deviation of a batch from the moments of its chunks, which are ``length`` pixels long.

    Table: as for :func:`activate`. Tiles: client, block of channels.
    """
    tile = tl.program_id(0)
    client = tl.load(tiles + 2 * tile)
    total = tl.load(counts + client) * area
    if total == 0:
        return
    row = table + 8 * client
    moments += tl.load(row + 1)
    statistics += tl.load(row + 4)
    channels = tl.load(row + 5).to(tl.int32)
    channel = tl.load(tiles + 2 * tile + 1) * COLS + tl.arange(0, COLS)
    real = channel < channels
    number = tl.cdiv(total, length)
    mean = tl.zeros((COLS,), tl.float32)
    for begin in range(0, number, CHUNKS):
        means, _, share = _chunk(moments, begin, channel, channels, real, total, length, chunks, CHUNKS)
        mean += tl.sum(means * share[:, None], 0)
    mean = mean / total
    square = tl.zeros((COLS,), tl.float32)
    for begin in range(0, number, CHUNKS):
        means, squares, share = _chunk(moments, begin, channel, channels, real, total, length, chunks, CHUNKS)
        off = means - mean[None, :]
        square += tl.sum(squares + off * off * share[:, None], 0)
    tl.store(statistics + channel, mean, real)
    tl.store(statistics + channels + channel, 1.0 / tl.sqrt(square / total + epsilon), real)


@triton.jit
def _chunk(moments, begin, channel, channels, real, total, length, chunks, CHUNKS: tl.constexpr):
    """Means, squared deviations and sizes of some chunks."""
    chunk = begin + tl.arange(0, CHUNKS)
    share = tl.maximum(0, tl.minimum(length, total - chunk * length)).to(tl.float32)
    here = real[None, :] & (share > 0)[:, None]
    at = chunk[:, None] * channels + channel[None, :]
    return tl.load(moments + at, here, other=0.0), tl.load(moments + chunks * channels + at, here, other=0.0), share


@triton.jit(do_not_specialize=["area", "length", "chunks"])
def total(
    sums, totals, grads, table, tiles, counts, area, length, chunks, CHUNKS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """The sums of :func:`deactivate` over all chunks; they are the gradients of shift and scale.

    Table: as for :func:`unnorm`. Tiles: client, block of channels. Totals: ``(2, channels)`` a client.
    """
    tile = tl.program_id(0)
    client = tl.load(tiles + 2 * tile)
    pixels = tl.load(counts + client) * area
    if pixels == 0:
        return
    row = table + 8 * client
    sums += tl.load(row + 1)
    totals += tl.load(row + 4)
    channels = tl.load(row + 5).to(tl.int32)
    channel = tl.load(tiles + 2 * tile + 1) * COLS + tl.arange(0, COLS)
    real = channel < channels
    first = tl.zeros((COLS,), tl.float32)
    second = tl.zeros((COLS,), tl.float32)
    for begin in range(0, tl.cdiv(pixels, length), CHUNKS):
        ones, others, _ = _chunk(sums, begin, channel, channels, real, pixels, length, chunks, CHUNKS)
        first += tl.sum(ones, 0)
        second += tl.sum(others, 0)
    tl.store(totals + channel, first, real)
    tl.store(totals + channels + channel, second, real)
    tl.store(grads + tl.load(row + 3) + channel, first, real)
    tl.store(grads + tl.load(row + 2) + channel, second, real)


@triton.jit(do_not_specialize=["area", "length", "chunks"])
def activate(
    values, moments, scales, out, statistics, table, tiles, counts, area, length, chunks, epsilon,
    READY: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Batch norm with the batch's statistics, scale, shift and ReLU.

    Table: where values (and output), moments, scales, shifts, statistics begin, channels.
    Tiles: client, block of pixels, block of channels. Statistics: mean and 1 / deviation, ``(2, channels)``; taken
    from the moments, of which there are at most ``CHUNKS``, unless they are ``READY``.
    """
    tile = tl.program_id(0)
    client, block = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    total = tl.load(counts + client) * area
    if block * ROWS >= total:
        return
    row = table + 8 * client
    begin = tl.multiple_of(tl.load(row), ALIGN)
    moments += tl.load(row + 1)
    statistics += tl.load(row + 4)
    channels = tl.multiple_of(tl.load(row + 5).to(tl.int32), ALIGN)
    channel = tl.load(tiles + 3 * tile + 2) * COLS + tl.arange(0, COLS)
    real = channel < channels
    if READY:
        mean = tl.load(statistics + channel, real, other=0.0)
        rstd = tl.load(statistics + channels + channel, real, other=0.0)
    else:
        means, squares, share = _chunk(moments, 0, channel, channels, real, total, length, chunks, CHUNKS)
        mean = tl.sum(means * share[:, None], 0) / total
        off = means - mean[None, :]
        rstd = 1.0 / tl.sqrt(tl.sum(squares + off * off * share[:, None], 0) / total + epsilon)
        if block == 0:
            tl.store(statistics + channel, mean, real)
            tl.store(statistics + channels + channel, rstd, real)
    scale = tl.load(scales + tl.load(row + 2) + channel, real, other=0.0)
    shift = tl.load(scales + tl.load(row + 3) + channel, real, other=0.0)
    pixels = block * ROWS + tl.arange(0, ROWS)
    good = (pixels < total)[:, None] & real[None, :]
    at = pixels[:, None] * channels + channel[None, :]
    value = tl.load(values + begin + at, good, other=0.0).to(tl.float32)
    value = (value - mean[None, :]) * (rstd * scale)[None, :] + shift[None, :]
    tl.store(out + begin + at, tl.maximum(value, 0.0).to(out.dtype.element_ty), good)


@triton.jit(do_not_specialize=["area", "steps", "chunks"])
def deactivate(
    parts, values, active, statistics, out, sums, table, tiles, counts, area, steps, chunks,
    PARTS: tl.constexpr, POOLED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Back through ReLU: add up the parts of its gradient, and sum it and its product with the normed values.

    Table: where parts, values (also active, output), sums, statistics begin, channels, distance of the parts.
    ``POOLED``: the gradient is one of the mean over an image's pixels. Sums: ``(2, chunks, channels)``.
    """
    tile = tl.program_id(0)
    client, chunk = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    total = tl.load(counts + client) * area
    if chunk * ROWS * steps >= total:
        return
    row = table + 8 * client
    parts += tl.multiple_of(tl.load(row), ALIGN)
    begin = tl.multiple_of(tl.load(row + 1), ALIGN)
    sums += tl.load(row + 2)
    statistics += tl.load(row + 3)
    channels = tl.multiple_of(tl.load(row + 4).to(tl.int32), ALIGN)
    apart = tl.multiple_of(tl.load(row + 5), ALIGN)
    channel = tl.load(tiles + 3 * tile + 2) * COLS + tl.arange(0, COLS)
    real = channel < channels
    mean = tl.load(statistics + channel, real, other=0.0)
    rstd = tl.load(statistics + channels + channel, real, other=0.0)
    first = tl.zeros((COLS,), tl.float32)
    second = tl.zeros((COLS,), tl.float32)
    for step in range(0, steps):
        pixels = (chunk * steps + step) * ROWS + tl.arange(0, ROWS)
        good = (pixels < total)[:, None] & real[None, :]
        at = pixels[:, None] * channels + channel[None, :]
        if POOLED:
            gradient = tl.load(parts + (pixels // area)[:, None] * channels + channel[None, :], good, other=0.0)
            gradient = gradient / area
        else:
            gradient = tl.load(parts + at, good, other=0.0)
            for part in tl.static_range(1, PARTS):
                gradient += tl.load(parts + part * apart + at, good, other=0.0)
        on = tl.load(active + begin + at, good, other=0.0).to(tl.float32) > 0
        stored = tl.where(on, gradient, 0.0).to(out.dtype.element_ty)
        tl.store(out + begin + at, stored, good)
        gradient = stored.to(tl.float32)
        normed = (tl.load(values + begin + at, good, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        first += tl.sum(gradient, 0)
        second += tl.sum(tl.where(good, gradient * normed, 0.0), 0)
    tl.store(sums + chunk * channels + channel, first, real)
    tl.store(sums + (chunks + chunk) * channels + channel, second, real)


@triton.jit(do_not_specialize=["area", "length", "chunks"])
def unnorm(
    gradient, values, statistics, sums, totals, scales, residual, out, grads, table, tiles, counts,
    area, length, chunks,
    READY: tl.constexpr, RESIDUAL: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Back through batch norm, plus the residual's gradient.

    Table: where values (also gradients), sums, scales, shifts (both also in grads), statistics (also totals) begin,
    channels. Sums are added up here, and the first block writes the gradients of scale and shift, unless the totals are
    ``READY``.
    """
    tile = tl.program_id(0)
    client, block = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    total = tl.load(counts + client) * area
    if block * ROWS >= total:
        return
    row = table + 8 * client
    begin = tl.multiple_of(tl.load(row), ALIGN)
    sums += tl.load(row + 1)
    scale_at, shift_at = tl.load(row + 2), tl.load(row + 3)
    statistics += tl.load(row + 4)
    channels = tl.multiple_of(tl.load(row + 5).to(tl.int32), ALIGN)
    channel = tl.load(tiles + 3 * tile + 2) * COLS + tl.arange(0, COLS)
    real = channel < channels
    if READY:
        totals += tl.load(row + 4)
        first = tl.load(totals + channel, real, other=0.0)
        second = tl.load(totals + channels + channel, real, other=0.0)
    else:
        ones, others, _ = _chunk(sums, 0, channel, channels, real, total, length, chunks, CHUNKS)
        first, second = tl.sum(ones, 0), tl.sum(others, 0)
        if block == 0:
            tl.store(grads + shift_at + channel, first, real)
            tl.store(grads + scale_at + channel, second, real)
    mean = tl.load(statistics + channel, real, other=0.0)
    rstd = tl.load(statistics + channels + channel, real, other=0.0)
    scale = tl.load(scales + scale_at + channel, real, other=0.0)
    pixels = block * ROWS + tl.arange(0, ROWS)
    good = (pixels < total)[:, None] & real[None, :]
    at = begin + pixels[:, None] * channels + channel[None, :]
    normed = (tl.load(values + at, good, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
    change = tl.load(gradient + at, good, other=0.0).to(tl.float32)
    change = (change - (first / total)[None, :] - normed * (second / total)[None, :]) * (rstd * scale)[None, :]
    if RESIDUAL:
        change += tl.load(residual + at, good, other=0.0).to(tl.float32)
    tl.store(out + at, change.to(out.dtype.element_ty), good)


@triton.jit
def pool(
    active, out, table, tiles, counts,
    AREA: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Mean over the pixels of every image.

    Table: where active values, weights, bias, means begin, channels. Tiles: client, block of images, of channels.
    """
    tile = tl.program_id(0)
    client = tl.load(tiles + 3 * tile)
    row = table + 8 * client
    active += tl.multiple_of(tl.load(row), ALIGN)
    channels = tl.multiple_of(tl.load(row + 4).to(tl.int32), ALIGN)
    image = tl.load(tiles + 3 * tile + 1) * ROWS + tl.arange(0, ROWS)
    channel = tl.load(tiles + 3 * tile + 2) * COLS + tl.arange(0, COLS)
    good = (image < tl.load(counts + client))[:, None] & (channel < channels)[None, :]
    mean = tl.zeros((ROWS, COLS), tl.float32)
    for pixel in tl.static_range(0, AREA):
        at = (image * AREA + pixel)[:, None] * channels + channel[None, :]
        mean += tl.load(active + at, good, other=0.0).to(tl.float32)
    at = image[:, None] * channels + channel[None, :]
    tl.store(out + tl.load(row + 3) + at, mean / AREA, good)


@triton.jit(do_not_specialize=["batch", "classes"])
def judge(
    weights, grads, means, targets, held, totals, table, counts, batch, classes,
    MASK: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr, COLS: tl.constexpr,
    ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Linear layer and cross-entropy; then back: the gradient of the means takes their place. One program a client.

    Table: as for :func:`pool`. ``MASK``: 0 none, 1 scores of classes the client does not hold become 0, 2 they
    are left out.
    """
    client = tl.program_id(0)
    count = tl.load(counts + client)
    if count == 0:
        return
    row = table + 8 * client
    weight_at, bias_at = tl.load(row + 1), tl.load(row + 2)
    means += tl.load(row + 3)
    channels = tl.multiple_of(tl.load(row + 4).to(tl.int32), ALIGN)
    image = tl.arange(0, ROWS)
    label = tl.arange(0, CLASSES)
    scores = tl.zeros((ROWS, CLASSES), tl.float32)
    for begin in range(0, channels, COLS):
        channel = begin + tl.arange(0, COLS)
        good = (image < count)[:, None] & (channel < channels)[None, :]
        mean = tl.load(means + image[:, None] * channels + channel[None, :], good, other=0.0)
        weight = tl.load(
            weights + weight_at + label[None, :] * channels + channel[:, None],
            (label < classes)[None, :] & (channel < channels)[:, None],
            other=0.0,
        )
        scores = tl.dot(mean, weight, scores, input_precision=PRECISION)
    scores += tl.load(weights + bias_at + label, label < classes, other=0.0)[None, :]
    known = label < classes
    mine = tl.load(held + client * classes + label, known, other=0) != 0
    counted = known
    if MASK == 1:
        scores = tl.where(mine[None, :], scores, 0.0)
    if MASK == 2:
        counted = known & mine
    scores = tl.where(counted[None, :], scores, float("-inf"))
    target = tl.load(targets + client * batch + image, image < count, other=0)
    scores = scores - tl.max(scores, 1)[:, None]
    size = tl.sum(tl.exp(scores), 1)
    hit = label[None, :] == target[:, None].to(tl.int32)
    losses = tl.log(size) - tl.sum(tl.where(hit, scores, 0.0), 1)
    tl.store(totals + client, tl.load(totals + client) + tl.sum(tl.where(image < count, losses, 0.0), 0) / count)
    change = (tl.exp(scores) / size[:, None] - hit.to(tl.float32)) / count
    if MASK == 1:
        change = tl.where(mine[None, :], change, 0.0)
    change = tl.where((image < count)[:, None] & counted[None, :], change, 0.0)
    tl.store(grads + bias_at + label, tl.sum(change, 0), known)
    for begin in range(0, channels, COLS):
        channel = begin + tl.arange(0, COLS)
        good = (image < count)[:, None] & (channel < channels)[None, :]
        mean = tl.load(means + image[:, None] * channels + channel[None, :], good, other=0.0)
        at = weight_at + label[:, None] * channels + channel[None, :]
        real = known[:, None] & (channel < channels)[None, :]
        weight = tl.load(weights + at, real, other=0.0)
        tl.store(grads + at, tl.dot(tl.trans(change), mean, input_precision=PRECISION), real)
        tl.debug_barrier()
        back = tl.dot(change, weight, input_precision=PRECISION)
        tl.store(means + image[:, None] * channels + channel[None, :], back, good)


@triton.jit(do_not_specialize=["slots"])
def collect(parts, grads, squares, chunks, slots, SIZE: tl.constexpr):
    """Add up the parts of gradients, and the squares of gradients that nobody has added up yet.

    Chunks: where it begins in the gradients, its length, where its parts begin, how many, their distance, the client,
    its place among the client's ``slots`` of ``squares``.
    """
    row = chunks + 8 * tl.program_id(0)
    at = tl.arange(0, SIZE)
    real = at < tl.multiple_of(tl.load(row + 1).to(tl.int32), 16)
    grads += tl.multiple_of(tl.load(row), 16)
    count = tl.load(row + 3).to(tl.int32)
    if count > 0:
        parts += tl.multiple_of(tl.load(row + 2), 16)
        apart = tl.multiple_of(tl.load(row + 4), 16)
        value = tl.load(parts + at, real, other=0.0)
        for part in range(1, count):
            value += tl.load(parts + part * apart + at, real, other=0.0)
        tl.store(grads + at, value, real)
    else:
        value = tl.load(grads + at, real, other=0.0)
    tl.store(squares + tl.load(row + 5) * slots + tl.load(row + 6), tl.sum(value * value, 0))


@triton.jit(do_not_specialize=["slots", "clip"])
def limit(squares, factors, slots, clip, SIZE: tl.constexpr):
    """What every client's gradient is multiplied by so that its norm is at most ``clip``."""
    client = tl.program_id(0)
    total = tl.zeros((SIZE,), tl.float32)
    for begin in range(0, slots, SIZE):
        at = begin + tl.arange(0, SIZE)
        total += tl.load(squares + client * slots + at, at < slots, other=0.0)
    norm = tl.sqrt(tl.sum(total, 0))
    tl.store(factors + client, tl.minimum(clip / (norm + 1e-6), 1.0))


@triton.jit(do_not_specialize=["decay", "momentum"])
def descend(
    weights, grads, first, second, low, factors, steps, rate, chunks, counts, decay, momentum,
    CLIP: tl.constexpr, ADAM: tl.constexpr, MOMENTUM: tl.constexpr, LOW: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The optimiser's step; a client that has no images in this batch stays as it is.

    Chunks: where it begins, its length, and in the sixth place the client. ``steps``: done by each client, with
    this one. ``LOW``: parameters are also written in the precision that products are taken in.
    """
    row = chunks + 8 * tl.program_id(0)
    client = tl.load(row + 5)
    if tl.load(counts + client) == 0:
        return
    at = tl.multiple_of(tl.load(row), 16) + tl.arange(0, SIZE)
    real = tl.arange(0, SIZE) < tl.multiple_of(tl.load(row + 1).to(tl.int32), 16)
    value = tl.load(weights + at, real, other=0.0)
    change = tl.load(grads + at, real, other=0.0)
    if CLIP:
        change *= tl.load(factors + client)
    change += decay * value
    speed = tl.load(rate)
    if ADAM:
        done = tl.load(steps + client).to(tl.float64)
        mean = tl.load(first + at, real, other=0.0)
        mean += (change - mean) * 0.1
        square = tl.load(second + at, real, other=0.0) * 0.999 + change * change * 0.001
        tl.store(first + at, mean, real)
        tl.store(second + at, square, real)
        speed = speed / (1.0 - tl.exp(done * -0.10536051565782628)).to(tl.float32)  # ln 0.9
        size = tl.sqrt(square) / tl.sqrt(1.0 - tl.exp(done * -0.0010005003335835335)).to(tl.float32) + 1e-8  # ln 0.999
        change = mean / size
    elif MOMENTUM:
        change += momentum * tl.load(first + at, real, other=0.0)
        tl.store(first + at, change, real)
    value -= speed * change
    tl.store(weights + at, value, real)
    if LOW:
        tl.store(low + at, value.to(low.dtype.element_ty), real)
