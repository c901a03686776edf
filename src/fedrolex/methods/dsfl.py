"""DS-FL: clients exchange what they say about public examples, never their models.

Itahara, Nishio, Koda, Morikura, Yamamoto, "Distillation-Based Semi-Supervised Federated Learning for
Communication-Efficient Collaborative Training with Non-IID Private Data", IEEE TMC 2023. In a round, the server names
some public examples. A client learns last round's labels of theirs, trains on its own data, and sends its probabilities
for this round's examples. The server averages them, lowers their entropy (ERA: a softmax of the mean *probabilities*,
divided by T), and its own model learns the result, which goes out with the next round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fedrolex.clients.work import LocalTraining
from fedrolex.core.errors import FedrolexError, check_numbers
from fedrolex.core.streams import sample, shuffle, words
from fedrolex.methods.method import Method
from fedrolex.slicing.schemes import Static
from fedrolex.slicing.windows import Rounding

Reduction = Literal["era", "power", "none"]


@dataclass(frozen=True, kw_only=True)
class SoftLabels:
    """How labels are made, and learned.

    Attributes:
        examples: public examples a round.
        reduce: of the labels' entropy: ``era``, a softmax of mean probabilities divided by ``temperature``, which
            flattens instead where there are many classes and none is likely; ``power``, mean probabilities to the power
            1 / ``temperature``, which never does; ``none``, the plain mean.
        temperature: see ``reduce``.
        epochs, batch, lr: of learning labels, by SGD.
    """

    examples: int = 1000
    reduce: Reduction = "era"
    temperature: float = 0.1
    epochs: int = 5
    batch: int = 50
    lr: float = 0.1

    def __post_init__(self) -> None:
        if self.reduce not in get_args(Reduction):
            raise FedrolexError(f"method.labels.reduce is {self.reduce!r}: use one of {', '.join(get_args(Reduction))}")
        least = {"examples": 2, "epochs": 0, "batch": 2}
        check_numbers("method.labels", self, least=least, positive=("temperature", "lr"))

    def chosen(self, count: int, seed: int, round: int) -> Tensor:
        """Which of so many public examples are labelled in a round, int64, ascending."""
        return torch.from_numpy(sample(count, min(self.examples, count), seed, "public", round))

    def together(self, every: Sequence[Tensor]) -> Tensor:
        """The labels that clients' probabilities ``(n, classes)`` make, with less entropy."""
        mean = torch.stack(list(every)).mean(0)
        if self.reduce == "era":
            return (mean / self.temperature).softmax(1)
        if self.reduce == "power":
            return (mean.clamp(min=1e-30).log() / self.temperature).softmax(1)
        return mean

    def learn(self, module: nn.Module, inputs: Tensor, labels: Tensor, *key: object) -> None:
        """Teach a model labels, in place; ``key`` is that of the order of batches, and of what the model draws."""
        module.train()
        optimizer = torch.optim.SGD(module.parameters(), lr=self.lr)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(words(1, 0, "learning", *key)[0] >> 1))
            for epoch in range(self.epochs):
                order = torch.from_numpy(shuffle(len(inputs), 0, "labels", *key, epoch)).to(inputs.device)
                for rows in order.split(self.batch):
                    if len(rows) < 2:  # batch norm cannot be trained on one
                        continue
                    said = module(inputs[rows]).log_softmax(1)
                    loss = nn.functional.kl_div(said, labels[rows], reduction="batchmean")
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()


def dsfl(client: LocalTraining, *, labels: SoftLabels | None = None, rounding: Rounding = "floor") -> Method:
    """Every client keeps a model of its own size; the server has the largest, which no client need hold."""
    return Method(name="dsfl", scheme=Static(rounding=rounding), client=client, labels=labels or SoftLabels())
