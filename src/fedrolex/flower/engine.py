"""An engine whose clients are real devices: Flower carries the jobs to them and the answers back."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from fedrolex.clients import Failure, Job, RoundPlan, Upload
from fedrolex.core import FedrolexError
from fedrolex.flower.checks import Norms, change, most_bytes, ticket_of, upload_of
from fedrolex.flower.exchange import exchanged
from fedrolex.flower.fleet import Present, Roster
from fedrolex.flower.messages import Answer, Asked, bytes_of, failure_of, one_clear_line, weight_of
from fedrolex.flower.settings import Settings, digest
from fedrolex.flower.transport import Transport, downward, packed
from fedrolex.recipes import Recipe
from fedrolex.rounds import Engine, Member
from fedrolex.runs import Training
from fedrolex.slicing import one_line

Key = tuple[int, str]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """On which terms messages are exchanged with devices: how long, how exactly, and what is believed.

    Attributes:
        recipe: a hash of the recipe.
        timeout: seconds that a device has for its round.
        grace: seconds that late devices are given once a quorum has answered; None waits until ``timeout``.
        quorum: answers that make a round count.
        transport: how values travel.
        factor: how many times the median norm of a change is too far to be believed.
        most: largest norm of a change; sums of such are still finite.
        keeps: whether clients of the method keep something from round to round.
        least, threshold, reach: of secure sums, see :class:`~fedrolex.flower.settings.Settings`.
    """

    recipe: str
    timeout: float = 600.0
    grace: float | None = None
    quorum: int = 1
    transport: Transport = "fp32"
    factor: float = 10.0
    most: float = 1e9
    keeps: bool = False
    least: int = 3
    threshold: float = 0.66
    reach: float = 8.0

    @staticmethod
    def of(recipe: Recipe, settings: Settings) -> "Terms":
        """As a run-config says, for a recipe."""
        needs, same = recipe.method.needs, ("timeout", "transport", "least", "threshold", "reach")
        return Terms(
            recipe=digest(recipe), quorum=recipe.quorum, grace=None if settings.grace < 0 else settings.grace,
            factor=inf if needs.apart else settings.norm_factor, keeps=needs.client_state,
            **{name: getattr(settings, name) for name in same},
        )  # fmt: skip


class Devices(Engine):
    """Sends every device its own parts of the server's tensors, and nothing else; checks what comes back.

    Args:
        grid: Flower's way to the nodes.
        fleet: the devices that are there.
        terms: on which messages are exchanged.
        say: tells the user something.

    Attributes:
        strays: replies of the last round that were answers to nothing, with who sent them.
    """

    label = "flower"
    foreign = True

    def __init__(self, grid: Grid, fleet: Present, terms: Terms, say: Callable[[str], None]) -> None:
        super().__init__()
        self.grid, self.fleet, self.terms, self.say = grid, fleet, terms, say
        self.norms = Norms(terms.factor, terms.most)
        self.strays: list[str] = []

    @property
    def remarks(self) -> Mapping[str, object]:  # type: ignore[override]
        """The strays, for the round's metrics."""
        return {"strays": list(self.strays)}

    def supports(self, plan: RoundPlan) -> Literal[None]:
        """Devices run every work."""
        return None

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """One answer a job; a device that is silent, or sends something odd, has failed."""
        self.strays, self.carried = [], {}
        asked = self.asked(plan)
        replies = self.replies(plan, asked)
        answers = self.checked(plan, {client: replies.get(self.fleet.nodes[client][0]) for client in asked})
        for job in plan.jobs:
            yield answers.pop(job.key) if job.key in answers else Failure(job, "is not there")

    def replies(self, plan: RoundPlan, asked: Mapping[int, tuple[Message, list[Job]]]) -> Mapping[int, Message]:
        """What nodes reply to what their clients are asked, by node."""
        return exchanged(
            self.grid,
            {self.fleet.nodes[client][0]: message for client, (message, _) in asked.items()},
            self.terms.timeout,
            grace=self.terms.grace,
            enough=self.terms.quorum,
            stray=lambda reply: self.stray(plan, reply),
        )

    def asked(self, plan: RoundPlan) -> dict[int, tuple[Message, list[Job]]]:
        """A message for every client of the round that is there, with its jobs."""
        found: dict[int, tuple[Message, list[Job]]] = {}
        for client, jobs in by_client(plan).items():
            if client not in self.fleet.nodes:
                continue
            node, _ = self.fleet.nodes[client]
            content = Asked(
                plan.round, client, [Member(client, jobs[0].capacity)], [job.name for job in jobs],
                [ticket_of(job.kept) for job in jobs], self.terms.recipe,
                [packed(plan.received(job), downward(self.terms.transport)) for job in jobs],
                [{purpose: packed(tensors) for purpose, tensors in job.sent.items()} for job in jobs],
            ).record()  # fmt: skip
            found[client] = Message(content, node, "train", group_id=str(plan.round), ttl=self.terms.timeout), jobs
            self.carried = {**self.carried, **_split(bytes_of(content), jobs)}
        return found

    def checked(self, plan: RoundPlan, replies: Mapping[int, Message | None]) -> dict[Key, Upload | Failure]:
        """Every job's answer, from the replies of those who were asked, by client."""
        jobs, found = by_client(plan), dict[Key, Upload | Failure]()
        for client, reply in replies.items():
            try:
                answers = self._read(plan, client, jobs[client], reply)
            except FedrolexError as error:
                answers = [Failure(job, one_clear_line(str(error))) for job in jobs[client]]
            except Exception as error:  # whatever a device sends, the run goes on
                answers = [Failure(job, f"sent what cannot be read: {one_line(error)}") for job in jobs[client]]
            found |= {answer.job.key: answer for answer in answers}
        moved = {
            key: (each.job, *change(plan.received(each.job), each.tensors))
            for key, each in found.items()
            if isinstance(each, Upload)
        }
        for key, why in self.norms.refused(moved).items():
            found[key] = Failure(found[key].job, why)
        return found

    def _read(self, plan: RoundPlan, client: int, jobs: list[Job], reply: Message | None) -> list[Upload | Failure]:
        """The answers in a reply; raises, in one line, where it is none."""
        if reply is None:
            raise FedrolexError(f"did not answer within {self.terms.timeout:g} s")
        if reply.has_error():
            raise failure_of(reply)
        size, weight, most = bytes_of(reply.content), weight_of(reply.content), most_bytes(plan, jobs)
        self.carried = {
            **self.carried,
            **{key: (self.carried.get(key, (0, 0))[0], up) for key, (up, _) in _split(size, jobs).items()},
        }
        if weight > most:
            raise FedrolexError(f"sent {weight:,} bytes; {most:,} are the most that is looked at")
        answer = Answer.read(reply.content)
        if answer.round != plan.round:
            raise FedrolexError(f"answered round {answer.round} in round {plan.round}")
        if answer.client != client:
            raise FedrolexError(f"sent the answer of client {answer.client}")
        if [said.name for said in answer.jobs] != [job.name for job in jobs]:
            raise FedrolexError("answered other jobs than it was asked")
        found: list[Upload | Failure] = []
        for job, said in zip(jobs, answer.jobs, strict=True):
            if said.failed:
                found.append(Failure(job, one_clear_line(said.failed)))
                continue
            found.append(upload_of(plan, job, said, self.terms.transport, keeps=self.terms.keeps))
        return found

    def stray(self, plan: RoundPlan, reply: Message) -> None:
        """Note a reply that is an answer to nothing."""
        node = reply.metadata.src_node_id
        client = next((c for c, (known, _) in self.fleet.nodes.items() if known == node), None)
        who = f"node {node}" if client is None else f"device {client}"
        self.note(f"round {plan.round}: {who} sent a reply to nothing it was asked, or a second one; it is left out")

    def note(self, said: str) -> None:
        """Tell of something odd that costs nobody the round; it is in the round's metrics, too."""
        self.strays.append(said)
        self.say(said)


Kind = TypeVar("Kind", bound=Devices)


def on_devices(training: Training, grid: Grid, recipe: Recipe, settings: Settings, kind: type[Kind]) -> Kind:
    """Let a training run on the nodes of a grid, by an engine of a kind."""
    terms = Terms.of(recipe, settings)
    roster = Roster(
        grid, training.server.fleet, terms.recipe, timeout=settings.timeout, patience=settings.patience,
        enough=recipe.quorum, say=training.say,
    )  # fmt: skip
    engine = kind(grid, roster.present, terms, training.say)
    training.server.fleet, training.engine = roster.present, engine
    return engine


def by_client(plan: RoundPlan) -> dict[int, list[Job]]:
    """The jobs of every client."""
    found: dict[int, list[Job]] = {}
    for job in plan.jobs:
        found.setdefault(job.client, []).append(job)
    return found


def cohort_of(plan: RoundPlan) -> list[Member]:
    """Who takes part in a round, and what each can hold."""
    return [Member(client, jobs[0].capacity) for client, jobs in sorted(by_client(plan).items())]


def _split(size: int, jobs: list[Job]) -> dict[Key, tuple[int, int]]:
    """Bytes of a message, on the account of its first job."""
    return {job.key: (size if place == 0 else 0, 0) for place, job in enumerate(jobs)}
