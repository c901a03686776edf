"""Clients of the same widths as one: their tensors stacked, their steps taken together.

Narrow sub-models are too small to keep a processor busy; ten of them at once are not. Clients are stacked that
have the same widths and the same number of examples, so that their batches have the same shapes; a client that
is alone, or whose model keeps buffers, is trained by ``loop``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedrolex.client import LocalTraining, Precision, in_precision
from fedrolex.engines.engine import Failure, Job, RoundPlan, Upload
from fedrolex.engines.loop import Loop, random_draws, why_failed
from fedrolex.optimizer import Memory
from fedrolex.streams import shuffle, words
from fedrolex.tasks.task import Examples, Task

Shape = tuple[object, ...]
Gradient = Callable[[list[Tensor], Tensor, Tensor, Tensor | None], tuple[list[Tensor], Tensor]]


class Stack:
    """Trains a cohort width by width.

    Args:
        model: the server's model, to cut sub-models from; its weights are not used.
        precision: of the forward and backward pass.
        fewest: clients that are worth a stack.
        most: clients in one stack.
    """

    together = False

    def __init__(self, model: nn.Module, *, precision: Precision = "fp32", fewest: int = 2, most: int = 10) -> None:
        self.model = model
        self.precision = precision
        self.fewest, self.most = fewest, most
        self.loop = Loop(model, precision=precision)
        self._modules: dict[Shape, nn.Module] = {}

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """Train the clients, stack by stack."""
        if plan.deadline is not None or next(self.model.buffers(), None) is not None:
            yield from self.loop.run(plan)  # a stack has no time of its own, and buffers are not stacked
            return
        groups: dict[Shape, list[tuple[Job, Examples]]] = {}
        for job in plan.jobs:
            try:
                data = plan.task.client(job.client)
                if not len(data):
                    raise ValueError("has no examples")
                groups.setdefault((*plan.axes.widths(job.window).items(), len(data)), []).append((job, data))
            except Exception as failure:
                yield Failure(job, why_failed(failure))
        for shape, group in groups.items():
            for start in range(0, len(group), self.most):
                part = group[start : start + self.most]
                if len(part) < self.fewest:
                    yield from self.loop.run(replace(plan, jobs=[job for job, _ in part]))
                else:
                    yield from self._train(plan, shape[:-1], part)

    def _train(
        self, plan: RoundPlan, widths: Shape, group: Sequence[tuple[Job, Examples]]
    ) -> Iterator[Upload | Failure]:
        """One stack: clients along the first dimension of everything."""
        work, task = plan.client, plan.task
        if widths not in self._modules:
            self._modules[widths] = plan.axes.cut(self.model, group[0][0].window).train()
        names = [name for name, p in self._modules[widths].named_parameters() if p.requires_grad]
        parts = [plan.axes.take({**plan.state, **job.own}, job.window) for job, _ in group]
        stacked = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        parameters = [stacked[name] for name in names]
        memory = Memory.of(parameters)
        held = _held(task, [data for _, data in group]) if work.mask != "none" else None
        gradient = self._gradient(self._modules[widths], names, work, task, masked=held is not None)
        rate, total, steps = work.rate(plan.round), torch.zeros(len(group), device=parameters[0].device), 0
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(words(1, plan.seed, "stack", plan.round, group[0][0].client)[0] >> 1))
                for epoch in range(work.epochs):
                    for x, y in _batches(plan, group, epoch):
                        gradients, losses = gradient(parameters, x, y, held)
                        with torch.no_grad():
                            _clip(gradients, work.clip)
                            replace(work, clip=None).move(parameters, gradients, memory, rate)
                        total += losses.detach()
                        steps += 1
        except Exception as failure:
            for job, _ in group:
                yield Failure(job, why_failed(failure))
            return
        for place, ((job, data), loss) in enumerate(zip(group, total.tolist(), strict=True)):
            labels = task.labels(data).tolist() if plan.tell_labels else None
            tensors = {name: tensor[place] for name, tensor in stacked.items()}
            yield Upload(job, tensors, len(data), loss / steps, steps, labels)

    def _gradient(
        self, module: nn.Module, names: Sequence[str], work: LocalTraining, task: Task, masked: bool
    ) -> Gradient:
        """Gradients and losses of all clients of a stack."""

        def objective(values: list[Tensor], x: Tensor, y: Tensor, held: Tensor | None) -> Tensor:
            known = dict(zip(names, values, strict=True))
            scores = in_precision(lambda x: functional_call(module, known, (x,)), x, self.precision)
            return work.objective(scores, y, task.loss, held)

        every = vmap(grad_and_value(objective), (0, 0, 0, 0 if masked else None), randomness="different")

        def gradient(
            parameters: list[Tensor], x: Tensor, y: Tensor, held: Tensor | None
        ) -> tuple[list[Tensor], Tensor]:
            gradients, losses = every(parameters, x, y, held)
            return list(gradients), losses

        return gradient


def _batches(plan: RoundPlan, group: Sequence[tuple[Job, Examples]], epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of every step of an epoch, clients first."""
    task, orders, draws = plan.task, [], []
    for job, data in group:
        key = (plan.round, job.client, epoch)
        orders.append(torch.from_numpy(shuffle(len(data), plan.seed, "batches", *key)).to(data.y.device))
        if task.random_inputs:
            draws.append(random_draws(len(data), plan.seed, *key).to(data.y.device))
    for start in range(0, len(orders[0]), plan.client.batch):
        rows = [order[start : start + plan.client.batch] for order in orders]
        x = torch.cat([data.x[row] for (_, data), row in zip(group, rows, strict=True)])
        drawn = torch.cat([draw[row] for draw, row in zip(draws, rows, strict=True)]) if draws else None
        y = torch.stack([data.y[row] for (_, data), row in zip(group, rows, strict=True)])
        yield task.inputs(x, drawn).unflatten(0, (len(group), -1)), y


def _held(task: Task, every: Sequence[Examples]) -> Tensor:
    """The classes each client holds, bool, shape ``(clients, classes)``."""
    held = torch.zeros(len(every), task.classes, dtype=torch.bool, device=every[0].y.device)
    for row, data in zip(held, every, strict=True):
        row[task.labels(data)] = True
    return held


def _clip(gradients: Sequence[Tensor], most: float | None) -> None:
    """Shorten every client's gradient to a norm of ``most``, in place."""
    if most is None:
        return
    norms = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients])
    scale = torch.clamp(most / (torch.linalg.vector_norm(norms, dim=0) + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))
