"""The reference engine: one client after the other, one step after the other, nothing clever."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fedrolex.client import Slot
from fedrolex.engines.engine import Failure, Job, RoundPlan, Upload
from fedrolex.slicing.capture import one_line
from fedrolex.streams import shuffle, words


class Loop:
    """Plain and obviously right, on a CPU or a GPU.

    Args:
        model: the server's model, to cut sub-models from; its weights are not used.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._slots: dict[tuple[tuple[str, int], ...], Slot] = {}

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """Train the clients in order."""
        for job in plan.jobs:
            try:
                yield self._train(plan, job)
            except (Exception, TimeoutError) as failure:
                yield Failure(job, f"{type(failure).__name__}: {one_line(failure)}")

    def _slot(self, plan: RoundPlan, job: Job) -> Slot:
        """The slot for this job's widths, loaded with its part of the server's tensors."""
        key = tuple(plan.axes.widths(job.window).items())
        if key not in self._slots:
            self._slots[key] = Slot(plan.axes.cut(self.model, job.window))
        slot = self._slots[key]
        plan.axes.load(slot.module, plan.state, job.window)
        return slot

    def _train(self, plan: RoundPlan, job: Job) -> Upload:
        began = time.monotonic()
        rows = plan.task.parts[job.client]
        if not len(rows):
            raise ValueError("has no examples")
        slot, work = self._slot(plan, job), plan.client
        rate = work.rate(plan.round)
        total: Tensor | None = None
        steps = 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(words(1, plan.seed, "client", plan.round, job.client)[0] >> 1))
            work.start(slot)
            for epoch in range(work.epochs):
                order = torch.from_numpy(shuffle(len(rows), plan.seed, "batches", plan.round, job.client, epoch))
                for batch in rows[order].split(work.batch):
                    if plan.deadline is not None and time.monotonic() - began > plan.deadline:
                        raise TimeoutError(f"past its deadline of {plan.deadline} s after {steps} steps")
                    data = plan.task.train.rows(batch)
                    loss = work.step(slot, data.x, data.y, plan.task.loss, rate)
                    total = loss if total is None else total + loss
                    steps += 1
        tensors = plan.axes.state(slot.module, job.window)
        return Upload(job, tensors, len(rows), float(total) / steps if total is not None else float("nan"), steps)
