"""Recipes: a run, described in full. Typed and checked here, YAML on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from fedrolex.clients.work import LocalTraining
from fedrolex.core.errors import FedrolexError
from fedrolex.methods import (
    Method,
    ServerOptimizer,
    dsfl,
    fed_dropout,
    fedavg,
    fedbe,
    feddf,
    fedet,
    fedgkt,
    fedprox,
    fedrolex,
    fedselect,
    fjord,
    heterofl,
    scaffold,
)
from fedrolex.methods.dsfl import SoftLabels
from fedrolex.methods.fedbe import BayesianEnsemble
from fedrolex.methods.feddf import EnsembleDistillation
from fedrolex.methods.fedet import EnsembleTransfer
from fedrolex.methods.fedgkt import KnowledgeTransfer
from fedrolex.methods.needs import TABLE
from fedrolex.recipes.decode import from_plain, one_of, read_yaml
from fedrolex.recipes.task_recipe import ImagesRecipe, WordsRecipe
from fedrolex.rounds.fleet import Fleet
from fedrolex.slicing.schemes import Rolling, spread
from fedrolex.slicing.windows import exact
from fedrolex.tasks.measure import Measure

FORMAT = 1
METHODS = tuple(TABLE)
TASKS = ("images", "words")
ENGINES = ("auto", "loop", "stack", "crew", "graph")
PART = 0.1
REPRESENTATION = 64
LEVELS = ("1", "1/2", "1/4", "1/8", "1/16")
INCOME = ("0.06", "0.10", "0.11", "0.18", "0.55")


@dataclass(frozen=True, kw_only=True)
class FleetRecipe:
    """Who learns it.

    Attributes:
        clients: how many; null is as many as the data has users.
        cohort: how many take part in a round.
        capacities: the levels, or the name of a mix: ``uniform`` (1 to 1/16, equal shares), ``income`` (the same
            levels in the shares of household incomes, 6, 10, 11, 18 and 55 %), ``rho:0.3`` (that share has 1, the rest
            1/16), ``gamma:4`` (all have 1/4: a server four times as wide as every client).
        shares: how large a part of the fleet has each level; null is equal parts.
        redrawn: draw every client's capacity anew each round, as in the published runs.
        availability: chance that a client is there in a round.
        stragglers: chance that a client manages only a part of its work in a round; fedprox keeps what it has done,
            other methods drop it.
        trace: instead, the clients that are there, a list a round.
        server: how many times wider the server's model is than the task's.
    """

    clients: int | None = 20
    cohort: int = 10
    capacities: list[str] | str = field(default_factory=lambda: list(LEVELS))
    shares: list[str] | None = None
    redrawn: bool = False
    availability: float = 1.0
    stragglers: float = 0.0
    trace: list[list[int]] | None = None
    server: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.capacities, str):
            if self.shares is not None:
                raise FedrolexError(f"fleet.capacities {self.capacities!r} has its own shares: leave fleet.shares out")
            levels, shares = _mix(self.capacities)
            object.__setattr__(self, "capacities", levels)
            object.__setattr__(self, "shares", shares)
        object.__setattr__(self, "capacities", [str(c) for c in self.capacities])
        if not self.capacities:
            raise FedrolexError("fleet.capacities is empty: give at least one")
        if self.server < 1:
            raise FedrolexError(f"fleet.server is {self.server}: give 1 or more")

    def build(self, seed: int, clients: int | None = None) -> Fleet:
        """The fleet, its capacities as parts of the server's model; ``clients`` where the data says how many."""
        count = self.clients if clients is None else clients
        if count is None:
            raise FedrolexError("fleet.clients is null: say how many, only text data has users of its own")
        levels = [exact(c) / self.server for c in self.capacities]
        there = self.availability if self.trace is None else self.trace
        return Fleet(
            clients=count,
            cohort=self.cohort,
            capacities=levels,
            shares=self.shares,
            redrawn=self.redrawn,
            availability=there,
            stragglers=self.stragglers,
            seed=seed,
        )


def _mix(name: str) -> tuple[list[str], list[str] | None]:
    """Capacities and shares of a mix by name."""
    kind, colon, number = name.partition(":")
    wrong = FedrolexError(f"fleet.capacities is {name!r}: use a list, uniform, income, rho:SHARE or gamma:FACTOR")
    if name == "uniform":
        return list(LEVELS), None
    if name == "income":
        return list(LEVELS), list(INCOME)
    try:
        value = Fraction(number) if len(number) < 12 and "e" not in number else Fraction(-1)
    except (ValueError, ZeroDivisionError):
        raise wrong from None
    if kind == "rho" and colon and 0 <= value <= 1:
        return ["1", "1/16"], [str(value), str(1 - value)]
    if kind == "gamma" and value >= 1:
        return [str(1 / value)], None
    raise wrong


@dataclass(frozen=True, kw_only=True)
class MethodRecipe:
    """How.

    Attributes:
        name: of the method.
        rounding: of β·K: ``floor`` or ``ceil``; at least one node is kept.
        overlap, spread: fedrolex's: overlap of consecutive windows; an offset for each axis and client.
        scope: fed_dropout's: who shares a draw.
        width, able_only: of methods that train one size: what everyone trains (null is the smallest capacity of the
            fleet), and whether only those who can hold it do.
        mu: fedprox's: strength of the pull back to the received model.
        option, denominator: scaffold's: how control variates are renewed; see :mod:`fedrolex.methods.scaffold`.
        widths, distil, alpha, temperature: fjord's: the widths batches are trained at (null is the fleet's capacities),
            and whether and how narrow ones learn from the client's widest; see :mod:`fedrolex.methods.fjord`.
        ensemble: fedbe's; see :class:`fedrolex.methods.fedbe.BayesianEnsemble`.
        keys: fedselect's: how many words or classes a client asks for; null is all that it has.
        knowledge: fedgkt's; see :class:`fedrolex.methods.fedgkt.KnowledgeTransfer`.
        transfer: fedet's; see :class:`fedrolex.methods.fedet.EnsembleTransfer`.
        labels: dsfl's; see :class:`fedrolex.methods.dsfl.SoftLabels`.
        distillation: feddf's; see :class:`fedrolex.methods.feddf.EnsembleDistillation`.
        server: the server's optimiser, of methods that average.
        weighting: of a client in the average: ``uniform`` or ``samples``; null is the method's own.
        norms: ``shared``, or ``per_capacity``: every capacity keeps scales and shifts of its own.
        rows: average a class's part of the output layer over the clients that hold the class only. They
            must say which they hold.
    """

    name: str = "fedrolex"
    rounding: str = "floor"
    overlap: str = "1"
    spread: bool = False
    scope: str = "client"
    width: str | None = None
    able_only: bool = False
    mu: float = 0.01
    option: str = "II"
    denominator: str | None = None
    widths: list[str] | None = None
    distil: bool = True
    alpha: float = 1.0
    temperature: float = 1.0
    ensemble: BayesianEnsemble = field(default_factory=BayesianEnsemble)
    keys: int | None = None
    knowledge: KnowledgeTransfer = field(default_factory=KnowledgeTransfer)
    transfer: EnsembleTransfer = field(default_factory=EnsembleTransfer)
    labels: SoftLabels = field(default_factory=SoftLabels)
    distillation: EnsembleDistillation = field(default_factory=EnsembleDistillation)
    server: ServerOptimizer = field(default_factory=lambda: ServerOptimizer(name="none"))
    weighting: str | None = None
    norms: str = "shared"
    rows: bool = False

    def __post_init__(self) -> None:
        one_of("method.name", self.name, METHODS)
        one_of("method.norms", self.norms, ("shared", "per_capacity"))
        if self.weighting is not None:
            one_of("method.weighting", self.weighting, ("uniform", "samples"))
        one_of("method.option", self.option, ("I", "II"))
        if self.denominator is not None:
            one_of("method.denominator", self.denominator, ("steps", "momentum"))
        one_of("method.rounding", self.rounding, ("floor", "ceil"))
        one_of("method.scope", self.scope, ("round", "capacity", "client"))
        if self.width is not None:
            exact(self.width)
        Rolling(overlap=self.overlap)

    def build(self, client: LocalTraining, fleet: Fleet, server: int, seed: int) -> Method:
        """The method, for a fleet whose server is so many times wider than the task's model."""
        made = self._method(client, fleet, server, seed)
        weighting: Any = self.weighting or made.weighting
        norms: Any = self.norms
        optimizer = None if self.server.name == "none" else self.server
        for what, asked in (("norms=per_capacity", norms != "shared"), ("rows", self.rows), ("server", optimizer)):
            rows = what == "rows" and made.keys is not None
            apart = what.startswith("norms") and made.client.widths
            if asked and (rows or apart or any((made.server, made.controls, made.labels, made.knowledge))):
                raise FedrolexError(f"method.{what} does not go with {self.name}")
        return replace(made, weighting=weighting, norms=norms, rows=self.rows, optimizer=optimizer)

    def _method(self, client: LocalTraining, fleet: Fleet, server: int, seed: int) -> Method:
        rounding: Any = self.rounding
        width = min(fleet.levels) if self.width is None else exact(self.width) / server
        able = self.able_only
        match self.name:
            case "fedrolex":
                offset = spread(fleet.cohort) if self.spread else None
                return fedrolex(client, overlap=self.overlap, offset=offset, rounding=rounding)
            case "heterofl":
                return heterofl(client, rounding=rounding)
            case "fed_dropout":
                scope: Any = self.scope
                return fed_dropout(client, seed=seed, scope=scope, rounding=rounding)
            case "fedprox":
                return fedprox(client, mu=self.mu, width=width, able_only=able, rounding=rounding)
            case "scaffold":
                option: Any = self.option
                by: Any = self.denominator
                return scaffold(client, option=option, denominator=by, width=width, able_only=able, rounding=rounding)
            case "fjord":
                return self._fjord(client, fleet, server)
            case "fedbe":
                return fedbe(client, ensemble=self.ensemble, width=width, able_only=able, rounding=rounding)
            case "fedselect":
                return fedselect(client, count=self.keys, overlap=self.overlap, rounding=rounding)
            case "fedgkt":
                return fedgkt(client, transfer=self.knowledge)
            case "fedet":
                return fedet(client, transfer=self.transfer, rounding=rounding)
            case "dsfl":
                return dsfl(client, labels=self.labels, rounding=rounding)
            case "feddf":
                return feddf(client, distillation=self.distillation, rounding=rounding)
        return fedavg(client, width=width, able_only=able, rounding=rounding)

    def _fjord(self, client: LocalTraining, fleet: Fleet, server: int) -> Method:
        widths = fleet.levels if self.widths is None else [exact(width) / server for width in self.widths]
        missing = [str(level) for level in fleet.levels if level not in widths]
        if missing:
            raise FedrolexError(f"method.widths has no {missing[0]}, which is a capacity of the fleet: add it")
        return fjord(client, widths=widths, distil=self.distil, alpha=self.alpha, temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class ClientRecipe:
    """What a client does; see :class:`fedrolex.clients.work.LocalTraining`."""

    epochs: int = 1
    batch: int = 16
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip: float | None = None
    milestones: list[int] = field(default_factory=list)
    decay: float = 0.1
    mask: str = "none"

    def build(self) -> LocalTraining:
        """The client's work."""
        return LocalTraining(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class EvaluationRecipe:
    """How good a model is, as measured.

    Attributes:
        statistics: of static batch norms: ``recalibrated`` collects them from training images first,
            ``test-batch`` uses those of each test batch, as the published code does.
        batch: examples at once; 100 in the published code, where it matters.
        calibration: training examples to collect statistics from.
        submodels: also measure the sub-model of every capacity.
    """

    statistics: str = "recalibrated"
    batch: int = 500
    calibration: int = 2000
    submodels: bool = False

    def __post_init__(self) -> None:
        one_of("evaluation.statistics", self.statistics, ("recalibrated", "test-batch"))
        for name in ("batch", "calibration"):
            if getattr(self, name) < 1:
                raise FedrolexError(f"evaluation.{name} is {getattr(self, name)}: give at least 1")

    def build(self) -> Measure:
        """What measures."""
        statistics: Any = self.statistics
        return Measure(statistics=statistics, batch=self.batch, calibration=self.calibration, submodels=self.submodels)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run, described in full.

    Attributes:
        format: version of this description.
        task: what is learned.
        fleet: who learns it.
        method: how.
        client: what a client does.
        evaluation: how it is measured.
        rounds: how many.
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        checkpoint_every: rounds between checkpoints.
        quorum: fewest good updates that make a round count.
        deadline: seconds a client may take, or null.
        compare: also train what the same fleet could do without partial training.
        engine: how client work runs: ``loop``, one client after the other; ``stack``, clients of the same widths and
            number of examples together; ``crew``, a worker for every core of a CPU; ``graph``, the cohort side by side
            on a GPU; ``auto``, the fastest on this machine, measured at the start and recorded.
        precision: of client work: ``fp32``, ``tf32``, ``bf16``.
        compiled: whether ``graph`` compiles sub-models first: minutes at the start, faster rounds.
        device: ``cpu``, ``cuda``, or ``auto``.
        weights: safetensors file to start from, or null.
        data: folder of the data sets; null is FEDROLEX_DATA, or ~/.cache/fedrolex.
        seed: key of every random choice.
    """

    format: int = FORMAT
    task: ImagesRecipe | WordsRecipe = field(default_factory=ImagesRecipe)
    fleet: FleetRecipe = field(default_factory=FleetRecipe)
    method: MethodRecipe = field(default_factory=MethodRecipe)
    client: ClientRecipe = field(default_factory=ClientRecipe)
    evaluation: EvaluationRecipe = field(default_factory=EvaluationRecipe)
    rounds: int = 40
    evaluate_every: int = 5
    checkpoint_every: int = 5
    quorum: int = 1
    deadline: float | None = None
    compare: bool = False
    engine: str = "loop"
    precision: str = "fp32"
    compiled: bool = False
    device: str = "auto"
    weights: str | None = None
    data: str | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        kinds = (FleetRecipe, MethodRecipe, ClientRecipe, EvaluationRecipe)
        for name, kind in zip(("fleet", "method", "client", "evaluation"), kinds, strict=True):
            if not isinstance(getattr(self, name), kind):
                raise FedrolexError(
                    f"Recipe({name}={getattr(self, name)!r}): give a {kind.__name__}, or start from plain words with "
                    f"Recipe().with_settings(['{name}...=...'])"
                )
        if self.format != FORMAT:
            raise FedrolexError(f"recipe has format {self.format}; this version reads {FORMAT}: update fedrolex")
        for name in ("rounds", "evaluate_every", "checkpoint_every", "quorum"):
            if getattr(self, name) < 1:
                raise FedrolexError(f"{name} is {getattr(self, name)}: give at least 1")
        one_of("engine", self.engine, ENGINES)
        one_of("precision", self.precision, ("fp32", "tf32", "bf16"))
        one_of("device", self.device, ("auto", "cpu", "cuda"))
        if self.deadline is not None and not self.deadline > 0:
            raise FedrolexError(f"deadline is {self.deadline}: give seconds above 0, or null")
        if self.quorum > self.fleet.cohort:
            raise FedrolexError(
                f"quorum {self.quorum} is above the cohort of {self.fleet.cohort}: no round would count"
            )

    def with_parts(self) -> Recipe:
        """The recipe with what its method needs of the task, where nothing is said of it."""
        if not isinstance(self.task, ImagesRecipe):
            return self
        task, needs = self.task, TABLE[self.method.name]
        public = PART if needs.public and task.public is None else task.public
        validation = PART if needs.validation and task.validation is None else task.validation
        size = REPRESENTATION if self.method.name == "fedet" and task.representation is None else task.representation
        return replace(self, task=replace(task, public=public, validation=validation, representation=size))

    def encode(self) -> dict[str, Any]:
        """Every key, defaults included, as plain data."""
        return asdict(self)

    @staticmethod
    def decode(data: Any) -> Recipe:
        """A recipe from plain data; unknown keys and wrong types are refused in one line."""
        made: Recipe = from_plain(Recipe, data)
        return made

    @staticmethod
    def read(path: Path) -> Recipe:
        """A recipe from a YAML file."""
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise FedrolexError(f"cannot read recipe {path}: {error}") from error
        data = read_yaml(text, f"recipe {path}")
        return Recipe.decode({} if data is None else data)

    def differs_from(self, other: Recipe) -> str | None:
        """The first key that changes what a run computes, or None; a run may go on for more rounds."""
        mine, theirs = self.encode(), other.encode()
        free = ("rounds", "evaluate_every", "checkpoint_every", "device", "compare", "weights", "data", "evaluation")
        if mine["rounds"] < theirs["rounds"]:
            return "rounds"
        return next((key for key in mine if key not in free and mine[key] != theirs[key]), None)

    def write(self, path: Path) -> None:
        """Write as YAML."""
        path.write_text(yaml.safe_dump(self.encode(), sort_keys=False))

    def with_settings(self, settings: Sequence[str]) -> Recipe:
        """A copy with ``key=value`` words applied; ``method=heterofl`` is short for ``method.name=heterofl``."""
        data = self.encode()
        for word in settings:
            key, equals, text = word.partition("=")
            if not (key and equals):
                raise FedrolexError(f"--set {word!r} is not KEY=VALUE")
            value = read_yaml(text, f"--set {key}")
            *path, last = key.split(".")
            section: Any = data
            for step in path:
                section = section.get(step) if isinstance(section, dict) else None
            if not isinstance(section, dict):
                raise FedrolexError(f"--set {key}: there is no section {'.'.join(path)!r} in a recipe")
            if key == "fleet.capacities" and isinstance(value, str):
                section["shares"] = None  # a mix has its own
            if isinstance(section.get(last), dict) and "name" in section[last] and isinstance(value, str):
                if key == "task" and value != section[last]["name"]:
                    section[last] = {}
                section[last]["name"] = value
            else:
                section[last] = value
        return Recipe.decode(data)
