"""SCAFFOLD: control variates against client drift.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML
2020. The server keeps c, every client cᵢ, both zero at first and in the shapes of the trainable parameters. A client
steps along g − cᵢ + c, then renews its own:

    option I:   cᵢ⁺ = gradient of its loss at the model it received
    option II:  cᵢ⁺ = cᵢ − c + (received − trained) / (K · η)

and sends cᵢ⁺ − cᵢ. The server adds the sum of those, divided by the number of *all* clients, to c. So c stays the mean
of all cᵢ, whoever takes part.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from fedrolex.clients import MODEL, Job, LocalTraining, Memory, Slot, Tensors, Upload, Visit, elementwise
from fedrolex.core import FedrolexError
from fedrolex.methods.method import adding
from fedrolex.methods.needs import Needs
from fedrolex.methods.one_size import OneSize
from fedrolex.methods.settings import Weighted
from fedrolex.methods.setup import Setup
from fedrolex.rounds import Fleet, Round, Server, State

Option = Literal["I", "II"]
Denominator = Literal["steps", "momentum"]
CONTROL = "control"


@dataclass(frozen=True, kw_only=True)
class ControlledTraining(LocalTraining):
    """Steps along g − cᵢ + c; what the client keeps is cᵢ."""

    denominator: Denominator = "momentum"
    constants = ("correction",)

    def before(self, visit: Visit) -> None:
        """The correction is c − cᵢ, with cᵢ = 0 for a newcomer."""
        c, own = visit.job.sent[CONTROL], visit.job.kept
        visit.constants["correction"] = {n: t.clone() if own is None else t - own[n].to(t) for n, t in c.items()}

    @elementwise
    def correct(self, parameters: list[Tensor], gradients: list[Tensor], memory: Memory) -> None:
        """Add the correction."""
        torch._foreach_add_(gradients, memory.constants["correction"])

    def renewed(self, visit: Visit) -> dict[str, Tensor]:
        """cᵢ⁺ of option II."""
        distance = self.distance(visit.plan.round, visit.steps)
        received, trained, correction = visit.received, visit.trained, visit.constants["correction"]
        return {name: (received[name] - trained[name]) / distance - change for name, change in correction.items()}

    def distance(self, round: int, steps: int) -> float:
        """How far a gradient of 1 moves a parameter in so many steps."""
        m = self.momentum if self.denominator == "momentum" else 0.0
        return self.rate(round) * (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)

    @torch.no_grad()
    def after(self, visit: Visit) -> None:
        """Keep cᵢ⁺, send how it changed."""
        new, own = self.renewed(visit), visit.job.kept
        visit.kept = new
        visit.sent = {name: tensor if own is None else tensor - own[name].to(tensor) for name, tensor in new.items()}


@dataclass(frozen=True, kw_only=True)
class GradientControlledTraining(ControlledTraining):
    """Option I: cᵢ⁺ is the gradient at the received model, which has to be found before training."""

    def train(self, visit: Visit, slot: Slot) -> None:
        """Find the gradient, then train."""
        visit.sent = self.gradient(visit, slot)
        super().train(visit, slot)

    def gradient(self, visit: Visit, slot: Slot) -> dict[str, Tensor]:
        """Of the received model, mean over the client's examples as they are stored, weight decay included."""
        task, data, held = visit.plan.task, visit.examples, visit.held(self.mask)
        total = [torch.zeros_like(p) for p in slot.parameters]
        slot.module.eval()
        for rows in torch.arange(len(data), device=data.y.device).split(self.batch):
            value = self.objective(slot.scores(task.inputs(data.x[rows])), data.y[rows], task.loss, held)
            found = torch.autograd.grad(value, slot.parameters, allow_unused=True, materialize_grads=True)
            torch._foreach_add_(total, found, alpha=len(rows) / len(data))
        with torch.no_grad():
            torch._foreach_add_(total, slot.parameters, alpha=self.weight_decay)
        return dict(zip(slot.names, total, strict=True))

    def renewed(self, visit: Visit) -> dict[str, Tensor]:
        """cᵢ⁺ of option I."""
        return visit.sent


@dataclass(frozen=True, kw_only=True)
class Scaffold(OneSize, Weighted):
    """One model of ``width`` for everyone, with control variates.

    Attributes:
        option: how a client renews its variate, see above.
        denominator: of option II: ``steps`` is K · η, as in the paper, which has no momentum; ``momentum`` is what a
            gradient that stays the same moves a client by in K steps, the same where there is no momentum.
    """

    option: Option = "II"
    denominator: Denominator = "momentum"
    needs = Needs(one_size=True, client_state=True)

    def check_fleet(self, fleet: Fleet, client: LocalTraining, scale: int) -> None:
        """A step is a gradient."""
        super().check_fleet(fleet, client, scale)
        if client.optimizer != "sgd":
            raise FedrolexError(
                f"scaffold needs client.optimizer sgd: with {client.optimizer} a step is not a gradient"
            )

    def work(self, setup: Setup) -> LocalTraining:
        """Controlled steps."""
        kind = GradientControlledTraining if self.option == "I" else ControlledTraining
        return kind(**asdict(setup.client), denominator=self.denominator)

    def begin(self, server: Server) -> State:
        """c = 0."""
        return {CONTROL: {name: torch.zeros_like(server.state[MODEL][name]) for name in server.trainable()}}

    def send(self, server: Server, job: Job) -> Mapping[str, Tensors]:
        """c, in the shapes of the client's window."""
        return {CONTROL: server.main.axes.take(server.state[CONTROL], job.window)}

    @adding
    def take(self, round: Round, upload: Upload) -> None:
        """Add up how the clients' variates changed."""
        upload.check_sent(upload.job.sent[CONTROL])
        super().take(round, upload)
        c = round.state[CONTROL]
        total = round.notes.setdefault("changes", {name: torch.zeros_like(tensor) for name, tensor in c.items()})
        for name, change in upload.sent.items():
            round.server.main.axes.region(name, upload.job.window).add(total[name], change, 1.0)

    def finish(self, round: Round) -> State:
        """The average, and c moved by the mean change over all clients that can ever take part."""
        fleet = round.server.fleet
        clients = fleet.able(self.capacity(fleet, round.server.scale)) if self.able_only else fleet.clients
        c, changes = round.state[CONTROL], round.notes["changes"]
        return {**super().finish(round), CONTROL: {name: c[name] + changes[name] / clients for name in c}}
