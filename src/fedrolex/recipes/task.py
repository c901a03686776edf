"""What is learned, as a recipe says it: the base of a recipe's section ``task``."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import nn

from fedrolex.core import FedrolexError
from fedrolex.methods import Method
from fedrolex.recipes.fleet import FleetRecipe
from fedrolex.rounds import Fleet
from fedrolex.tasks import Mask, Task


@dataclass(frozen=True, kw_only=True)
class TaskRecipe(ABC):
    """A section ``task``: a subclass's fields are its keys, and it opens its data for a fleet."""

    name: ClassVar[str] = "task"  # as in recipes; set when the class is registered

    @abstractmethod
    def open(self, fleet: FleetRecipe, *, seed: int, folder: Path, mask: Mask) -> tuple[Task, Fleet]:
        """The task with its data, and the fleet that it is spread over.

        Args:
            fleet: the recipe's fleet; ``fleet.build(seed)`` makes it, with a number of clients where the data says it.
            seed: key of all random choices.
            folder: where data sets lie.
            mask: what clients do with the scores of classes that they do not hold.
        """

    def check(self, fleet: FleetRecipe, method: Method) -> None:  # noqa: B027 - a section need not mind
        """Raise FedrolexError, in one line, where the section does not go with a fleet or a method; reads no data."""

    def completed(self, wants: Mapping[str, Any]) -> Self:
        """The section with what a method wants of it, where the section says null."""
        own = {each.name for each in fields(self)}
        lacking = {key: value for key, value in wants.items() if key in own and getattr(self, key) is None}
        return replace(self, **lacking)

    def plain(self, wants: Mapping[str, Any]) -> Self:
        """The same data, whatever a method puts aside of it, for methods in which everyone trains one network."""
        return self.completed(wants)

    def with_whole_paths(self) -> Self:
        """The section with its files named in full, so that a run can be resumed from anywhere."""
        return self

    def make_model(self, scale: int = 1) -> nn.Module:
        """The server's model, ``scale`` times as wide, without reading data where that is possible."""
        raise FedrolexError(f"the model of task {self.name} is not known without its data")

    def make_models(self) -> dict[Fraction, nn.Module]:
        """The models that clients of some capacities have instead of a part of the server's."""
        return {}

    def frozen_axes(self) -> Sequence[str]:
        """Axes of the model that capacities do not cut."""
        return ()


@dataclass(frozen=True, kw_only=True)
class GivenInPython(TaskRecipe):
    """A task that was given in Python, beside the recipe: no recipe describes its model and its data."""

    def open(self, fleet: FleetRecipe, *, seed: int, folder: Path, mask: Mask) -> tuple[Task, Fleet]:
        """Refuse."""
        raise FedrolexError("the recipe's task was given in Python: train it there, with train(recipe, task)")


def whole_path(path: str) -> str:
    """A path in full where there is something; else as it is."""
    return str(Path(path).expanduser().resolve()) if path and Path(path).expanduser().exists() else path
