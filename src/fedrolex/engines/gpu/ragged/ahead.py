"""How many clients of every width rounds will have, so that steps are captured once, not whenever a round has more."""

from collections import Counter
from dataclasses import dataclass, field

from fedrolex.clients import Network, RoundPlan
from fedrolex.core import FedrolexError
from fedrolex.slicing import Window
from fedrolex.tasks import Classification

ROUNDS = 1000  # that are looked at together

Widths = tuple[tuple[str, int], ...]


@dataclass
class Need:
    """What the rounds need for the clients of one network.

    Attributes:
        places: most clients of every width in a round.
        windows: one of every width.
        clients: most in a round, of all widths.
        images: most that a client has.
    """

    places: Counter[Widths] = field(default_factory=Counter)
    windows: dict[Widths, Window] = field(default_factory=dict)
    clients: int = 0
    images: int = 0


def needs(plan: RoundPlan) -> dict[str, Need]:
    """By network, from the first round to the last of the thousand that the plan's round is in.

    All rounds in between are given the same answer, so that a run that goes on from a checkpoint has the places, and
    with them the bits, of one that was never stopped.
    """
    found: dict[str, Need] = {}
    for round in range(ROUNDS * (plan.round // ROUNDS + 1)):
        try:
            jobs = [job for job in plan.jobs_of(round) if job.part == 1]  # stragglers are not trained here
        except FedrolexError:
            break  # a method that cannot say yet
        counts: dict[str, Counter[Widths]] = {}
        for job in jobs:
            need, widths = found.setdefault(job.network, Need()), widths_of(plan.networks[job.network], job.window)
            need.windows.setdefault(widths, job.window)
            need.images = max(need.images, len(task_of(plan).parts[job.client]))
            counts.setdefault(job.network, Counter())[widths] += 1
        for network, here in counts.items():
            need = found[network]
            need.places |= here
            need.clients = max(need.clients, here.total())
    return found


def widths_of(network: Network, window: Window) -> Widths:
    """The width of every axis in a window."""
    return tuple(network.axes.widths(window).items())


def task_of(plan: RoundPlan) -> Classification:
    """The plan's task, which is known to be one of images and classes."""
    assert isinstance(plan.task, Classification)
    return plan.task
