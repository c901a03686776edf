"""The engine of a GPU: of the ways to train a cohort at once, the first that can."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fedrolex.clients import Failure, Precision, RoundPlan, Upload
from fedrolex.engines.gpu.lanes import Lanes
from fedrolex.engines.gpu.ragged import Ragged
from fedrolex.engines.gpu.stacked import Stacked
from fedrolex.engines.gpu.waves import Waves, refuse_cpu
from fedrolex.rounds import Averaged, Engine

WAYS: tuple[type[Waves], ...] = (Ragged, Stacked, Lanes)
"""Ragged kernels for PreResNets; one stacked step where stacking pays; one captured step a client for everything."""


class Graph(Engine):
    """Trains a round by the first of :data:`WAYS` that supports it.

    Args:
        precision, device, options: of every way, see :class:`~fedrolex.engines.gpu.waves.Waves`.

    Attributes:
        ways: all of them, with what each keeps on the device.
        way: the one that trained the last round.
    """

    shares_process = True

    def __init__(self, *, precision: Precision = "fp32", device: torch.device | None = None, **options: Any) -> None:
        super().__init__(precision=precision, device=device)
        if not options.get("rehearsed"):
            refuse_cpu(self)
        self.ways = [way(precision=precision, device=device, **options) for way in WAYS]
        for way in self.ways:
            way.neighbours.update(other for other in self.ways if other is not way)
        self.way: Waves | None = None

    def supports(self, plan: RoundPlan) -> str | None:
        """None where one of the ways can; else the reason of the last way, the most general one."""
        for way in self.ways:
            if (why := way.supports(plan)) is None:
                return None
        return why

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """Train the clients by the first way that can."""
        self.together = False
        self.way = next((way for way in self.ways if way.supports(plan) is None), self.ways[-1])
        for answer in self.way.run(plan):
            self.together = self.way.together
            yield answer

    def average(self, uploads: Sequence[Upload], weights: Sequence[float], label_axis: str | None) -> Averaged | None:
        """The average as the way that trained the last round takes it."""
        return None if self.way is None else self.way.average(uploads, weights, label_axis)

    def release(self) -> bool:
        """Give back what all ways keep on the device: they are neighbours of the first."""
        return self.ways[0].release()
