"""A method whose clients do nothing, to see that no engine does something else in their place."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch import Tensor

from fedrolex.clients.optimizer import Rate
from fedrolex.clients.slot import Slot
from fedrolex.clients.work import LocalTraining, Loss
from fedrolex.methods import FedRolex, Setup


class Resting(LocalTraining):
    """Steps that move nothing."""

    def step(self, slot: Slot, x: Tensor, y: Tensor, loss: Loss, rate: Rate, held: Tensor | None = None) -> Tensor:
        """Tell the loss."""
        return self.objective(slot.scores(x), y, loss, held).detach()


@dataclass(frozen=True, kw_only=True)
class Idle(FedRolex):
    """FedRolex without training."""

    def work(self, setup: Setup) -> LocalTraining:
        """Nothing."""
        return Resting(**asdict(setup.client))
