"""Methods for tests of devices: one that trusts clients, one whose clients move by little."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from fedrolex.clients import LocalTraining, Upload, Visit
from fedrolex.methods import FedRolex
from fedrolex.rounds import Round


@dataclass(frozen=True, kw_only=True)
class Measured(LocalTraining):
    """Clients say how long what they trained is."""

    def after(self, visit: Visit) -> None:
        visit.sent = {"length": torch.stack([t.float().norm() for t in visit.trained.values()]).norm().reshape(1)}


@dataclass(frozen=True, kw_only=True)
class Trusting(FedRolex):
    """FedRolex that looks up a client's length before it takes the rest."""

    def work(self, setup: Any) -> LocalTraining:
        return Measured(**asdict(setup.client))

    def take(self, round: Round, upload: Upload) -> None:
        float(upload.sent["length"])
        super().take(round, upload)


@dataclass(frozen=True, kw_only=True)
class Creep(LocalTraining):
    """Clients that move one value of every tensor by 1, and all others by very little, the same in every round."""

    little: float = 0.002

    def after(self, visit: Visit) -> None:
        moved = {name: torch.full_like(tensor, self.little) for name, tensor in visit.received.items()}
        for tensor in moved.values():
            tensor.view(-1)[0] = 1.0
        visit.trained = {name: tensor + moved[name] for name, tensor in visit.received.items()}


@dataclass(frozen=True, kw_only=True)
class Creeping(FedRolex):
    """FedRolex with such clients."""

    def work(self, setup: Any) -> LocalTraining:
        return Creep(**asdict(setup.client))
