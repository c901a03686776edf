# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Batch norm, ReLU and their way back for ragged cohorts; see :mod:`.convolution_kernels` for how they are laid out."""

import triton
import triton.language as tl

from fedrolex.engines.gpu.ragged.convolution_kernels import own


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
    tile, row, total = own(table, tiles, counts, area, 3)
    chunk = tl.load(tile + 1)
    if chunk * ROWS * steps >= total:
        return
    parts += tl.multiple_of(tl.load(row), ALIGN)
    begin = tl.multiple_of(tl.load(row + 1), ALIGN)
    moments += tl.load(row + 2)
    channels = tl.multiple_of(tl.load(row + 3).to(tl.int32), ALIGN)
    apart = tl.multiple_of(tl.load(row + 4), ALIGN)
    channel = tl.load(tile + 2) * COLS + tl.arange(0, COLS)
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
    tile, row, total = own(table, tiles, counts, area, 2)
    if total == 0:
        return
    moments += tl.load(row + 1)
    statistics += tl.load(row + 4)
    channels = tl.load(row + 5).to(tl.int32)
    channel = tl.load(tile + 1) * COLS + tl.arange(0, COLS)
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
    tile, row, pixels = own(table, tiles, counts, area, 2)
    if pixels == 0:
        return
    sums += tl.load(row + 1)
    totals += tl.load(row + 4)
    channels = tl.load(row + 5).to(tl.int32)
    channel = tl.load(tile + 1) * COLS + tl.arange(0, COLS)
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
    tile, row, total = own(table, tiles, counts, area, 3)
    block = tl.load(tile + 1)
    if block * ROWS >= total:
        return
    begin = tl.multiple_of(tl.load(row), ALIGN)
    moments += tl.load(row + 1)
    statistics += tl.load(row + 4)
    channels = tl.multiple_of(tl.load(row + 5).to(tl.int32), ALIGN)
    channel = tl.load(tile + 2) * COLS + tl.arange(0, COLS)
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
    tile, row, total = own(table, tiles, counts, area, 3)
    chunk = tl.load(tile + 1)
    if chunk * ROWS * steps >= total:
        return
    parts += tl.multiple_of(tl.load(row), ALIGN)
    begin = tl.multiple_of(tl.load(row + 1), ALIGN)
    sums += tl.load(row + 2)
    statistics += tl.load(row + 3)
    channels = tl.multiple_of(tl.load(row + 4).to(tl.int32), ALIGN)
    apart = tl.multiple_of(tl.load(row + 5), ALIGN)
    channel = tl.load(tile + 2) * COLS + tl.arange(0, COLS)
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
    tile, row, total = own(table, tiles, counts, area, 3)
    block = tl.load(tile + 1)
    if block * ROWS >= total:
        return
    begin = tl.multiple_of(tl.load(row), ALIGN)
    sums += tl.load(row + 1)
    scale_at, shift_at = tl.load(row + 2), tl.load(row + 3)
    statistics += tl.load(row + 4)
    channels = tl.multiple_of(tl.load(row + 5).to(tl.int32), ALIGN)
    channel = tl.load(tile + 2) * COLS + tl.arange(0, COLS)
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
