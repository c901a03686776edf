"""How many places the clients of a network need, so that steps are captured once, not whenever a round has more.

Places are made for what the first rounds need, and some more; a round that needs still more adds to them. What a round
needs follows from the recipe, so a run that goes on from a checkpoint goes through all rounds before it again, and has
the places, and with them the bits, of one that was never stopped.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from fedrolex.clients import Job, Network, RoundPlan
from fedrolex.core import FedrolexError
from fedrolex.slicing import Window
from fedrolex.tasks import Classification

ROUNDS = 100  # that are looked at before the first
SPARE = 2  # places of every width beside those that the first rounds need, or that a later round adds

Widths = tuple[tuple[str, int], ...]


@dataclass
class Need:
    """What the clients of one network need.

    Attributes:
        places: of every width.
        windows: one of every width.
        clients: most in a round, of all widths, when places were last made: what steps are tiled for.
        images: most that a client has.
        met: most clients in a round so far.
    """

    places: dict[Widths, int] = field(default_factory=dict)
    windows: dict[Widths, Window] = field(default_factory=dict)
    clients: int = 0
    images: int = 0
    met: int = 0

    def grow(self, network: Network, images: Mapping[Job, int], spare: int) -> bool:
        """Room for the jobs of a round, each with so many images, and to spare; whether there was too little."""
        of = {window: widths_of(network, window) for window in {job.window: None for job in images}}
        counts = Counter(of[job.window] for job in images)
        short = {widths: count + spare for widths, count in counts.items() if count > self.places.get(widths, 0)}
        most = max(images.values(), default=0)
        grown = bool(short) or most > self.images
        self.places |= short
        self.windows = {widths: window for window, widths in of.items()} | self.windows
        self.met, self.images = max(len(images), self.met), max(most, self.images)
        if grown:
            self.clients = self.met
        return grown


def needs(plan: RoundPlan) -> dict[str, Need]:
    """Of every network, for the first rounds and all before the plan's."""
    found: dict[str, Need] = {}
    for round in range(ROUNDS):
        _grow(found, plan, round, 0)
    for need in found.values():
        need.places = {widths: count + SPARE for widths, count in need.places.items()}
        need.clients = need.met
    for round in range(ROUNDS, plan.round):
        _grow(found, plan, round, SPARE)
    return found


def _grow(found: dict[str, Need], plan: RoundPlan, round: int, spare: int) -> None:
    """By what a round needs; nothing where the method cannot say yet."""
    with suppress(FedrolexError):
        for name, mine in by_network(plan.jobs_of(round)).items():
            images = {job: images_of(plan, job) for job in mine}
            found.setdefault(name, Need()).grow(plan.networks[name], images, spare)


def by_network(jobs: Sequence[Job]) -> dict[str, list[Job]]:
    """Those that are trained in full: stragglers go to another engine."""
    found: dict[str, list[Job]] = {}
    for job in jobs:
        if job.part == 1:
            found.setdefault(job.network, []).append(job)
    return found


def widths_of(network: Network, window: Window) -> Widths:
    """The width of every axis in a window."""
    return tuple(network.axes.widths(window).items())


def images_of(plan: RoundPlan, job: Job) -> int:
    """How many a job's client has."""
    return len(task_of(plan).parts[job.client])


def task_of(plan: RoundPlan) -> Classification:
    """The plan's task, which is known to be one of images and classes."""
    assert isinstance(plan.task, Classification)
    return plan.task
