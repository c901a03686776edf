"""Who is trained together: a cohort as units of work for the workers of a crew."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from fedrolex.clients.dropout import has_dropout
from fedrolex.clients.messages import Kind, Network, RoundPlan
from fedrolex.clients.visit import Visit
from fedrolex.engines.stacking import filling
from fedrolex.engines.visits import steps_of

STACKED_VALUES = 2**12  # of a parameter on average, up to which clients are worth a stack
FEWEST, MOST = 4, 10  # clients of a stack
BASE = 200_000  # what a step costs beside its parameters, in parameters
SHARED = 0.8  # how much of every core a step that all workers share makes use of


@dataclass(frozen=True, eq=False)
class Unit:
    """Clients that are trained together: a stack, or one alone.

    Attributes:
        kind: the network and the widths of all.
        visits: of the clients, those with the most steps first.
        parameters: of one client's sub-model.
        ignored: the target of examples that fill up short batches; None where all clients hold as many examples.
    """

    kind: Kind
    visits: Sequence[Visit]
    parameters: int
    ignored: int | None = None

    @cached_property
    def cost(self) -> float:
        """How long the unit takes, up to a factor."""
        return (self.parameters + BASE) * sum(map(steps_of, self.visits))


def units_of(plan: RoundPlan, visits: Sequence[Visit], workers: int, alone: Collection[Kind] = ()) -> list[Unit]:
    """A cohort as units of work, the longest first; clients of a kind in ``alone`` are not stacked.

    Stacked are clients of one network and widths, of which there are at least :data:`FEWEST`. Hooks between their steps
    treat every value alone. The network has no
    buffers, and its parameter tensors have at most :data:`STACKED_VALUES` values each on average: operations on so few
    values cost more to call than to do. The clients hold the same number of examples each, or short batches may be
    filled up. Stacks of one kind are of almost equal size, and as many of them as a multiple of ``workers``, where that
    leaves them large enough.
    """
    filled = {name: _filling(plan, name) for name in {visit.job.network for visit in visits}}
    groups: dict[tuple[Kind, int], list[Visit]] = {}
    for visit in visits:
        kind = plan.kind(visit.job)
        groups.setdefault((kind, 0 if filled[kind[0]] is not None else len(visit.examples)), []).append(visit)
    units = []
    for (kind, _), group in groups.items():
        parameters = plan.axes(group[0].job).parameters(group[0].job.window)
        stackable = kind not in alone and plan.work.looks_at_wholes is None
        stackable = stackable and _is_stackable(plan.networks[kind[0]], parameters)
        count = stacks_of(len(group), workers) if stackable else len(group)
        longest_first = sorted(group, key=lambda visit: (-steps_of(visit), -len(visit.examples)))
        ends = [len(group) * number // count for number in range(count + 1)]
        units += [Unit(kind, longest_first[a:b], parameters, filled[kind[0]]) for a, b in pairwise(ends)]
    return sorted(units, key=lambda unit: -unit.cost)


def stacks_of(clients: int, multiple: int) -> int:
    """How many stacks to make of clients of one kind; as many as there are clients where stacks are not worth it."""
    if clients < FEWEST:
        return clients
    fewest = -(-clients // MOST)
    even = -(-fewest // multiple) * multiple
    return even if clients >= even * FEWEST else fewest


def first_together(costs: Sequence[float], workers: int, most: int | None = None) -> int:
    """How many of the longest units all workers should do together first, so that all are done soonest.

    ``costs`` are those of the units, the longest first; ``most`` of them may be done together, None is any.
    """

    def finish(shared: int) -> float:
        ends = [sum(costs[:shared]) / (workers * SHARED)] * workers
        for one in costs[shared:]:
            heapq.heappushpop(ends, ends[0] + one)
        return max(ends)

    limit = min(workers, len(costs), len(costs) if most is None else most)
    return min(range(limit + 1), key=finish)


def _filling(plan: RoundPlan, network: str) -> int | None:
    """As :func:`filling`; dropout would draw for the filling, too, and so otherwise than for a client alone."""
    return None if has_dropout(plan.networks[network].module) else filling(plan, network)


def _is_stackable(network: Network, parameters: int) -> bool:
    tensors = sum(layout.role == "parameter" for layout in network.axes.tensors.values())
    return parameters <= STACKED_VALUES * tensors and next(network.module.buffers(), None) is None
