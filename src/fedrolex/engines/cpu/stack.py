"""Clients of the same widths as one: their tensors stacked, their steps taken together.

Narrow sub-models are too small to keep a processor busy; ten of them at once are not. Clients are stacked that
have the same widths and the same number of examples, so that their batches have the same shapes; a client that
is alone, or whose model keeps buffers, is trained by ``loop``. A convolution of a stack is one grouped
convolution, channels last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedrolex.clients.dropout import OwnDropout
from fedrolex.clients.messages import Failure, Job, RoundPlan, Upload
from fedrolex.clients.optimizer import Memory
from fedrolex.clients.work import LocalTraining, Precision, in_precision
from fedrolex.core.streams import shuffle
from fedrolex.engines.cpu.loop import Loop, random_draws, why_failed
from fedrolex.tasks.task import Examples, Task

Shape = tuple[object, ...]
Gradient = Callable[[list[Tensor], Tensor, Tensor, Tensor | None], tuple[list[Tensor], Tensor]]


@dataclass(frozen=True)
class Unit:
    """Clients that are trained together: a stack, or one alone.

    Attributes:
        jobs: with what each client holds.
        shape: widths and number of examples, the same for all.
    """

    jobs: Sequence[tuple[Job, Examples]]
    shape: Shape


class Stack:
    """Trains a cohort width by width.

    Args:
        model: the server's model, to cut sub-models from; its weights are not used.
        precision: of the forward and backward pass.
        fewest: clients that are worth a stack.
        most: clients in one stack.
        stacked: capacities whose clients are stacked; None is all.
        loop: trains those that are not.
    """

    together = False

    def __init__(
        self,
        model: nn.Module,
        *,
        precision: Precision = "fp32",
        fewest: int = 2,
        most: int = 10,
        stacked: Collection[Fraction] | None = None,
        loop: Loop | None = None,
    ) -> None:
        self.model = model
        self.precision = precision
        self.fewest, self.most, self.stacked = fewest, most, stacked
        self.loop = Loop(model, precision=precision) if loop is None else loop
        self.channels_last = True
        self._modules: dict[Shape, nn.Module] = {}

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """Train the clients, stack by stack."""
        if not plan.plain:
            yield from self.loop.run(plan)  # a stack has no time of its own, and all of it does the same
            return
        units, failures = self.units(plan)
        yield from failures
        for unit in units:
            yield from self.train(plan, unit)

    def units(self, plan: RoundPlan, multiple: int = 1) -> tuple[list[Unit], list[Failure]]:
        """Who is trained together, and who cannot be trained at all.

        Stacks of one shape are of almost equal size, and as many of them as a multiple of ``multiple``, where
        that leaves them large enough.
        """
        groups: dict[tuple[Fraction, Shape], list[tuple[Job, Examples]]] = {}
        failures = []
        for job in plan.jobs:
            try:
                data = plan.task.client(job.client)
                if not len(data):
                    raise ValueError("has no examples")
                shape = (*plan.axes.widths(job.window).items(), len(data))
                groups.setdefault((job.capacity, shape), []).append((job, data))
            except Exception as failure:
                failures.append(Failure(job, why_failed(failure)))
        units = []
        for (capacity, shape), group in groups.items():
            parts = self._parts(len(group), multiple) if self._stackable(capacity) else len(group)
            ends = [len(group) * part // parts for part in range(parts + 1)]
            units += [Unit(group[a:b], shape) for a, b in pairwise(ends)]
        return units, failures

    def _stackable(self, capacity: Fraction) -> bool:
        """Buffers are not stacked."""
        chosen = self.stacked is None or capacity in self.stacked
        return chosen and next(self.model.buffers(), None) is None

    def _parts(self, clients: int, multiple: int) -> int:
        """How many stacks to make of clients of one shape; as many as there are clients if it is not worth it."""
        if clients < self.fewest:
            return clients
        parts = -(-clients // self.most)
        even = -(-parts // multiple) * multiple
        return even if clients >= even * max(2, self.fewest) else parts

    def train(self, plan: RoundPlan, unit: Unit) -> Iterator[Upload | Failure]:
        """The answers of a unit's clients, in its order."""
        try:
            if len(unit.jobs) > 1:
                yield from self._train_in_any_layout(plan, unit)
                return
        except Exception as failure:
            yield from (Failure(job, why_failed(failure)) for job, _ in unit.jobs)
            return
        yield from self.loop.run(replace(plan, jobs=[job for job, _ in unit.jobs]))

    def _train_in_any_layout(self, plan: RoundPlan, unit: Unit) -> list[Upload]:
        """Channels last, or where this version of PyTorch does not take that inside ``vmap``, as tensors come."""
        if self.channels_last:
            try:
                return self._train(plan, unit)
            except RuntimeError as error:
                if "memory_format" not in str(error):
                    raise
                self.channels_last = False
        return self._train(plan, unit)

    def _train(self, plan: RoundPlan, unit: Unit) -> list[Upload]:
        """One stack: clients along the first dimension of everything."""
        work, task, group = plan.client, plan.task, unit.jobs
        widths = unit.shape[:-1]
        if widths not in self._modules:
            self._modules[widths] = self.loop.cut(plan, group[0][0]).train()
        names = [name for name, p in self._modules[widths].named_parameters() if p.requires_grad]
        stacked = _stacked(plan, [job for job, _ in group], self.channels_last)
        parameters = [stacked[name] for name in names]
        memory = Memory.of(parameters)
        every = [job.correction for job, _ in group]
        work.begin(
            memory, parameters, [torch.stack([one[name] for one in every]) for name in names] if every[0] else ()
        )
        held = _held(task, [data for _, data in group]) if work.mask != "none" else None
        rate, total, steps = work.rate(plan.round), torch.zeros(len(group), device=parameters[0].device), 0
        with self.loop.drawing(plan, *(job for job, _ in group)) as dropout:
            gradient = self._gradient(self._modules[widths], names, work, task, held is not None, dropout)
            for epoch in range(work.epochs):
                for x, y in _batches(plan, group, epoch):
                    self.loop.go_on(plan, 0.0, steps)
                    gradients, losses = gradient(parameters, x, y, held)
                    with torch.no_grad():
                        work.pull(parameters, gradients, memory)
                        clip_each(gradients, work.clip)
                        work.descend(parameters, gradients, memory, rate)
                    total += losses
                    steps += 1
        answers = []
        for place, ((job, data), loss) in enumerate(zip(group, total.tolist(), strict=True)):
            labels = task.labels(data).tolist() if plan.tell_labels else None
            tensors = {name: tensor[place] for name, tensor in stacked.items()}
            answers.append(Upload(job, tensors, len(data), loss / steps, steps, labels))
        return answers

    def _gradient(
        self,
        module: nn.Module,
        names: Sequence[str],
        work: LocalTraining,
        task: Task,
        masked: bool,
        dropout: OwnDropout | None,
    ) -> Gradient:
        """Gradients and losses of all clients of a stack.

        A client's loss depends on its own parameters alone, so the gradient of the sum holds everyone's.
        """

        def objective(values: list[Tensor], x: Tensor, y: Tensor, held: Tensor | None, client: Tensor) -> Tensor:
            if dropout is not None:
                dropout.client = client
            known = dict(zip(names, values, strict=True))
            scores = in_precision(lambda x: functional_call(module, known, (x,)), x, self.precision)
            return work.objective(scores, y, task.loss, held)

        every = vmap(objective, (0, 0, 0, 0 if masked else None, 0), randomness="different")

        def gradient(
            parameters: list[Tensor], x: Tensor, y: Tensor, held: Tensor | None
        ) -> tuple[list[Tensor], Tensor]:
            leaves = [parameter.detach().requires_grad_() for parameter in parameters]
            losses = every(leaves, x, y, held, torch.arange(len(x)))
            found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True, materialize_grads=True)
            return list(found), losses.detach()

        return gradient


def _stacked(plan: RoundPlan, jobs: Sequence[Job], channels_last: bool) -> dict[str, Tensor]:
    """Every client's part of the server's tensors, clients first."""
    known: dict[tuple[object, ...], dict[str, Tensor]] = {}  # clients of one window get the same
    for job in jobs:
        if job.source not in known:
            known[job.source] = plan.axes.take({**plan.state, **job.own}, job.window)
    parts = [known[job.source] for job in jobs]
    stacked = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    return {name: _channels_last(tensor) for name, tensor in stacked.items()} if channels_last else stacked


def _channels_last(stack: Tensor) -> Tensor:
    """The same values; those of a convolution's weights, of four dimensions a client, channels last."""
    return stack.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3) if stack.dim() == 5 else stack


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


def clip_each(gradients: Sequence[Tensor], most: float | None) -> None:
    """Shorten every client's gradient to a norm of ``most``, in place."""
    if most is None:
        return
    norms = torch.stack([torch.linalg.vector_norm(g, dim=list(range(1, g.dim()))) for g in gradients])
    scale = torch.clamp(most / (torch.linalg.vector_norm(norms, dim=0) + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))
