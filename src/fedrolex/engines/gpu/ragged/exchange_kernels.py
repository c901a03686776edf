# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Triton kernels between server and cohort; see :mod:`.exchange` for what they are given."""

import triton
import triton.language as tl


@triton.jit
def deal(chunks, parts, layouts, servers, homes, windows, maps, tensors, length, SIZE: tl.constexpr):
    """The window of every place: the server's values, zero where a place's tensor is padded.

    Chunks: place, tensor, first element, number of elements. Parts, by place and tensor: address, stored lines and
    columns, real lines and columns. Layouts: where the maps of lines and columns begin, the server's distance from
    tap to tap, line to line, column to column. Servers, by home and tensor: address. Homes: that of every place.
    """
    row = chunks + 4 * tl.program_id(0)
    place, tensor = tl.load(row), tl.load(row + 1)
    window = tl.load(windows + place)
    if window < 0:
        return
    part = parts + 8 * tl.load(row + 2)
    element = tl.load(row + 3) + tl.arange(0, SIZE)
    lines, columns = tl.load(part + 1), tl.load(part + 2)
    here = element < tl.load(part + 5)
    line, column = (element // columns) % lines, element % columns
    real = here & (line < tl.load(part + 3)) & (column < tl.load(part + 4))
    held = maps + window * 2 * length
    layout = layouts + 16 * tensor
    line_of = tl.load(held + tl.load(layout) + line, real, other=0).to(tl.int64)
    column_of = tl.load(held + tl.load(layout + 1) + column, real, other=0).to(tl.int64)
    at = element // (lines * columns) * tl.load(layout + 2)
    at += line_of * tl.load(layout + 3) + column_of * tl.load(layout + 4)
    server = tl.load(servers + tl.load(homes + place) * tensors + tensor).to(tl.pointer_type(tl.float32))
    to = tl.load(part).to(tl.pointer_type(tl.float32))
    tl.store(to + element, tl.load(server + at, real, other=0.0), here)


@triton.jit
def merge(
    chunks, parts, layouts, old, new, windows, maps, weights, rows, labels, sums, places, tensors, length, classes,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The selective average, and for every place the sums that drift is made of.

    Chunks: tensor, first element, of the whole tensors in the order tap, line, column. Layouts: as for
    :func:`deal`, then lines, columns, elements. ``weights`` of zero leave a place out. ``labels``: whether a tensor's
    lines (1) or columns (2) are classes; with ``ROWS`` those count only for places that hold them. Sums, by program
    and place: of change · average change, of change², of average change².
    """
    program = tl.program_id(0)
    tensor, first = tl.load(chunks + 2 * program), tl.load(chunks + 2 * program + 1)
    layout = layouts + 16 * tensor
    lines, columns = tl.load(layout + 5), tl.load(layout + 6)
    element = first + tl.arange(0, SIZE)
    here = element < tl.load(layout + 7)
    label = tl.load(labels + tensor)
    tap, line, column = element // (lines * columns), (element // columns) % lines, element % columns
    at = tap * tl.load(layout + 2) + line * tl.load(layout + 3) + column * tl.load(layout + 4)
    before = tl.load(tl.load(old + tensor).to(tl.pointer_type(tl.float32)) + at, here, other=0.0)
    total = tl.zeros((SIZE,), tl.float32)
    count = tl.zeros((SIZE,), tl.float32)
    for place in range(0, places):
        weight = tl.load(weights + place)
        if weight > 0:
            value, held = _value(place, tensor, tap, line, column, here, parts, layout, windows, maps, tensors, length)
            share = tl.where(held, weight, 0.0)
            if ROWS:
                which = tl.where(column * 0 + label == 1, line, column)
                mine = tl.load(rows + place * classes + which, held & (column * 0 + label > 0), other=1)
                share = tl.where(mine != 0, share, 0.0)
            total += share * value
            count += share
    average = tl.where(count > 0, total / tl.where(count > 0, count, 1.0), before)
    tl.store(tl.load(new + tensor).to(tl.pointer_type(tl.float32)) + at, average, here)
    moved = tl.where(here, average - before, 0.0)
    for place in range(0, places):
        if tl.load(weights + place) > 0:
            value, held = _value(place, tensor, tap, line, column, here, parts, layout, windows, maps, tensors, length)
            change = tl.where(held, value - before, 0.0)
            out = sums + (program * places + place) * 3
            tl.store(out, tl.sum(change * moved, 0))
            tl.store(out + 1, tl.sum(change * change, 0))
            tl.store(out + 2, tl.sum(tl.where(held, moved * moved, 0.0), 0))


@triton.jit
def _value(place, tensor, tap, line, column, here, parts, layout, windows, maps, tensors, length):
    """What a place holds for elements of the whole tensor, and whether it holds them."""
    held = maps + (tl.load(windows + place) * 2 + 1) * length
    part = parts + 8 * (place * tensors + tensor)
    line_at = tl.load(held + tl.load(layout) + line, here, other=-1).to(tl.int64)
    column_at = tl.load(held + tl.load(layout + 1) + column, here, other=-1).to(tl.int64)
    has = here & (line_at >= 0) & (column_at >= 0)
    lines, columns = tl.load(part + 1), tl.load(part + 2)
    values = tl.load(part).to(tl.pointer_type(tl.float32))
    return tl.load(values + (tap * lines + line_at) * columns + column_at, has, other=0.0), has
