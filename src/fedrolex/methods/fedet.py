"""Fed-ET: small models of several sizes teach a large one that only the server holds.

Cho, Manoel, Joshi, Sim, Dimitriadis, "Heterogeneous Ensemble Knowledge Transfer for Training Large Models in Federated
Learning", IJCAI 2022. After clients of each size are averaged: the mean of all clients' representation layers goes into
the server's model; for public examples, clients' logits are weighed by their variance, which is their confidence; the
server's model learns the class they agree on and, a little, what those say who do not agree; its representation layer
goes back into all small models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from fedrolex.clients.work import LocalTraining
from fedrolex.core.errors import check_numbers
from fedrolex.methods.method import Method
from fedrolex.methods.server_round import ServerRound
from fedrolex.models.represented import TOP
from fedrolex.slicing.schemes import Static
from fedrolex.slicing.windows import Rounding


@dataclass(frozen=True)
class Consensus:
    """What clients say together about public examples.

    Attributes:
        label: the class they agree on, int64 ``(n,)``.
        apart: logits of those who say another class, weighed, ``(n, classes)``; of no meaning where there are none.
        torn: whether there are any, bool ``(n,)``.
    """

    label: Tensor
    apart: Tensor
    torn: Tensor


@dataclass(frozen=True, kw_only=True)
class EnsembleTransfer:
    """The server's part.

    Attributes:
        diversity: λ, how much those who do not agree count.
        confident: weigh clients by the variance of their logits; otherwise all alike.
        steps, batch, lr, momentum: of SGD on the server's model.
    """

    diversity: float = 0.05
    confident: bool = True
    steps: int = 128
    batch: int = 64
    lr: float = 0.005
    momentum: float = 0.9

    def __post_init__(self) -> None:
        least = {"diversity": 0, "steps": 0, "batch": 2, "momentum": 0}
        check_numbers("method.transfer", self, least=least, positive=("lr",))

    def __call__(self, server: ServerRound) -> dict[Fraction | None, dict[str, Tensor]]:
        """New tensors of the server's model (None) and of every size."""
        assert server.own is not None
        uploads = [(group, upload) for group in server.groups.values() for upload in group.uploads]
        top = {name: torch.stack([upload[name] for _, upload in uploads]).mean(0) for name in TOP}
        module = server.own.load({**server.own.average, **top}).train()
        if self.steps:
            consensus = self.consensus([group.scores(upload, server.public) for group, upload in uploads])
            self.teach(module, server, consensus)
        new = server.own.tensors()
        top = {name: new[name] for name in TOP}
        return {None: new, **{width: {**group.average, **top} for width, group in server.groups.items()}}

    def consensus(self, logits: Sequence[Tensor]) -> Consensus:
        """Of clients' logits, each ``(n, classes)``."""
        every = torch.stack(list(logits))
        trust = (
            every.var(2, unbiased=False, keepdim=True) + 1e-12 if self.confident else torch.ones_like(every[..., :1])
        )
        label = (trust * every).sum(0).argmax(1)
        trust = trust * (every.argmax(2) != label)[..., None]
        total = trust.sum(0)
        apart = (trust * every).sum(0) / total.clamp(min=1e-30)
        return Consensus(label, apart, total[:, 0] > 0)

    def teach(self, module: nn.Module, server: ServerRound, consensus: Consensus) -> None:
        """Train the server's model on the consensus, in place."""
        optimizer = torch.optim.SGD(module.parameters(), lr=self.lr, momentum=self.momentum)
        for rows in server.batches(self.batch, self.steps, "transfer"):
            scores = module(server.public[rows])
            loss = cross_entropy(scores, consensus.label[rows])
            torn = consensus.torn[rows]
            if self.diversity:
                apart = kl_div(scores.log_softmax(1), consensus.apart[rows].softmax(1), reduction="none").sum(1)
                loss = loss + self.diversity * torch.where(torn, apart, 0.0).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def fedet(client: LocalTraining, *, transfer: EnsembleTransfer | None = None, rounding: Rounding = "floor") -> Method:
    """Every capacity has a model of its own, the server a larger one that no client need hold."""
    return Method(
        name="fedet",
        scheme=Static(rounding=rounding),
        client=client,
        own_models=True,
        server_model=True,
        server=transfer or EnsembleTransfer(),
    )
