"""Clients in seats: all that a captured step reads stays on the device, and serves the clients of every round.

Shapes depend on the widths alone, so a step is captured once for every widths: a round loads parameters, fills the data
buffers, and replays. The step counts its own batches; learning rate and label mask are tensors that the step reads.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from fedrolex.clients import Failure, Job, Kind, Precision, RoundPlan, Tensors, Upload, Visit, stream_seed
from fedrolex.engines.gpu.captured import captured
from fedrolex.engines.gpu.waves import Waves
from fedrolex.engines.visits import Key, close_visit, open_visits, steps_of
from fedrolex.tasks import Examples


class Seats(ABC):
    """Places for clients that take their steps together, with their data, their stream and their captured steps.

    Args:
        plan: of a round; its work and its task are those of all rounds.
        longest: the examples of the client that has the most.
        places: for so many clients.
        precision: of the products of a step.
        stream: what the steps run on; None on a CPU.

    Attributes:
        tensors: parameters and buffers of all places, by name.
        rate: learning rate of the round.
        x, y: inputs and targets of one epoch in the order of training, ``(places, room, …)``.
        counter: the next batch of the epoch, int64.
        held: the classes of each client for the loss's mask, bool ``(places, classes)``.
        totals: sum of each place's losses of the round.
        draws: where the steps' dropout draws from; None on a CPU.
        queue: the steps of the epoch.
        visits: of this round, by place.
    """

    tensors: dict[str, Tensor]
    rate: Tensor

    def __init__(self, plan: RoundPlan, longest: Examples, places: int, precision: Precision, stream: Any) -> None:
        self.work, self.task, self.precision, self.stream = plan.work, plan.task, precision, stream
        device, room = longest.y.device, -(-len(longest) // plan.work.batch) * plan.work.batch
        x, y = plan.task.inputs(longest.x[:1]), longest.y
        self.x = x.new_zeros((places, room, *x.shape[1:]))
        self.y = y.new_zeros((places, room, *y.shape[1:]))
        self.counter = torch.zeros((), dtype=torch.int64, device=device)
        self.held = torch.ones(places, plan.task.classes, dtype=torch.bool, device=device)
        self.totals = torch.zeros(places, device=device)
        self.draws = torch.Generator(device) if device.type == "cuda" else None
        self.queue: list[Callable[[], Any]] = []
        self.visits: Sequence[Visit] = ()
        self._steps: dict[int, Callable[[], Any]] = {}
        self._read: list[Tensor] = []  # by captured steps: these tensors must live as long

    @abstractmethod
    def begin(self, visits: Sequence[Visit]) -> None:
        """A new round of clients, whose parameters are there: the optimiser remembers nothing."""

    @abstractmethod
    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """One step on a batch of every place, ``(places, batch, …)``; returns the losses, still on the device."""

    @abstractmethod
    def trained(self, place: int) -> Tensors:
        """The tensors of a place, by name."""

    @abstractmethod
    def sizes(self) -> Tensor:
        """For each place a number, float64 ``(places,)``, that is finite if all its tensors are, up to overflow."""

    def step(self, size: int) -> Callable[[], Any]:
        """A step on the next ``size`` examples of every place: a graph, or on a CPU the function itself."""
        if size not in self._steps:
            within = torch.arange(size, device=self.y.device)

            def step() -> None:
                rows = self.counter * self.work.batch + within
                self.totals.add_(self.losses(self.x.index_select(1, rows), self.y.index_select(1, rows)))
                self.counter.add_(1)

            self._read.append(within)
            self._steps[size] = captured(step, self.counter.zero_, self.stream, self.precision, self.draws)
        return self._steps[size]

    def start(self, plan: RoundPlan) -> None:
        """A new round of the clients that are seated, whose parameters are there."""
        self.begin(self.visits)
        self.totals.zero_()
        self.rate.fill_(self.work.rate(plan.round))
        for own, visit in zip(self.held, self.visits, strict=False):
            if (held := visit.held(self.work.mask)) is not None:
                own.copy_(held)
        if self.draws is not None:
            self.draws.manual_seed(stream_seed(plan, self.visits[0].job))


class Seated(Waves):
    """Trains clients in seats, which are kept from round to round."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._kept: dict[tuple[Kind, int], list[Seats]] = {}
        self._modules: dict[Kind, nn.Module] = {}
        self._ahead: Mapping[int, Examples] = {}

    @abstractmethod
    def _seated(self, plan: RoundPlan, visits: Sequence[Visit], failures: dict[Key, Failure]) -> list[Seats]:
        """Seats for all visits; who cannot be seated is added to the failures."""

    @abstractmethod
    def _made(self, visits: Sequence[Visit], places: int, stream: Any) -> Seats:
        """New seats for clients of the same widths; the first visit's client has the most examples."""

    @abstractmethod
    def _load(self, plan: RoundPlan, seats: Sequence[Seats]) -> None:
        """What every client starts from into its place."""

    @abstractmethod
    def _fill(self, plan: RoundPlan, seats: Sequence[Seats], epoch: int) -> None:
        """The epoch's examples into the places, and its steps into the queues."""

    @abstractmethod
    def _get_ready(self, plan: RoundPlan) -> None:
        """Of the next round, while the device is at work, what can be done now."""

    def _holds(self) -> bool:
        return bool(self._kept)

    def _clear(self) -> None:
        self._kept.clear()
        self._modules.clear()
        self._ahead = {}

    def _wave(self, plan: RoundPlan, jobs: Sequence[Job]) -> list[Upload | Failure]:
        visits, failures = open_visits(plan, jobs, partial(self._module, plan), self._ahead)
        seats = self._seated(plan, visits, failures)
        self._load(plan, seats)
        on_cpu = self.device.type != "cuda"
        with torch.random.fork_rng(devices=[], enabled=on_cpu):  # on a GPU, all seats have their generator
            if on_cpu:
                torch.manual_seed(stream_seed(plan, plan.jobs[0]))
            for epoch in range(plan.work.epochs):
                self._fill(plan, seats, epoch)
                self._train(seats)
        if len(jobs) == len(plan.jobs):
            self._get_ready(plan)
        answers = {**failures, **self._answers(seats)}
        return [answers[job.key] for job in jobs]

    def _module(self, plan: RoundPlan, job: Job) -> nn.Module:
        """A sub-model of a job's widths, for its code and for hooks to try things with."""
        kind, network = plan.kind(job), plan.networks[job.network]
        if kind not in self._modules:
            self._modules[kind] = network.axes.cut(network.module, job.window)
        return self._modules[kind]

    def _seats(self, visits: Sequence[Visit], places: int, number: int) -> Seats:
        """The seats of a number for clients of the same widths, of whom the first has the most examples."""
        plan, job = visits[0].plan, visits[0].job
        kept = self._kept.setdefault((plan.kind(job), places), [])
        if number == len(kept):
            kept.append(self._made(visits, places, self._stream(sum(map(len, self._kept.values())))))
        elif len(visits[0].examples) > kept[number].y.shape[1]:
            kept[number] = self._made(visits, places, kept[number].stream)
        kept[number].visits = visits
        return kept[number]

    def _train(self, seats: Sequence[Seats]) -> None:
        """All steps of an epoch, step by step through the seats."""
        streams = {each.stream for each in seats if each.stream is not None}
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for steps in zip_longest(*(each.queue for each in seats)):
            for each, step in zip(seats, steps, strict=True):
                if step is not None:
                    with torch.cuda.stream(each.stream):
                        step()
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    def _answers(self, seats: Sequence[Seats]) -> dict[Key, Upload | Failure]:
        """Of every client; the device is asked once for all losses, and for sizes that say what is finite."""
        found: dict[Key, Upload | Failure] = {}
        told = [torch.stack([each.totals.double(), each.sizes()], 1)[: len(each.visits)] for each in seats]
        rows = iter(torch.cat(told).tolist() if told else ())
        for each in seats:
            for (place, visit), (total, size) in zip(enumerate(each.visits), rows, strict=False):
                visit.steps = steps_of(visit)
                visit.loss, visit.trained = total / visit.steps, each.trained(place)
                found[visit.job.key] = close_visit(visit, True if isfinite(size) else None)
            each.visits = ()
        return found
