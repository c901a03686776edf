"""One worker of a crew: its sub-models, its steps, and the memory that keeps its answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedrolex.clients.dropout import OwnDropout
from fedrolex.clients.messages import Failure, Job, Kind, RoundPlan, Tensors
from fedrolex.clients.slot import Precision
from fedrolex.clients.visit import Visit, why_failed
from fedrolex.engines.cpu.backward import CpuSlot, plain_rate
from fedrolex.engines.cpu.loop import Loop
from fedrolex.engines.cpu.units import Unit
from fedrolex.engines.stacking import Stack
from fedrolex.engines.visits import Key, epoch_of, starts, steps_of
from fedrolex.rounds.finite import not_finite

CUTTING = threading.Lock()  # a cut changes the process's generator for a while, and puts it back

Shapes = tuple[tuple[torch.Size, torch.dtype], ...]
Results = dict[Key, Failure | tuple[Visit, bool]]
"""By job: why it failed, or the visit and whether its tensors are known to be finite."""


class Stopped(BaseException):
    """The run was interrupted while a worker was busy."""


class Copies:
    """Tensors that keep answers until the round is over, used again in every round."""

    def __init__(self) -> None:
        self._free: dict[Shapes, list[list[Tensor]]] = {}
        self._used: dict[Shapes, list[list[Tensor]]] = {}

    def free(self) -> None:
        """No answer is needed any longer."""
        for shapes, used in self._used.items():
            self._free.setdefault(shapes, []).extend(used)
        self._used.clear()

    def of(self, tensors: Tensors) -> dict[str, Tensor]:
        """A copy of tensors that is good until :meth:`free`."""
        values = list(tensors.values())
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in values)
        free = self._free.get(shapes)
        place = free.pop() if free else [torch.empty_like(tensor) for tensor in values]
        torch._foreach_copy_(place, values)
        self._used.setdefault(shapes, []).append(place)
        return dict(zip(tensors, place, strict=True))


class CrewWorker(Loop):
    """A worker has sub-models of its own, channels last, and leaves when it is told to.

    Args:
        precision: of the products of the forward and backward pass.
        stop: set when the run is interrupted.
        alone: kinds of clients that turned out not to be stackable; all workers of a crew have the same set.
    """

    slot_class = CpuSlot

    def __init__(self, precision: Precision, stop: threading.Event, alone: set[Kind]) -> None:
        super().__init__(precision=precision)
        self.stop, self.alone, self.copies = stop, alone, Copies()
        self._channels_last = True

    def do(self, unit: Unit) -> Results:
        """Train a unit's clients; what comes of it is in their visits."""
        if len(unit.visits) == 1:
            return self._do_alone(unit.visits[0])
        try:
            return self._do_stack(unit)
        except Exception:  # a model that cannot be stacked, or a client whose data are broken: everyone alone tells
            results = {key: found for visit in unit.visits for key, found in self._do_alone(visit).items()}
            if not any(isinstance(found, Failure) for found in results.values()):
                self.alone.add(unit.kind)
            return results

    def slot(self, plan: RoundPlan, job: Job) -> CpuSlot:
        """The slot for a job's network and widths, told how its steps are taken."""
        slot = super().slot(plan, job)
        assert isinstance(slot, CpuSlot)
        slot.rate = plain_rate(plan.work, plan.round)
        return slot

    def cut(self, plan: RoundPlan, job: Job) -> nn.Module:
        """A new sub-model, channels last; the weights that it draws are not what counts as drawing."""
        with CUTTING, torch.random.fork_rng(devices=[]):
            return super().cut(plan, job).to(memory_format=torch.channels_last)

    @contextmanager
    def drawing(self, plan: RoundPlan, *jobs: Job) -> Iterator[OwnDropout | None]:
        """Threads share one random generator; dropout has another, and what else is drawn the crew notices."""
        with self.own_dropout(plan, *jobs) as dropout:
            yield dropout

    def _go_on(self, steps: int) -> None:
        if self.stop.is_set():
            raise Stopped

    def _do_alone(self, visit: Visit) -> Results:
        visit.go_on, visit.steps = self._go_on, 0
        try:
            self.train(visit, self.slot(visit.plan, visit.job))
            finite = not_finite(visit.trained) is None
            visit.trained = self.copies.of(visit.trained)  # the slot is used again
            return {visit.job.key: (visit, finite)}
        except Exception as failure:
            return {visit.job.key: Failure(visit.job, why_failed(failure))}

    def _do_stack(self, unit: Unit) -> Results:
        """In channels last or, where this version of PyTorch does not take that inside ``vmap``, as tensors come."""
        try:
            return self._stacked(unit)
        except RuntimeError as error:
            if not (self._channels_last and "memory_format" in str(error)):
                raise
            self._channels_last = False
            return self._stacked(unit)

    def _stacked(self, unit: Unit) -> Results:
        visits = unit.visits
        plan, work = visits[0].plan, visits[0].plan.work
        parts = starts(visits)
        tensors = {name: self._laid_out(torch.stack([part[name] for part in parts])) for name in parts[0]}
        held = [held for visit in visits if (held := visit.held(work.mask)) is not None]
        module, rate, total = self.slot(plan, visits[0].job).module, work.rate(plan.round), torch.zeros(len(visits))
        with self.drawing(plan, *(visit.job for visit in visits)) as dropout:
            stack = busy = Stack(module, tensors, torch.stack(held) if held else None, self.precision, dropout)
            stack.begin(work, visits)
            for steps, (x, y) in enumerate(batches_of(visits, unit.ignored)):
                self._go_on(steps)
                busy = stack.first(len(x)) if len(x) < len(busy.parameters[0]) else busy
                total[: len(x)] += busy.step(work, plan.task.loss, x, y, rate)
        for place, (visit, loss) in enumerate(zip(visits, total.tolist(), strict=True)):
            visit.steps = steps_of(visit)
            visit.loss = loss / visit.steps
            visit.trained = {name: tensor[place] for name, tensor in tensors.items()}
        finite = stack.sums().isfinite().tolist()
        return {visit.job.key: (visit, known) for visit, known in zip(visits, finite, strict=True)}

    def _laid_out(self, stack: Tensor) -> Tensor:
        """The same values; weights of a convolution, of four dimensions a client, channels last."""
        if stack.dim() != 5 or not self._channels_last:
            return stack
        return stack.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def batches_of(visits: Sequence[Visit], ignored: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of every step of a stack, ``(clients, batch, …)``, of the clients that are not done yet.

    Clients with the most steps come first; batches shorter than others' are filled up with ``ignored`` targets.
    """
    feeds, steps = [_batches(visit) for visit in visits], [steps_of(visit) for visit in visits]
    for number in range(steps[0]):
        parts = [next(feed) for feed, count in zip(feeds, steps, strict=True) if number < count]
        size = max(len(y) for _, y in parts)
        yield (
            torch.stack([_filled(x, size, None) for x, _ in parts]),
            torch.stack([_filled(y, size, ignored) for _, y in parts]),
        )


def _batches(visit: Visit) -> Iterator[tuple[Tensor, Tensor]]:
    work = visit.plan.work
    for epoch in range(work.epochs):
        x, y = epoch_of(visit, epoch)
        yield from zip(x.split(work.batch), y.split(work.batch), strict=True)


def _filled(rows: Tensor, size: int, value: int | None) -> Tensor:
    """Rows with as many more as are missing: of this value, or copies of the last row."""
    missing = size - len(rows)
    if not missing:
        return rows
    more = rows[-1:].expand(missing, *rows.shape[1:])
    return torch.cat([rows, more if value is None else torch.full_like(more, value)])
