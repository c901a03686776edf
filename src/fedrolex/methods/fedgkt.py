"""FedGKT: clients train the first layers, the server the rest, and both learn from each other's logits.

He, Annavaram, Avestimehr, "Group Knowledge Transfer: Federated Learning of Large CNNs at the Edge", NeurIPS 2020. A
client trains a small network of its own: an extractor and a head. It sends, for every example, the extractor's feature
map, its logits and the label. The server trains a large network on the feature maps, and sends its logits for every
example back; in the next round the client learns from those too. Logits belong to examples, never to places in a
batch: the released code mixes them up whenever it shuffles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy, kl_div

from fedrolex.clients.optimizer import Memory, adam
from fedrolex.clients.work import LocalTraining
from fedrolex.core.errors import check_numbers
from fedrolex.core.streams import shuffle
from fedrolex.methods.method import Method
from fedrolex.slicing.schemes import Static

MAPS = 16  # channels of the feature maps that travel


class Edge(nn.Module):
    """A client's network: one convolution whose maps are sent, and a small head that never leaves the client.

    Args:
        channels: of the images.
        classes: of the scores.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(channels, MAPS, 3, padding=1), nn.GroupNorm(1, MAPS)
        self.conv, self.conv_norm = nn.Conv2d(MAPS, MAPS, 3, padding=1), nn.GroupNorm(1, MAPS)
        self.head = nn.Linear(4 * MAPS, classes)

    def features(self, x: Tensor) -> Tensor:
        """Images to maps of the same size, ``(batch, 16, h, w)``."""
        return torch.relu(self.norm(self.stem(x)))

    def forward(self, x: Tensor) -> Tensor:
        """Images to scores."""
        maps = self.features(x)
        maps = torch.relu(self.conv_norm(self.conv(maps)) + maps)
        scores: Tensor = self.head(adaptive_avg_pool2d(maps, 2).flatten(1))
        return scores


@dataclass(frozen=True, kw_only=True)
class KnowledgeTransfer:
    """How client and server learn.

    Attributes:
        temperature: T of both distillations.
        alpha: weight of what a client learns from the server.
        server_alpha: weight of what the server learns from clients; 0 is what the authors' documented commands do.
        lr, weight_decay: of Adam, on both sides.
        server_epochs, server_batch: of the server; clients have the recipe's.
    """

    temperature: float = 3.0
    alpha: float = 1.0
    server_alpha: float = 1.0
    lr: float = 1e-3
    weight_decay: float = 1e-4
    server_epochs: int = 5
    server_batch: int = 64

    def __post_init__(self) -> None:
        least = {"alpha": 0, "server_alpha": 0, "weight_decay": 0, "server_epochs": 1, "server_batch": 2}
        check_numbers("method.knowledge", self, least=least, positive=("temperature", "lr"))

    def distance(self, student: Tensor, teacher: Tensor) -> Tensor:
        """T² · KL(teacher ‖ student) at temperature T, mean over examples."""
        t = self.temperature
        return t * t * kl_div((student / t).log_softmax(1), (teacher / t).softmax(1), reduction="batchmean")

    def learn(
        self,
        module: nn.Module,
        memory: Memory,
        x: Tensor,
        y: Tensor,
        teacher: Tensor | None,
        *,
        weight: float,
        batches: Iterator[Tensor],
    ) -> float:
        """Train a network on labels and, where there is a teacher, on its logits, row by row; the mean loss."""
        module.train()
        parameters: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        losses = []
        for rows in batches:
            scores = module(x[rows])
            loss = cross_entropy(scores, y[rows])
            if teacher is not None and weight:
                loss = loss + weight * self.distance(scores, teacher[rows])
            gradients = list(torch.autograd.grad(loss, parameters))
            with torch.no_grad():
                torch._foreach_add_(gradients, parameters, alpha=self.weight_decay)
                adam(parameters, gradients, memory, torch.tensor(self.lr, device=x.device))
            losses.append(loss.detach())
        return float(torch.stack(losses).mean()) if losses else float("nan")


def batches(count: int, size: int, epochs: int, device: torch.device, *key: object) -> Iterator[Tensor]:
    """Rows of every batch, epoch after epoch; a last batch of one is left out, which norms may not take."""
    for epoch in range(epochs):
        order = torch.from_numpy(shuffle(count, 0, "gkt", *key, epoch)).to(device)
        yield from (rows for rows in order.split(size) if len(rows) > 1 or 1 in (size, count))


def fedgkt(client: LocalTraining, *, transfer: KnowledgeTransfer | None = None) -> Method:
    """Clients hold the first layers; the server's network is the task's, fed with feature maps."""
    return Method(name="fedgkt", scheme=Static(), client=client, knowledge=transfer or KnowledgeTransfer())
