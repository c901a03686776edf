"""How one dimension of a tensor is made of axes.

A dimension is rarely just "the channels": a flattened feature map is channel × 7 × 7, a packed projection
is q then k then v, an attention row is head × dimension. A :data:`Layout` is that structure as plain data,
a tree of four small classes::

    Ref("stem")                          the 64 indices of axis "stem"
    Fixed(3)                             three indices that are never cut
    Prod((Ref("stem"), Fixed(49)))       row-major product: index = channel * 49 + place
    Cat((Ref("q"), Ref("k")))            first all of q, then all of k

Every question about a cut (how wide, which indices, which memory) is a fold over this tree.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrolex.core import FedrolexError


@dataclass(frozen=True, slots=True)
class Fixed:
    """``size`` indices that stay whole in every window."""

    size: int


@dataclass(frozen=True, slots=True)
class Ref:
    """The indices of one axis, by its name."""

    axis: str


@dataclass(frozen=True, slots=True)
class Prod:
    """Row-major product, outermost part first."""

    parts: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class Cat:
    """The parts one after the other."""

    parts: tuple[Layout, ...]


Layout = Fixed | Ref | Prod | Cat
DEEPEST = 100  # parts inside parts; those of real models are a few deep


def size(layout: Layout, widths: Mapping[str, int]) -> int:
    """Number of indices of ``layout`` when axis ``a`` has ``widths[a]`` of them."""
    match layout:
        case Fixed(n):
            return n
        case Ref(axis):
            return widths[axis]
        case Prod(parts):
            return reduce(lambda total, part: total * size(part, widths), parts, 1)
        case Cat(parts):
            return sum(size(part, widths) for part in parts)


def refs(layout: Layout) -> Iterator[str]:
    """The axes a layout mentions, in order, repeats included."""
    match layout:
        case Ref(axis):
            yield axis
        case Prod(parts) | Cat(parts):
            for part in parts:
                yield from refs(part)
        case Fixed():
            return


def has_axis(layout: Layout) -> bool:
    """Whether a window can cut the dimension."""
    return any(True for _ in refs(layout))


def positions(
    layout: Layout, widths: Mapping[str, int], chosen: Callable[[str], NDArray[np.int64]]
) -> NDArray[np.int64]:
    """The positions along this dimension that a choice of indices per axis selects, in order.

    Args:
        layout: the dimension.
        widths: full size of each axis.
        chosen: axis name to its ordered index list.
    """
    match layout:
        case Fixed(n):
            return np.arange(n)
        case Ref(axis):
            return chosen(axis)
        case Prod(parts):
            result = np.zeros(1, dtype=np.int64)
            for part in parts:
                inner = positions(part, widths, chosen)
                result = (result[:, None] * size(part, widths) + inner[None, :]).reshape(-1)
            return result
        case Cat(parts):
            offset, segments = 0, [np.zeros(0, dtype=np.int64)]
            for part in parts:
                segments.append(positions(part, widths, chosen) + offset)
                offset += size(part, widths)
            return np.concatenate(segments)


def encode(layout: Layout) -> Any:
    """The layout as JSON data: an integer, an axis name, ``{"prod": [...]}`` or ``{"cat": [...]}``."""
    match layout:
        case Fixed(n):
            return n
        case Ref(axis):
            return axis
        case Prod(parts):
            return {"prod": [encode(part) for part in parts]}
        case Cat(parts):
            return {"cat": [encode(part) for part in parts]}


def decode(data: Any, deepest: int = DEEPEST) -> Layout:
    """Inverse of :func:`encode`; refuses anything else in one line, also parts in more than ``deepest`` others."""
    if deepest < 0:
        raise FedrolexError(f"not a layout: parts are nested more than {DEEPEST} deep")
    match data:
        case bool():
            pass
        case int() if data >= 0:
            return Fixed(data)
        case str():
            return Ref(data)
        case {"prod": [*parts], **rest} if not rest:
            return Prod(tuple(decode(part, deepest - 1) for part in parts))
        case {"cat": [*parts], **rest} if not rest:
            return Cat(tuple(decode(part, deepest - 1) for part in parts))
    raise FedrolexError(f"not a layout: {reprlib.repr(data)} (expected an integer, an axis name, a prod or a cat)")


def show(layout: Layout) -> str:
    """A layout for people, e.g. ``stem×49`` or ``q|k|v``."""
    match layout:
        case Fixed(n):
            return str(n)
        case Ref(axis):
            return axis
        case Prod(parts):
            return "×".join(f"({show(p)})" if isinstance(p, Cat) else show(p) for p in parts)
        case Cat(parts):
            return "|".join(show(p) for p in parts)


def shape(dims: Sequence[Layout], widths: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a tensor with these dimensions at these widths."""
    return tuple(size(dim, widths) for dim in dims)
