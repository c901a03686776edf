"""The reference engine: one client after the other, one step after the other, nothing clever."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from fedrolex.clients.dropout import OwnDropout, has_dropout
from fedrolex.clients.messages import Failure, Job, RoundPlan, Upload
from fedrolex.clients.work import Precision, Slot
from fedrolex.core.errors import FedrolexError
from fedrolex.core.streams import shuffle, words
from fedrolex.engines.narrow import Narrow
from fedrolex.slicing.capture import one_line
from fedrolex.tasks.task import Examples


class Loop:
    """Plain and obviously right, on a CPU or a GPU.

    Args:
        model: the server's model, to cut sub-models from; its weights are not used.
        precision: of the forward and backward pass.
    """

    together = False

    def __init__(self, model: nn.Module, *, precision: Precision = "fp32") -> None:
        self.model = model
        self.precision = precision
        self.dropout = has_dropout(model) and next(model.parameters()).device.type == "cpu"
        self._slots: dict[tuple[tuple[str, int], ...], Slot] = {}

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """Train the clients in order."""
        for job in plan.jobs:
            try:
                yield self._train(plan, job)
            except (Exception, TimeoutError) as failure:
                yield Failure(job, why_failed(failure))

    def _slot(self, plan: RoundPlan, job: Job) -> Slot:
        """The slot for this job's widths, loaded with its part of the server's tensors."""
        key = tuple(plan.axes.widths(job.window).items())
        if key not in self._slots:
            self._slots[key] = self.new_slot(plan, job)
        slot = self._slots[key]
        plan.axes.load(slot.module, {**plan.state, **job.own}, job.window)
        return slot

    def new_slot(self, plan: RoundPlan, job: Job) -> Slot:
        """A slot for this job's widths, not loaded yet."""
        return Slot(self.cut(plan, job), self.precision)

    def cut(self, plan: RoundPlan, job: Job) -> nn.Module:
        """A new sub-model of this job's widths."""
        return plan.axes.cut(self.model, job.window)

    def go_on(self, plan: RoundPlan, began: float, steps: int) -> None:
        """Asked before every step; raises where a client must not take another."""
        if plan.deadline is not None and time.monotonic() - began > plan.deadline:
            raise TimeoutError(f"past its deadline of {plan.deadline} s after {steps} steps")

    def _train(self, plan: RoundPlan, job: Job) -> Upload:
        began = time.monotonic()
        task, work = plan.task, plan.client
        data = task.client(job.client)
        if not len(data):
            raise ValueError("has no examples")
        device = data.y.device
        slot = self._slot(plan, job)
        rate = work.rate(plan.round)
        labels = task.labels(data) if plan.tell_labels or work.mask != "none" else None
        held = None
        if labels is not None and work.mask != "none":
            held = torch.zeros(task.classes, dtype=torch.bool, device=device).index_fill_(0, labels, True)
        gradient = self._gradient(plan, job, slot, data, held) if work.gradient else None
        total: Tensor | None = None
        steps, last = 0, work.steps(len(data), job.part)
        with self.drawing(plan, job):
            work.start(slot, job.correction)
            inside = self._narrower(plan, job, slot)
            for epoch in range(work.epochs):
                key = (plan.round, job.client, epoch)
                order = torch.from_numpy(shuffle(len(data), plan.seed, "batches", *key)).to(device)
                draws = random_draws(len(data), plan.seed, *key).to(device) if task.random_inputs else None
                for batch in order.split(work.batch)[: last - steps]:
                    self.go_on(plan, began, steps)
                    if inside:
                        draw = int(words(1, plan.seed, "width", plan.round, job.client, steps)[0])
                        slot.drawn = inside[draw * len(inside) >> 64]
                    x = task.inputs(data.x[batch], None if draws is None else draws[batch])
                    loss = work.step(slot, x, data.y[batch], task.loss, rate, held)
                    total = loss if total is None else total + loss
                    steps += 1
        return Upload(
            job,
            plan.axes.state(slot.module, job.window),
            len(data),
            float(total) / steps if total is not None else float("nan"),
            steps,
            labels.tolist() if labels is not None and plan.tell_labels else None,
            gradient=gradient,
            narrower={p: {n: slot.narrower[p].buffers[n] for n in own} for p, (_, own) in job.narrower.items()},
        )

    def _narrower(self, plan: RoundPlan, job: Job, slot: Slot) -> list[Narrow | None]:
        """The models to draw from for a batch, the whole sub-model (None) last; none where batches have one width."""
        slot.drawn = None
        if not plan.client.widths:
            return []
        found: list[Narrow | None] = []
        for width, (window, own) in job.narrower.items():
            if width not in slot.narrower:
                module = plan.axes.cut(self.model, window)
                slot.narrower[width] = Narrow.inside(plan.axes, module, slot.names, job.window, window)
            slot.narrower[width].start(own, plan.axes, window)
            found.append(slot.narrower[width])
        return [*found, None]

    def _gradient(
        self, plan: RoundPlan, job: Job, slot: Slot, data: Examples, held: Tensor | None
    ) -> dict[str, Tensor]:
        """Of the received model, mean over the client's examples as they are stored, weight decay included."""
        work, task = plan.client, plan.task
        total = [torch.zeros_like(p) for p in slot.parameters]
        slot.module.eval()
        for batch in torch.arange(len(data), device=data.y.device).split(work.batch):
            value = work.objective(slot.scores(task.inputs(data.x[batch])), data.y[batch], task.loss, held)
            found = torch.autograd.grad(value, slot.parameters, allow_unused=True, materialize_grads=True)
            torch._foreach_add_(total, found, alpha=len(batch) / len(data))
        with torch.no_grad():
            torch._foreach_add_(total, slot.parameters, alpha=work.weight_decay)
        return dict(zip(slot.names, total, strict=True))

    @contextmanager
    def drawing(self, plan: RoundPlan, *jobs: Job) -> Iterator[OwnDropout | None]:
        """What a model draws inside comes from streams of its own; dropout, from that of every client of a stack."""
        seeds = [stream_seed(plan, job) for job in jobs]
        with torch.random.fork_rng(devices=[]), OwnDropout(*seeds) if self.dropout else nullcontext() as dropout:
            torch.manual_seed(seeds[0])
            yield dropout


def stream_seed(plan: RoundPlan, job: Job) -> int:
    """Of what a model draws while a client trains it."""
    return int(words(1, plan.seed, "client", plan.round, job.client)[0] >> 1)


def why_failed(failure: BaseException) -> str:
    """Why a client is dropped, in one line."""
    known = isinstance(failure, FedrolexError)
    return str(failure) if known else f"{type(failure).__name__}: {one_line(failure)}"


def random_draws(count: int, seed: int, round: int, client: int, epoch: int) -> Tensor:
    """One random int64 ≥ 0 for every example of a client, for :meth:`~fedrolex.tasks.task.Task.inputs`."""
    return torch.from_numpy((words(count, seed, "augment", round, client, epoch) >> np.uint64(1)).astype(np.int64))
