"""A task: a model, data that is spread over clients, and how well the model does on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedrolex.tasks.partition import alike, even


@dataclass(frozen=True)
class Examples:
    """Inputs and targets, one row each."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def rows(self, index: Tensor) -> Examples:
        """Some of them."""
        return Examples(self.x[index], self.y[index])

    def to(self, device: torch.device) -> Examples:
        """The same on another device."""
        return Examples(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Task:
    """What is learned.

    Attributes:
        name: for reports.
        build: makes the server's model, ``build(scale)`` a ``scale`` times wider one; weights are drawn from
            torch's current random state.
        train: the examples the clients hold.
        test: examples no client holds.
        parts: for each client, the rows of ``train`` it holds.
        test_parts: for each client, the rows of ``test`` that are like its own (its labels).
        loss: mean loss of a batch from (outputs, targets).
    """

    name: str
    build: Callable[[int], nn.Module]
    train: Examples
    test: Examples
    parts: Sequence[Tensor]
    test_parts: Sequence[Tensor]
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy

    @staticmethod
    def split(
        build: Callable[[int], nn.Module],
        train: Examples,
        test: Examples,
        clients: int,
        seed: int = 0,
        name: str = "task",
    ) -> Task:
        """A task of one's own, its training examples spread evenly over clients; targets are classes."""
        parts = even(len(train), clients, seed)
        return Task(name, build, train, test, parts, alike(train.y, parts, test.y))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batch: int = 1024) -> dict[str, float]:
        """Accuracy over the test set, and the mean over clients of the accuracy on examples like theirs.

        One forward pass gives both; the model is put into evaluation mode for it.
        """
        before = model.training
        model.eval()
        outputs = torch.cat([model(x) for x in self.test.x.split(batch)])
        model.train(before)
        right = (outputs.argmax(-1) == self.test.y).double()
        local = [float(right[rows].mean()) for rows in self.test_parts if len(rows)]
        return {
            "loss": float(self.loss(outputs, self.test.y)),
            "global_accuracy": float(right.mean()),
            "local_accuracy": sum(local) / len(local) if local else float("nan"),
        }
