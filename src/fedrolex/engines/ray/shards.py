"""Who trains what: a cohort dealt out to workers, by how long clients have taken before."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from fedrolex.clients import Job, Kind, RoundPlan
from fedrolex.slicing import Window
from fedrolex.slicing.sums import hull

BASE = 200_000  # what a client costs beside its parameters, in parameters, before any was measured
WEIGHT = 0.3  # of the newest measurement in a mean


class Costs:
    """How long a client takes, by network and widths: running means of what was measured.

    Clients of a kind that was not seen yet are judged by their size, at the speed of the others.
    """

    def __init__(self) -> None:
        self._seconds: dict[Kind, float] = {}
        self._sizes: dict[Kind, float] = {}

    def measured(self, plan: RoundPlan, job: Job, seconds: float) -> None:
        """Take in the seconds that a job took."""
        kind = self._kind(plan, job)
        before = self._seconds.get(kind, seconds)
        self._seconds[kind] = before + WEIGHT * (seconds - before)

    def of(self, plan: RoundPlan, job: Job) -> float:
        """How long a job will take, in seconds, once anything was measured."""
        kind = self._kind(plan, job)
        speed = sum(self._seconds.values()) / sum(self._sizes[k] for k in self._seconds) if self._seconds else 1.0
        return self._seconds.get(kind, speed * self._sizes[kind])

    def _kind(self, plan: RoundPlan, job: Job) -> Kind:
        kind = plan.kind(job)
        if kind not in self._sizes:
            self._sizes[kind] = plan.axes(job).parameters(job.window) + BASE
        return kind


def dealt(jobs: Sequence[Job], costs: Sequence[float], workers: int) -> list[list[Job]]:
    """Jobs in as many shards as there are workers, the longest jobs first, each to the worker that is done soonest.

    The longest shard comes first; in a shard, jobs are in their own order. None is empty.
    """
    ends = [(0.0, worker) for worker in range(min(workers, len(jobs)))]
    shards: list[list[int]] = [[] for _ in ends]
    for place in sorted(range(len(jobs)), key=lambda place: -costs[place]):
        end, worker = heapq.heappop(ends)
        shards[worker].append(place)
        heapq.heappush(ends, (end + costs[place], worker))
    longest_first = sorted(shards, key=lambda shard: -sum(costs[place] for place in shard))
    return [[jobs[place] for place in sorted(shard)] for shard in longest_first]


def worth_adding(plan: RoundPlan, jobs: Sequence[Job]) -> bool:
    """Whether what clients train is no fewer bytes than its sum, which takes two values for one."""
    windows: dict[tuple[str, str], set[Window]] = {}
    for job in jobs:
        windows.setdefault((job.sections[0], job.network), set()).add(job.window)
    sizes = {
        (network, w): plan.networks[network].axes.parameters(w) for (_, network), own in windows.items() for w in own
    }
    hulls = ((plan.networks[network].axes, own) for (_, network), own in windows.items())
    summed = sum(2 * axes.parameters(hull(axes, own)) for axes, own in hulls)
    return summed <= sum(sizes[job.network, job.window] for job in jobs)


def in_order(jobs: Sequence[Job], sizes: Sequence[int], parts: int, most: int) -> list[list[Job]]:
    """Jobs in about so many pieces, in their order; a piece's sizes add up to ``most``, unless it is a single job."""
    pieces: list[list[Job]] = []
    length, used = -(-len(jobs) // max(1, parts)), 0
    for job, size in zip(jobs, sizes, strict=True):
        if not pieces or len(pieces[-1]) == length or used + size > most:
            pieces.append([])
            used = 0
        pieces[-1].append(job)
        used += size
    return pieces
