"""Places for the clients of networks of one shape: one captured step for wide clients, one for narrow ones.

Places are kept from round to round: as many for every width as any round of the next thousand needs, as far as the
method can say (:mod:`.ahead`), or as any has needed. A place without a client costs next to nothing, so the captured
steps serve cohorts of every composition.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from fedrolex.clients import Failure, Job, Network, Precision, RoundPlan, Upload
from fedrolex.engines.gpu.ragged.ahead import Need, Widths, task_of, widths_of
from fedrolex.engines.gpu.ragged.cohort import Cohort
from fedrolex.engines.gpu.ragged.exchange import CohortExchange
from fedrolex.engines.visits import Key, order_of
from fedrolex.models import PreResNet
from fedrolex.models.preresnet import Plan
from fedrolex.rounds import Averaged, out_of_memory
from fedrolex.rounds.drift import DriftSums, drift_of
from fedrolex.slicing import Window

WIDE = 32  # channels of the first layer from which a client is wide
SPARE = 2  # places more than needed, where more are needed than before
REMEMBERED = 10_000  # clients whose classes are known
STREAMS_USED = 4  # by the places of a shape: two for wide clients, two for narrow ones

Kind = tuple[str, Widths]
"""A network's name, and widths of its axes."""


@dataclass
class Placement:
    """A client's place in this round, in its cohort and among those of its network, and how many images it has."""

    job: Job
    images: int
    cohort: Cohort
    place: int
    number: int

    @property
    def home(self) -> tuple[str, tuple[str, ...]]:
        """What its tensors are cut from."""
        return self.job.network, self.job.sections


class Places:
    """The cohorts of networks that differ in width only, and who is trained where in a round.

    Args:
        networks: PreResNets of one :func:`shape`, by name; their cohorts have the precision and are on the device.
        streams: as many as :data:`STREAMS_USED`; each is None without a GPU.
    """

    def __init__(
        self, networks: Mapping[str, Network], precision: Precision, device: torch.device, streams: Sequence[Any]
    ) -> None:
        self.networks, self.precision, self.device, self._streams = networks, precision, device, streams
        self._shape = shape(next(iter(networks.values())))
        self.cohorts: list[Cohort] = []  # of wide and of narrow clients, as far as there are any
        self._placed: list[Placement] = []
        self._places: dict[Kind, list[tuple[Cohort, int, int]]] = {}  # cohort, place in it, number
        self._exchanges: dict[str, CohortExchange] = {}  # by network
        self._homes: dict[tuple[str, tuple[str, ...]], int] = {}
        self._needed: dict[Kind, int] = {}
        self._clients: dict[str, int] = {}  # of every network, most at once
        self._room = 0
        self._outgrown = False
        self._labels: dict[int, list[int]] = {}
        self._models: dict[Kind, PreResNet] = {}
        self._made: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    # --- places ---

    def expect(self, network: str, need: Need) -> None:
        """Rounds will need so much for a network: places for all of it are built with the next ones."""
        for widths, window in need.windows.items():
            self._cut((network, widths), window)
        counts = {(network, widths): count for widths, count in need.places.items()}
        more = {kind: count for kind, count in counts.items() if count > self._needed.get(kind, 0)}
        self._outgrown = self._outgrown or bool(more) or need.images > self._room
        self._needed |= more
        self._room = max(need.images, self._room)
        self._clients[network] = max(need.clients, self._clients.get(network, 0))

    def seat(self, plan: RoundPlan, jobs: Sequence[Job]) -> dict[Key, Failure]:
        """Give every job a place, building cohorts where there are too few; who cannot be trained, and why."""
        sizes = {job.key: self._images(plan, job) for job in jobs}
        failures = {job.key: Failure(job, why) for job in jobs if (why := self._why_not(plan, sizes[job.key]))}
        jobs = [job for job in jobs if job.key not in failures]
        kinds = self._kinds(jobs)
        short = {kind: count for kind, count in Counter(kinds).items() if count > self._needed.get(kind, 0)}
        room = max((sizes[job.key] for job in jobs), default=0)
        if jobs and (short or room > self._room or self._outgrown):
            spare = SPARE if self._needed else 0
            self._needed |= {kind: count + spare for kind, count in short.items()}
            self._room = max(room, self._room)
            for network, count in Counter(job.network for job in jobs).items():
                self._clients[network] = max(count, self._clients.get(network, 0))
            for kind, job in zip(kinds, jobs, strict=True):
                self._cut(kind, job.window)
            self._build(plan)
        free = {kind: iter(places) for kind, places in self._places.items()}
        placed = [Placement(job, sizes[job.key], *next(free[kind])) for job, kind in zip(jobs, kinds, strict=True)]
        self._placed = sorted(placed, key=lambda each: self.cohorts.index(each.cohort))
        return failures

    def _kinds(self, jobs: Iterable[Job]) -> list[Kind]:
        """What each job trains."""
        known: dict[tuple[str, Window], Kind] = {}
        for job in jobs:
            if (job.network, job.window) not in known:
                known[job.network, job.window] = job.network, widths_of(self.networks[job.network], job.window)
        return [known[job.network, job.window] for job in jobs]

    def _cut(self, kind: Kind, window: Window) -> None:
        """A model of a kind, for its shapes."""
        if kind not in self._models:
            network = self.networks[kind[0]]
            found = network.axes.cut(network.module, window)
            assert isinstance(found, PreResNet)
            self._models[kind] = found

    def _build(self, plan: RoundPlan) -> None:
        self._outgrown = False
        self.cohorts, self._placed = [], []  # what they hold on the device goes first
        self._exchanges.clear()
        self._places.clear()
        groups: dict[bool, list[Kind]] = {}
        for kind, count in self._needed.items():
            groups.setdefault(self._wide(kind), []).extend([kind] * count)
        share = Fraction(sum(self._clients.values()), sum(self._needed.values()))
        members: dict[str, list[tuple[Cohort, int]]] = {}
        for number, (_, group) in enumerate(sorted(groups.items(), reverse=True)):
            stream, beside = self._streams[2 * number : 2 * number + 2]
            cohort = Cohort(
                [self._models[kind] for kind in group], plan.work,
                room=self._room, share=share, precision=self.precision, device=self.device, beside=beside,
            )  # fmt: skip
            cohort.capture(stream)
            for place, kind in enumerate(group):
                mine = members.setdefault(kind[0], [])
                self._places.setdefault(kind, []).append((cohort, place, len(mine)))
                mine.append((cohort, place))
            self.cohorts.append(cohort)
        self._exchanges = {name: CohortExchange(self.networks[name].axes, mine) for name, mine in members.items()}

    def _why_not(self, plan: RoundPlan, images: int) -> str | None:
        """Why a client cannot be trained: the same as in ``loop``."""
        if not images:
            return "ValueError: has no examples"
        halved = len(self._shape.blocks) - 1
        if self._shape.size >> halved == 1 and images % plan.work.batch == 1:
            return "ValueError: its last batch is one image, of which batch norm sees one value a channel"
        return None

    def _images(self, plan: RoundPlan, job: Job) -> int:
        return len(task_of(plan).parts[job.client])

    def _wide(self, kind: Kind) -> bool:
        return self._models[kind].stem.out_channels >= WIDE

    def _mine(self) -> list[tuple[Cohort, list[Placement]]]:
        """Every cohort with those that are placed in it."""
        return [(cohort, [each for each in self._placed if each.cohort is cohort]) for cohort in self.cohorts]

    # --- a round ---

    def start(self, plan: RoundPlan) -> None:
        """Every client's part of the server's tensors to its place."""
        if not self._placed:
            return
        self._homes = {}
        for name, exchange in self._exchanges.items():
            mine = [each for each in self._placed if each.job.network == name]
            if not mine:
                continue
            windows: list[Window | None] = [None] * exchange.places
            of = [0] * exchange.places
            jobs = {each.home: each.job for each in mine}
            self._homes |= {home: number for number, home in enumerate(jobs)}
            for each in mine:
                windows[each.number], of[each.number] = each.job.window, self._homes[each.home]
            exchange.deal([plan.whole(job) for job in jobs.values()], windows, of)
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
        exchange = self._exchanges[uploads[0].job.network]
        places, number = exchange.places, {each.job.key: each.number for each in self._placed}
        share = [0.0] * places
        rows = None if label_axis is None else torch.zeros(places, self._shape.classes, dtype=torch.int8)
        for upload, weight in zip(uploads, weights, strict=True):
            share[number[upload.job.key]] = weight
            if rows is not None:
                rows[number[upload.job.key], list(upload.labels or ())] = 1
        first = uploads[0].job
        home, held = self._homes[first.network, first.sections], None if rows is None else rows.to(self.device)
        new, sums, finite = exchange.average(share, label_axis, held, home)
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
        for name, exchange in self._exchanges.items():
            exchange.get_ready(job.window for job in jobs if job.network == name)
        able = [job for job in jobs if self._why_not(plan, self._images(plan, job)) is None]
        kinds = self._kinds(able)
        if able and all(kind in self._models for kind in kinds):
            wide_first = sorted(zip(able, kinds, strict=True), key=lambda each: not self._wide(each[1]))
            seated = [job.client for job, _ in wide_first]
            try:
                self._made[plan.seed, plan.round + 1, 0, *seated] = self._inputs(plan, plan.round + 1, 0, seated)
            except RuntimeError as failure:
                if not out_of_memory(failure):  # then they are made when their round comes
                    raise


def shape(network: Network) -> Plan:
    """What networks that one cohort can train have in common: all but their width."""
    assert isinstance(network.module, PreResNet)
    return replace(network.module.plan, width=1)
