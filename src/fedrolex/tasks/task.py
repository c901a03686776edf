"""A task: a model, data that is spread over clients, and how well the model does on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedrolex.core import FedrolexError, in_one_line
from fedrolex.tasks.metrics import Metrics


@dataclass(frozen=True, init=False)
class Examples:
    """Inputs and targets, one row each.

    Attributes:
        x: inputs, ``(examples, …)``; a numpy array is taken, too, and float64 in one becomes torch's default dtype.
        y: targets, ``(examples, …)``, likewise.
    """

    x: Tensor
    y: Tensor

    def __init__(self, x: Any, y: Any) -> None:
        object.__setattr__(self, "x", _rows("inputs", x))
        object.__setattr__(self, "y", _rows("targets", y))
        if len(self.x) != len(self.y):
            raise FedrolexError(f"{len(self.x):,} inputs and {len(self.y):,} targets: give one target for each input")

    def __len__(self) -> int:
        return len(self.y)

    def rows(self, index: Tensor) -> Examples:
        """Some of them."""
        return Examples(self.x[index], self.y[index])

    def to(self, device: torch.device) -> Examples:
        """The same on another device."""
        return Examples(self.x.to(device), self.y.to(device))


def _rows(what: str, given: Any) -> Tensor:
    """A tensor or an array, as a tensor with a row for every example."""
    masked = isinstance(given, np.ma.MaskedArray) and np.ma.is_masked(given)
    if masked or not (isinstance(given, Tensor) or hasattr(given, "__array__")):
        raise FedrolexError(f"{what} of examples are a {type(given).__name__}: give a tensor or a numpy array")
    with in_one_line(f"{what} of examples"):
        found = given.detach() if isinstance(given, Tensor) else _from_numpy(what, np.asarray(given))
    if found.is_nested or found.is_meta:
        raise FedrolexError(
            f"{what} of examples are {'nested' if found.is_nested else 'on the meta device'}: give values"
        )
    if found.dim() == 0 or found.layout is not torch.strided or found.is_complex():
        kind = f"{str(found.dtype).removeprefix('torch.')} {tuple(found.shape)}, {found.layout}"
        raise FedrolexError(f"{what} of examples are {kind}: give plain numbers, a row for every example")
    return found


def _from_numpy(what: str, array: np.ndarray[Any, Any]) -> Tensor:
    try:
        found = torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    except TypeError:
        raise FedrolexError(f"{what} of examples are an array of {array.dtype}: give numbers") from None
    return found.to(torch.get_default_dtype()) if found.dtype == torch.float64 else found


class LocalAnswers(NamedTuple):
    """A model's answers to a client's own test examples.

    Attributes:
        right: how many are right.
        right_masked: how many are right with the classes that the client lacks left out.
        examples: how many there are.
    """

    right: int
    right_masked: int
    examples: int


class Task(ABC):
    """What is learned, as training sees it.

    Attributes:
        name: for reports.
        build: makes the server's model, ``build(scale)`` a ``scale`` times wider one; weights are drawn from
            torch's current random state.
        loss: mean loss of a batch from (outputs, targets).
        classes: number of different targets; 0 where targets are no classes.
        frozen: axes that capacities do not cut.
        random_inputs: whether :meth:`inputs` draws (augmentation).
        ignored: a target that the loss leaves out, and does not count; None where there is none.
    """

    name: str
    build: Callable[[int], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    classes: int
    frozen: Sequence[str]
    random_inputs: bool
    ignored: int | None = None

    @property
    @abstractmethod
    def clients(self) -> int:
        """How many clients hold data."""

    @abstractmethod
    def client(self, number: int) -> Examples:
        """What one client holds, as it is stored; see :meth:`inputs`."""

    @abstractmethod
    def inputs(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        """Stored inputs as the model takes them.

        Args:
            x: stored inputs, one row an example.
            draws: for training where ``random_inputs``, one random int64 ≥ 0 an example; it alone decides how
                the example is changed.
        """

    def labels(self, examples: Examples) -> Tensor:
        """The different targets among a client's examples: the rows of the output layer it trains."""
        found: Tensor = examples.y.unique()
        return found

    @abstractmethod
    def example(self) -> Tensor:
        """Two inputs, to trace the model with."""

    @abstractmethod
    def evaluate(
        self, model: nn.Module, *, batch: int = 500, apart: bool = False, metrics: Metrics | None = None
    ) -> dict[str, Any]:
        """Metrics on examples no client holds; always ``loss``, and ``global_accuracy`` or ``r2`` to compare models by.

        Args:
            model: put into evaluation mode.
            batch: examples at once.
            apart: scores of an example depend on its batch (batch norm on the batch's own statistics), so
                every client's examples go through the model on their own.
            metrics: more metrics to take, by name.
        """

    def by_client(self, model: nn.Module, *, batch: int = 500, apart: bool = False) -> dict[int, LocalAnswers] | None:
        """Right answers of single clients, by their numbers; None where the task measures no local accuracy.

        For the arguments see :meth:`evaluate`.
        """
        return None

    @abstractmethod
    def some_inputs(self, count: int, batch: int) -> Iterator[Tensor]:
        """Batches of the inputs of up to ``count`` training examples, mixed over clients, not augmented."""

    def held_out(self, count: int) -> Task:
        """The same task, measured on examples to choose by instead of its test examples.

        They are those put aside for choosing or, where there are none, ``count`` of what clients hold.
        """
        raise FedrolexError(
            f"task {self.name} has no held_out(): nothing can be chosen without looking at test examples"
        )

    @abstractmethod
    def to(self, device: torch.device) -> Task:
        """The same with its data on another device."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hash of the data and how it is spread, to notice that it changed under a run.

        Where a newer version of a task hashes more, it puts that after a ``+``: runs of the older one still go on.
        """

    def check_model(self, model: nn.Module) -> None:  # noqa: B027 - a task need not
        """Raise, in one line, where the outputs of a model, which is on the CPU, are not what the loss takes."""

    def facts(self) -> dict[str, Any]:
        """What a report should say about the data."""
        return {}

    @staticmethod
    def split(
        build: Callable[[int], nn.Module],
        train: Examples,
        test: Examples,
        clients: int,
        seed: int = 0,
        name: str = "task",
        public: float = 0.0,
        validation: float = 0.0,
        classes: int = 0,
    ) -> Task:
        """A task of one's own, its training examples spread evenly over clients.

        Whole numbers as targets are classes, so many or one more than the largest; real numbers are what is to be
        predicted, see :class:`~fedrolex.tasks.regression.Regression`. ``public`` and ``validation`` are shares of the
        training examples put aside, for methods that need them.
        """
        from fedrolex.tasks.classification import Classification
        from fedrolex.tasks.partition import even, hold_out
        from fedrolex.tasks.regression import Regression

        check_examples("train", train)
        if train.y.is_floating_point():
            if public or validation or classes:
                raise FedrolexError("public, validation and classes are for targets that are classes: leave them out")
            return Regression(name, build, train, test, even(train.y, clients, seed))
        shares = {"public": public, "validation": validation}
        held = hold_out(len(train), shares, seed)
        rest = train.rows(held["rest"]) if public or validation else train
        aside: dict[str, Any] = {what: train.rows(held[what]) for what, share in shares.items() if share}
        return Classification(name, build, rest, test, even(rest.y, clients, seed), classes=classes, **aside)


def check_examples(what: str, given: object) -> None:
    """Raise, in one line, unless these are examples, and some."""
    if not isinstance(given, Examples):
        raise FedrolexError(f"{what} of the task is a {type(given).__name__}: give Examples(x, y)")
    if not len(given):
        raise FedrolexError(f"{what} of the task has no examples: give at least one")
