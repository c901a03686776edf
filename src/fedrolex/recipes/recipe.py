"""Recipes: a run, described in full. Typed and checked here, YAML on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

import yaml

from fedrolex.clients import LocalTraining, Precision
from fedrolex.core import CALLBACKS, ENGINES, METHODS, TASKS, FedrolexError, check_paths, check_words, in_one_line
from fedrolex.methods import FedRolex, Method
from fedrolex.recipes import format1
from fedrolex.recipes.decode import REGISTRY, from_plain, read_yaml, to_plain
from fedrolex.recipes.fleet import FleetRecipe
from fedrolex.recipes.images import ImagesRecipe
from fedrolex.recipes.settings import changed
from fedrolex.recipes.task import TaskRecipe, whole_path
from fedrolex.tasks import Measure

FORMAT = 2
MOST_ROUNDS = 10**9
FREE = ("evaluate_every", "checkpoint_every", "device", "compare", "weights", "data", "evaluation", "callbacks")
"""Keys beside ``rounds`` that may be changed before a run goes on."""

OWN = Path(__file__).parent
"""The package's own recipes lie beside this file."""


@dataclass(frozen=True, kw_only=True)
class ClientRecipe(LocalTraining):
    """The settings of :class:`~fedrolex.clients.work.LocalTraining`, with momentum."""

    momentum: float = 0.9


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run, described in full.

    Attributes:
        format: version of this description.
        task: what is learned.
        fleet: who learns it.
        method: how; the method's fields are the section's keys.
        client: what a client does.
        evaluation: how the model is measured.
        callbacks: names of what is told of the run, see :data:`~fedrolex.core.registry.CALLBACKS`.
        rounds: how many.
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        checkpoint_every: rounds between checkpoints.
        quorum: fewest good updates that make a round count.
        deadline: seconds a client may take, or null.
        mean_over: the model that is judged is the mean of the server's over about so many rounds; 1: as it is.
        compare: also train what the same fleet could do without partial training.
        engine: how client work runs: ``loop``, one client after the other; ``crew``, a worker for every core of a CPU;
            ``graph``, the cohort side by side on a GPU; ``ray``, workers on a cluster; ``auto``, the fastest for the
            device.
        precision: of products, the clients' and those of a server that learns: ``fp32``, ``tf32`` (on a CPU the same as
            ``fp32``), ``bf16``.
        device: ``cpu``, ``cuda``, or ``auto``.
        weights: safetensors file to start from, or null.
        data: folder of the data sets; null is FEDROLEX_DATA, or ~/.cache/fedrolex.
        seed: key of every random choice.
    """

    format: int = FORMAT
    task: TaskRecipe = field(default_factory=ImagesRecipe, metadata={REGISTRY: TASKS})
    fleet: FleetRecipe = field(default_factory=FleetRecipe)
    method: Method = field(default_factory=FedRolex, metadata={REGISTRY: METHODS})
    client: LocalTraining = field(default_factory=ClientRecipe)
    evaluation: Measure = field(default_factory=Measure)
    callbacks: list[str] = field(default_factory=lambda: ["drift", "tensorboard"])
    rounds: int = 40
    evaluate_every: int = 5
    checkpoint_every: int = 5
    quorum: int = 1
    deadline: float | None = None
    mean_over: int = 1
    compare: bool = False
    engine: str = "auto"
    precision: Precision = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    weights: str | None = None
    data: str | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Recipe).items():
            if isinstance(kind, type) and is_dataclass(kind) and not isinstance(getattr(self, name), kind):
                plain = f"start from plain words with Recipe().with_settings(['{name}...=...'])"
                raise FedrolexError(f"Recipe({name}={getattr(self, name)!r}): give a {kind.__name__}, or {plain}")
        if type(self.client) not in (ClientRecipe, LocalTraining):
            given = f"Recipe(client={type(self.client).__name__}(...))"
            raise FedrolexError(f"{given}: give a ClientRecipe; other work comes from a method's work()")
        METHODS.name_of(type(self.method))  # gives it its name
        TASKS.name_of(type(self.task))
        if self.format != FORMAT:
            raise FedrolexError(f"recipe has format {self.format}; this version reads 1 and {FORMAT}: update fedrolex")
        for name in ("rounds", "evaluate_every", "checkpoint_every", "quorum", "mean_over"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise FedrolexError(f"{name} is {getattr(self, name)!r}: give at least 1, a whole number")
        if self.rounds > MOST_ROUNDS:
            raise FedrolexError(f"rounds is {self.rounds}: give at most {MOST_ROUNDS:,}")
        if self.deadline is not None and not (isinstance(self.deadline, int | float) and self.deadline > 0):
            raise FedrolexError(f"deadline is {self.deadline!r}: give seconds above 0, or null")
        ENGINES.check(self.engine)
        check_words("", self)
        check_paths("", self, "weights", "data")
        for name in self.callbacks:
            CALLBACKS.check(name)
        if self.quorum > self.fleet.cohort:
            raise FedrolexError(f"quorum {self.quorum} is above the cohort of {self.fleet.cohort}: give fewer")
        with in_one_line(f"method {self.method.name} cannot be checked"):
            self.method.check_fleet(
                self.fleet.build(self.seed, self.fleet.expected), self.client, self.fleet.server_scale
            )
        with in_one_line(f"task {self.task.name} cannot be checked"):
            self.task.completed(self.method.wants()).check(self.fleet, self.method)

    def with_whole_paths(self) -> Recipe:
        """The recipe with its files named in full, so that a run can be resumed from anywhere."""
        return replace(self, weights=self.weights and whole_path(self.weights), task=self.task.with_whole_paths())

    def with_settings(self, settings: Sequence[str]) -> Recipe:
        """A copy with ``key=value`` words applied.

        ``method=heterofl`` starts that method's own section; what means the same in both methods is kept.
        """
        return Recipe.decode(changed(self.encode(), settings, self.method))

    def encode(self) -> dict[str, Any]:
        """Every key, defaults included, as plain data."""
        with in_one_line("the recipe cannot be written as plain data"):
            return dict(to_plain(self))

    @staticmethod
    def decode(data: Any) -> Recipe:
        """A recipe from plain data; unknown keys and wrong types are refused in one line."""
        if isinstance(data, Mapping) and data.get("format") == 1 and type(data["format"]) is int:  # not true, not 1.0
            data = format1.upgraded(data)
        made: Recipe = from_plain(Recipe, data)
        return made

    @staticmethod
    def read(path: Path | str) -> Recipe:
        """A recipe from a YAML file."""
        try:
            text = Path(path).read_text()
        except (OSError, ValueError) as error:  # a ValueError: no text, or no name of a file
            raise FedrolexError(f"cannot read recipe {path}: {error}") from error
        data = read_yaml(text, f"recipe {path}")
        if data is None or data == {}:
            raise FedrolexError(
                f"recipe {path} is empty: give keys and values, such as format: {FORMAT} for all defaults"
            )
        return Recipe.decode(data)

    def write(self, path: Path) -> None:
        """Write as YAML."""
        text = yaml.safe_dump(self.encode(), sort_keys=False)
        try:
            path.write_text(text)
        except (OSError, ValueError) as error:  # a ValueError: no name of a file
            raise FedrolexError(f"cannot write recipe {path}: {error}") from error

    def differs_from(self, other: Recipe) -> str | None:
        """The first key, such as ``client.lr``, that changes what a run computes, or None; rounds may become more."""
        mine, theirs = self.encode(), other.encode()
        if mine["rounds"] < theirs["rounds"]:
            return "rounds"
        return _first_difference({key: mine[key] for key in mine if key not in (*FREE, "rounds")}, theirs)


def _first_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first key of plain data that is another there, one of a section as ``section.key``; None if there is none."""
    for key, value in mine.items():
        other = theirs.get(key)
        if value != other:
            inner = _first_difference(value, other) if isinstance(value, dict) and isinstance(other, dict) else None
            return f"{key}.{inner}".removesuffix(".name") if inner else key
    return None


def recipe_names() -> list[str]:
    """Names of the package's own recipes."""
    return sorted(file.stem for file in OWN.glob("*.yaml"))


@cache
def own_recipe(name: str) -> Recipe:
    """One of the package's own recipes."""
    return Recipe.read(OWN / f"{name}.yaml")
