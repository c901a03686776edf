"""The server's optimiser: the cohort's average change taken as a gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated Optimization", ICLR 2021. The change
of every trainable parameter is smoothed and scaled; buffers keep their average: a running variance that an adaptive
optimiser moved could become negative.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fedrolex.core.errors import FedrolexError, check_numbers

Kind = Literal["none", "sgd", "adam", "yogi"]


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer:
    """How the server moves.

    Attributes:
        name: ``none`` takes averages as they are; ``sgd`` (with momentum: FedAvgM), ``adam`` (FedAdam), ``yogi``
            (FedYogi).
        lr: its rate; with ``sgd``, 1 and no momentum the plain average.
        momentum: of the change: β₁ of Adam and Yogi.
        second: β₂ of Adam and Yogi.
        floor: τ, added to the root of the second moment.
    """

    name: Kind = "sgd"
    lr: float = 1.0
    momentum: float = 0.0
    second: float = 0.99
    floor: float = 1e-3

    def __post_init__(self) -> None:
        if self.name not in get_args(Kind):
            raise FedrolexError(f"method.server.name is {self.name!r}: use one of {', '.join(get_args(Kind))}")
        check_numbers("method.server", self, least={}, positive=("lr", "floor"))
        for name in ("momentum", "second"):
            if not 0 <= getattr(self, name) < 1:
                raise FedrolexError(f"method.server.{name} is {getattr(self, name)}: give 0 or more, below 1")

    @property
    def first_values(self) -> dict[str, float]:
        """What it remembers of every parameter, by suffix, and the value it begins with."""
        return {"first": 0.0} if self.name == "sgd" else {"first": 0.0, "second": self.floor**2}

    @torch.no_grad()
    def step(
        self, before: Mapping[str, Tensor], average: Mapping[str, Tensor], parameters: Iterable[str]
    ) -> dict[str, Tensor]:
        """The average with its parameters moved by the optimiser, and what it remembers (``name@first`` …).

        Args:
            before: the server's tensors before the round, with what was remembered.
            average: the same after it.
            parameters: names of the tensors to move.
        """
        new = dict(average)
        for name in parameters:
            change = average[name] - before[name]
            first = before[f"{name}@first"]
            if self.name == "sgd":
                first = self.momentum * first + change
                move = first
            else:
                first = torch.lerp(change, first, self.momentum)
                second = self._second(before[f"{name}@second"], change.square())
                new[f"{name}@second"] = second
                move = first / (second.sqrt() + self.floor)
            new[f"{name}@first"] = first
            new[name] = before[name] + self.lr * move
        return new

    def _second(self, before: Tensor, square: Tensor) -> Tensor:
        if self.name == "adam":
            return torch.lerp(square, before, self.second)
        return before - (1 - self.second) * square * torch.sign(before - square)
