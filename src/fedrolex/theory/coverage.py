"""Which nodes and which weights a scheme reaches after a number of rounds, computed from the layouts.

A node is reached when its index is in a window; a weight only when both its ends are, in the same round.
Rolling every axis in lockstep reaches all nodes and, for a small client, a narrow band of the weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fedrolex.core import FedrolexError
from fedrolex.slicing import Axes, Capacity, Cat, Fixed, Layout, Prod, Ref, Scheme, Window, exact, refs
from fedrolex.slicing.layout import has_axis, shape

CHUNK = 1024  # windows counted at once


@dataclass(frozen=True)
class Coverage:
    """What was reached.

    Attributes:
        rounds: rounds counted.
        clients: clients in each round.
        nodes: share of the indices of all cut axes that were ever in a window.
        weights: share of the positions of all parameters that are cut that were ever trained.
        matrices: that share of parameters cut along two or more dimensions alone: convolutions, linear layers.
        untouched: number of parameters never trained.
        mean: updates an average position of those matrices got.
        variation: standard deviation over mean of the updates per position of those matrices; 0 is even.
        by_tensor: share reached of each parameter that is cut.
    """

    rounds: int
    clients: int
    nodes: float
    weights: float
    matrices: float
    untouched: int
    mean: float
    variation: float
    by_tensor: dict[str, float]

    def encode(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)


def coverage(
    axes: Axes, scheme: Scheme, fleet: Sequence[Capacity], rounds: int, progress: Callable[[int], None] | None = None
) -> Coverage:
    """Count what ``fleet`` (one capacity a client) reaches in ``rounds`` rounds.

    Exact, and quick: counts are products of which indices were held, and parameters that are cut alike are
    counted once.
    """
    betas = [exact(beta) for beta in fleet]
    if not betas or not isinstance(rounds, int) or rounds < 1:
        raise FedrolexError(f"coverage of {len(betas)} clients in {rounds} rounds: give whole numbers of at least 1")
    if not isinstance(axes, Axes) or not isinstance(scheme, Scheme):
        given = f"{type(axes).__name__} and {type(scheme).__name__}"
        raise FedrolexError(
            f"coverage of {given}: give Axes, from trace(model, example), and a Scheme, such as Rolling()"
        )
    counts = Counts(axes)
    pending: dict[Window, int] = {}
    for round in range(rounds):
        for client, beta in enumerate(betas):
            window = scheme.window(axes, round=round, capacity=beta, client=client)
            pending[window] = pending.get(window, 0) + 1
        if len(pending) >= CHUNK or round == rounds - 1:
            counts.add(pending)
            pending.clear()
        if progress is not None:
            progress(round + 1)
    return counts.summary(rounds, len(betas))


class Counts:
    """How often every node and every weight was in a window, added up window by window.

    Attributes:
        axes: of the model.
        groups: parameters that are cut, those with the same cuts together, by the first of them.
        weights: for the first of every group, updates by position; dimensions that are never cut are left out.
        nodes: for every axis that is cut, updates by index, ``(size,)``.
    """

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.groups = _alike(axes)
        self.weights = {first: torch.zeros(shape(axes.counted(first), axes.full)) for first in self.groups}
        self.nodes = {axis.name: torch.zeros(axis.size) for axis in axes.cut_axes}

    def add(self, windows: Mapping[Window, int]) -> None:
        """Add windows, each so many times: a position is held when all its indices are, so counts are products.

        For every axis, ``held`` has one row a window and one column an index: 1 where the window holds it.
        """
        if any(window.wiring for window in windows):
            raise FedrolexError("coverage is about sub-networks: the published mis-wiring has none")
        times = torch.tensor([float(count) for count in windows.values()])
        held = {axis.name: torch.ones(len(windows), axis.size) for axis in self.axes.axes.values()}
        for row, window in enumerate(windows):
            for name, span in window.items():
                held[name][row] = 0.0
                held[name][row, torch.from_numpy(span.indices())] = 1.0
        for name, count in self.nodes.items():
            count += times @ held[name]
        for name, count in self.weights.items():
            dims = [_held(dim, held) for dim in self.axes.tensors[name].dims if has_axis(dim)]
            letters = "abcdefgh"[: len(dims)]
            equation = ",".join(f"w{letter}" for letter in letters) + "->" + letters
            count += torch.einsum(equation, dims[0] * times[:, None], *dims[1:]).view(count.shape)

    def summary(self, rounds: int, clients: int) -> Coverage:
        """What was reached so far, in so many rounds of so many clients; where nothing is cut, everything."""
        reached = total = 0.0
        matrices = torch.zeros(4, dtype=torch.float64)  # reached, positions, updates, squared updates
        by_tensor: dict[str, float] = {}
        for name, kept in ((name, self.weights[first]) for first, names in self.groups.items() for name in names):
            repeat = prod(self.axes.shape(name)) / kept.numel()
            count = kept.double()
            positions = torch.tensor(count.numel())
            found = torch.stack([(count > 0).sum(), positions, count.sum(), count.square().sum()]) * repeat
            hit, size = float(found[0]), float(found[1])
            by_tensor[name] = _share(hit, size)
            reached, total = reached + hit, total + size
            if _cut_dims(self.axes, name) > 1:
                matrices += found
        hits, every, updates, squares = matrices.tolist()
        mean = updates / every if every else 0.0
        nodes = self.nodes.values()
        return Coverage(
            rounds=rounds,
            clients=clients,
            nodes=_share(sum(float((n > 0).sum()) for n in nodes), sum(n.numel() for n in nodes)),
            weights=_share(reached, total),
            matrices=_share(hits, every),
            untouched=int(total - reached + 0.5),
            mean=mean,
            variation=max(0.0, squares / every - mean**2) ** 0.5 / mean if mean else 0.0,
            by_tensor=by_tensor,
        )


def _share(reached: float, every: float) -> float:
    """What part of ``every`` was reached; of nothing, all."""
    return reached / every if every else 1.0


def _held(layout: Layout, held: dict[str, Tensor]) -> Tensor:
    """One row a window, one column a position of this dimension: 1 where the window holds it."""
    rows = len(next(iter(held.values())))
    match layout:
        case Fixed(n):
            return torch.ones(rows, n)
        case Ref(axis):
            return held[axis]
        case Cat(parts):
            return torch.cat([_held(part, held) for part in parts], 1)
        case Prod(parts):
            result = torch.ones(rows, 1)
            for part in parts:
                result = (result[:, :, None] * _held(part, held)[:, None, :]).flatten(1)
            return result


def _alike(axes: Axes) -> dict[str, list[str]]:
    """Parameters that are cut, those with the same cuts together: one of them is counted for all."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in axes.tensors.items():
        if tensor.role == "parameter" and _cut_dims(axes, name):
            groups.setdefault(axes.counted(name), []).append(name)
    return {names[0]: names for names in groups.values()}


def _cut_dims(axes: Axes, name: str) -> int:
    """How many dimensions of a tensor capacities cut."""
    cut = {axis.name for axis in axes.cut_axes}
    return sum(any(axis in cut for axis in refs(dim)) for dim in axes.tensors[name].dims)
