"""The reference engine: one client after the other, one step after the other, nothing clever."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar

import torch
from torch import nn

from fedrolex.clients.dropout import OwnDropout, has_dropout
from fedrolex.clients.messages import Failure, Job, Kind, RoundPlan, Upload
from fedrolex.clients.slot import Slot
from fedrolex.clients.visit import Visit, examples_of, stream_seed, why_failed
from fedrolex.core.threads import spread_over, threads_for
from fedrolex.rounds.engine import Engine


class Loop(Engine):
    """Plain and obviously right, on a CPU or a GPU; runs every client's work."""

    shares_process = True
    slot_class: ClassVar[type[Slot]] = Slot

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._slots: dict[Kind, Slot] = {}

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """Train the clients in order."""
        for job in plan.jobs:
            try:
                yield self.trained(plan, job)
            except Exception as failure:
                yield Failure(job, why_failed(failure))

    def trained(self, plan: RoundPlan, job: Job) -> Upload:
        """One client's answer."""
        began = time.monotonic()
        slot = self.slot(plan, job)

        def go_on(steps: int) -> None:
            if plan.deadline is not None and time.monotonic() - began > plan.deadline:
                raise TimeoutError(f"past its deadline of {plan.deadline} s after {steps} steps")

        visit = Visit(plan, job, examples_of(plan, job), lambda: slot.module, go_on)
        with spread_over(threads_for(sum(parameter.numel() for parameter in slot.parameters))):
            plan.work.before(visit)
            self.train(visit, slot)
            plan.work.after(visit)
        return visit.upload()

    def train(self, visit: Visit, slot: Slot) -> None:
        """All steps of a client, in a slot of its widths; the slot's tensors are the visit's from then on."""
        plan, job = visit.plan, visit.job
        visit.load(slot.module)
        with self.drawing(plan, job):
            plan.work.train(visit, slot)
        visit.trained = plan.axes(job).state(slot.module, job.window)

    def slot(self, plan: RoundPlan, job: Job) -> Slot:
        """The slot for a job's network and widths."""
        kind = plan.kind(job)
        if kind not in self._slots:
            self._slots[kind] = self.slot_class(self.cut(plan, job), self.precision)
        return self._slots[kind]

    def cut(self, plan: RoundPlan, job: Job) -> nn.Module:
        """A new sub-model of a job's widths."""
        network = plan.networks[job.network]
        return network.axes.cut(network.module, job.window)

    @contextmanager
    def drawing(self, plan: RoundPlan, *jobs: Job) -> Iterator[OwnDropout | None]:
        """Inside, a model draws from streams of its own; dropout from the stream of every job of a stack."""
        with torch.random.fork_rng(devices=[]), self.own_dropout(plan, *jobs) as dropout:
            torch.manual_seed(stream_seed(plan, jobs[0]))
            yield dropout

    def own_dropout(self, plan: RoundPlan, *jobs: Job) -> AbstractContextManager[OwnDropout | None]:
        """Inside, dropout on a CPU draws from the streams of the jobs."""
        model = plan.networks[jobs[0].network].module
        own = has_dropout(model) and next(model.parameters()).device.type == "cpu"
        return OwnDropout(*(stream_seed(plan, job) for job in jobs)) if own else nullcontext()
