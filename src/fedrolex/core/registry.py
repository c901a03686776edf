"""Everything a user may bring, by name: methods, schemes, engines, tasks, models, data sets, metrics, callbacks.

A name is one of the package's own, one that a decorator registered, an entry point of an installed package (group
``fedrolex.methods`` and so on), or ``package.module:Name``, which is imported. One's own go before the package's only
under another name: a name that is taken is refused.
"""

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from fedrolex.core.errors import FedrolexError, did_you_mean
from fedrolex.core.importing import resolve

PACKAGE = "fedrolex"
"""The origin of the package's own things."""

Thing = TypeVar("Thing")


class Registry:
    """Things of one kind by name.

    Args:
        kind: the kind, in the singular, for messages.
        key: the recipe's key that takes the name, for messages.
        expected: what a thing of one's own must be, for messages.
        own: the package's own things, as ``package.module:Name``.
        base: the class that all things of the kind are subclasses of, as ``package.module:Name``; without one, a thing
            is anything that can be called.
        example: a thing of another package, for messages.
    """

    def __init__(
        self, kind: str, key: str, expected: str, own: Mapping[str, str], base: str | None = None, example: str = ""
    ) -> None:
        self.kind, self.key, self.expected, self.base = kind, key, expected, base
        self._elsewhere = f"package.module:Name of your own{f' ({example})' * bool(example)}"
        self.group = f"fedrolex.{kind.replace(' ', '')}s"  # of the entry points of installed packages
        self._own = dict(own)
        self._registered: dict[str, Any] = {}

    def register(self, name: str) -> Callable[[Thing], Thing]:
        """A decorator that makes a class or function known under a name."""
        if not isinstance(name, str) or ":" in name or not name:
            raise FedrolexError(f"a {self.kind} cannot be called {name!r}: use a word without a colon")

        def known(thing: Thing) -> Thing:
            taken, entry = self.origins().get(name), self._installed().get(name)
            same = _again(self._registered.get(name), thing) or (entry is not None and entry.value == _path(thing))
            if taken is not None and not same:
                raise FedrolexError(f"there is a {self.kind} {name!r} already, from {taken}: use another name")
            self._registered[name] = _named(self._checked(thing, name), name)
            return thing

        return known

    def find(self, name: str, key: str | None = None) -> Any:
        """The thing of a name; an unknown name raises in one line, which begins with ``key``."""
        self.check(name, key)
        if name in self._registered:
            return self._registered[name]
        place = self._own.get(name)
        if place is None and name in (installed := self._installed()):
            place = installed[name].value
        try:
            return _named(self._checked(resolve(place or name, here=place is None), name), name)
        except FedrolexError as error:
            raise FedrolexError(f"{key or self.key} is {name!r}: {error}") from error

    def check(self, name: str, key: str | None = None) -> None:
        """Raise, in one line, where a name is neither known nor ``package.module:Name``."""
        if not isinstance(name, str):
            raise FedrolexError(f"{key or self.key} is {name!r}: give a name")
        if "<locals>" in name:
            raise FedrolexError(f"{name} is defined inside a function: define it in a module, or register() it")
        if ":" in name or name in self._registered or name in self._own or name in self._installed():
            return
        known = self.names()
        said = f"{key or self.key} is {name!r}{did_you_mean(name, known)}"
        raise FedrolexError(f"{said}: use one of {', '.join(known)}, or {self._elsewhere}")

    def name_of(self, thing: Any) -> str:
        """The name under which :meth:`find` gives a class or function: if possible, in another process, too."""
        path = _path(thing)
        places = {name: entry.value for name, entry in self._installed().items()} | self._own
        found = next((name for name, place in places.items() if place == path), None)
        if found is None and not _importable(thing):
            found = next((name for name, known in self._registered.items() if known is thing), None)
        _named(thing, found or path)
        return found or path

    def names(self) -> list[str]:
        """All names, the package's own first."""
        return list(self.origins())

    def own(self) -> list[str]:
        """Names of the package's own things."""
        return list(self._own)

    def origins(self) -> dict[str, str]:
        """Where each name comes from: ``fedrolex``, an installed package, or the module that registered it."""
        found = dict.fromkeys(self._own, PACKAGE)
        for name, entry in self._installed().items():
            found.setdefault(name, entry.dist.name if entry.dist is not None else entry.value.partition(":")[0])
        for name, thing in self._registered.items():
            found.setdefault(name, str(getattr(thing, "__module__", "registered")))
        return found

    def _installed(self) -> dict[str, EntryPoint]:
        return _installed(self.group, tuple(sys.path))

    def _checked(self, thing: Any, name: str) -> Any:
        """The thing, which must be of the kind."""
        if self.base is None:
            fits = callable(thing)
        else:
            fits = isinstance(thing, type) and issubclass(thing, resolve(self.base, here=False))
        if not fits:
            what = f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"
            raise FedrolexError(f"{name} is {what}, not a {self.kind}: give {self.expected}")
        return thing


def _path(thing: Any) -> str:
    """``module:name`` of a class or function."""
    if not hasattr(thing, "__qualname__"):
        raise FedrolexError(f"a {type(thing).__name__} has no name to be found by: give a class or a function")
    return f"{thing.__module__}:{thing.__qualname__}"


def _again(known: Any, thing: Any) -> bool:
    """Whether a thing is the known one, or the same line run again: a notebook's cell, a module that is reloaded."""
    return known is not None and (known is thing or _path(known) == _path(thing))


def _importable(thing: Any) -> bool:
    """Whether another process would find a class or function by its module and name."""
    found = None if thing.__module__ == "__main__" else sys.modules.get(thing.__module__)
    for attribute in thing.__qualname__.split("."):
        found = getattr(found, attribute, None)
    return found is thing


def _named(thing: Any, name: str) -> Any:
    """The thing; a class that has no name of its own gets this one."""
    if isinstance(thing, type) and "name" not in vars(thing):
        thing.name = name  # type: ignore[attr-defined]
    return thing


@lru_cache
def _installed(group: str, _path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Entry points of the packages on a path; looking for them takes milliseconds."""
    return {entry.name: entry for entry in entry_points(group=group)}


def _in(module: str, *names: str, **places: str) -> dict[str, str]:
    """Things of a module of this package that are called as they are there, and things of places inside it."""
    own = {name: f"fedrolex.{module}:{name}" for name in names}
    return own | {name: f"fedrolex.{module}{place}" for name, place in places.items()}


METHODS = Registry(
    "method", "method.name", "a subclass of fedrolex.Method",
    _in(
        "methods", fedavg=".fedavg:FedAvg", fedprox=".fedprox:FedProx", scaffold=".scaffold:Scaffold",
        fedbe=".fedbe:FedBE", fedgkt=".fedgkt:FedGKT", feddf=".feddf:FedDF", fedet=".fedet:FedET", dsfl=".dsfl:DSFL",
        fed_dropout=".fed_dropout:FedDropout", fedselect=".fedselect:FedSelect", heterofl=".heterofl:HeteroFL",
        fjord=".fjord:Fjord", fedrolex=".fedrolex:FedRolex", submodels=".submodels:SubModels",
        columns=".columns:Columns", private=".private:Private",
    ),
    "fedrolex.methods.method:Method",
)  # fmt: skip

SCHEMES = Registry(
    "scheme", "method.scheme", "a subclass of fedrolex.Scheme",
    _in("slicing.schemes", rolling=":Rolling", static=":Static", random=":Random", blocks=":Blocks"),
    "fedrolex.slicing.schemes:Scheme",
)  # fmt: skip
"""Subclasses of :class:`fedrolex.slicing.schemes.Scheme`, made with keyword arguments."""

ENGINES = Registry(
    "engine", "engine", "a subclass of fedrolex.Engine, or a function of precision and device that gives an engine",
    _in(
        "engines", auto=".auto:choose", loop=".cpu.loop:Loop", crew=".cpu.crew:Crew", graph=".gpu.graph:Graph",
        lanes=".gpu.lanes:Lanes", stacked=".gpu.stacked:Stacked", ragged=".gpu.ragged:Ragged",
        ray=".ray.engine:RayEngine",
    ),
)  # fmt: skip

TASKS = Registry(
    "task", "task.name", "a subclass of fedrolex.TaskRecipe",
    _in("recipes", images=".images:ImagesRecipe", words=".words:WordsRecipe"), "fedrolex.recipes.task:TaskRecipe",
)  # fmt: skip

MODELS = Registry(
    "model", "task.model", "a function of a fedrolex.ImageModel that gives a torch.nn.Module",
    _in(
        "models.image_models", "convnet", "lenet", "resnet8", "resnet14", "resnet20", "resnet32", "vgg11",
        "preresnet18", "preresnet34",
    ),
    example="or another's: torchvision.models:resnet18",
)  # fmt: skip

DATASETS = Registry(
    "data set", "task.data", "a function of (folder, seed) that gives a fedrolex.ImageSet",
    _in("data.images", "digits", "cifar10", "cifar100", **{"fashion-mnist": ":fashion_mnist"}),
)  # fmt: skip

METRICS = Registry(
    "metric", "evaluation.metrics", "a function of (outputs, targets) that gives a number",
    _in("tasks.metrics", "top5", "worst_class"),
)  # fmt: skip

CALLBACKS = Registry(
    "callback", "callbacks", "a subclass of fedrolex.Callback",
    _in(
        "runs", drift=".callbacks:DriftByCapacity", tensorboard=".callbacks:TensorBoard",
        details=".details:Details", mlflow=".mlflow_tracker:MLflow", wandb=".wandb_tracker:WandB",
    ),
    "fedrolex.runs.callbacks:Callback",
)  # fmt: skip
"""Subclasses of :class:`fedrolex.runs.callbacks.Callback`, made without arguments."""

REGISTRIES = {
    f"{each.kind}s": each for each in (METHODS, SCHEMES, ENGINES, TASKS, MODELS, DATASETS, METRICS, CALLBACKS)
}
