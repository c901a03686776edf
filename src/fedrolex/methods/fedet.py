"""Fed-ET: small models of several sizes teach a large one that only the server holds.

Cho, Manoel, Joshi, Sim, Dimitriadis, "Heterogeneous Ensemble Knowledge Transfer for Training Large Models in Federated
Learning", IJCAI 2022. After clients of each capacity are averaged: the mean of all clients' representation layers goes
into the server's model; for public examples, clients' logits are weighed by their variance, which is their confidence;
the server's model learns the class that clients agree on and, a little, the logits of those who do not agree; its
representation layer goes back into all small models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from fedrolex.clients import MODEL, Network, copied, in_precision
from fedrolex.core import FedrolexError, check_numbers
from fedrolex.methods.distillation import Public, check_examples_a_round, teaching
from fedrolex.methods.model_per_capacity import ModelPerCapacity
from fedrolex.methods.needs import Needs
from fedrolex.methods.setup import Setup
from fedrolex.models import TOP
from fedrolex.rounds import Round, State
from fedrolex.slicing import Axes, refs

REPRESENTATION = 64  # the size of the representation where a recipe says nothing


@dataclass(frozen=True)
class Consensus:
    """What clients say together about public examples.

    Attributes:
        label: the class that clients agree on, int64 ``(n,)``.
        apart: weighed logits of clients who say another class, ``(n, classes)``; of no meaning where there are none.
        torn: whether there are such clients, bool ``(n,)``.
    """

    label: Tensor
    apart: Tensor
    torn: Tensor


@dataclass(frozen=True, kw_only=True)
class FedET(ModelPerCapacity):
    """Every capacity has a model of its own, the server a larger one that no client need hold.

    Attributes:
        diversity: λ, how much clients count that do not agree.
        confident: weigh clients by the variance of their logits; otherwise all alike.
        examples: public examples a round, drawn anew; null is all of them.
        steps, batch, lr, momentum: of SGD on the server's model.
    """

    diversity: float = 0.05
    confident: bool = True
    examples: int | None = None
    steps: int = 128
    batch: int = 64
    lr: float = 0.005
    momentum: float = 0.9
    needs = Needs(public=True, uploads=True, larger_server=True, families=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_examples_a_round(self.examples)
        least = {"diversity": 0, "steps": 0, "batch": 2, "momentum": 0}
        check_numbers("method", self, least=least, positive=("lr",))

    def wants(self) -> dict[str, Any]:
        """Public examples, and a representation layer."""
        return {**super().wants(), "representation": REPRESENTATION}

    def networks(self, setup: Setup) -> dict[str, Network]:
        """All networks have a last layer of one shape."""
        found = super().networks(setup)
        if not all(whole_at_every_width(network.axes, name) for network in found.values() for name in TOP):
            raise FedrolexError(
                f"{self.name} needs a last layer of one shape at every width: set task.representation, or wrap a "
                "network of your own in fedrolex.models.Represented"
            )
        return found

    def finish(self, round: Round) -> State:
        """Average the clients of every capacity; representation up, transfer, representation down."""
        server, averages = round.server, round.average.result()
        groups = self.groups(round, averages)
        uploads = [(group, upload) for group in groups.values() for upload in group.uploads]
        top = {name: torch.stack([upload[name] for _, upload in uploads]).mean(0) for name in TOP}
        axes, module = server.main.axes, server.main.module
        axes.load(module, {**round.state[MODEL], **top})
        with teaching(round, self.examples) as public:
            if self.steps:
                said = [group.scores(upload, public) for group, upload in uploads]
                self.teach(module, public, self.consensus(said))
        large = copied(axes.state(module))
        small = {level: {**group.average, **{name: large[name] for name in TOP}} for level, group in groups.items()}
        return {**self.replaced(round, averages, small), MODEL: large}

    def consensus(self, logits: Sequence[Tensor]) -> Consensus:
        """Of clients' logits, each ``(n, classes)``."""
        every = torch.stack(list(logits))
        spread = every.var(2, unbiased=False, keepdim=True) + 1e-12
        trust = spread if self.confident else torch.ones_like(spread)
        label = (trust * every).sum(0).argmax(1)
        trust = trust * (every.argmax(2) != label)[..., None]
        total = trust.sum(0)
        apart = (trust * every).sum(0) / total.clamp(min=1e-30)
        return Consensus(label, apart, total[:, 0] > 0)

    def teach(self, module: nn.Module, public: Public, consensus: Consensus) -> None:
        """Train the server's model on the consensus, in place."""
        module.train()
        optimizer = torch.optim.SGD(module.parameters(), lr=self.lr, momentum=self.momentum)
        for rows in public.batches(self.batch, self.steps, "transfer"):
            said = in_precision(module, public.inputs[rows], public.precision)
            loss = cross_entropy(said, consensus.label[rows])
            if self.diversity:
                apart = kl_div(said.log_softmax(1), consensus.apart[rows].softmax(1), reduction="none").sum(1)
                loss = loss + self.diversity * torch.where(consensus.torn[rows], apart, 0.0).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def whole_at_every_width(axes: Axes, name: str) -> bool:
    """Whether there is a tensor of that name, which no capacity cuts."""
    if name not in axes.tensors:
        return False
    return not any(axes.axes[axis].kind == "width" for dim in axes.tensors[name].dims for axis in refs(dim))
