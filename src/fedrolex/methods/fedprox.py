"""FedProx: clients are held back from drifting, and partial work counts.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020. A client
minimises its loss + μ/2 · ‖w − θ‖², θ being the model it received; whoever manages only a part of its steps
sends what it has.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fedrolex.clients import Job, LocalTraining, Memory, Visit, elementwise
from fedrolex.core import check_numbers
from fedrolex.methods.fedavg import FedAvg
from fedrolex.methods.setup import Setup


@dataclass(frozen=True, kw_only=True)
class ProximalTraining(LocalTraining):
    """Steps with the gradient of μ/2 · ‖w − received‖² in every gradient."""

    mu: float = 0.01
    constants = ("received",)

    def before(self, visit: Visit) -> None:
        """Steps need to know what was received."""
        visit.constants["received"] = visit.received

    @elementwise
    def pull(self, parameters: list[Tensor], gradients: list[Tensor], memory: Memory) -> None:
        """Add μ · (w − received)."""
        torch._foreach_add_(gradients, torch._foreach_sub(parameters, memory.constants["received"]), alpha=self.mu)


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term, which keeps stragglers; with μ = 0 and no stragglers it is FedAvg.

    Attributes:
        mu: strength of the pull back to the received model.
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers("method", self, least={"mu": 0})

    def work(self, setup: Setup) -> LocalTraining:
        """The proximal term; without one, plain training."""
        return ProximalTraining(**asdict(setup.client), mu=self.mu) if self.mu else setup.client

    def waits_for(self, job: Job) -> bool:
        """Stragglers count, too."""
        return True
