"""Rolling sub-models whose updates are shortened before they are averaged, and which are pulled towards zero."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from fedrolex.clients.messages import Upload
from fedrolex.clients.optimizer import Memory
from fedrolex.clients.work import LocalTraining, elementwise
from fedrolex.methods import FedRolex, Setup
from fedrolex.rounds.round import Round


@dataclass(frozen=True, kw_only=True)
class Shrinking(LocalTraining):
    """Steps that also make weights smaller."""

    shrink: float = 0.0

    @elementwise
    def correct(self, parameters: list[Tensor], gradients: list[Tensor], memory: Memory) -> None:
        """Add a multiple of the weights."""
        torch._foreach_add_(gradients, parameters, alpha=self.shrink)


@dataclass(frozen=True, kw_only=True)
class Clipped(FedRolex):
    """FedRolex whose server trusts no client beyond ``most``.

    Attributes:
        most: largest norm of a client's change.
        shrink: how strongly clients pull weights towards zero.
    """

    most: float = 1.0
    shrink: float = 0.01

    def work(self, setup: Setup) -> LocalTraining:
        """Shrinking steps."""
        return Shrinking(**asdict(setup.client), shrink=self.shrink)

    def take(self, round: Round, upload: Upload) -> None:
        """Shorten the client's change, then average as always."""
        before = round.plan.received(upload.job)
        change = {name: upload.tensors[name] - tensor for name, tensor in before.items()}
        norm = torch.stack([tensor.double().norm() for tensor in change.values()]).norm()
        short = min(1.0, self.most / float(norm))
        shortened = {name: before[name] + short * tensor for name, tensor in change.items()}
        super().take(round, replace(upload, tensors=shortened))
