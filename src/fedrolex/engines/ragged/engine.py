"""Rounds of cohorts that are trained by :mod:`.kernels`: one captured step for wide clients, one for narrow ones.

Places are kept from round to round: as many for every width as any round has needed. A place without a client
costs next to nothing, so the captured steps serve cohorts of every composition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fedrolex.client import LocalTraining, Precision
from fedrolex.engines.engine import Averaged, Failure, Job, RoundPlan, Upload
from fedrolex.engines.holdings import holdings
from fedrolex.engines.loop import random_draws
from fedrolex.engines.ragged.cohort import Cohort, takes
from fedrolex.engines.ragged.exchange import Exchange, plain
from fedrolex.models.preresnet import PreResNet
from fedrolex.slicing.windows import Window
from fedrolex.streams import shuffle
from fedrolex.tasks.task import Examples, Task

WIDE = 32  # channels of the first layer from which a client is wide
SPARE = 2  # places more than needed, where more are needed than before
REMEMBERED = 10_000

Widths = tuple[tuple[str, int], ...]


@dataclass
class Lane:
    """A cohort with its captured step.

    Attributes:
        widths: of every place.
        cohort: their tensors.
        stream, graph: the step, and what it runs on.
    """

    widths: list[Widths]
    cohort: Cohort
    stream: Any
    graph: Any

    def replay(self, steps: int) -> None:
        """As many steps, on the lane's own stream."""
        with torch.cuda.stream(self.stream):
            for _ in range(steps):
                self.graph.replay()


@dataclass
class Seat:
    """A client's place in this round."""

    job: Job
    data: Examples
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
    _work: LocalTraining | None = None
    _labels: dict[int, list[int]] = field(default_factory=dict)
    _seats: list[Seat] = field(default_factory=list)
    _exchange: Exchange | None = None
    _taken: bool | None = None
    _models: dict[Widths, PreResNet] = field(default_factory=dict)

    def takes(self, plan: RoundPlan) -> bool:
        """Whether a round can be trained here."""
        if self._taken is None:
            self._taken = takes(self.model, plan.task.loss)
        return (
            self._taken
            and next(self.model.parameters()).is_cuda
            and plan.deadline is None
            and plain(plan.axes) is not None
            and not any(job.own or job.window.wiring for job in plan.jobs)
        )

    def run(self, plan: RoundPlan, jobs: Sequence[Job]) -> Iterator[Upload | Failure]:
        """Train clients at once; answers come in the order of the jobs."""
        data, failures = holdings(plan, jobs)
        for job in jobs:
            if job.client in data and self._lonely(plan, len(data[job.client])):
                failures[job.client] = Failure(job, "its last batch is one image: batch norm sees one value a channel")
        self._seats = self._seat(plan, [job for job in jobs if job.client not in failures], data)
        if self._seats:
            self._start(plan)
            for epoch in range(plan.client.epochs):
                self._fill(plan, epoch)
                self._train(plan)
        answers = {**failures, **self._answers(plan)}
        for job in jobs:
            yield answers[job.client]

    def _lonely(self, plan: RoundPlan, examples: int) -> bool:
        """Whether a client has what torch's batch norm refuses to train on: a single value a channel."""
        assert isinstance(self.model, PreResNet)
        return self.model.plan.size == 8 and examples % plan.client.batch == 1

    # --- places ---

    def _seat(self, plan: RoundPlan, jobs: Sequence[Job], data: Mapping[int, Examples]) -> list[Seat]:
        """A place for every job, building lanes where there are too few."""
        widths = [tuple(plan.axes.widths(job.window).items()) for job in jobs]
        needed = {each: widths.count(each) for each in widths}
        room = max((len(data[job.client]) for job in jobs), default=0)
        short = any(count > self._needed.get(each, 0) for each, count in needed.items())
        if jobs and (short or room > self._room or plan.client != self._work):
            spare = SPARE if self._needed else 0
            for each, count in needed.items():
                if count > self._needed.get(each, 0):
                    self._needed[each] = count + spare
            self._room, self._work = max(room, self._room), plan.client
            self._build(plan, {each: job.window for each, job in zip(widths, jobs, strict=True)})
        free = [(lane, place, each) for lane in self.lanes for place, each in enumerate(lane.widths)]
        seats = []
        for job, wanted in zip(jobs, widths, strict=True):
            found = next(which for which, (_, _, each) in enumerate(free) if each == wanted)
            lane, place, _ = free.pop(found)
            seats.append(Seat(job, data[job.client], lane, place))
        return seats

    def _build(self, plan: RoundPlan, windows: Mapping[Widths, Window]) -> None:
        for widths, window in windows.items():
            if widths not in self._models:
                found = plan.axes.cut(self.model, window)
                assert isinstance(found, PreResNet)
                self._models[widths] = found
        self.lanes, self._exchange = [], None
        groups: dict[bool, list[Widths]] = {}
        for widths, count in self._needed.items():
            groups.setdefault(self._models[widths].stem.out_channels >= WIDE, []).extend([widths] * count)
        for _, group in sorted(groups.items(), reverse=True):
            models = [self._models[widths] for widths in group]
            device = next(self.model.parameters()).device
            cohort = Cohort(models, plan.client, room=self._room, precision=self.precision, device=device)
            cohort.compile()
            self.lanes.append(Lane(group, cohort, *_captured(cohort, device)))
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
                    sizes[seat.place] = len(seat.data)
                    if masked:
                        held[seat.place, self._labels_of(plan.task, seat)] = 1
            lane.cohort.sizes.copy_(torch.tensor(sizes, dtype=torch.int32))
            if masked:
                lane.cohort.held.copy_(held)
            lane.cohort.start(plan.client.rate(plan.round))

    def _fill(self, plan: RoundPlan, epoch: int) -> None:
        """The epoch's inputs, augmented for the whole cohort in one go."""
        task, xs, draws = plan.task, [], []
        for seat in self._seats:
            key = (plan.round, seat.job.client, epoch)
            order = torch.from_numpy(shuffle(len(seat.data), plan.seed, "batches", *key))
            if task.random_inputs:
                draws.append(random_draws(len(seat.data), plan.seed, *key)[order])
            order = order.to(seat.data.y.device, non_blocking=True)
            xs.append(seat.data.x[order])
            seat.lane.cohort.y[seat.place, : len(order)] = seat.data.y[order]
        drawn = torch.cat(draws).to(xs[0].device, non_blocking=True) if draws else None
        inputs = task.inputs(torch.cat(xs), drawn).permute(0, 2, 3, 1).split([len(x) for x in xs])
        for seat, x in zip(self._seats, inputs, strict=True):
            seat.lane.cohort.x[seat.place, : len(x), ..., : x.shape[-1]] = x
        for lane in self.lanes:
            lane.cohort.counter.zero_()

    def _train(self, plan: RoundPlan) -> None:
        for lane in self.lanes:
            lane.stream.wait_stream(torch.cuda.current_stream())
        for lane in self.lanes:
            longest = max((len(seat.data) for seat in self._seats if seat.lane is lane), default=0)
            lane.replay(-(-longest // plan.client.batch))
        for lane in self.lanes:
            torch.cuda.current_stream().wait_stream(lane.stream)

    def _answers(self, plan: RoundPlan) -> dict[int, Upload | Failure]:
        if not self._seats:
            return {}
        own = [seat.lane.cohort.parameters.whole(seat.place).sum() for seat in self._seats]
        losses = [seat.lane.cohort.totals[seat.place] for seat in self._seats]
        told = torch.stack([torch.stack(own), torch.stack(losses)]).tolist()
        found: dict[int, Upload | Failure] = {}
        for seat, total, loss in zip(self._seats, *told, strict=True):
            steps = plan.client.epochs * -(-len(seat.data) // plan.client.batch)
            labels = self._labels_of(plan.task, seat) if plan.tell_labels else None
            tensors = seat.lane.cohort.parameters.tensors(seat.place)
            good = True if total - total == 0 else None  # a sum that is not finite may still be one of finite values
            found[seat.job.client] = Upload(seat.job, tensors, len(seat.data), loss / steps, steps, labels, good)
        return found

    def _labels_of(self, task: Task, seat: Seat) -> list[int]:
        """The classes a client holds; asked once."""
        if seat.job.client not in self._labels:
            if len(self._labels) >= REMEMBERED:
                self._labels.clear()
            self._labels[seat.job.client] = task.labels(seat.data).tolist()
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
        new, sums = self._exchange.average(share, label_axis, None if rows is None else rows.to(device))
        drift: dict[Any, list[float]] = {}
        for upload in uploads:
            mine = drift.setdefault(upload.job.capacity, [0.0, 0.0, 0.0])
            for which, value in enumerate(sums[places[upload.job.client]]):
                mine[which] += value
        return Averaged(
            new, {str(c): 1 - a / (b * m) ** 0.5 if b * m > 0 else 0.0 for c, (a, b, m) in sorted(drift.items())[::-1]}
        )


def _captured(cohort: Cohort, device: torch.device) -> tuple[Any, Any]:
    """A stream and a graph of one step; nobody has images yet, so trying it out changes nothing."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cohort.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        cohort.step()
    return stream, graph
