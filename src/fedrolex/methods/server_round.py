"""What a server has at hand when a round's answers are averaged, for methods that then train on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn

from fedrolex.core.streams import shuffle
from fedrolex.models.norms import collect, static_norms, with_statistics

AT_ONCE = 500


@dataclass(frozen=True)
class Group:
    """The clients that train models of one size.

    Attributes:
        module: a model of that size, to load tensors into; its own are of no meaning.
        sent: the tensors the clients received.
        average: what came back, averaged; ``sent`` where nobody answered.
        uploads: what came back, client by client.
        weights: of the clients in the average.
    """

    module: nn.Module
    sent: Mapping[str, Tensor]
    average: Mapping[str, Tensor]
    uploads: Sequence[Mapping[str, Tensor]] = ()
    weights: Sequence[float] = ()

    def load(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """The module with these tensors."""
        with torch.no_grad():
            for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
                if name in tensors:
                    tensor.copy_(tensors[name])
        return self.module

    def tensors(self) -> dict[str, Tensor]:
        """A copy of what the module holds, of the names that travel."""
        held = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {name: held[name].detach().clone() for name in self.average}

    @torch.no_grad()
    def scores(self, tensors: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """What a model of this size with these tensors says in evaluation mode, shape ``(n, classes)``."""
        return said(self.load(tensors), inputs)


@dataclass(frozen=True)
class ServerRound:
    """One round, seen from the server.

    Attributes:
        round: counted from 0.
        seed: of the run.
        groups: by the part of the server's model they train; methods of one size have one.
        public: inputs without labels, ``(n, …)``.
        held: inputs and labels to judge by, where the method asks for them.
        own: the server's own model, where it has one that no client trains; ``average`` are its tensors.
    """

    round: int
    seed: int
    groups: Mapping[Fraction, Group]
    public: Tensor
    held: tuple[Tensor, Tensor] | None = None
    own: Group | None = None

    def batches(self, size: int, steps: int, purpose: str) -> Iterator[Tensor]:
        """So many random batches of rows of ``public``, epoch after epoch."""
        count, epoch = len(self.public), 0
        while steps > 0:
            order = torch.from_numpy(shuffle(count, self.seed, purpose, self.round, epoch)).to(self.public.device)
            for rows in order.split(size)[:steps]:
                if len(rows) > 1 or count == 1:  # batch norm cannot be trained on one
                    yield rows
                steps -= 1
            epoch += 1


@torch.no_grad()
def said(module: nn.Module, inputs: Tensor, statistics_of: Tensor | None = None) -> Tensor:
    """Scores of a model in evaluation mode; static norms take their statistics from the inputs (or from others)."""
    before = module.training
    if static_norms(module):
        source = inputs if statistics_of is None else statistics_of
        module = with_statistics(module, collect(module, source.split(AT_ONCE)))
    module.eval()
    try:
        return torch.cat([module(part).float() for part in inputs.split(AT_ONCE)])
    finally:
        module.train(before)
