"""FedDF: models of several sizes, fused by distilling the ensemble of all clients into each.

Lin, Kong, Stich, Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020. Clients of
one size are averaged; then every average learns, on public examples, what the mean of *all* clients' logits says, until
a few labelled examples show no more progress.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn

from fedrolex.clients.work import LocalTraining
from fedrolex.core.errors import check_numbers
from fedrolex.methods.method import Method
from fedrolex.methods.server_round import Group, ServerRound, said
from fedrolex.slicing.schemes import Static
from fedrolex.slicing.windows import Rounding


@dataclass(frozen=True, kw_only=True)
class EnsembleDistillation:
    """The server's part.

    Attributes:
        steps: most steps for one average; the authors have 10,000.
        batch, lr: of Adam, its rate annealed to 0 along a cosine over ``steps``.
        temperature: divides logits on both sides.
        clip: largest norm of a gradient.
        judge_every: steps between looks at the held-out examples; the best look is kept. The authors have 100.
        patience: steps without progress after which it ends; the authors have 1000.
    """

    steps: int = 500
    batch: int = 64
    lr: float = 1e-3
    temperature: float = 1.0
    clip: float = 5.0
    judge_every: int = 25
    patience: int = 100

    def __post_init__(self) -> None:
        least = {"steps": 0, "batch": 2, "judge_every": 1, "patience": 1}
        check_numbers("method.distillation", self, least=least, positive=("lr", "temperature", "clip"))

    def __call__(self, server: ServerRound) -> dict[Fraction | None, dict[str, Tensor]]:
        """Teach the average of every size; their new tensors."""
        if not (self.steps and any(group.uploads for group in server.groups.values())):
            return {width: dict(group.average) for width, group in server.groups.items()}
        target = self.target(server)
        return {width: self.taught(server, width, group, target) for width, group in server.groups.items()}

    def target(self, server: ServerRound) -> Tensor:
        """What all clients say together: the softmax of their mean logits, ``(n, classes)``."""
        everyone = [(group, upload) for group in server.groups.values() for upload in group.uploads]
        logits = torch.stack([group.scores(upload, server.public) for group, upload in everyone]).mean(0)
        return (logits / self.temperature).softmax(1)

    def taught(self, server: ServerRound, width: Fraction, group: Group, target: Tensor) -> dict[str, Tensor]:
        """The average of one size after it learned the target."""
        student = group.load(group.average).train()
        optimizer = torch.optim.Adam(student.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        best, found, since = self.judged(server, student), group.tensors(), 0
        for step, rows in enumerate(server.batches(self.batch, self.steps, f"distil {width}"), 1):
            scores = student(server.public[rows]) / self.temperature
            loss = nn.functional.kl_div(scores.log_softmax(1), target[rows], reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), self.clip)
            optimizer.step()
            schedule.step()
            if step % self.judge_every == 0 or step == self.steps:
                now = self.judged(server, student)
                since += self.judge_every
                if now > best:
                    best, found, since = now, group.tensors(), 0
                if since >= self.patience:
                    break
        return found

    @staticmethod
    def judged(server: ServerRound, student: nn.Module) -> float:
        """Accuracy on the held-out examples."""
        assert server.held is not None
        x, y = server.held
        return float((said(student, x, server.public).argmax(1) == y).double().mean())


def feddf(
    client: LocalTraining, *, distillation: EnsembleDistillation | None = None, rounding: Rounding = "floor"
) -> Method:
    """Every capacity has a model of its own; sizes learn from each other through the ensemble alone."""
    return Method(
        name="feddf",
        scheme=Static(rounding=rounding),
        client=client,
        own_models=True,
        server=distillation or EnsembleDistillation(),
    )
