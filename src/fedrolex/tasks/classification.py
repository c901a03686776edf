"""Examples of classes, in memory, spread over clients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self, get_args

import torch
from torch import Tensor, nn

from fedrolex.core import FedrolexError, one_of, sample
from fedrolex.models import WithOffsets, evaluating
from fedrolex.tasks.in_memory import InMemory, row_numbers
from fedrolex.tasks.masking import Mask, masked
from fedrolex.tasks.metrics import Metrics, measured
from fedrolex.tasks.pixels import Pixels
from fedrolex.tasks.task import Examples, LocalAnswers, check_examples

MEASURED = 1000  # clients whose local accuracy is measured, at most
AT_ONCE = 2**26  # masked scores held at once, at most


@dataclass(frozen=True)
class Classification(InMemory):
    """A task whose targets are classes.

    Attributes:
        name, build, train, test, parts: see :class:`~fedrolex.tasks.in_memory.InMemory`. Targets are whole numbers from
            0, the model's outputs scores, ``(examples, classes)``.
        loss, frozen: see :class:`~fedrolex.tasks.task.Task`.
        test_parts: for each client, the rows of ``test`` that are its own; by default all with its labels.
        pixels: how stored images become inputs; None where they are stored as such.
        validation, public: examples put aside, for choosing settings and for distillation.
        rare: classes that belong to the small devices.
        mask: how absent classes are treated where local accuracy is measured with them masked.
        classes: how many there are; by default one more than the largest target.
        class_names: of the classes, in the order of the scores; empty where they have none.
        models: by capacity, as in recipes, what makes the model its clients train instead of a part of ``build``'s.
        build_for: makes the model for so many input channels instead of the images', and so many times as wide, for
            feature maps (FedGKT).
    """

    test_parts: Sequence[Tensor] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    frozen: Sequence[str] = ()
    pixels: Pixels | None = None
    validation: Examples | None = None
    public: Examples | None = None
    rare: Sequence[int] = ()
    mask: Mask = "neg_inf"
    classes: int = 0
    models: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    build_for: Callable[[int, int], nn.Module] | None = None
    class_names: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for what in ("validation", "public"):
            if getattr(self, what) is not None:
                check_examples(what, getattr(self, what))
        largest = 0
        for what, examples in self.examples().items():
            if what != "public":  # whose targets nobody looks at
                self._set(**{what: Examples(examples.x, _labels(what, examples.y))})
                largest = max(largest, int(getattr(self, what).y.max()))
        if not self.classes:
            self._set(classes=1 + largest)
        if not isinstance(self.classes, int) or largest >= self.classes:
            raise FedrolexError(f"the task has a target {largest}, but {self.classes!r} classes")
        if self.class_names and len(self.class_names) != self.classes:
            given = f"the task has {len(self.class_names)} class_names"
            raise FedrolexError(f"{given}, but {self.classes} classes: give a name for each, or none")
        known = isinstance(self.rare, Sequence) and all(label in range(self.classes) for label in self.rare)
        if not known:
            raise FedrolexError(f"rare of the task is {self.rare}: there are classes 0 to {self.classes - 1}")
        one_of("mask of the task", self.mask, get_args(Mask))
        if self.test_parts is not None:
            self._set(test_parts=row_numbers("test_parts", self.test_parts, len(self.test)))
            if len(self.test_parts) != self.clients:
                raise FedrolexError(f"a task of {self.clients} parts, {len(self.test_parts)} test parts: give as many")

    # --- what training asks ---

    @property
    def random_inputs(self) -> bool:  # type: ignore[override]
        """Whether images are augmented."""
        return self.pixels is not None and self.pixels.random

    def inputs(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        """Normalised and augmented images, or what is stored."""
        return x if self.pixels is None else self.pixels(x, draws)

    def check_outputs(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise, in one line, unless there is a score for every class."""
        if targets.dim() == 1 and outputs.shape != (len(targets), self.classes):
            said = f"the model's outputs for {len(targets)} examples are {tuple(outputs.shape)}"
            remedy = "give one score a class; if there are more classes than the data shows, say classes=..."
            raise FedrolexError(f"{said}, but the targets are {self.classes} classes: {remedy}")

    def facts(self) -> dict[str, Any]:
        """How the data was spread."""
        return {
            **super().facts(),
            "labels_per_client": float(self._held.sum(1).double().mean()),
            "public_examples": 0 if self.public is None else len(self.public),
            "validation_examples": 0 if self.validation is None else len(self.validation),
        }

    def held_out(self, count: int) -> Self:
        """Measured on the validation examples or, where there are none, on a random choice of what clients hold."""
        aside = self.some_held(count) if self.validation is None else self.validation
        return replace(self, test=aside, test_parts=None, validation=None)

    def classes_of_clients(self) -> list[list[int]]:
        """The classes that each client holds, ascending."""
        return [held.nonzero().flatten().tolist() for held in self._held]

    # --- how good a model is ---

    def evaluate(
        self, model: nn.Module, *, batch: int = 500, apart: bool = False, metrics: Metrics | None = None
    ) -> dict[str, Any]:
        """Accuracy on the test set, and on every client's part of it, plain and with absent classes masked.

        One forward pass over the test set gives all of them, unless ``apart``. Local accuracies are means
        over all examples of all clients (of at most 1000 clients, evenly chosen).
        """
        if self.test.y.dim() > 1:
            shape = tuple(self.test.y.shape)
            raise FedrolexError(f"targets of test are {shape}: accuracy is measured of one class an example")
        with evaluating(model):
            inner = model.model if isinstance(model, WithOffsets) else model
            plain = self.outputs(inner, self.test.x, batch)
            outputs = plain + model.class_offsets if isinstance(model, WithOffsets) else plain
            found: dict[str, Any] = {"loss": float(self.loss(outputs, self.test.y))}
            found |= self._accuracies(model, outputs, apart)
            if isinstance(model, WithOffsets):
                found["accuracy_as_trained"] = float((plain.argmax(-1) == self.test.y).double().mean())
            if self.validation is not None:
                scores = self.outputs(inner, self.validation.x, batch)  # offsets were fitted on these
                found["validation_accuracy"] = float((scores.argmax(-1) == self.validation.y).double().mean())
            found |= measured(metrics or {}, outputs, self.test.y, found)
        return found

    def by_client(self, model: nn.Module, *, batch: int = 500, apart: bool = False) -> dict[int, LocalAnswers] | None:
        """Right answers of the clients whose local accuracy is measured, as in :meth:`evaluate`."""
        if self.test.y.dim() > 1:
            return None
        measured = self._measured()
        with evaluating(model):
            counted = self._counted(model, self.outputs(model, self.test.x, batch), apart, measured)
        return {client: LocalAnswers(*row) for client, row in zip(measured, counted.tolist(), strict=True)}

    def _accuracies(self, model: nn.Module, outputs: Tensor, apart: bool) -> dict[str, float]:
        y = self.test.y
        right = outputs.argmax(-1) == y
        plain, hidden, total = self._counted(model, outputs, apart, self._measured()).sum(0).tolist()
        found = {
            "global_accuracy": float(right.double().mean()),
            "local_accuracy": plain / total if total else float("nan"),
            "local_accuracy_masked": hidden / total if total else float("nan"),
        }
        if self.rare:
            among = torch.isin(y, torch.tensor(list(self.rare), device=y.device))
            found["rare_accuracy"] = float(right[among].double().mean())
        return found

    def _measured(self) -> list[int]:
        """The clients whose local accuracy is measured."""
        found: list[int] = sample(self.clients, min(MEASURED, self.clients), 0, "measured").tolist()
        return found

    def _counted(self, model: nn.Module, outputs: Tensor, apart: bool, clients: Sequence[int]) -> Tensor:
        """Of every client's own examples the right answers, plain and masked, and how many there are, (clients, 3)."""
        if apart or self.test_parts is not None:
            return self._counted_one_by_one(model, outputs, apart, clients)
        return self._counted_by_classes(outputs, clients)

    def _counted_by_classes(self, outputs: Tensor, clients: Sequence[int]) -> Tensor:
        """Where clients are measured on all examples of their classes: every set of classes once."""
        sets, which = self._held[list(clients)].unique(dim=0, return_inverse=True)
        y, sets, which = self.test.y, sets.to(outputs.device), which.to(outputs.device)
        right, found = outputs.argmax(-1) == y, []
        for some in sets.split(max(1, AT_ONCE // outputs.numel())):
            own = some[:, y]
            hidden = (masked(outputs, some[:, None], self.mask).argmax(-1) == y) & own
            found.append(torch.stack([(own & right).sum(1), hidden.sum(1), own.sum(1)], 1))
        return torch.cat(found)[which]

    def _counted_one_by_one(self, model: nn.Module, outputs: Tensor, apart: bool, clients: Sequence[int]) -> Tensor:
        """Where clients have test examples of their own, or go through the model on their own."""
        y, found = self.test.y, []
        known: dict[bytes, tuple[int, int, int]] = {}
        for client in clients:
            held = self._held[client]
            key = held.numpy().tobytes() if self.test_parts is None else client.to_bytes(8, "little")
            if key not in known:
                own = held.to(y.device)[y].nonzero().flatten() if self.test_parts is None else self.test_parts[client]
                rows = own.to(y.device)
                alone = apart and len(rows)
                scores = self.outputs(model, self.test.x[rows], len(rows)) if alone else outputs[rows]
                sums = masked(scores, held.to(y.device), self.mask).argmax(-1) == y[rows]
                known[key] = (int((scores.argmax(-1) == y[rows]).sum()), int(sums.sum()), len(rows))
            found.append(known[key])
        return torch.tensor(found, dtype=torch.int64)

    @cached_property
    def _held(self) -> Tensor:
        """Which classes each client holds, bool, shape ``(clients, classes)``, on the CPU."""
        return self.partition.label_sets(self.train.y, self.classes)


def _labels(what: str, y: Tensor) -> Tensor:
    """Targets as classes, int64; a single column is taken for a list."""
    if y.is_floating_point():
        kind = str(y.dtype).removeprefix("torch.")
        raise FedrolexError(
            f"targets of {what} are {kind}: give classes (y.long()); numbers to predict are a Regression"
        )
    found = (y.flatten() if y.dim() == 2 and y.shape[1] == 1 else y).long()
    if int(found.min()) < 0:
        raise FedrolexError(f"targets of {what} have a {int(found.min())}: classes are numbers from 0")
    return found
