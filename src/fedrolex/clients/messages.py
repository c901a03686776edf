"""What a client is asked in a round, and what it answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedrolex.clients.slot import Precision
from fedrolex.core import FedrolexError
from fedrolex.slicing import Axes, Window
from fedrolex.tasks import Task

if TYPE_CHECKING:
    from fedrolex.clients.work import LocalTraining

MODEL = "model"
"""The name of a run's main network, and of the section of the server's state with its tensors."""

Tensors = Mapping[str, Tensor]

Kind = tuple[str, tuple[tuple[str, int], ...]]
"""A network's name, and the width of every axis: sub-models of one kind are the same but for their values."""


def copied(tensors: Tensors) -> dict[str, Tensor]:
    """Tensors of the same names and values in memory of their own."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


@dataclass(frozen=True, eq=False)
class Network:
    """A model that clients train, whole or in parts.

    Attributes:
        module: sub-models are cut from it; its own weights are of no meaning.
        axes: of the module.
    """

    module: nn.Module
    axes: Axes


@dataclass(frozen=True, eq=False)
class Job:
    """One piece of work for one client in one round; a client may have several, under different names.

    Attributes:
        client: the client's number.
        capacity: how much of the network the client trains.
        window: which nodes of the network the client trains.
        network: the name of the network.
        sections: the sections of the server's state that hold the network's tensors for this client. Where two
            sections have a tensor of the same name, the later section's counts; the answer goes back to it, too.
        name: tells the jobs of one client apart; empty where a client has one job.
        part: how much of its steps the client does; a straggler does less than 1.
        sent: what else the server sends: tensors by purpose and name.
        kept: what the client kept from earlier rounds; None at first.
    """

    client: int
    capacity: Fraction
    window: Window
    network: str = MODEL
    sections: tuple[str, ...] = (MODEL,)
    name: str = ""
    part: float = 1.0
    sent: Mapping[str, Tensors] = field(default_factory=dict)
    kept: Tensors | None = None

    @property
    def key(self) -> tuple[int, str]:
        """Identifies the job in its round."""
        return self.client, self.name

    @property
    def source(self) -> tuple[str, Window, tuple[str, ...]]:
        """Jobs of one source receive the same tensors."""
        return self.network, self.window, self.sections


@dataclass(frozen=True, eq=False)
class Origin:
    """How another process makes the networks, the task and the work of a run.

    Attributes:
        maker: a function as ``package.module:name``. It is called with an origin and a device, and gives a plan
            without tensors and jobs.
        recipe: the run's recipe, or that as plain data.
        task: a task that was given in Python, which no recipe describes; None where the recipe does.
        view: the task as clients see it, where that is not what the maker would find; else None.
    """

    maker: str
    recipe: Any
    task: Task | None = None
    view: Task | None = None


@dataclass(frozen=True, eq=False)
class Summing:
    """How an engine adds up answers where they lie, for a method that looks at none of their tensors.

    Attributes:
        weight: of an answer, from all that it says but its tensors.
        label_axis: the axis of the classes, where a class counts for the clients that hold it only.
        drift: whether it is measured how far clients drift apart.
    """

    weight: Callable[["Upload"], float]
    label_axis: str | None = None
    drift: bool = False


def nobody(_round: int) -> "Sequence[Job]":
    """No jobs, whatever the round."""
    return ()


@dataclass(frozen=True, eq=False)
class RoundPlan:
    """The client work of one round.

    Attributes:
        round: counted from 0.
        seed: of the run; random streams are keyed by the seed, their purpose, the round and the client.
        networks: what is trained, by name.
        tensors: the server's tensors by section and name.
        task: data and loss.
        work: what each client does.
        jobs: in the order of client numbers.
        deadline: seconds a client may take, checked between steps; None is no limit.
        tell_labels: whether clients say which classes they hold.
        jobs_of: gives the jobs of any round, without what is sent: an engine that waits for its device may use the
            time to read the data of the next round's clients, and one that makes room for clients sees how many will
            come.
        summing: how answers may be added up where they lie; None where each is looked at.
        origin: how another process makes all this; None where only this one can.
        precision: of products, the clients' and those of a server that learns.
    """

    round: int
    seed: int
    networks: Mapping[str, Network]
    tensors: Mapping[str, Tensors]
    task: Task
    work: "LocalTraining"
    jobs: Sequence[Job]
    deadline: float | None = None
    tell_labels: bool = False
    jobs_of: Callable[[int], Sequence[Job]] = nobody
    summing: Summing | None = None
    origin: Origin | None = None
    precision: Precision = "fp32"

    def upcoming(self) -> Sequence[Job]:
        """The jobs of the next round."""
        return self.jobs_of(self.round + 1)

    def axes(self, job: Job) -> Axes:
        """The axes of the job's network."""
        return self.networks[job.network].axes

    def whole(self, job: Job) -> dict[str, Tensor]:
        """The whole tensors that the job's part is cut from."""
        return {name: tensor for section in job.sections for name, tensor in self.tensors[section].items()}

    def received(self, job: Job) -> dict[str, Tensor]:
        """The job's part of the server's tensors, in the shapes of its window."""
        return self.axes(job).take(self.whole(job), job.window)

    def load(self, module: nn.Module, job: Job) -> None:
        """Copy the job's part of the server's tensors into a module of its widths."""
        self.axes(job).load(module, self.whole(job), job.window)

    def widths(self, job: Job) -> tuple[tuple[str, int], ...]:
        """The width of every axis of the job's network: what the shapes of its tensors depend on."""
        return tuple(self.axes(job).widths(job.window).items())

    def kind(self, job: Job) -> Kind:
        """The kind of the job's sub-model: jobs of one kind can use the same module, and be trained as one."""
        return job.network, self.widths(job)


@dataclass(frozen=True, eq=False)
class Upload:
    """A client's answer to a job; its tensors are only good until the engine is asked for the next answer.

    Attributes:
        job: what the client was asked.
        tensors: the window's part of every tensor, trained.
        examples: how many examples the client trained on.
        loss: mean over the steps.
        steps: how many steps the client did.
        labels: the classes the client holds, where the plan asks for them.
        finite: whether all values are finite, where the engine has looked.
        sent: what else the client sends: tensors by name.
        kept: what the client keeps for its next rounds, if this round counts; None keeps what there was.
        summed: the weight with which the engine has added the answer to its own sums; its tensors are gone then.
            None where it has not.
    """

    job: Job
    tensors: Tensors
    examples: int
    loss: float
    steps: int
    labels: Sequence[int] | None = None
    finite: bool | None = None
    sent: Tensors = field(default_factory=dict)
    kept: Tensors | None = None
    summed: float | None = None

    def check_sent(self, like: Tensors) -> None:
        """Raise, in one line, unless ``sent`` has tensors of these names and shapes; call it before any is taken."""
        odd = next(iter(sorted(set(self.sent) ^ set(like))), None)
        if odd is not None:
            raise FedrolexError(
                f"sent beside its tensors {odd[:80]!r}, which is {'not asked' if odd in self.sent else 'missing'}"
            )
        for name, wanted in like.items():
            given = self.sent[name]
            if given.shape != wanted.shape or given.is_floating_point() != wanted.is_floating_point():
                raise FedrolexError(
                    f"sent {name} as {given.dtype} {tuple(given.shape)}: {tuple(wanted.shape)} is asked"
                )


@dataclass(frozen=True, eq=False)
class Failure:
    """A job that came to nothing, and why, in one line."""

    job: Job
    why: str
