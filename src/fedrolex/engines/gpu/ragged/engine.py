"""Rounds of ragged cohorts: one captured step for wide clients, one for narrow ones.

Places are kept from round to round: as many for every width as any round has needed. A place without a client
costs next to nothing, so the captured steps serve cohorts of every composition.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from fedrolex.clients.messages import Averaged, Failure, Job, RoundPlan, Upload, out_of_memory
from fedrolex.clients.work import LocalTraining, Precision
from fedrolex.core.streams import shuffle
from fedrolex.engines.cpu.loop import random_draws
from fedrolex.engines.gpu.captured import captured
from fedrolex.engines.gpu.ragged.cohort import Cohort, takes
from fedrolex.engines.gpu.ragged.exchange import Exchange, plain
from fedrolex.models.preresnet import PreResNet
from fedrolex.slicing.windows import Window
from fedrolex.tasks.classification import Classification
from fedrolex.tasks.task import Task

WIDE = 32  # channels of the first layer from which a client is wide
SPARE = 2  # places more than needed, where more are needed than before
REMEMBERED = 10_000
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on a CPU, for tests

Widths = tuple[tuple[str, int], ...]


@dataclass
class Lane:
    """A cohort with its captured step.

    Attributes:
        widths: of every place.
        cohort: their tensors.
        stream, step: what a step runs on, and the captured step; none and the plain one without a GPU.
    """

    widths: list[Widths]
    cohort: Cohort
    stream: Any
    step: Callable[[], Any]

    def replay(self, steps: int) -> None:
        """As many steps, on the lane's own stream."""
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            for _ in range(steps):
                self.step()


@dataclass
class Seat:
    """A client's place in this round, and how many images it has."""

    job: Job
    images: int
    lane: Lane
    place: int


@dataclass
class Ragged:
    """Trains cohorts of PreResNets.

    Attributes:
        model: the server's model, to cut sub-models from; its weights are not used.
        precision: of products.
    """

    model: nn.Module
    precision: Precision
    lanes: list[Lane] = field(default_factory=list)
    _needed: dict[Widths, int] = field(default_factory=dict)
    _room: int = 0
    _at_once: int = 0
    _work: LocalTraining | None = None
    _labels: dict[int, list[int]] = field(default_factory=dict)
    _seats: list[Seat] = field(default_factory=list)
    _exchange: Exchange | None = None
    _taken: bool | None = None
    _models: dict[Widths, PreResNet] = field(default_factory=dict)
    _made: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _made_of: Task | None = None

    def takes(self, plan: RoundPlan) -> bool:
        """Whether a round can be trained here."""
        if self._taken is None:
            self._taken = takes(self.model, plan.task.loss)
        return (
            self._taken
            and isinstance(plan.task, Classification)
            and (next(self.model.parameters()).is_cuda or INTERPRETED)
            and not plan.client.proximal
            and plain(plan.axes) is not None
            and not any(job.own or job.correction or job.window.wiring for job in plan.jobs)
        )

    def run(self, plan: RoundPlan, jobs: Sequence[Job]) -> Iterator[Upload | Failure]:
        """Train clients at once; answers come in the order of the jobs."""
        task = plan.task
        assert isinstance(task, Classification)
        sizes = {job.client: len(task.parts[job.client]) for job in jobs}
        refused = {job.client: self._why_not(plan, sizes[job.client]) for job in jobs}
        failures = {job.client: Failure(job, why) for job in jobs if (why := refused[job.client]) is not None}
        self._seats = self._seat(plan, [job for job in jobs if job.client not in failures], sizes)
        if self._seats:
            self._start(plan)
            for epoch in range(plan.client.epochs):
                self._fill(plan, epoch)
                self._train(plan)
            if len(jobs) == len(plan.jobs):
                self._get_ready(plan)
        answers = {**failures, **self._answers(plan)}
        for job in jobs:
            yield answers[job.client]

    def _why_not(self, plan: RoundPlan, images: int) -> str | None:
        """Why a client cannot be trained: the same as in ``loop``."""
        assert isinstance(self.model, PreResNet)
        if not images:
            return "ValueError: has no examples"
        halved = len(self.model.plan.blocks) - 1
        if self.model.plan.size >> halved == 1 and images % plan.client.batch == 1:
            return "ValueError: its last batch is one image, of which batch norm sees one value a channel"
        return None

    # --- places ---

    def _seat(self, plan: RoundPlan, jobs: Sequence[Job], sizes: Mapping[int, int]) -> list[Seat]:
        """A place for every job, building lanes where there are too few."""
        of = {window: tuple(plan.axes.widths(window).items()) for window in {job.window for job in jobs}}
        widths = [of[job.window] for job in jobs]
        needed = {each: widths.count(each) for each in widths}
        room = max((sizes[job.client] for job in jobs), default=0)
        short = any(count > self._needed.get(each, 0) for each, count in needed.items())
        if jobs and (short or room > self._room or plan.client != self._work):
            spare = SPARE if self._needed else 0
            for each, count in needed.items():
                if count > self._needed.get(each, 0):
                    self._needed[each] = count + spare
            self._room, self._at_once = max(room, self._room), max(len(jobs), self._at_once)
            self._work = plan.client
            self._build(plan, {each: job.window for each, job in zip(widths, jobs, strict=True)})
        free = [(lane, place, each) for lane in self.lanes for place, each in enumerate(lane.widths)]
        seats = []
        for job, wanted in zip(jobs, widths, strict=True):
            found = next(which for which, (_, _, each) in enumerate(free) if each == wanted)
            lane, place, _ = free.pop(found)
            seats.append(Seat(job, sizes[job.client], lane, place))
        return sorted(seats, key=lambda seat: self.lanes.index(seat.lane))

    def _build(self, plan: RoundPlan, windows: Mapping[Widths, Window]) -> None:
        for widths, window in windows.items():
            if widths not in self._models:
                found = plan.axes.cut(self.model, window)
                assert isinstance(found, PreResNet)
                self._models[widths] = found
        self.lanes, self._exchange, self._seats = [], None, []  # what they hold on the device goes first
        groups: dict[bool, list[Widths]] = {}
        for widths, count in self._needed.items():
            groups.setdefault(self._wide(widths), []).extend([widths] * count)
        share = Fraction(self._at_once, sum(self._needed.values()))
        device = next(self.model.parameters()).device
        for _, group in sorted(groups.items(), reverse=True):
            models = [self._models[widths] for widths in group]
            cohort = Cohort(models, plan.client, room=self._room, share=share, precision=self.precision, device=device)
            self.lanes.append(Lane(group, cohort, *_ready(cohort)))
        self._exchange = Exchange(plan.axes, [lane.cohort for lane in self.lanes])

    # --- a round ---

    def _start(self, plan: RoundPlan) -> None:
        assert self._exchange is not None
        windows = {(id(seat.lane), seat.place): seat.job.window for seat in self._seats}
        places = [windows.get((id(lane), place)) for lane in self.lanes for place in range(lane.cohort.clients)]
        self._exchange.deal(plan.state, places)
        masked = plan.client.mask != "none"
        for lane in self.lanes:
            sizes = [0] * lane.cohort.clients
            held = torch.zeros(lane.cohort.held.shape, dtype=torch.int8)
            for seat in self._seats:
                if seat.lane is lane:
                    sizes[seat.place] = seat.images
                    if masked:
                        held[seat.place, self._labels_of(plan.task, seat)] = 1
            lane.cohort.sizes.copy_(torch.tensor(sizes, dtype=torch.int32))
            if masked:
                lane.cohort.held.copy_(held)
            lane.cohort.start(plan.client.rate(plan.round))

    def _fill(self, plan: RoundPlan, epoch: int) -> None:
        """The epoch's inputs and targets, each client's to its place."""
        inputs, targets = self._inputs(plan, plan.round, epoch, [seat.job.client for seat in self._seats])
        self._made.clear()
        done = 0
        for lane in self.lanes:
            mine = [seat for seat in self._seats if seat.lane is lane]
            count, cohort = sum(seat.images for seat in mine), lane.cohort
            if count:
                room = cohort.y.shape[1]
                to = torch.cat([seat.place * room + torch.arange(seat.images) for seat in mine]).to(targets.device)
                cohort.y.view(-1)[to] = targets[done : done + count]
                cohort.x.flatten(0, 1)[to, ..., : inputs.shape[-1]] = inputs[done : done + count]
                done += count
            cohort.counter.zero_()

    def _inputs(self, plan: RoundPlan, round: int, epoch: int, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of clients, one after the other in the order of training, augmented in one go."""
        task, known = plan.task, self._made.pop((plan.seed, round, epoch, *clients), None)
        if known is not None and task is self._made_of:
            return known
        assert isinstance(task, Classification)
        rows, draws = [], []
        for client in clients:
            key = (round, client, epoch)
            held = task.parts[client]
            order = torch.from_numpy(shuffle(len(held), plan.seed, "batches", *key))
            rows.append(held[order])
            if task.random_inputs:
                draws.append(random_draws(len(held), plan.seed, *key)[order])
        found = task.train.rows(torch.cat(rows).to(task.train.y.device, non_blocking=True))
        drawn = torch.cat(draws).to(found.y.device, non_blocking=True) if draws else None
        inputs = task.inputs(found.x, drawn).to(self.lanes[0].cohort.x.dtype)
        return inputs.permute(0, 2, 3, 1), found.y

    def _get_ready(self, plan: RoundPlan) -> None:
        """For the next round, while the device is at work: what is to be done on the host, and inputs."""
        assert self._exchange is not None
        assert isinstance(plan.task, Classification)
        self._made.clear()
        self._made_of = plan.task
        jobs = [job for job in plan.upcoming() if job.part == 1]  # stragglers are not trained here
        self._exchange.get_ready(job.window for job in jobs)
        widths = {job.client: tuple(plan.axes.widths(job.window).items()) for job in jobs}
        able = [client for client in widths if self._why_not(plan, len(plan.task.parts[client])) is None]
        if able and all(widths[client] in self._models for client in able):
            seated = sorted(able, key=lambda client: not self._wide(widths[client]))
            try:
                self._made[plan.seed, plan.round + 1, 0, *seated] = self._inputs(plan, plan.round + 1, 0, seated)
            except RuntimeError as failure:
                if not out_of_memory(failure):  # then they are made when their round comes
                    raise

    def _wide(self, widths: Widths) -> bool:
        return self._models[widths].stem.out_channels >= WIDE

    def _train(self, plan: RoundPlan) -> None:
        streams = [lane.stream for lane in self.lanes if lane.stream is not None]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for lane in self.lanes:
            longest = max((seat.images for seat in self._seats if seat.lane is lane), default=0)
            lane.replay(-(-longest // plan.client.batch))
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    def _answers(self, plan: RoundPlan) -> dict[int, Upload | Failure]:
        if not self._seats:
            return {}
        own = torch._foreach_norm([seat.lane.cohort.parameters.whole(seat.place) for seat in self._seats])
        losses = [seat.lane.cohort.totals[seat.place] for seat in self._seats]
        told = torch.stack([*own, *losses]).view(2, -1).tolist()
        found: dict[int, Upload | Failure] = {}
        for seat, norm, loss in zip(self._seats, *told, strict=True):
            steps = plan.client.epochs * -(-seat.images // plan.client.batch)
            labels = self._labels_of(plan.task, seat) if plan.tell_labels else None
            tensors = seat.lane.cohort.parameters.tensors(seat.place)
            good = True if isfinite(norm) else None  # a norm that is not may still be one of finite values
            found[seat.job.client] = Upload(seat.job, tensors, seat.images, loss / steps, steps, labels, good)
        return found

    def _labels_of(self, task: Task, seat: Seat) -> list[int]:
        """The classes a client holds; asked once."""
        if seat.job.client not in self._labels:
            if len(self._labels) >= REMEMBERED:
                self._labels.clear()
            self._labels[seat.job.client] = task.labels(task.client(seat.job.client)).tolist()
        return self._labels[seat.job.client]

    def average(self, uploads: Sequence[Upload], weights: Sequence[float], label_axis: str | None) -> Averaged:
        """The selective average of a round's uploads, and their drift, without moving them."""
        assert self._exchange is not None
        numbers = [(lane, place) for lane in self.lanes for place in range(lane.cohort.clients)]
        seats = {seat.job.client: seat for seat in self._seats}
        share, rows = [0.0] * len(numbers), None
        if label_axis is not None:
            rows = torch.zeros(len(numbers), self.lanes[0].cohort.held.shape[1], dtype=torch.int8)
        places = {}
        for upload, weight in zip(uploads, weights, strict=True):
            seat = seats[upload.job.client]
            place = next(n for n, (lane, p) in enumerate(numbers) if lane is seat.lane and p == seat.place)
            share[place], places[upload.job.client] = weight, place
            if rows is not None:
                rows[place, list(upload.labels or ())] = 1
        device = self.lanes[0].cohort.device
        new, sums, finite = self._exchange.average(share, label_axis, None if rows is None else rows.to(device))
        drift: dict[Any, list[float]] = {}
        for upload in uploads:
            mine = drift.setdefault(upload.job.capacity, [0.0, 0.0, 0.0])
            for which, value in enumerate(sums[places[upload.job.client]]):
                mine[which] += value
        by_capacity = {
            str(c): 1 - a / (b * m) ** 0.5 if b * m > 0 else 0.0 for c, (a, b, m) in sorted(drift.items())[::-1]
        }
        return Averaged(new, by_capacity, finite or None)


def _ready(cohort: Cohort) -> tuple[Any, Callable[[], Any]]:
    """A stream and a captured step; nobody has images yet, so trying it out changes nothing."""
    if cohort.device.type != "cuda":
        return None, cohort.step
    cohort.compile()
    stream = torch.cuda.Stream(cohort.device)
    return stream, captured(cohort.step, cohort.counter.zero_, stream)
