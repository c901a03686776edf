"""Clients of the same widths as one captured step, whatever they hold: for models that treat examples one by one.

As in :mod:`.stack`, tensors of the clients are stacked and a step is one ``vmap``. Here clients need not hold as
many examples: a short batch is filled up with examples whose targets the loss ignores, and a client that is done
stands still while the others go on. Batch norms would see the filling, so models that have them are not for this.

Stacked convolutions are grouped ones, which pay where what they save, launches of kernels, is what a step costs: small
networks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from fedrolex.clients.messages import Failure, Job, RoundPlan, Upload, out_of_memory
from fedrolex.clients.optimizer import Memory
from fedrolex.clients.work import Precision, in_precision
from fedrolex.core.streams import shuffle, words
from fedrolex.engines.cpu.loop import random_draws
from fedrolex.engines.cpu.stack import clip_each
from fedrolex.engines.gpu.captured import captured
from fedrolex.engines.holdings import holdings
from fedrolex.tasks.task import Examples, Task

PLACES = 16  # clients in one step, at most
FEW = 4  # from so many clients of the same widths on, stacked convolutions pay
SMALL = 2**18  # parameters, up to which they do

Widths = tuple[tuple[str, int], ...]


@dataclass
class Lane:
    """Places for clients of the same widths, with their captured step.

    Attributes:
        module: the sub-model, for its code.
        tensors: parameters and buffers of all places, places first.
        parameters: those that are trained.
        x, y: examples of an epoch in the order of training, ``(places, room, …)``.
        sizes: examples of each place; 0 is idle.
        held: the classes of each place, for the loss's mask.
        rate: learning rate of the round.
        counter: the next batch.
        totals: sum of each place's losses.
        stream: None on a CPU.
        step: one batch of every place.
    """

    module: nn.Module
    tensors: dict[str, Tensor]
    parameters: list[Tensor]
    memory: Memory
    x: Tensor
    y: Tensor
    sizes: Tensor
    held: Tensor
    rate: Tensor
    counter: Tensor
    totals: Tensor
    stream: Any = None
    step: Any = None
    read: list[Tensor] = field(default_factory=list)

    def on_stream(self) -> AbstractContextManager[Any]:
        """What runs inside runs on this lane's stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


@dataclass(frozen=True)
class Seat:
    """A client's place in this round."""

    job: Job
    data: Examples
    lane: Lane
    place: int


class Batched:
    """Trains cohorts of many small clients.

    Args:
        model: the server's model, to cut sub-models from; its weights are not used.
        precision: of the forward and backward pass.
    """

    def __init__(self, model: nn.Module, *, precision: Precision = "fp32") -> None:
        self.model = model
        self.precision = precision
        self.lanes: dict[tuple[Widths, int], list[Lane]] = {}
        self._ahead: dict[int, Examples] = {}
        self._ahead_of: Task | None = None
        kinds = {type(module) for module in model.modules()}
        self._alone = not any(issubclass(kind, _BatchNorm) for kind in kinds)
        self._convolves = any(issubclass(kind, nn.modules.conv._ConvNd) for kind in kinds)

    def takes(self, plan: RoundPlan) -> bool:
        """Whether a round can be trained here, and is worth it."""
        if not self._alone or ignored_by(plan.task) is None:
            return False
        if plan.client.optimizer == "adam" and plan.client.epochs > 1:
            return False  # its count of steps is one for all, and those who are done early take fewer
        if not self._convolves:
            return len(plan.jobs) >= PLACES
        widths = Counter(tuple(plan.axes.widths(job.window).items()) for job in plan.jobs)
        return min(widths.values()) >= FEW and all(plan.axes.parameters(job.window) <= SMALL for job in plan.jobs)

    def run(self, plan: RoundPlan, jobs: Sequence[Job]) -> Iterator[Upload | Failure]:
        """Train clients at once; answers come in the order of the jobs."""
        data, failures = holdings(plan, jobs, self._ahead if plan.task is self._ahead_of else {})
        seats = self._seats(plan, [job for job in jobs if job.client in data], data)
        self._start(plan, seats)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(words(1, plan.seed, "cohort", plan.round)[0] >> 1))
            for epoch in range(plan.client.epochs):
                self._fill(plan, seats, epoch)
                self._train(plan, seats)
        if len(jobs) == len(plan.jobs):
            self._read_ahead(plan)
        answers = {**failures, **self._answers(plan, seats)}
        for job in jobs:
            yield answers[job.client]

    # --- places ---

    def _seats(self, plan: RoundPlan, jobs: Sequence[Job], data: dict[int, Examples]) -> list[Seat]:
        """A place for every job, those with about as many examples side by side."""
        groups: dict[Widths, list[Job]] = {}
        for job in sorted(jobs, key=lambda job: -len(data[job.client])):
            groups.setdefault(tuple(plan.axes.widths(job.window).items()), []).append(job)
        seats = []
        for widths, group in groups.items():
            places = min(PLACES, len(group) + len(group) % 2)  # cohorts that differ by one use the same lanes
            for number, start in enumerate(range(0, len(group), places)):
                part = group[start : start + places]
                lane = self._lane(plan, (widths, places), number, part[0], data[part[0].client])
                seats += [Seat(job, data[job.client], lane, place) for place, job in enumerate(part)]
        return seats

    def _lane(self, plan: RoundPlan, key: tuple[Widths, int], number: int, job: Job, longest: Examples) -> Lane:
        """The lane of a number among those of the same widths and places, with room for as many examples."""
        lanes = self.lanes.setdefault(key, [])
        if number < len(lanes) and len(longest) <= lanes[number].y.shape[1]:
            return lanes[number]
        lane = self._built(plan, job, longest, key[1])
        lanes[number : number + 1] = [lane]
        return lane

    def _built(self, plan: RoundPlan, job: Job, longest: Examples, places: int) -> Lane:
        device, work = longest.y.device, plan.client
        module = plan.axes.cut(self.model, job.window).train()
        tensors = {name: torch.stack([tensor] * places) for name, tensor in plan.axes.state(module, job.window).items()}
        names = [name for name, p in module.named_parameters() if p.requires_grad]
        parameters = [tensors[name] for name in names]
        room = -(-len(longest) // work.batch) * work.batch
        x, y = plan.task.inputs(longest.x[:1]), longest.y[:1]
        lane = Lane(
            module,
            tensors,
            parameters,
            Memory.of(parameters),
            x.new_zeros((places, room, *x.shape[1:])),
            y.new_zeros((places, room, *y.shape[1:])),
            torch.zeros(places, dtype=torch.int64, device=device),
            torch.ones(places, plan.task.classes, dtype=torch.bool, device=device),
            parameters[0].new_zeros(()),
            torch.zeros((), dtype=torch.int64, device=device),
            torch.zeros(places, device=device),
            torch.cuda.Stream(device) if device.type == "cuda" else None,
        )
        lane.step = self._captured(plan, lane, names, corrected=bool(job.correction))
        return lane

    def _captured(self, plan: RoundPlan, lane: Lane, names: Sequence[str], *, corrected: bool) -> Any:
        """One batch of every place: a graph, or on a CPU the function itself."""
        work, task = plan.client, plan.task
        nothing = [torch.zeros_like(p) for p in lane.parameters] if corrected else ()
        work.begin(lane.memory, lane.parameters, nothing)
        within = torch.arange(work.batch, device=lane.y.device)
        fixed = [name for name in lane.tensors if name not in names]
        masks = work.mask != "none"
        goes_on = work.epochs > 1 and work.momentum > 0  # who stands still at the end of an epoch keeps its velocity

        def objective(values: list[Tensor], others: list[Tensor], x: Tensor, y: Tensor, held: Tensor | None) -> Tensor:
            known = dict(zip((*names, *fixed), (*values, *others), strict=True))
            scores = in_precision(lambda x: functional_call(lane.module, known, (x,)), x, self.precision)
            return work.objective(scores, y, task.loss, held)

        every = vmap(objective, (0, 0, 0, 0, 0 if masks else None), randomness="different")

        def step() -> None:
            rows = lane.counter * work.batch + within
            x, y = lane.x.index_select(1, rows), lane.y.index_select(1, rows)
            leaves = [parameter.detach().requires_grad_() for parameter in lane.parameters]
            with sdpa_kernel(SDPBackend.MATH):  # the others' gradients do not take stacked clients
                losses = every(leaves, [lane.tensors[name] for name in fixed], x, y, lane.held if masks else None)
            gradients = list(torch.autograd.grad(losses.sum(), leaves, allow_unused=True, materialize_grads=True))
            busy = lane.counter * work.batch < lane.sizes
            with torch.no_grad():
                work.pull(lane.parameters, gradients, lane.memory)
                clip_each(gradients, work.clip)
                rates = [(lane.rate * busy).view(-1, *[1] * (p.dim() - 1)) for p in lane.parameters]
                velocity = [each.clone() for each in lane.memory.first] if goes_on else []
                work.descend(lane.parameters, gradients, lane.memory, rates)
                for own, before in zip(lane.memory.first, velocity, strict=False):
                    own.copy_(torch.where(busy.view(-1, *[1] * (own.dim() - 1)), own, before))
                lane.totals.add_(torch.where(busy, losses.detach(), 0.0))
                lane.counter.add_(1)

        lane.read.append(within)
        return captured(step, lane.counter.zero_, lane.stream, self.precision)

    # --- a round ---

    def _start(self, plan: RoundPlan, seats: Sequence[Seat]) -> None:
        """Every client's part of the server's tensors, cut once for every window."""
        known: dict[tuple[object, ...], dict[str, Tensor]] = {}
        lanes = {id(seat.lane): seat.lane for seat in seats}
        for lane in lanes.values():
            mine = [seat for seat in seats if seat.lane is lane]
            for seat in mine:
                if seat.job.source not in known:
                    known[seat.job.source] = plan.axes.take({**plan.state, **seat.job.own}, seat.job.window)
            sources = {seat.job.source for seat in mine}
            for name, tensor in lane.tensors.items():
                if len(sources) == 1:
                    tensor.copy_(known[next(iter(sources))][name])
                else:
                    parts = [known[seat.job.source][name] for seat in mine]
                    tensor[: len(parts)] = torch.stack(parts)
            sizes = [len(seat.data) for seat in mine]
            lane.sizes.copy_(torch.tensor(sizes + [0] * (len(lane.sizes) - len(sizes))))
            plan.client.begin(lane.memory, lane.parameters)
            self._correct(lane, mine)
            lane.totals.zero_()
            lane.rate.fill_(plan.client.rate(plan.round))
            if plan.client.mask != "none":
                lane.held.zero_()
                for seat in mine:
                    lane.held[seat.place, plan.task.labels(seat.data)] = True

    @staticmethod
    def _correct(lane: Lane, seats: Sequence[Seat]) -> None:
        """What is added to the gradients of the round."""
        trained = {id(tensor): name for name, tensor in lane.tensors.items()}
        for kept, parameter in zip(lane.memory.correction, lane.parameters, strict=False):
            name = trained[id(parameter)]
            kept[: len(seats)] = torch.stack([(seat.job.correction or {})[name] for seat in seats])

    def _fill(self, plan: RoundPlan, seats: Sequence[Seat], epoch: int) -> None:
        """The epoch's examples; a short batch is filled up with ignored ones, what comes after with any."""
        task, ignored = plan.task, ignored_by(plan.task)
        assert ignored is not None
        for seat in seats:
            data, lane, key = seat.data, seat.lane, (plan.round, seat.job.client, epoch)
            count, batch, room = len(data), plan.client.batch, lane.y.shape[1]
            order = torch.from_numpy(shuffle(count, plan.seed, "batches", *key))
            order = order.repeat(-(-room // count))[:room].to(data.y.device, non_blocking=True)
            draws = random_draws(count, plan.seed, *key).to(data.y.device) if task.random_inputs else None
            lane.x[seat.place] = task.inputs(data.x, draws)[order]
            lane.y[seat.place] = data.y[order]
            lane.y[seat.place, count : -(-count // batch) * batch] = ignored
        for lane in {id(seat.lane): seat.lane for seat in seats}.values():
            lane.counter.zero_()

    def _train(self, plan: RoundPlan, seats: Sequence[Seat]) -> None:
        steps: dict[int, int] = {}
        lanes = {id(seat.lane): seat.lane for seat in seats}
        for seat in seats:
            steps[id(seat.lane)] = max(steps.get(id(seat.lane), 0), -(-len(seat.data) // plan.client.batch))
        for lane in lanes.values():
            if lane.stream is not None:
                lane.stream.wait_stream(torch.cuda.current_stream())
        for number in range(max(steps.values(), default=0)):
            for key, lane in lanes.items():
                if number < steps[key]:
                    with lane.on_stream():
                        lane.step()
        for lane in lanes.values():
            if lane.stream is not None:
                torch.cuda.current_stream().wait_stream(lane.stream)

    def _read_ahead(self, plan: RoundPlan) -> None:
        """What the next round's clients hold, while the device is at work and as far as there is room."""
        self._ahead, self._ahead_of = {}, plan.task
        try:
            self._ahead, _ = holdings(plan, plan.upcoming())
        except RuntimeError as failure:
            if not out_of_memory(failure):
                raise

    def _answers(self, plan: RoundPlan, seats: Sequence[Seat]) -> dict[int, Upload | Failure]:
        lanes = {id(seat.lane): seat.lane for seat in seats}
        sums = {
            key: torch.stack([tensor.flatten(1).sum(1).double() for tensor in lane.tensors.values()]).sum(0)
            for key, lane in lanes.items()
        }
        told = {key: torch.stack([lane.totals.double(), sums[key]]) for key, lane in lanes.items()}
        known = dict(zip(told, torch.stack(list(told.values())).tolist(), strict=True)) if told else {}
        found: dict[int, Upload | Failure] = {}
        for seat in seats:
            losses, totals = known[id(seat.lane)]
            total = totals[seat.place]
            steps = plan.client.epochs * -(-len(seat.data) // plan.client.batch)
            tensors = {name: tensor[seat.place] for name, tensor in seat.lane.tensors.items()}
            labels = plan.task.labels(seat.data).tolist() if plan.tell_labels else None
            loss = losses[seat.place] / steps
            good = True if total - total == 0 else None
            found[seat.job.client] = Upload(seat.job, tensors, len(seat.data), loss, steps, labels, good)
        return found


def ignored_by(task: Task) -> int | None:
    """A target that a task's loss leaves out, and does not count."""
    if task.ignored is None and task.loss is nn.functional.cross_entropy:
        return -100
    return task.ignored
