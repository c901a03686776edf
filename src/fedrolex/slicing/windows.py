"""Windows: for one client in one round, which indices of each axis it holds, in which order.

A contiguous window is two integers (:class:`Arc`); any other is an index list (:class:`Pick`). Axes a
window does not mention are whole.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise
from numbers import Integral
from operator import index
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedrolex.core import FedrolexError, one_of

Rounding = Literal["floor", "ceil"]
Capacity = Fraction | str | float
"""A share of every axis, e.g. ``"1/4"``; see :func:`exact`."""


LARGEST = 2**62
"""Most indices of an axis: sums of two are whole numbers of 64 bits."""


@dataclass(frozen=True, slots=True)
class Arc:
    """``width`` consecutive indices of an axis of ``size``, from ``start``, wrapping past the end to 0."""

    start: int
    width: int
    size: int

    def __post_init__(self) -> None:
        for number in (self.start, self.width, self.size):
            if not isinstance(number, Integral) or number > LARGEST:
                what = reprlib.repr(number)
                raise FedrolexError(f"a window of {what}: give whole numbers up to 2**62, Arc(start, width, size)")
        if not (0 <= self.start < self.size and 1 <= self.width <= self.size):
            raise FedrolexError(
                f"no window of {self.width} from {self.start} on an axis of {self.size}: "
                f"start must be in 0..{self.size - 1}, width in 1..{self.size}"
            )

    @property
    def whole(self) -> bool:
        """Whether this is every index in its own order."""
        return self.start == 0 and self.width == self.size

    def indices(self) -> NDArray[np.int64]:
        """The indices in order, shape ``(width,)``."""
        return (self.start + np.arange(self.width)) % self.size

    def pieces(self) -> list[tuple[int, int]]:
        """At most two (start, length) slices that make up the arc, in order."""
        first = min(self.width, self.size - self.start)
        return [(self.start, first)] + ([(0, self.width - first)] if first < self.width else [])


@dataclass(frozen=True, slots=True)
class Pick:
    """Any distinct indices of an axis of ``size``, in the order given."""

    chosen: tuple[int, ...]
    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.size, Integral) or self.size > LARGEST:
            what = reprlib.repr(self.size)
            raise FedrolexError(f"a window on an axis of {what}: give its size, a whole number up to 2**62")
        if not self.chosen:
            raise FedrolexError("a window of no indices: give at least one")
        if len(set(self.chosen)) != len(self.chosen):
            twice = next(index for index, times in Counter(self.chosen).items() if times > 1)
            raise FedrolexError(f"a window names index {twice} twice: give every index once")
        outside = [index for index in self.chosen if not 0 <= index < self.size]
        if outside:
            raise FedrolexError(f"a window names index {outside[0]} of an axis of {self.size} (0..{self.size - 1})")

    @property
    def width(self) -> int:
        """Number of indices."""
        return len(self.chosen)

    @property
    def whole(self) -> bool:
        """Whether this is every index in its own order."""
        return self.width == self.size and self.chosen == tuple(range(self.size))

    def indices(self) -> NDArray[np.int64]:
        """The indices in order, shape ``(width,)``."""
        return np.asarray(self.chosen, dtype=np.int64)


Span = Arc | Pick


def pick(indices: Iterable[int], size: int) -> Span:
    """An index list as a span; a contiguous one (wrapping allowed) becomes an :class:`Arc`."""
    try:
        values = indices.tolist() if isinstance(indices, np.ndarray | Tensor) else list(indices)
        chosen = () if bool in map(type, values) else tuple(map(index, values))
    except TypeError:
        values, chosen = [None], ()
    if values and not chosen:
        said = f"a window of {reprlib.repr(indices)}"
        raise FedrolexError(f"{said}: give indices, whole numbers; those of a mask are mask.nonzero()")
    span = Pick(chosen, size)
    if all((a + 1) % size == b for a, b in pairwise(chosen)):
        return Arc(chosen[0], len(chosen), size)
    return span


class Window(Mapping[str, Span]):
    """Axis name to :class:`Arc` or :class:`Pick`; immutable, hashable, plain data.

    Args:
        spans: the axes that are not whole.
        wiring: indices for single (tensor, dimension) pairs that differ from their axis'. Only the
            compatibility scheme of :mod:`fedrolex.slicing.published` uses it: such a cut is not a
            sub-network of the model.
    """

    def __init__(self, spans: Mapping[str, Span], wiring: Mapping[tuple[str, int], Span] | None = None) -> None:
        if not isinstance(spans, Mapping):
            raise FedrolexError(f"a window of a {type(spans).__name__}: give {{axis: Arc(start, width, size)}}")
        for name, span in spans.items():
            if not isinstance(span, Arc | Pick):
                kind = type(span).__name__
                raise FedrolexError(f"axis {name}: give Arc(start, width, size) or pick(indices, size), not a {kind}")
        self._spans = {name: span for name, span in spans.items() if not span.whole}
        self.wiring: Mapping[tuple[str, int], Span] = dict(wiring or {})

    def __getitem__(self, axis: str) -> Span:
        return self._spans[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return (tuple(sorted(self._spans.items())), tuple(sorted(self.wiring.items())))

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Window) and self._key == other._key)

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the hash that is kept: hashes of names differ from process to process."""
        return type(self), (self._spans, self.wiring)

    def __repr__(self) -> str:
        def short(span: Span) -> str:
            return f"{span.start}+{span.width}/{span.size}" if isinstance(span, Arc) else f"{span.width} of {span.size}"

        return "Window(" + ", ".join(f"{name}: {short(span)}" for name, span in self._spans.items()) + ")"

    def span(self, tensor: str, dim: int, axis: str) -> Span | None:
        """What ``axis`` is cut to inside dimension ``dim`` of ``tensor``; None where it is whole."""
        return self.wiring.get((tensor, dim)) or self._spans.get(axis)

    def encode(self) -> dict[str, Any]:
        """As JSON data: a run is ``[start, width, size]``, a pick ``{"pick": [...], "size": n}``."""
        if self.wiring:
            raise FedrolexError("a window of the published mis-wiring cannot be sent: it is for comparison only")
        return {
            name: [int(s.start), int(s.width), int(s.size)]
            if isinstance(s, Arc)
            else {"pick": list(s.chosen), "size": int(s.size)}
            for name, s in self._spans.items()
        }

    @staticmethod
    def decode(data: Mapping[str, Any]) -> Window:
        """Inverse of :meth:`encode`."""
        if not isinstance(data, Mapping):
            raise FedrolexError(f"not a window: {data!r}")
        spans: dict[str, Span] = {}
        for name, value in data.items():
            match value:
                case [int(start), int(width), int(full)] if bool not in map(type, value):
                    spans[name] = Arc(start, width, full)
                case {"pick": [*chosen], "size": int(full)} if all(type(i) is int for i in chosen):
                    spans[name] = Pick(tuple(chosen), full)
                case _:
                    raise FedrolexError(f"not a window for axis {name}: {value!r}")
        return Window(spans)


WHOLE = Window({})


def exact(value: Capacity) -> Fraction:
    """A capacity (or any share of an axis) as an exact fraction in (0, 1]; see :func:`fraction`."""
    found = fraction(value, "capacity")
    if not 0 < found <= 1:
        raise FedrolexError(f"capacity {value} is outside (0, 1]: give a fraction such as 1/4, or 0.25")
    return found


def fraction(value: Capacity, what: str) -> Fraction:
    """A number as an exact fraction; ``what`` begins the line that refuses anything else.

    Strings such as ``"1/16"`` or ``"0.25"`` and floats are read as the decimal they print as, so ``0.1``
    is one tenth.
    """
    try:
        if isinstance(value, bool) or len(str(value)) > 40 or re.search(r"[eE][+-]?\d{4}", str(value)):
            raise ValueError
        return value if isinstance(value, Fraction) else Fraction(str(value).strip())
    except (ValueError, ZeroDivisionError):
        raise FedrolexError(
            f"{what} {reprlib.repr(value)} is not a number: give a fraction such as 1/4, or 0.25"
        ) from None


@lru_cache(maxsize=4096)
def width(size: int, beta: Fraction, rounding: Rounding = "floor") -> int:
    """How many of ``size`` indices a client of capacity ``beta`` holds: ⌊βK⌋ or ⌈βK⌉, never below 1."""
    one_of("rounding", rounding, get_args(Rounding))
    share = beta * size
    return max(1, math.ceil(share) if rounding == "ceil" else math.floor(share))
