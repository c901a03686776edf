"""What every method is made of. As it stands, this class is FedAvg over whatever windows its scheme gives."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from fedrolex.clients import MODEL, Job, LocalTraining, Network, Tensors, Upload
from fedrolex.core import FedrolexError, check_words
from fedrolex.methods.needs import Needs
from fedrolex.methods.setup import Setup
from fedrolex.rounds import Fleet, Member, Round, Server, State
from fedrolex.slicing import WHOLE, Scheme, Static, Window
from fedrolex.tasks import Classification, Measure, Task
from fedrolex.tasks.metrics import score

Take = TypeVar("Take", bound=Callable[..., None])
ADDING = "adding"
ASIDE = 0.1  # of the training examples, for methods that need public or validation examples


def adding(take: Take) -> Take:
    """Marks a ``take`` that refuses no answer, and does nothing with its tensors but ``super().take(round, upload)``.

    An engine may then add answers up where they lie, with the weights of :meth:`Method.weight`, before ``take`` is
    called with answers that have no tensors any more; what clients send beside their tensors is still there.
    """
    setattr(take, ADDING, True)
    return take


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method: its fields are its settings in a recipe, its hooks are its algorithm.

    A subclass overrides the hooks that its paper changes. Hooks get the :class:`~fedrolex.rounds.server.Server` (data,
    fleet, networks, the tensors of the run) and change nothing in it: new tensors are returned, and what clients keep
    is told with :meth:`Round.remember <fedrolex.rounds.round.Round.remember>`.

    Attributes:
        name: as in recipes; set when the class is registered.
        needs: what the method must be given.
    """

    name: ClassVar[str] = "method"
    needs: ClassVar[Needs] = Needs()

    def __post_init__(self) -> None:
        settings = {each.name for each in fields(self)}
        hints = [(cls, *hint) for cls in type(self).__mro__ for hint in inspect.get_annotations(cls).items()]
        for cls, name, kind in hints:
            if name not in settings and "ClassVar" not in str(kind):
                remedy = f"put @dataclass(frozen=True, kw_only=True) above class {cls.__name__}"
                raise FedrolexError(f"{name} of method {type(self).__name__} is no setting yet: {remedy}")
        check_words("method", self)

    def on_devices(self) -> "Method":
        """The method as it runs on real devices, where a simulation's may differ."""
        return self

    # --- before the first round ---

    def check_fleet(self, fleet: Fleet, client: LocalTraining, scale: int) -> None:
        """Raise FedrolexError, in one line, where the method does not go with a fleet or with what clients do.

        Asked when a recipe is read, before there is any data.

        Args:
            fleet: capacities are parts of the server's model; ``clients`` is huge where the data will say it.
            client: what clients do, before the method changes it.
            scale: how many times wider the server's model is than the task's.
        """
        if not (self.needs.larger_server or self.needs.one_size) and max(fleet.levels) < 1:
            raise FedrolexError(
                f"with {self.name} a server larger than every client has nodes that nobody trains: leave "
                "fleet.server_scale at 1 and let the largest capacity be 1, or use fedrolex"
            )

    def check_kind(self, task: str, *, classes: bool, models: bool) -> None:
        """Raise FedrolexError, in one line, where the method does not go with a kind of task.

        Args:
            task: its name.
            classes: whether the task is about examples of classes.
            models: whether some capacities have a model of their own.
        """
        if (self.needs.public or self.needs.uploads) and not classes:
            raise FedrolexError(f"{self.name} compares scores of classes: it needs a task of images, not {task}")
        if models and not self.needs.families:
            raise FedrolexError(
                f"{self.name} brings clients together by their weights: task.models needs a method that compares "
                "what models say (dsfl, feddf, fedet)"
            )

    def check(self, setup: Setup) -> None:
        """Raise FedrolexError, in one line, where the method does not go with a task and its data."""
        needs, task = self.needs, setup.task
        images = task if isinstance(task, Classification) else None
        self.check_kind(task.name, classes=images is not None, models=images is not None and bool(images.models))
        if images is not None:
            for what, why, given in (
                ("public", "public examples: set task.public to a share, a set or a folder", images.public),
                ("validation", "held-out examples to judge by: set task.validation to a share", images.validation),
            ):
                if getattr(needs, what) and not given:
                    raise FedrolexError(f"{self.name} needs {why}; in Python, {what}= of Classification or Task.split")
        if setup.client.mask != "none" and not task.classes:
            raise FedrolexError(f"client.mask is {setup.client.mask}, but {task.name} has no classes to mask: use none")

    def wants(self) -> dict[str, Any]:
        """Keys of a recipe's task that the method needs, and the values to take where the recipe says null."""
        return {what: ASIDE for what in ("public", "validation") if getattr(self.needs, what)}

    def networks(self, setup: Setup) -> dict[str, Network]:
        """The models that clients train; by default the server's, of which clients train parts."""
        return {MODEL: setup.network(lambda: setup.task.build(setup.scale), "weights")}

    def windows(self, server: Server) -> Scheme:
        """Which nodes of the main network a client trains in a round."""
        return Static()

    def work(self, setup: Setup) -> LocalTraining:
        """What a client does."""
        return setup.client

    def view(self, task: Task) -> Task:
        """The task as clients see it."""
        return task

    def begin(self, server: Server) -> State:
        """Sections that the method adds to the server's state: what it remembers between rounds."""
        return {}

    # --- a round ---

    def sizes(self, server: Server) -> Sequence[Fraction]:
        """The capacities that clients train at."""
        return server.fleet.levels

    def members(self, server: Server, round: int) -> list[Member]:
        """The clients that take part in a round."""
        return server.fleet.members(round)

    def jobs(self, server: Server, round: int) -> list[Job]:
        """Who trains which window of what; a pure function of the round, without anything that is sent.

        Jobs are in the order of the networks, then of client numbers.
        """
        known: dict[Window, Window] = {}  # equal windows are one object: looking them up is then quick
        found = []
        for member in self.members(server, round):
            network = self.network(server, member.capacity)
            window = server.window(round, member.capacity, member.client) if network == MODEL else WHOLE
            window, sections = known.setdefault(window, window), self.sections(server, member.capacity)
            found.append(Job(member.client, member.capacity, window, network, sections, part=member.part))
        order = list(server.networks)
        return sorted(found, key=lambda job: order.index(job.network))

    def network(self, server: Server, capacity: Fraction) -> str:
        """The name of the network that clients of a capacity train: the main one in parts, any other one whole."""
        return MODEL

    def sections(self, server: Server, capacity: Fraction) -> tuple[str, ...]:
        """The sections of the server's state with the tensors that clients of a capacity train."""
        return (self.network(server, capacity),)

    def weights(self, server: Server) -> Sequence[str]:
        """The sections of the server's state that hold weights of models: those that are judged among them."""
        trained = [section for capacity in self.sizes(server) for section in self.sections(server, capacity)]
        return list(dict.fromkeys([*server.networks, *trained]))

    def extent(self, server: Server, section: str) -> Window:
        """The nodes of the main network for which a section has tensors that count: for reports; by default all."""
        return WHOLE

    def waits_for(self, job: Job) -> bool:
        """Whether the answer to a job counts; by default a straggler's does not."""
        return job.part == 1

    def send(self, server: Server, job: Job) -> Mapping[str, Tensors]:
        """What the server sends to a client beside its part of the network; pure."""
        return {}

    def label_axis(self, server: Server) -> str | None:
        """The axis of the classes, where a class's part of the output layer counts for clients that hold it only."""
        return None

    def weight(self, upload: Upload) -> float:
        """A client's weight in the average."""
        return 1.0

    @adding
    def take(self, round: Round, upload: Upload) -> None:
        """Take in an answer; raise FedrolexError to refuse it."""
        round.average.add(upload, self.weight(upload))

    @property
    def only_adds(self) -> bool:
        """Whether :meth:`take` is marked as :func:`adding`."""
        return hasattr(type(self).take, ADDING)

    def finish(self, round: Round) -> State:
        """The new tensors of the sections that a round changes."""
        return round.average.result()

    # --- what comes of it ---

    def leading(self, server: Server) -> str:
        """The name of the network that a run is for."""
        return MODEL

    def judged(self, server: Server) -> nn.Module:
        """The model that is measured: the leading network, or any module of one's own, such as an ensemble."""
        return server.loaded(network=self.leading(server))

    def submodel(self, server: Server, capacity: Fraction) -> nn.Module | None:
        """The model that a client of a capacity would be given now; None where there is none to measure."""
        network = self.network(server, capacity)
        module = server.loaded(*self.sections(server, capacity), network=network)
        if network != MODEL:
            return module
        return server.main.axes.cut(module, server.window(max(0, server.round - 1), capacity))

    def evaluate(self, server: Server, measure: Measure) -> dict[str, Any]:
        """Metrics of the model that is judged and, where asked, of every capacity's."""
        found = measure(server.task, self.judged(server))
        parts = {level: self.submodel(server, level) for level in self.sizes(server)} if measure.submodels else {}
        measured = {str(level): measure(server.task, part) for level, part in parts.items() if part is not None}
        if measured:
            found["submodels"] = {level: metrics[score(metrics)] for level, metrics in measured.items()}
            found["submodel_statistics"] = {level: metrics["statistics"] for level, metrics in measured.items()}
        return found

    def facts(self, server: Server) -> dict[str, Any]:
        """What a finished run's summary should say of the method."""
        return {}

    def measured(self, server: Server, measure: Measure) -> nn.Module:
        """The model that is judged, as it is measured: its static norms have statistics."""
        return measure.ready(server.task, self.judged(server))

    def full_size(self, server: Server) -> int:
        """Bytes of the model that clients would be sent if they could hold it whole."""
        return size(server.state[self.leading(server)])

    def traffic(self, server: Server, job: Job, upload: Upload | None) -> tuple[int, int]:
        """Bytes that a job brought to its client and back; the answer is None where the client failed."""
        part = server.bytes(job)
        down = part + sum(size(tensors) for tensors in job.sent.values())
        return down, 0 if upload is None else part + size(upload.sent)


def size(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
