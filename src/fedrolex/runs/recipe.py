"""Recipes: a run, described in full. Typed and checked here, YAML on disk."""

from __future__ import annotations

import difflib
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fedrolex.client import LocalSGD
from fedrolex.errors import FedrolexError
from fedrolex.fleet import Fleet
from fedrolex.methods import Method, fed_dropout, fedavg, fedrolex, heterofl
from fedrolex.slicing.capture import one_line
from fedrolex.slicing.schemes import Rolling, spread
from fedrolex.slicing.windows import exact
from fedrolex.tasks import Task, digits

FORMAT = 1
METHODS = ("fedrolex", "heterofl", "fed_dropout", "fedavg")
TASKS = ("digits",)
ENGINES = ("loop",)


@dataclass(frozen=True, kw_only=True)
class TaskRecipe:
    """What is learned."""

    name: str = "digits"
    labels_per_client: int = 10
    width: int = 32

    def __post_init__(self) -> None:
        _one_of("task.name", self.name, TASKS)
        if self.width < 1:
            raise FedrolexError(f"task.width is {self.width}: give 1 or more")
        if not 1 <= self.labels_per_client <= 10:
            raise FedrolexError(f"task.labels_per_client is {self.labels_per_client}: give 1 to 10")

    def build(self, clients: int, seed: int) -> Task:
        """The task, spread over clients."""
        return digits(clients, self.labels_per_client, self.width, seed)


@dataclass(frozen=True, kw_only=True)
class FleetRecipe:
    """Who learns it. ``server`` is how many times wider the server's model is than the largest client's."""

    clients: int = 20
    cohort: int = 10
    capacities: list[str] = field(default_factory=lambda: ["1", "1/2", "1/4", "1/8", "1/16"])
    shares: list[str] | None = None
    redrawn: bool = False
    availability: float = 1.0
    trace: list[list[int]] | None = None
    server: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "capacities", [str(c) for c in self.capacities])
        if self.server < 1:
            raise FedrolexError(f"fleet.server is {self.server}: give 1 or more")

    def build(self, seed: int) -> Fleet:
        """The fleet, its capacities as parts of the server's model."""
        levels = [exact(c) / self.server for c in self.capacities]
        there = self.availability if self.trace is None else self.trace
        return Fleet(
            clients=self.clients,
            cohort=self.cohort,
            capacities=levels,
            shares=self.shares,
            redrawn=self.redrawn,
            availability=there,
            seed=seed,
        )


@dataclass(frozen=True, kw_only=True)
class MethodRecipe:
    """How. ``width`` and ``able_only`` are fedavg's, ``overlap`` and ``spread`` fedrolex's."""

    name: str = "fedrolex"
    rounding: str = "floor"
    overlap: str = "1"
    spread: bool = False
    scope: str = "client"
    width: str = "1"
    able_only: bool = False
    weighting: str = "uniform"

    def __post_init__(self) -> None:
        _one_of("method.name", self.name, METHODS)
        _one_of("method.weighting", self.weighting, ("uniform", "samples"))
        _one_of("method.rounding", self.rounding, ("floor", "ceil"))
        _one_of("method.scope", self.scope, ("round", "capacity", "client"))
        exact(self.width)
        Rolling(overlap=self.overlap)

    def build(self, client: LocalSGD, cohort: int, server: int, seed: int) -> Method:
        """The method."""
        weighting: Any = self.weighting
        return replace(self._method(client, cohort, server, seed), weighting=weighting)

    def _method(self, client: LocalSGD, cohort: int, server: int, seed: int) -> Method:
        rounding: Any = self.rounding
        match self.name:
            case "fedrolex":
                offset = spread(cohort) if self.spread else None
                return fedrolex(client, overlap=self.overlap, offset=offset, rounding=rounding)
            case "heterofl":
                return heterofl(client, rounding=rounding)
            case "fed_dropout":
                scope: Any = self.scope
                return fed_dropout(client, seed=seed, scope=scope, rounding=rounding)
        return fedavg(client, width=exact(self.width) / server, able_only=self.able_only, rounding=rounding)


@dataclass(frozen=True, kw_only=True)
class ClientRecipe:
    """What a client does; see :class:`fedrolex.client.LocalSGD`."""

    epochs: int = 1
    batch: int = 16
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip: float | None = None
    milestones: list[int] = field(default_factory=list)
    decay: float = 0.1

    def build(self) -> LocalSGD:
        """The client's work."""
        return LocalSGD(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run, described in full.

    Attributes:
        format: version of this description.
        task: what is learned.
        fleet: who learns it.
        method: how.
        client: what a client does.
        rounds: how many.
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        checkpoint_every: rounds between checkpoints.
        quorum: fewest good updates that make a round count.
        deadline: seconds a client may take, or null.
        compare: also train what the same fleet could do without partial training.
        engine: how client work runs.
        device: ``cpu``, ``cuda``, or ``auto``.
        weights: safetensors file to start from, or null.
        seed: key of every random choice.
    """

    format: int = FORMAT
    task: TaskRecipe = field(default_factory=TaskRecipe)
    fleet: FleetRecipe = field(default_factory=FleetRecipe)
    method: MethodRecipe = field(default_factory=MethodRecipe)
    client: ClientRecipe = field(default_factory=ClientRecipe)
    rounds: int = 40
    evaluate_every: int = 5
    checkpoint_every: int = 5
    quorum: int = 1
    deadline: float | None = None
    compare: bool = False
    engine: str = "loop"
    device: str = "auto"
    weights: str | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise FedrolexError(f"recipe has format {self.format}; this version reads {FORMAT}: update fedrolex")
        for name in ("rounds", "evaluate_every", "checkpoint_every", "quorum"):
            if getattr(self, name) < 1:
                raise FedrolexError(f"{name} is {getattr(self, name)}: give at least 1")
        _one_of("engine", self.engine, ENGINES)
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        if self.deadline is not None and not self.deadline > 0:
            raise FedrolexError(f"deadline is {self.deadline}: give seconds above 0, or null")
        if self.quorum > self.fleet.cohort:
            raise FedrolexError(
                f"quorum {self.quorum} is above the cohort of {self.fleet.cohort}: no round would count"
            )

    def encode(self) -> dict[str, Any]:
        """Every key, defaults included, as plain data."""
        return asdict(self)

    @staticmethod
    def decode(data: Any) -> Recipe:
        """A recipe from plain data; unknown keys and wrong types are refused in one line."""
        made: Recipe = _build(Recipe, data, "")
        return made

    @staticmethod
    def read(path: Path) -> Recipe:
        """A recipe from a YAML file."""
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise FedrolexError(f"cannot read recipe {path}: {error}") from error
        data = _yaml(text, f"recipe {path}")
        return Recipe.decode({} if data is None else data)

    def differs_from(self, other: Recipe) -> str | None:
        """The first key that changes what a run computes, or None; a run may go on for more rounds."""
        mine, theirs = self.encode(), other.encode()
        free = ("rounds", "evaluate_every", "checkpoint_every", "device", "compare", "weights")
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
            value = _yaml(text, f"--set {key}")
            *path, last = key.split(".")
            section: Any = data
            for step in path:
                section = section.get(step) if isinstance(section, dict) else None
            if not isinstance(section, dict):
                raise FedrolexError(f"--set {key}: there is no section {'.'.join(path)!r} in a recipe")
            if isinstance(section.get(last), dict) and isinstance(value, str):
                section[last]["name"] = value
            else:
                section[last] = value
        return Recipe.decode(data)


def _yaml(text: str, what: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FedrolexError(f"{what} is not YAML: {one_line(error)}") from error


def _one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise FedrolexError(f"{key} is {value!r}{hint}: use one of {', '.join(allowed)}")


def _build(cls: Any, data: Any, path: str) -> Any:
    """A dataclass from plain data, checked against its annotations."""
    if isinstance(data, str) and any(f.name == "name" for f in fields(cls)):
        data = {"name": data}
    if not isinstance(data, Mapping):
        raise FedrolexError(f"recipe {path or 'file'} is {reprlib.repr(data)}: expected keys and values")
    hints = typing.get_type_hints(cls)
    known = [f.name for f in fields(cls)]
    values = {}
    for key, value in data.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise FedrolexError(f"recipe has an unknown key {where!r}: {hint}")
        values[key] = _value(hints[key], value, where)
    return cls(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    if is_dataclass(hint):
        return _build(hint, value, where)
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        found = _convert(option, value)
        if found is not _NO:
            return found
    wanted = " or ".join((str(o) if typing.get_origin(o) else o.__name__).replace("NoneType", "null") for o in options)
    raise FedrolexError(f"recipe key {where} is {reprlib.repr(value)} ({type(value).__name__}): expected {wanted}")


_NO = object()


def _convert(hint: Any, value: Any) -> Any:
    """``value`` as ``hint``, or _NO; numbers may stand for strings (a capacity of 1), integers for floats."""
    if hint is type(None):
        return None if value is None else _NO
    if typing.get_origin(hint) is list:
        (inner,) = typing.get_args(hint)
        items = [_convert(inner, item) for item in value] if isinstance(value, list) else [_NO]
        return _NO if any(item is _NO for item in items) else items
    if isinstance(value, bool) and hint is not bool:
        return _NO
    if hint is float and isinstance(value, int | str):
        try:
            return float(value)  # YAML reads 1e-3 as text
        except ValueError:
            return _NO
    if hint is str and isinstance(value, int | float):
        return str(value)
    return value if isinstance(value, hint) else _NO
