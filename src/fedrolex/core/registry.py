"""Everything a user may bring, by name: methods, schemes, engines, tasks, models, data sets, metrics, callbacks.

A name is one of the package's own, one that a decorator registered, an entry point of an installed package (group
``fedrolex.methods`` and so on), or ``package.module:Name``, which is imported. One's own go before the package's only
under another name: a name that is taken is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from fedrolex.core.errors import FedrolexError
from fedrolex.core.importing import resolve

Thing = TypeVar("Thing")


class Registry:
    """Things of one kind by name.

    Args:
        kind: what they are, in the singular, for messages.
        group: of the entry points of installed packages.
        key: the recipe's key that takes the name, for messages.
        own: the package's own, as ``package.module:Name``.
    """

    def __init__(self, kind: str, group: str, key: str, own: Mapping[str, str]) -> None:
        self.kind, self.group, self.key = kind, group, key
        self._own = dict(own)
        self._registered: dict[str, Any] = {}

    def register(self, name: str) -> Callable[[Thing], Thing]:
        """A decorator that makes a class or function known under a name."""

        def known(thing: Thing) -> Thing:
            if ":" in name or not name:
                raise FedrolexError(f"a {self.kind} cannot be called {name!r}: use a word without a colon")
            taken = self.origins().get(name)
            if taken is not None and self._registered.get(name) is not thing:
                raise FedrolexError(f"there is a {self.kind} {name!r} already, from {taken}: use another name")
            self._registered[name] = _named(thing, name)
            return thing

        return known

    def find(self, name: str) -> Any:
        """The thing of a name; an unknown name raises in one line."""
        if name in self._registered:
            return self._registered[name]
        if name in self._own:
            return _named(resolve(self._own[name]), name)
        if ":" in str(name):
            return _named(resolve(name), name)
        installed = self._installed()
        if name in installed:
            return _named(resolve(installed[name].value), name)
        known = self.names()
        near = difflib.get_close_matches(str(name), known, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise FedrolexError(
            f"{self.key} is {name!r}{hint}: use one of {', '.join(known)}, or package.module:Name of your own"
        )

    def names(self) -> list[str]:
        """All names, the package's own first."""
        return list(self.origins())

    def origins(self) -> dict[str, str]:
        """Where each name comes from: ``fedrolex``, an installed package, or the module that registered it."""
        found = dict.fromkeys(self._own, "fedrolex")
        for name, entry in self._installed().items():
            found.setdefault(name, entry.dist.name if entry.dist is not None else entry.value.partition(":")[0])
        for name, thing in self._registered.items():
            found.setdefault(name, str(getattr(thing, "__module__", "registered")))
        return found

    def own(self) -> list[str]:
        """Names of the package's own."""
        return list(self._own)

    def _installed(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=self.group)}


def _named(thing: Any, name: str) -> Any:
    """The thing; a class that has no name of its own gets this one."""
    if isinstance(thing, type) and "name" not in vars(thing):
        thing.name = name  # type: ignore[attr-defined]
    return thing


def _in(package: str, **things: str) -> dict[str, str]:
    return {name: f"fedrolex.{package}{'' if place[0] == ':' else '.'}{place}" for name, place in things.items()}


METHODS = Registry(
    "method", "fedrolex.methods", "method.name",
    _in(
        "methods", fedavg="fedavg:FedAvg", fedprox="fedprox:FedProx", scaffold="scaffold:Scaffold", fedbe="fedbe:FedBE",
        fedgkt="fedgkt:FedGKT", feddf="feddf:FedDF", fedet="fedet:FedET", dsfl="dsfl:DSFL",
        fed_dropout="fed_dropout:FedDropout", fedselect="fedselect:FedSelect", heterofl="heterofl:HeteroFL",
        fjord="fjord:Fjord", fedrolex="fedrolex:FedRolex", submodels="submodels:SubModels",
    ),
)  # fmt: skip
"""Subclasses of :class:`fedrolex.methods.method.Method`."""

SCHEMES = Registry(
    "scheme", "fedrolex.schemes", "method.scheme",
    _in("slicing.schemes", rolling=":Rolling", static=":Static", random=":Random", blocks=":Blocks"),
)  # fmt: skip
"""Subclasses of :class:`fedrolex.slicing.schemes.Scheme`, made with keyword arguments."""

ENGINES = Registry(
    "engine", "fedrolex.engines", "engine",
    _in(
        "engines", auto="auto:choose", loop="cpu.loop:Loop", crew="cpu.crew:Crew", graph="gpu.graph:Graph",
        lanes="gpu.lanes:Lanes", stacked="gpu.stacked:Stacked", ragged="gpu.ragged:Ragged",
    ),
)  # fmt: skip
"""Subclasses of :class:`fedrolex.rounds.engine.Engine`, or functions of (precision, device) that give one."""

TASKS = Registry(
    "task", "fedrolex.tasks", "task.name", _in("recipes", images="images:ImagesRecipe", words="words:WordsRecipe")
)
"""Classes of a recipe's section ``task``."""

MODELS = Registry(
    "model", "fedrolex.models", "task.model",
    _in(
        "models.image_models", convnet=":convnet", lenet=":lenet", resnet8=":resnet8", resnet14=":resnet14",
        resnet20=":resnet20", resnet32=":resnet32", vgg11=":vgg11", preresnet18=":preresnet18",
        preresnet34=":preresnet34",
    ),
)  # fmt: skip
"""Functions of an :class:`fedrolex.models.image_models.ImageModel` that give a module."""

DATASETS = Registry(
    "data set", "fedrolex.datasets", "task.data",
    _in("data.images", **{"digits": ":digits", "cifar10": ":cifar10", "cifar100": ":cifar100", "fashion-mnist": ":fashion_mnist"}),
)  # fmt: skip
"""Functions of (folder, seed) that give a :class:`fedrolex.data.images.ImageSet`."""

METRICS = Registry(
    "metric", "fedrolex.metrics", "evaluation.metrics", _in("tasks.metrics", top5=":top5", worst_class=":worst_class")
)
"""Functions of (outputs, targets) of the test examples that give a number."""

CALLBACKS = Registry(
    "callback", "fedrolex.callbacks", "callbacks",
    _in("runs.callbacks", drift=":DriftByCapacity", tensorboard=":TensorBoard"),
)  # fmt: skip
"""Subclasses of :class:`fedrolex.runs.callbacks.Callback`, made without arguments."""

REGISTRIES = {
    "methods": METHODS, "schemes": SCHEMES, "engines": ENGINES, "tasks": TASKS, "models": MODELS,
    "data sets": DATASETS, "metrics": METRICS, "callbacks": CALLBACKS,
}  # fmt: skip
