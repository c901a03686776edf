"""The server's optimiser: the cohort's average change taken as a gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated Optimization", ICLR 2021. The change
of every trainable parameter is smoothed and scaled; buffers keep their average: a running variance that an adaptive
optimiser moved could become negative.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from fedrolex.clients import MODEL
from fedrolex.core import FedrolexError, check_numbers, check_words
from fedrolex.rounds import State

FIRST, SECOND = "server_optimizer.first", "server_optimizer.second"
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

    name: Kind = "none"
    lr: float = 1.0
    momentum: float = 0.0
    second: float = 0.99
    floor: float = 1e-3

    def __post_init__(self) -> None:
        check_words("method.server_optimizer", self)
        check_numbers("method.server_optimizer", self, least={}, positive=("lr", "floor"))
        for name in ("momentum", "second"):
            if not 0 <= getattr(self, name) < 1:
                raise FedrolexError(f"method.server_optimizer.{name} is {getattr(self, name)}: give 0 or more, below 1")
        idle = [each for each in fields(self) if self.name == "none" and getattr(self, each.name) != each.default]
        if idle:
            said = f"method.server_optimizer.{idle[0].name} is {getattr(self, idle[0].name)}, but there is no optimiser"
            raise FedrolexError(f"{said}: set method.server_optimizer.name to sgd, adam or yogi")

    def begin(self, parameters: Mapping[str, Tensor], section: str = MODEL) -> State:
        """What the optimiser remembers of a section's parameters before the first round, in sections of its own."""
        if self.name == "none":
            return {}
        of_first, of_second = _memories(section)
        first = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
        if self.name == "sgd":
            return {of_first: first}
        return {of_first: first, of_second: {n: torch.full_like(t, self.floor**2) for n, t in parameters.items()}}

    @torch.no_grad()
    def moved(self, before: State, average: State, names: Iterable[str], section: str = MODEL) -> State:
        """What a round's average changed, a section's parameters of these names moved on, and what is remembered."""
        if self.name == "none" or section not in average:
            return average
        of_first, of_second = _memories(section)
        old, mean = before[section], average[section]
        new: State = {**average, section: dict(mean), of_first: {}} | ({} if self.name == "sgd" else {of_second: {}})
        for name in names:
            change, first = mean[name] - old[name], before[of_first][name]
            if self.name == "sgd":
                move = first = self.momentum * first + change
            else:
                first = torch.lerp(change, first, self.momentum)
                new[of_second][name] = second = self._second(before[of_second][name], change.square())
                move = first / (second.sqrt() + self.floor)
            new[of_first][name] = first
            new[section][name] = old[name] + self.lr * move
        return new

    def _second(self, before: Tensor, square: Tensor) -> Tensor:
        if self.name == "adam":
            return torch.lerp(square, before, self.second)
        return before - (1 - self.second) * square * torch.sign(before - square)


def _memories(section: str) -> tuple[str, str]:
    """The sections of what is remembered of a section."""
    return (FIRST, SECOND) if section == MODEL else (f"{FIRST}.{section}", f"{SECOND}.{section}")
