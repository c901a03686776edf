"""Places for the clients of one network: one captured step for wide clients, one for narrow ones.

Places are kept from round to round, as many for every width as rounds need (:mod:`.ahead`). A place without a client
costs next to nothing, so the captured steps serve cohorts of every composition.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from fedrolex.clients import Failure, Job, Network, Precision, RoundPlan, Upload
from fedrolex.engines.gpu.ragged.ahead import Need, Widths, images_of, task_of, widths_of
from fedrolex.engines.gpu.ragged.cohort import Cohort
from fedrolex.engines.gpu.ragged.exchange import CohortExchange
from fedrolex.engines.visits import Key, order_of
from fedrolex.models import PreResNet
from fedrolex.rounds import Averaged, out_of_memory
from fedrolex.rounds.drift import DriftSums, drift_of
from fedrolex.slicing import Window

WIDE = 32  # channels of the first layer from which a client is wide
REMEMBERED = 10_000  # clients whose classes are known
STREAMS_USED = 4  # by the places of a network: two for wide clients, two for narrow ones


@dataclass
class Placement:
    """A client's place in this round, in its cohort and among those of all cohorts, and how many images it has."""

    job: Job
    images: int
    cohort: Cohort
    place: int
    number: int


class Places:
    """The cohorts of one network of PreResNets, and who is trained where in a round.

    Args:
        network: of PreResNets; its cohorts have the precision and are on the device.
        need: what rounds need, as far as it is known.
        streams: as many as :data:`STREAMS_USED`; each is None without a GPU.
    """

    def __init__(
        self, network: Network, need: Need, precision: Precision, device: torch.device, streams: Sequence[Any]
    ) -> None:
        assert isinstance(network.module, PreResNet)
        self.network, self.need, self.precision, self.device = network, need, precision, device
        self._streams = streams
        self._shape = network.module.plan
        self.cohorts: list[Cohort] = []  # of wide and of narrow clients, as far as there are any
        self._outgrown = True
        self._placed: list[Placement] = []
        self._places: dict[Widths, list[tuple[Cohort, int, int]]] = {}  # cohort, place in it, number
        self._exchange: CohortExchange | None = None
        self._homes: dict[tuple[str, ...], int] = {}
        self._labels: dict[int, list[int]] = {}
        self._models: dict[Widths, PreResNet] = {}
        self._made: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    # --- places ---

    def seat(self, plan: RoundPlan, jobs: Sequence[Job], spare: int) -> dict[Key, Failure]:
        """Give every job a place; who cannot be trained, and why.

        Cohorts are built where there are too few places, with so many of a width to spare.
        """
        images = {job: images_of(plan, job) for job in jobs}
        self._outgrown = self.need.grow(self.network, images, spare) or self._outgrown
        failures = {job.key: Failure(job, why) for job in jobs if (why := self._why_not(plan, images[job]))}
        jobs = [job for job in jobs if job.key not in failures]
        if jobs and self._outgrown:
            self._build(plan)
        of = {window: widths_of(self.network, window) for window in {job.window for job in jobs}}
        free = {each: iter(places) for each, places in self._places.items()}
        placed = [Placement(job, images[job], *next(free[of[job.window]])) for job in jobs]
        self._placed = sorted(placed, key=lambda each: self.cohorts.index(each.cohort))
        return failures

    def _build(self, plan: RoundPlan) -> None:
        for widths, window in self.need.windows.items():
            if widths not in self._models:
                found = self.network.axes.cut(self.network.module, window)
                assert isinstance(found, PreResNet)
                self._models[widths] = found
        self.cohorts, self._exchange, self._placed = [], None, []  # what they hold on the device goes first
        self._places.clear()
        groups: dict[bool, list[Widths]] = {}
        for widths, count in self.need.places.items():
            groups.setdefault(self._wide(widths), []).extend([widths] * count)
        share = Fraction(self.need.clients, sum(self.need.places.values()))
        for number, (_, group) in enumerate(sorted(groups.items(), reverse=True)):
            stream, beside = self._streams[2 * number : 2 * number + 2]
            cohort = Cohort(
                [self._models[widths] for widths in group], plan.work,
                room=self.need.images, share=share, precision=self.precision, device=self.device, beside=beside,
            )  # fmt: skip
            cohort.capture(stream)
            before = sum(each.clients for each in self.cohorts)
            for place, widths in enumerate(group):
                self._places.setdefault(widths, []).append((cohort, place, before + place))
            self.cohorts.append(cohort)
        self._exchange = CohortExchange(self.network.axes, self.cohorts)
        self._outgrown = False

    def _why_not(self, plan: RoundPlan, images: int) -> str | None:
        """Why a client cannot be trained: the same as in ``loop``."""
        if not images:
            return "ValueError: has no examples"
        halved = len(self._shape.blocks) - 1
        if self._shape.size >> halved == 1 and images % plan.work.batch == 1:
            return "ValueError: its last batch is one image, of which batch norm sees one value a channel"
        return None

    def _wide(self, widths: Widths) -> bool:
        return self._models[widths].stem.out_channels >= WIDE

    def _mine(self) -> list[tuple[Cohort, list[Placement]]]:
        """Every cohort with those that are placed in it."""
        return [(cohort, [each for each in self._placed if each.cohort is cohort]) for cohort in self.cohorts]

    # --- a round ---

    def start(self, plan: RoundPlan) -> None:
        """Every client's part of the server's tensors to its place."""
        if self._exchange is None or not self._placed:
            return
        windows: list[Window | None] = [None] * self._exchange.places
        of = [0] * self._exchange.places
        jobs = {each.job.sections: each.job for each in self._placed}
        self._homes = {sections: home for home, sections in enumerate(jobs)}
        for each in self._placed:
            windows[each.number], of[each.number] = each.job.window, self._homes[each.job.sections]
        self._exchange.deal([plan.whole(job) for job in jobs.values()], windows, of)
        masked = plan.work.mask != "none"
        for cohort, mine in self._mine():
            sizes = [0] * cohort.clients
            held = torch.zeros(cohort.held.shape, dtype=torch.int8)
            for placement in mine:
                sizes[placement.place] = placement.images
                if masked:
                    held[placement.place, self._labels_of(plan, placement.job)] = 1
            cohort.sizes.copy_(torch.tensor(sizes, dtype=torch.int32))
            if masked:
                cohort.held.copy_(held)
            cohort.start(plan.work.rate(plan.round))

    def fill(self, plan: RoundPlan, epoch: int) -> None:
        """The epoch's inputs and targets, each client's to its place."""
        if not self._placed:
            return
        inputs, targets = self._inputs(plan, plan.round, epoch, [each.job.client for each in self._placed])
        self._made.clear()
        done = 0
        for cohort, mine in self._mine():
            if count := sum(placement.images for placement in mine):
                room = cohort.y.shape[1]
                to = torch.cat([one.place * room + torch.arange(one.images) for one in mine]).to(targets.device)
                cohort.y.view(-1)[to] = targets[done : done + count]
                cohort.x.flatten(0, 1)[to, ..., : inputs.shape[-1]] = inputs[done : done + count]
                done += count
            cohort.counter.zero_()

    def launch(self, plan: RoundPlan) -> None:
        """All steps of an epoch, on the cohorts' own streams."""
        for each, mine in self._mine():
            if each.stream is not None:
                each.stream.wait_stream(torch.cuda.current_stream())
            each.replay(-(-max((placement.images for placement in mine), default=0) // plan.work.batch))

    def join(self) -> None:
        """What is launched from now on comes after the steps."""
        for each in self.cohorts:
            if each.stream is not None:
                torch.cuda.current_stream().wait_stream(each.stream)

    def answers(self, plan: RoundPlan) -> dict[Key, Upload]:
        """Every client's answer; the device is asked once."""
        if not self._placed:
            return {}
        own = torch._foreach_norm([each.cohort.parameters.whole(each.place) for each in self._placed])
        losses = [each.cohort.totals[each.place] for each in self._placed]
        told = torch.stack([*own, *losses]).view(2, -1).tolist()
        found: dict[Key, Upload] = {}
        for each, norm, loss in zip(self._placed, *told, strict=True):
            steps = plan.work.epochs * -(-each.images // plan.work.batch)
            labels = self._labels_of(plan, each.job) if plan.tell_labels else None
            tensors = each.cohort.parameters.tensors(each.place)
            good = True if isfinite(norm) else None  # a norm that is not may still be one of finite values
            found[each.job.key] = Upload(each.job, tensors, each.images, loss / steps, steps, labels, good)
        return found

    def average(self, uploads: Sequence[Upload], weights: Sequence[float], label_axis: str | None) -> Averaged:
        """The selective average of uploads for one section, and their drift, without moving them."""
        assert self._exchange is not None
        places, number = self._exchange.places, {each.job.key: each.number for each in self._placed}
        share = [0.0] * places
        rows = None if label_axis is None else torch.zeros(places, self._shape.classes, dtype=torch.int8)
        for upload, weight in zip(uploads, weights, strict=True):
            share[number[upload.job.key]] = weight
            if rows is not None:
                rows[number[upload.job.key], list(upload.labels or ())] = 1
        home, held = self._homes[uploads[0].job.sections], None if rows is None else rows.to(self.device)
        new, sums, finite = self._exchange.average(share, label_axis, held, home)
        drift: DriftSums = {}
        for upload in uploads:
            along, mean, square = drift.get(upload.job.capacity, (0.0, 0.0, 0.0))
            own = sums[number[upload.job.key]]
            drift[upload.job.capacity] = along + own[0], mean + own[2], square + own[1]
        return Averaged(new, drift_of(drift), finite or None)

    def _labels_of(self, plan: RoundPlan, job: Job) -> list[int]:
        """The classes a client holds; asked once."""
        if job.client not in self._labels:
            if len(self._labels) >= REMEMBERED:
                self._labels.clear()
            self._labels[job.client] = plan.task.labels(plan.task.client(job.client)).tolist()
        return self._labels[job.client]

    # --- data ---

    def _inputs(self, plan: RoundPlan, round: int, epoch: int, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of clients, one after the other in the order of training, augmented in one go."""
        task, known = task_of(plan), self._made.pop((plan.seed, round, epoch, *clients), None)
        if known is not None:
            return known
        rows, draws = [], []
        for client in clients:
            held = task.parts[client]
            order, drawn = order_of(plan, len(held), round, client, epoch)
            rows.append(held[order])
            draws += [] if drawn is None else [drawn]
        found = task.train.rows(torch.cat(rows).to(task.train.y.device, non_blocking=True))
        drawn = torch.cat(draws).to(found.y.device, non_blocking=True) if draws else None
        inputs = task.inputs(found.x, drawn).to(self.cohorts[0].x.dtype)
        return inputs.permute(0, 2, 3, 1), found.y

    def get_ready(self, plan: RoundPlan, jobs: Sequence[Job]) -> None:
        """For jobs of the next round, while the device is at work: what is to be done on the host, and inputs."""
        self._made.clear()
        if self._exchange is None:
            return
        self._exchange.get_ready(job.window for job in jobs)
        able = [job for job in jobs if self._why_not(plan, images_of(plan, job)) is None]
        widths = {job.key: widths_of(self.network, job.window) for job in able}
        if able and all(each in self._models for each in widths.values()):
            seated = [job.client for job in sorted(able, key=lambda job: not self._wide(widths[job.key]))]
            try:
                self._made[plan.seed, plan.round + 1, 0, *seated] = self._inputs(plan, plan.round + 1, 0, seated)
            except RuntimeError as failure:
                if not out_of_memory(failure):  # then they are made when their round comes
                    raise
