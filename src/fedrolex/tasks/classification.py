"""Examples of classes, in memory, spread over clients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedrolex.core import FedrolexError, sample, shuffle
from fedrolex.models import evaluating
from fedrolex.tasks.masking import Mask, masked
from fedrolex.tasks.metrics import Metrics, measured
from fedrolex.tasks.partition import Partition
from fedrolex.tasks.pixels import Pixels
from fedrolex.tasks.task import Examples, Task

MEASURED = 1000  # clients whose local accuracy is measured, at most
AT_ONCE = 2**26  # masked scores held at once, at most


@dataclass(frozen=True)
class Classification(Task):
    """A task whose targets are classes.

    Attributes:
        name, build, loss, frozen: see :class:`~fedrolex.tasks.task.Task`.
        train: the examples the clients hold.
        test: examples no client holds.
        parts: for each client, the rows of ``train`` it holds.
        test_parts: for each client, the rows of ``test`` that are its own; by default all with its labels.
        pixels: how stored images become inputs; None where they are stored as such.
        validation, public: examples put aside, for choosing settings and for distillation.
        rare: classes that belong to the small devices.
        mask: how absent classes are treated where local accuracy is measured with them masked.
        classes: how many there are; by default one more than the largest target.
        models: by capacity, as in recipes, what makes the model its clients train instead of a part of ``build``'s.
        build_for: makes the model for so many input channels instead of the images', and so many times as wide, for
            feature maps (FedGKT).
    """

    name: str
    build: Callable[[int], nn.Module]
    train: Examples
    test: Examples
    parts: Sequence[Tensor]
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

    def __post_init__(self) -> None:
        targets = [part.y for part in (self.train, self.test) if len(part) and not part.y.is_floating_point()]
        largest = max((int(y.max()) for y in targets), default=0)
        if not self.classes:
            object.__setattr__(self, "classes", 1 + largest)
        if largest >= self.classes:
            raise FedrolexError(f"the task has a target {largest}, but {self.classes} classes")
        for what, rows in (("parts", len(self.train)), ("test_parts", len(self.test))):
            parts = getattr(self, what)
            for client, part in enumerate([parts.rows] if isinstance(parts, Partition) else parts or ()):
                if not isinstance(part, Tensor) or part.dtype != torch.int64:
                    raise FedrolexError(f"{what}[{client}] of the task is not a tensor of row numbers (int64)")
                if len(part) and not 0 <= int(part.min()) <= int(part.max()) < rows:
                    raise FedrolexError(f"{what}[{client}] of the task names a row outside 0..{rows - 1}")
        if self.test_parts is not None and len(self.test_parts) != len(self.parts):
            raise FedrolexError(f"a task of {len(self.parts)} parts, {len(self.test_parts)} test parts: give as many")

    # --- what training asks ---

    @property
    def clients(self) -> int:
        """How many clients hold data."""
        return len(self.parts)

    @property
    def random_inputs(self) -> bool:  # type: ignore[override]
        """Whether images are augmented."""
        return self.pixels is not None and self.pixels.random

    def client(self, number: int) -> Examples:
        """The rows a client holds."""
        return self.train.rows(self.parts[number].to(self.train.y.device))

    def inputs(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        """Normalised and augmented images, or what is stored."""
        return x if self.pixels is None else self.pixels(x, draws)

    def example(self) -> Tensor:
        """The first two training inputs."""
        return self.inputs(self.train.x[:2])

    def some_inputs(self, count: int, batch: int) -> Iterator[Tensor]:
        """A random choice of what clients hold, the same for every seed."""
        rows = self.parts.rows if isinstance(self.parts, Partition) else torch.cat(list(self.parts))
        chosen = rows[torch.from_numpy(shuffle(len(rows), 0, "calibration")[:count])]
        for part in _evenly(chosen.to(self.train.y.device), batch):
            yield self.inputs(self.train.x[part])

    def to(self, device: torch.device) -> Self:
        """Examples on another device; rows stay where they are."""
        held = {name: getattr(self, name) for name in ("train", "test", "pixels", "validation", "public")}
        return replace(self, **{name: part.to(device) for name, part in held.items() if part is not None})

    def fingerprint(self) -> str:
        """Of examples, their order and their clients."""
        found = blake2b(digest_size=8)
        rows = self.parts if isinstance(self.parts, Partition) else Partition.of(self.parts)
        for tensor in (self.train.x, self.train.y, self.test.x, self.test.y, rows.rows, rows.starts):
            found.update(tensor.cpu().contiguous().numpy().tobytes())
        return found.hexdigest()

    def facts(self) -> dict[str, Any]:
        """How the data was spread."""
        held = self._held.sum(1).double() if not self.train.y.is_floating_point() else None
        used = sum(len(part) for part in self.parts)
        return {
            "examples": used,
            "unused_examples": len(self.train) - used,
            "labels_per_client": None if held is None else float(held.mean()),
            "public_examples": 0 if self.public is None else len(self.public),
            "validation_examples": 0 if self.validation is None else len(self.validation),
        }

    # --- how good a model is ---

    def evaluate(
        self, model: nn.Module, *, batch: int = 500, apart: bool = False, metrics: Metrics | None = None
    ) -> dict[str, Any]:
        """Accuracy on the test set, and on every client's part of it, plain and with absent classes masked.

        One forward pass over the test set gives all of them, unless ``apart``. Local accuracies are means
        over all examples of all clients (of at most 1000 clients, evenly chosen).
        """
        with evaluating(model):
            outputs = self._outputs(model, self.test.x, batch)
            found: dict[str, Any] = {"loss": float(self.loss(outputs, self.test.y))}
            if not self.test.y.is_floating_point():
                found |= self._accuracies(model, outputs, apart)
            if self.validation is not None:
                scores = self._outputs(model, self.validation.x, batch)
                found["validation_accuracy"] = float((scores.argmax(-1) == self.validation.y).double().mean())
            found |= measured(metrics or {}, outputs, self.test.y)
        return found

    def _outputs(self, model: nn.Module, x: Tensor, batch: int) -> Tensor:
        return torch.cat([model(self.inputs(part)) for part in _evenly(x, batch)])

    def _accuracies(self, model: nn.Module, outputs: Tensor, apart: bool) -> dict[str, float]:
        y = self.test.y
        right = outputs.argmax(-1) == y
        measured = sample(self.clients, min(MEASURED, self.clients), 0, "measured").tolist()
        if apart or self.test_parts is not None:
            plain, hidden, total = self._counted_one_by_one(model, outputs, apart, measured)
        else:
            plain, hidden, total = self._counted(outputs, right, measured)
        found = {
            "global_accuracy": float(right.double().mean()),
            "local_accuracy": plain / total if total else float("nan"),
            "local_accuracy_masked": hidden / total if total else float("nan"),
        }
        if self.rare:
            among = torch.isin(y, torch.tensor(list(self.rare), device=y.device))
            found["rare_accuracy"] = float(right[among].double().mean())
        return found

    def _counted(self, outputs: Tensor, right: Tensor, clients: Sequence[int]) -> tuple[int, int, int]:
        """Right answers of all clients on examples of their classes, plain and masked, and how many there are.

        Clients of the same classes are measured once, all sets of classes in a few operations.
        """
        sets, times = self._held[list(clients)].unique(dim=0, return_counts=True)
        y, sets, times = self.test.y, sets.to(outputs.device), times.to(outputs.device)
        sums = torch.zeros(3, dtype=torch.int64, device=outputs.device)
        most = max(1, AT_ONCE // outputs.numel())
        for some, often in zip(sets.split(most), times.split(most), strict=True):
            own = some[:, y]
            hidden = (masked(outputs, some[:, None], self.mask).argmax(-1) == y) & own
            sums += (torch.stack([(own & right).sum(1), hidden.sum(1), own.sum(1)]) * often).sum(1)
        plain, masked_right, total = sums.tolist()
        return plain, masked_right, total

    def _counted_one_by_one(
        self, model: nn.Module, outputs: Tensor, apart: bool, clients: Sequence[int]
    ) -> tuple[int, int, int]:
        """The same where clients have test examples of their own, or go through the model on their own."""
        y = self.test.y
        plain = hidden = total = 0
        known: dict[bytes, tuple[int, int, int]] = {}
        for client in clients:
            held = self._held[client]
            key = held.numpy().tobytes() if self.test_parts is None else client.to_bytes(8, "little")
            if key not in known:
                own = held.to(y.device)[y].nonzero().flatten() if self.test_parts is None else self.test_parts[client]
                rows = own.to(y.device)
                alone = apart and len(rows)
                scores = self._outputs(model, self.test.x[rows], len(rows)) if alone else outputs[rows]
                sums = masked(scores, held.to(y.device), self.mask).argmax(-1) == y[rows]
                known[key] = (int((scores.argmax(-1) == y[rows]).sum()), int(sums.sum()), len(rows))
            plain, hidden, total = (a + b for a, b in zip((plain, hidden, total), known[key], strict=True))
        return plain, hidden, total

    @cached_property
    def _held(self) -> Tensor:
        """Which classes each client holds, bool, shape ``(clients, classes)``, on the CPU."""
        parts = self.parts if isinstance(self.parts, Partition) else Partition.of(self.parts)
        return parts.label_sets(self.train.y, self.classes)


def _evenly(rows: Tensor, most: int) -> Sequence[Tensor]:
    """Rows in pieces of (almost) equal size: no lonely last one, which batch norm could not take."""
    return rows.tensor_split(max(1, -(-len(rows) // most)))
