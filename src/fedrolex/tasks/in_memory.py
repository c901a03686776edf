"""Examples in memory, spread over clients by rows: what tasks of classes and of numbers have in common."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from inspect import signature
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from fedrolex.core import FedrolexError, in_one_line, shuffle
from fedrolex.models import evaluating
from fedrolex.slicing.inputs import is_sentence
from fedrolex.tasks.partition import Partition
from fedrolex.tasks.pixels import Pixels
from fedrolex.tasks.task import Examples, Task, check_examples


@dataclass(frozen=True)
class InMemory(Task):
    """A task whose examples are in memory.

    Attributes:
        name, build: see :class:`~fedrolex.tasks.task.Task`.
        train: the examples the clients hold.
        test: examples no client holds.
        parts: for each client, the rows of ``train`` it holds, int64.
    """

    name: str
    build: Callable[[int], nn.Module]
    train: Examples
    test: Examples
    parts: Sequence[Tensor]

    def __post_init__(self) -> None:
        _check_build(self.build)
        for what in ("train", "test"):
            check_examples(what, getattr(self, what))
        for what, examples in self.examples().items():
            check_examples(what, examples)
            _check_inputs(what, examples.x, self.train.x)
        self._set(parts=row_numbers("parts", self.parts, len(self.train)))
        if not any(len(part) for part in self.parts):
            raise FedrolexError("parts of the task are empty: give the rows of at least one client")

    def examples(self) -> dict[str, Examples]:
        """All examples of the task, by the name of the field that has them."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Examples)}

    def _set(self, **values: Any) -> None:
        """Give fields their values while the task is made."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    # --- what training asks ---

    @property
    def clients(self) -> int:
        """How many clients hold data."""
        return len(self.parts)

    def client(self, number: int) -> Examples:
        """The rows a client holds."""
        return self.train.rows(self.parts[number].to(self.train.y.device))

    def inputs(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        """What is stored."""
        return x

    def example(self) -> Tensor:
        """The first two training inputs."""
        return self.inputs(self.train.x[:2])

    def some_inputs(self, count: int, batch: int) -> Iterator[Tensor]:
        """A random choice of what clients hold, the same for every seed."""
        rows = self.partition.rows
        chosen = rows[torch.from_numpy(shuffle(len(rows), 0, "calibration")[:count])]
        for part in evenly(chosen.to(self.train.y.device), batch):
            yield self.inputs(self.train.x[part])

    def held_out(self, count: int) -> Self:
        """Measured on a random choice of what clients hold, the same for every seed."""
        return replace(self, test=self.some_held(count))

    def some_held(self, count: int) -> Examples:
        """Up to ``count`` of the examples that clients hold, others than those of :meth:`some_inputs` come first."""
        rows = self.partition.rows
        chosen = rows[torch.from_numpy(shuffle(len(rows), 0, "calibration")[::-1][:count].copy())]
        return self.train.rows(chosen.to(self.train.y.device))

    def to(self, device: torch.device) -> Self:
        """Examples on another device; rows stay where they are."""
        held = {each.name: getattr(self, each.name) for each in fields(self)}
        moved: dict[str, Any] = {n: v.to(device) for n, v in held.items() if isinstance(v, Examples | Pixels)}
        return replace(self, **moved)

    def fingerprint(self) -> str:
        """Of examples that are trained and tested on, their order and their clients; after a +, of other examples."""
        rows, more = self.partition, {k: v for k, v in self.examples().items() if k not in ("train", "test")}
        found = _hash(self.train.x, self.train.y, self.test.x, self.test.y, rows.rows, rows.starts)
        return found + (f"+{_hash(*(t for each in more.values() for t in (each.x, each.y)))}" if more else "")

    @property
    def partition(self) -> Partition:
        """The parts in one piece."""
        return self.parts if isinstance(self.parts, Partition) else Partition.of(self.parts)

    @property
    def tests_on_training(self) -> bool:
        """Whether the test examples are the training examples: a server of real devices has no others."""
        return self.train.x.shape == self.test.x.shape and torch.equal(self.train.x, self.test.x)

    def facts(self) -> dict[str, Any]:
        """How the data was spread."""
        used = sum(len(part) for part in self.parts)
        return {"examples": used, "unused_examples": len(self.train) - used, "test_examples": len(self.test)}

    # --- the model ---

    def check_model(self, model: nn.Module) -> None:
        """Raise, in one line, unless the loss can be taken of the model's outputs on the first two examples."""
        some = self.train.rows(torch.arange(min(2, len(self.train)), device=self.train.y.device))
        x, y = self.inputs(some.x).cpu(), some.y.cpu()
        with evaluating(model):
            outputs = model(given := x.clone())
        if not torch.equal(given, x):
            raise FedrolexError("the model changes its inputs in place, which are your data: let it work on a copy")
        if not isinstance(outputs, Tensor):
            raise FedrolexError(f"the model gives a {type(outputs).__name__}: let its forward return one tensor")
        self.check_outputs(outputs, y)
        with in_one_line(f"the loss of outputs {tuple(outputs.shape)} and targets {tuple(y.shape)} failed"):
            value = self.loss(outputs.requires_grad_(), y)
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"values {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise FedrolexError(f"the loss gives {what}: it must be one number, the mean over a batch, as a tensor")
        if not value.requires_grad or not any(parameter.requires_grad for parameter in model.parameters()):
            raise FedrolexError("nothing can be trained: the loss has no gradient, or no parameter takes one")

    def check_outputs(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise, in one line, unless outputs have the shape that belongs to these targets."""

    def outputs(self, model: nn.Module, x: Tensor, batch: int) -> Tensor:
        """What a model says about stored inputs, ``batch`` at once."""
        return torch.cat([model(self.inputs(part)) for part in evenly(x, batch)])


def _hash(*tensors: Tensor) -> str:
    """A short hash of tensors' values."""
    found = blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def evenly(rows: Tensor, most: int) -> Sequence[Tensor]:
    """Rows in pieces of (almost) equal size: no lonely last one, which batch norm could not take."""
    return rows.tensor_split(max(1, -(-len(rows) // most)))


def _check_build(build: object) -> None:
    """Raise, in one line, unless this can be called with a scale to make a model."""
    how = "give a function that makes one, e.g. build=lambda scale: Net(width=64 * scale)"
    if isinstance(build, nn.Module):
        raise FedrolexError(f"build is a model ({type(build).__name__}): {how}")
    if not callable(build):
        raise FedrolexError(f"build is a {type(build).__name__}, not what makes a model: {how}")
    try:
        signature(build).bind(1)
    except TypeError:
        raise FedrolexError(f"build cannot be called with one argument, how many times as wide: {how}") from None
    except ValueError:  # built in, without a signature
        pass


def _check_inputs(what: str, x: Tensor, train: Tensor) -> None:
    """Raise, in one line, unless inputs are finite and like those of training."""
    if x.dtype != train.dtype or (x.shape[1:] != train.shape[1:] and not (is_sentence(x) and is_sentence(train))):
        kinds = [f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape[1:])}" for each in (x, train)]
        raise FedrolexError(f"inputs of {what} are {kinds[0]} a row, those of train {kinds[1]}: give the same")
    if x.is_floating_point() and not bool(x.isfinite().all()):
        row = int((~x.isfinite()).nonzero()[0, 0])
        raise FedrolexError(f"inputs of {what} are not all finite: look at row {row}")


def row_numbers(what: str, parts: Any, rows: int) -> Sequence[Tensor]:
    """Rows by client, as int64 tensors; arrays and lists are taken, too."""
    found: Sequence[Tensor] = parts
    if not isinstance(parts, Partition):
        if not isinstance(parts, Sequence | Tensor | np.ndarray) or isinstance(parts, str):
            raise FedrolexError(f"{what} of the task is a {type(parts).__name__}: give a list with every client's rows")
        found = [_numbers(f"{what}[{client}]", part) for client, part in enumerate(parts)]
    for client, part in enumerate([found.rows] if isinstance(found, Partition) else found):
        if len(part) and not 0 <= int(part.min()) <= int(part.max()) < rows:
            raise FedrolexError(f"{what}[{client}] of the task names a row outside 0..{rows - 1}")
    return found


def _numbers(what: str, part: Any) -> Tensor:
    try:
        found = part if isinstance(part, Tensor) else torch.from_numpy(np.array(part))
    except (TypeError, ValueError):
        found = torch.empty(())
    odd = found.is_floating_point() or found.is_complex() or found.dtype == torch.bool or found.is_meta
    if found.dim() != 1 or (len(found) and odd):
        raise FedrolexError(f"{what} of the task is not a list of row numbers (int64)")
    return found.long()
