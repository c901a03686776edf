"""The server's selective average: what clients trained is averaged where they trained it.

For every position, over the clients that hold it::

    new = Σ weight · value / Σ weight        and nobody held it: new = old, bit for bit

A :class:`Fold` streams: it keeps one sum and one (smaller) count a tensor, whatever the cohort.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Literal

import torch
from torch import Tensor

from fedrolex.core import FedrolexError
from fedrolex.slicing.axes import Axes, Tensors
from fedrolex.slicing.layout import refs, shape
from fedrolex.slicing.regions import region_of
from fedrolex.slicing.rows import Rows, trained_rows
from fedrolex.slicing.windows import Span, Window, pick

PENDING = 16
Normaliser = Literal["per_position", "cohort", "expected"]
Weight = float | Mapping[str, float]
SENT, SKIPPED = "has sent an update", "was skipped"
ONE_BY_ONE = "a fold with an order takes updates one by one: use add()"
WEIGHTS = torch.finfo(torch.float32)  # sums are taken in it


@dataclass(frozen=True)
class _Update:
    part: Tensors | None  # None: its sum comes by itself
    window: Window
    weight: Weight
    rows: Mapping[str, list[int]] | None


class Fold:
    """A selective average in progress.

    Args:
        axes: the model's axes.
        base: the server's tensors; they are read, never written.
        normaliser: ``per_position`` divides by the weight that covered a position (the paper),
            ``cohort`` by the weight of all clients (a zero-padded mean of updates), ``expected`` by
            ``expected`` (what privacy needs: a divisor that does not depend on who took part).
        expected: the divisor, one for all tensors or one for each, for ``normaliser="expected"``.
        order: client ids in the order to fold them in. Updates that arrive before their turn wait, so
            that the result does not depend on the order of arrival; memory is then the model plus
            what waits. Every client of the order is added or skipped, once.
    """

    def __init__(
        self,
        axes: Axes,
        base: Tensors,
        *,
        normaliser: Normaliser = "per_position",
        expected: Weight | None = None,
        order: Sequence[Hashable] | None = None,
    ) -> None:
        if normaliser not in ("per_position", "cohort", "expected"):
            raise FedrolexError(f"normaliser {normaliser!r} is unknown: use per_position, cohort or expected")
        if (normaliser == "expected") != (expected is not None):
            raise FedrolexError("normaliser 'expected' needs expected=, the divisor, and only it does")
        if not isinstance(axes, Axes):
            raise FedrolexError(f"axes is a {type(axes).__name__}: give what trace(model, example) returned")
        self._order = None if order is None else _ids(order)
        axes.check_whole(base)
        self.axes = axes
        self.base = {name: tensor for name, tensor in base.items() if axes.tensors[name].floating}
        self._integers = {name: tensor for name, tensor in base.items() if name not in self.base}
        self.normaliser = normaliser
        self._expected = {} if expected is None else {n: _weight(expected, n, "expected") for n in self.base}
        self.clients: list[Hashable] = []
        self._sums = {name: _zeros(tensor, tensor.shape) for name, tensor in self.base.items()}
        self._counts = {n: _zeros(tensor, shape(axes.counted(n), axes.full)) for n, tensor in self.base.items()}
        self._pending: dict[str, dict[Window, float]] = {}
        self._covered: set[str] = set()  # tensors of which somebody sent every position
        self._total = dict.fromkeys(self.base, 0.0)
        self._next = 0
        self._waiting: dict[Hashable, _Update | None] = {}
        self._heard: dict[Hashable, str] = {}  # what every client did that was added or skipped
        self._new: dict[str, Tensor] | None = None

    # --- taking updates in ---

    def add(
        self, client: Hashable, part: Tensors, window: Window, weight: Weight = 1.0, rows: Rows | None = None
    ) -> None:
        """Fold in what one client sends back. A bad update raises and changes nothing.

        Args:
            client: the client's id; each client counts once.
            part: the window's part of every floating tensor of ``base``; integer tensors are ignored.
            window: the window this client was given.
            weight: the client's weight, or one for each tensor.
            rows: axis name to the indices the client really trained (its own classes, its own words): whole
                numbers, or a mask with a boolean for every index of the axis; a list, array or tensor. Other
                positions of that axis do not count.
        """
        self.check(client, part, window, weight, rows)
        trained = trained_rows(rows, self.axes)
        self._heard[client] = SENT
        if self._order is None:
            self._fold(_Update(part, window, weight, trained))
            self.clients.append(client)
            return
        due = self._order[self._next : self._next + 1] == [client]
        kept = part if due else {name: tensor.clone() for name, tensor in part.items()}
        self._waiting[client] = _Update(kept, window, weight, trained)
        self._advance()

    def count_in(self, client: Hashable, window: Window, weight: float = 1.0, rows: Rows | None = None) -> None:
        """Count a client whose part is among the sums of :meth:`add_sums`; for the arguments see :meth:`add`."""
        if self._order is not None:
            raise FedrolexError(ONE_BY_ONE)
        with _naming(client):
            self._check_client(client)
            update = _Update(None, window, weight, trained_rows(rows, self.axes))
        self._heard[client] = SENT
        self._fold(update)
        self.clients.append(client)

    def add_sums(self, sums: Tensors) -> None:
        """Add weighted sums over clients that were counted in, every tensor of ``base`` at its full shape."""
        for name in self.base:
            self._sums[name] = self._sums[name] + sums[name].to(self._sums[name].device)

    def add_all(
        self,
        clients: Sequence[Hashable],
        parts: Sequence[Tensors],
        window: Window,
        weights: Sequence[float],
        rows: Sequence[Rows] | None = None,
    ) -> None:
        """Fold in several clients of one window: added up first, then put into their place once.

        The same as :meth:`add` for each up to the order of summation, and fewer operations. All are checked
        before anything is changed.
        """
        if self._order is not None:
            raise FedrolexError(ONE_BY_ONE)
        given = (clients, parts, weights, clients if rows is None else rows)
        if not all(isinstance(each, Sized) and len(each) == len(clients) > 0 for each in given):
            raise FedrolexError("give every client, at least one, its part, its weight and, if any, its rows")
        if any(isinstance(weight, Mapping) for weight in weights):
            raise FedrolexError("give every client one weight, a number: weights by tensor are for add()")
        _ids(clients)
        for place, (client, part, weight) in enumerate(zip(clients, parts, weights, strict=True)):
            self.check(client, part, window, weight, None if rows is None else rows[place])
        trained = [None if rows is None else trained_rows(rows[place], self.axes) for place in range(len(clients))]
        named = {axis for each in trained for axis in each or ()}
        apart = {name for name in self.base if self._mentioned(name, named)}
        names = [name for name in self.base if name not in apart]
        with torch.no_grad():
            total = [part.to(self._sums[name].dtype) for name, part in ((n, parts[0][n]) for n in names)]
            total = list(torch._foreach_mul(total, float(weights[0]))) if names else []
            for part, weight in zip(parts[1:] if names else (), weights[1:] if names else (), strict=True):
                torch._foreach_add_(total, [part[name] for name in names], alpha=float(weight))
            for name, summed in zip(names, total, strict=True):
                self._place(name, summed, window, 1.0, float(sum(weights)))
                self._total[name] += float(sum(weights))
            for place, part in enumerate(parts):
                update = _Update(part, window, float(weights[place]), trained[place])
                for name in apart:
                    self._fold_tensor(name, update)
        self.clients += clients
        self._heard |= dict.fromkeys(clients, SENT)

    def _mentioned(self, name: str, rows: Collection[str]) -> set[str]:
        """The axes of a tensor that ``rows`` are given for."""
        return {axis for dim in self.axes.tensors[name].dims for axis in refs(dim) if axis in rows}

    def skip(self, client: Hashable) -> None:
        """Say that a client of ``order`` will not report."""
        with _naming(client):
            self._check_client(client)
        if self._order is None:
            raise FedrolexError("a fold without an order waits for nobody: there is no client to skip")
        self._heard[client] = SKIPPED
        self._waiting[client] = None
        self._advance()

    def check(
        self, client: Hashable, part: Tensors, window: Window, weight: Weight = 1.0, rows: Rows | None = None
    ) -> None:
        """Raise, in one line that names the client, if :meth:`add` would not take this update."""
        with _naming(client):
            self._check(client, part, window, weight, rows)

    def _check_client(self, client: Hashable) -> None:
        """Raise unless the client may be added or skipped now."""
        if self._new is not None:
            raise FedrolexError("this fold has ended: start a new one every round")
        _ids([client])
        if client in self._heard:
            raise FedrolexError(f"{self._heard[client]} already: each client is added or skipped once")
        if self._order is not None and client not in self._order:
            raise FedrolexError("is not in the order of this fold")

    def _check(self, client: Hashable, part: Tensors, window: Window, weight: Weight, rows: Rows | None) -> None:
        self._check_client(client)
        if not isinstance(part, Mapping):
            kind = type(part).__name__
            raise FedrolexError(f"the update is a {kind}: give tensors by name, e.g. axes.state(module, window)")
        if not isinstance(window, Window):
            raise FedrolexError(f"the window is a {type(window).__name__}: give the Window this client was cut with")
        sent = {name for name in part if name not in self._integers}
        odd = sorted(sent ^ set(self.base))
        if odd:
            raise FedrolexError(f"tensor {odd[0]!r} is {'unknown' if odd[0] in sent else 'missing'}")
        for name in self.base:
            self.axes.fits(name, part[name], window)
            _weight(weight, name)
        trained_rows(rows, self.axes)

    def _advance(self) -> None:
        assert self._order is not None
        while self._next < len(self._order) and self._order[self._next] in self._waiting:
            client = self._order[self._next]
            update = self._waiting.pop(client)
            self._next += 1
            if update is not None:
                self._fold(update)
                self.clients.append(client)

    def _fold(self, update: _Update) -> None:
        with torch.no_grad():
            for name in self.base:
                self._fold_tensor(name, update)

    def _fold_tensor(self, name: str, update: _Update) -> None:
        part, window = None if update.part is None else update.part[name], update.window
        weight = _weight(update.weight, name)
        self._total[name] += weight
        if update.rows is not None:
            narrowed = self._narrow(name, part, window, update.rows)
            if narrowed is None:
                return
            part, window = narrowed
        self._place(name, part, window, weight, weight)

    def _place(self, name: str, part: Tensor | None, window: Window, weight: float, count: float) -> None:
        """Add ``weight · part``, if there is one, where it belongs, and ``count`` to the weight that covers it."""
        if part is not None:
            self.axes.region(name, window).add(self._sums[name], part.to(self._sums[name].device), weight)
        pending = self._pending.setdefault(name, {})
        pending[window] = pending.get(window, 0.0) + count
        if len(pending) >= PENDING:
            self._count(name)

    def _count(self, name: str) -> None:
        """Count what is pending; clients of one window are counted together."""
        for window, weight in self._pending.pop(name, {}).items():
            region = self.axes.region(name, window, counts=True)
            region.add_constant(self._counts[name], weight)
            if region.shape == region.full:
                self._covered.add(name)

    def _narrow(
        self, name: str, part: Tensor | None, window: Window, rows: Mapping[str, list[int]]
    ) -> tuple[Tensor | None, Window] | None:
        """The rows of ``part`` that count, and the window they lie in; None where there are none."""
        mentioned = self._mentioned(name, rows)
        if not mentioned:
            return part, window
        inside: dict[str, Span] = {}
        outside: dict[str, Span] = dict(window)
        for axis in mentioned:
            size = self.axes.axes[axis].size
            held = window[axis].indices().tolist() if axis in window else list(range(size))
            wanted = set(rows[axis])
            places = [place for place, index in enumerate(held) if index in wanted]
            if not places:
                return None
            inside[axis] = pick(places, len(held))
            outside[axis] = pick([held[place] for place in places], size)
        within = region_of(name, self.axes.tensors[name].dims, self.axes.widths(window), Window(inside))
        return None if part is None else within.take(part), Window(outside)

    # --- giving the result out ---

    def average(self) -> dict[str, Tensor]:
        """The new server tensors. Ends the fold: nothing can be added afterwards."""
        if self._new is not None:
            return self._new
        if self._order is not None and self._next < len(self._order):
            late = self._order[self._next]
            raise FedrolexError(f"client {late!r} has not reported: add its update, or skip it")
        with torch.no_grad():
            new = {name: self._average(name) for name in self.base}
        self._sums.clear()
        self._new = {**new, **{name: tensor.clone() for name, tensor in self._integers.items()}}
        return self._new

    def change(self) -> dict[str, Tensor]:
        """The average minus ``base``, zero where nobody trained: what a server optimiser steps along."""
        new = self.average()
        return {name: new[name] - base for name, base in self.base.items()}

    def sum(self, name: str) -> Tensor:
        """The weighted sum of what clients sent for a tensor so far, at its full shape."""
        self._check_name(name)
        if self._new is not None:
            raise FedrolexError("this fold has ended: its sums are gone")
        return self._sums[name]

    def count(self, name: str) -> Tensor:
        """The weight that covered each position of a tensor so far; broadcasts against it."""
        self._check_name(name)
        self._count(name)
        return self._counts[name]

    def _check_name(self, name: str) -> None:
        if name not in self.base:
            raise FedrolexError(f"the fold has no tensor {name!r}")

    def _average(self, name: str) -> Tensor:
        sums, counts, base = self._sums[name], self.count(name), self.base[name]
        if self.normaliser == "per_position":
            bare = None if name in self._covered else counts == 0
            if bare is None or not bool(bare.any()):
                return sums.div_(counts).to(base.dtype)
            return torch.where(bare, base, sums.div_(counts.masked_fill(bare, 1)).to(base.dtype))
        divisor = self._total[name] if self.normaliser == "cohort" else self._expected[name]
        step = (sums - counts * base) / (divisor or 1.0)
        return torch.where(counts == 0, base, (base + step).to(base.dtype))


@contextmanager
def _naming(client: Hashable) -> Iterator[None]:
    """Inside, every mistake is said of this client."""
    try:
        yield
    except FedrolexError as error:
        raise FedrolexError(f"client {client!r}: {error}") from None


def _ids(clients: Iterable[Hashable]) -> list[Hashable]:
    """Ids of clients; raise, in one line, where one is there twice, or cannot be looked up."""
    try:
        found = list(clients)
        twice = next((client for client, times in Counter(found).items() if times > 1), None)
    except TypeError as error:
        raise FedrolexError(f"the ids of clients are numbers or words, a list of them: {error}") from None
    if twice is not None:
        raise FedrolexError(f"the list of clients names client {twice!r} twice: each is added or skipped once")
    return found


def _zeros(like: Tensor, sizes: Sequence[int]) -> Tensor:
    """An accumulator: float32 at least."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros(sizes, dtype=dtype, device=like.device)


def _weight(weight: Weight, name: str, what: str = "weight") -> float:
    """The weight of a tensor, a positive number; FedrolexError for anything else."""
    given = weight.get(name) if isinstance(weight, Mapping) else weight
    if not isinstance(given, Real):
        raise FedrolexError(f"{what} {given!r} is not a positive number")
    try:
        number = float(given)
    except OverflowError:
        number = inf
    if not WEIGHTS.tiny <= number <= WEIGHTS.max:
        limits = f"from {WEIGHTS.tiny:.0e} to {WEIGHTS.max:.0e}"
        raise FedrolexError(f"{what} {number:g} is not a positive number {limits}")
    return number
