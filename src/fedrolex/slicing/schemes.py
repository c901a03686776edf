"""Schemes: which indices a client holds in a round. Pure functions of (round, capacity, client, axis).

Server and client compute the same window from the same few numbers; nothing is remembered between rounds.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from math import isqrt
from numbers import Integral
from typing import Literal

from fedrolex.core import FedrolexError, check_words, in_one_line, sample
from fedrolex.slicing.axes import Axes
from fedrolex.slicing.axis import Axis
from fedrolex.slicing.windows import Arc, Capacity, Pick, Rounding, Span, Window, exact, fraction, pick, width


@dataclass(frozen=True, kw_only=True)
class Scheme(ABC):
    """A rule for windows.

    Attributes:
        rounding: whether ⌊βK⌋ or ⌈βK⌉ indices are held; never fewer than one.
    """

    rounding: Rounding = "floor"

    def __post_init__(self) -> None:
        check_words("scheme", self)

    def window(self, axes: Axes, *, round: int, capacity: Capacity, client: int = 0) -> Window:
        """The window of one client in one round."""
        beta = exact(capacity)
        _check_call(axes, round, client)
        with in_one_line(f"the scheme {type(self).__name__} failed"):
            return self._window(axes, round, beta, client)

    def _window(self, axes: Axes, round: int, beta: Fraction, client: int) -> Window:
        return Window({a.name: self.span(a, place, round, beta, client) for place, a in enumerate(axes.cut_axes)})

    @abstractmethod
    def span(self, axis: Axis, place: int, round: int, beta: Fraction, client: int) -> Span:
        """The indices of one axis; ``place`` counts the axes that are cut."""

    def width(self, axis: Axis, beta: Fraction) -> int:
        """How many indices of ``axis`` a client of capacity ``beta`` holds."""
        return width(axis.size, beta, self.rounding)


def _check_call(axes: Axes, round: int, client: int) -> None:
    if not isinstance(axes, Axes):
        raise FedrolexError(f"axes is a {type(axes).__name__}: give what trace(model, example) returned")
    for what, number in (("round", round), ("client", client)):
        if not hasattr(number, "__index__") or getattr(number, "ndim", False) or number < 0:
            raise FedrolexError(f"{what} {number!r} is not a whole number from 0 on")


Offset = Callable[[Axis, int, int, int], int]
"""(axis, its place, round, client) to a shift of the window's start."""


@dataclass(frozen=True, kw_only=True)
class Rolling(Scheme):
    """FedRolex: the window advances every round and wraps, so that all nodes are trained evenly.

    Equation (4) of the paper: in round j a client of capacity β holds the ⌊βK⌋ nodes from j mod K on.

    Attributes:
        overlap: r of the paper's appendix, in [0, 1]. The window advances 1 + ⌊β(1−r)K⌋ a round: one node
            at r = 1, (almost) disjoint windows at r = 0.
        offset: shift of the start by axis and client. None is the paper's formula: every axis and every
            client starts at the same place, and only weights near the diagonal are ever trained. See
            :func:`spread`.
    """

    overlap: Capacity = 1
    offset: Offset | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= fraction(self.overlap, "overlap") <= 1:
            raise FedrolexError(f"overlap {self.overlap} is outside [0, 1]")
        if self.offset is not None and not callable(self.offset):
            raise FedrolexError(f"offset {self.offset!r} is not a function: give e.g. spread(clients)")

    def stride(self, axis: Axis, beta: Fraction) -> int:
        """How far the window advances in one round."""
        return _stride(axis.size, beta, str(self.overlap))

    def span(self, axis: Axis, place: int, round: int, beta: Fraction, client: int) -> Arc:
        shift = 0 if self.offset is None else self.offset(axis, place, round, client)
        start = (round * self.stride(axis, beta) + shift) % axis.size
        return Arc(start, self.width(axis, beta), axis.size)


@lru_cache(maxsize=4096)
def _stride(size: int, beta: Fraction, overlap: str) -> int:
    return 1 + int(beta * (1 - Fraction(overlap)) * size)


def spread(clients: int) -> Offset:
    """Low-discrepancy start offsets: every axis and every client of a round starts somewhere else.

    Offset t of axis i is ⌊K·frac(t·∛pᵢ)⌋, with t = round · clients + client and pᵢ the i-th prime: an
    additive recurrence whose axes are independent of each other, so that pairs of nodes meet evenly and
    all weights are reached, not only all nodes.

    Args:
        clients: clients in a round.
    """
    if not isinstance(clients, Integral) or clients < 1:
        raise FedrolexError(f"spread over {clients!r} clients: give a whole number of at least 1")

    def offset(axis: Axis, place: int, round: int, client: int) -> int:
        turn = round * clients + client % clients
        return (turn * _root(place) % 2**64 * axis.size) >> 64

    return offset


@cache
def _root(place: int) -> int:
    """The fractional part of the cube root of the (place + 1)-th prime, in units of 2⁻⁶⁴."""
    prime, found = 1, -1
    while found < place:
        prime += 1
        found += all(prime % d for d in range(2, isqrt(prime) + 1))
    radicand = prime << 192
    low, high = 0, 1 << 72
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**3 <= radicand else (low, middle)
    return low % 2**64


@dataclass(frozen=True, kw_only=True)
class Blocks(Scheme):
    """Disjoint windows in turn: block b of an axis is its indices b·w … b·w + w − 1.

    Where w does not divide K the last block is the last w indices, so that every node has its turn.

    Attributes:
        per_client: clients of one round take different blocks (block = round + client) instead of the same.
    """

    per_client: bool = False

    def span(self, axis: Axis, place: int, round: int, beta: Fraction, client: int) -> Arc:
        w = self.width(axis, beta)
        count = -(-axis.size // w)
        block = (round + client * self.per_client) % count
        return Arc(min(block * w, axis.size - w), w, axis.size)


@dataclass(frozen=True, kw_only=True)
class Static(Scheme):
    """HeteroFL: always the first ⌊βK⌋ nodes."""

    def span(self, axis: Axis, place: int, round: int, beta: Fraction, client: int) -> Arc:
        return Arc(0, self.width(axis, beta), axis.size)


Scope = Literal["round", "capacity", "client"]


@dataclass(frozen=True, kw_only=True)
class Random(Scheme):
    """Federated Dropout: ⌊βK⌋ nodes drawn anew every round, the same for all tensors of an axis.

    Attributes:
        seed: key of the draws.
        scope: who shares a draw: everybody in a ``round`` (of nested windows, small in large), everybody of
            one ``capacity``, or nobody but the ``client``.
    """

    seed: int = 0
    scope: Scope = "client"

    def span(self, axis: Axis, place: int, round: int, beta: Fraction, client: int) -> Span:
        who = {"round": "", "capacity": beta, "client": client}[self.scope]
        chosen = sample(axis.size, self.width(axis, beta), self.seed, "window", round, self.scope, who, axis.name)
        return pick(chosen, axis.size)


@dataclass(frozen=True, kw_only=True)
class Ordered(Static):
    """FjORD: the first nodes of every axis, at any of several widths up to the client's capacity.

    What travels is the prefix at the client's capacity; while it trains, a client narrows it further, batch
    by batch (:meth:`inner`).

    Attributes:
        widths: the fractions a batch may be trained at.
    """

    widths: Sequence[Capacity] = ("1/5", "2/5", "3/5", "4/5", "1")
    rounding: Rounding = "ceil"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.widths:
            raise FedrolexError("a scheme of no widths: give at least one, e.g. widths=['1/2', '1']")
        for part in self.widths:
            exact(part)

    def inner(self, axes: Axes, beta: Capacity, p: Capacity) -> Window:
        """The window of width ``p`` inside the sub-model of capacity ``beta``, on the sub-model's own axes."""
        outer, narrow = exact(beta), exact(p)
        if narrow > outer:
            raise FedrolexError(f"width {p} is larger than the client's capacity {beta}")
        return Window({a.name: Arc(0, self.width(a, narrow), self.width(a, outer)) for a in axes.cut_axes})


Keys = Mapping[str, Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Select(Scheme):
    """Federated Select: the client says which indices it wants; the other schemes are special cases.

    Attributes:
        keys: (round, client) to index lists by axis name; axes of any kind may be named, among them
            embedding rows and classes.
        base: scheme for the axes that ``keys`` does not name; None keeps them whole.
    """

    keys: Callable[[int, int], Keys]
    base: Scheme | None = None

    def _window(self, axes: Axes, round: int, beta: Fraction, client: int) -> Window:
        spans: dict[str, Span] = {}
        if self.base is not None:
            spans.update(self.base.window(axes, round=round, capacity=beta, client=client))
        for name, indices in self.keys(round, client).items():
            spans[name] = pick(indices, axes[name].size)
        return Window(spans)

    def span(self, axis: Axis, place: int, round: int, beta: Fraction, client: int) -> Span:
        return Pick(tuple(self.keys(round, client)[axis.name]), axis.size)
