"""The engine of a GPU: of the ways to train a cohort at once, the first that can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedrolex.clients.messages import Failure, RoundPlan, Upload
from fedrolex.engines.gpu.lanes import Lanes
from fedrolex.engines.gpu.ragged import Ragged
from fedrolex.engines.gpu.stacked import Stacked
from fedrolex.engines.gpu.waves import Waves
from fedrolex.rounds.engine import Averaged, Engine

WAYS: tuple[type[Waves], ...] = (Ragged, Stacked, Lanes)
"""Ragged kernels for PreResNets; one stacked step where stacking pays; one captured step a client for everything."""


class Graph(Engine):
    """Trains a round by the first of :data:`WAYS` that supports it.

    Args:
        options: of every way, see :class:`~fedrolex.engines.gpu.waves.Waves`.
    """

    shares_process = True

    def __init__(self, **options: Any) -> None:
        self.ways = [way(**options) for way in WAYS]
        super().__init__(precision=self.ways[0].precision, device=self.ways[0].device)
        for way in self.ways:
            way.neighbours = [other for other in self.ways if other is not way]
        self.way: Waves | None = None

    def supports(self, work: RoundPlan) -> str | None:
        """What the last way, the most general one, cannot run, nobody can."""
        why = None
        for way in self.ways:
            why = way.supports(work)
            if why is None:
                return None
        return why

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """Train the clients."""
        self.way = next((way for way in self.ways if way.supports(plan) is None), self.ways[-1])
        for answer in self.way.run(plan):
            self.together = self.way.together
            yield answer

    def average(self, uploads: Sequence[Upload], weights: Sequence[float], label_axis: str | None) -> Averaged | None:
        """By the way that ran."""
        return None if self.way is None else self.way.average(uploads, weights, label_axis)

    def release(self) -> bool:
        """Of all ways."""
        return self.ways[0].release()
