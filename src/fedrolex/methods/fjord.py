"""FjORD: ordered dropout, so that every width is a good model, and self-distillation.

Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane, "FjORD: Fair and Accurate Federated Learning under
heterogeneous targets with Ordered Dropout", NeurIPS 2021. A client of capacity p_max holds the first ⌈p_max · K⌉ nodes
of every layer. For every batch it draws a width p ≤ p_max and trains the first ⌈p · K⌉ of them; with distillation it
trains p_max, and p learns what p_max says. Positions are averaged over the clients that hold them, by samples. Running
statistics of batch norms are kept apart for every width: shared ones would fit none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from fedrolex.clients.optimizer import Rate
from fedrolex.clients.work import LocalTraining, Slot, in_precision, masked
from fedrolex.core.errors import FedrolexError, check_numbers
from fedrolex.methods.method import Method
from fedrolex.slicing.schemes import Ordered


@dataclass(frozen=True, kw_only=True)
class OrderedDropout(LocalTraining):
    """A client's work: batches at widths drawn for each.

    Attributes:
        distil: train the whole sub-model at every batch, and let the drawn width learn from it.
        alpha: how much of what the drawn width learns comes from the whole sub-model, the rest from labels.
        temperature: of that.
    """

    distil: bool = True
    alpha: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise FedrolexError(f"method.alpha is {self.alpha}: give a number between 0 and 1")
        check_numbers("method", self, least={}, positive=("temperature",))

    def step(
        self,
        slot: Slot,
        x: Tensor,
        y: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
        rate: Rate,
        held: Tensor | None = None,
    ) -> Tensor:
        """One batch at ``slot.drawn``, the width drawn for it; None is the whole sub-model."""
        narrow = slot.drawn
        if narrow is None:  # nothing to learn from itself; what it would learn from labels counts
            often = 2 - self.alpha if self.distil else 1.0
            return super().step(slot, x, y, lambda said, y: often * loss(said, y), rate, held) / often
        gradients = [torch.zeros_like(p) for p in slot.parameters]
        narrow.load(slot.parameters)
        low = in_precision(narrow.module, x, slot.precision)
        if self.distil:
            scores = slot.scores(x)
            value = self.objective(scores, y, loss, held)
            found = torch.autograd.grad(value, slot.parameters, allow_unused=True, materialize_grads=True)
            torch._foreach_add_(gradients, found)
            small = self.alpha * self.learned(low, scores.detach(), held)
            if self.alpha < 1:
                small = small + (1 - self.alpha) * self.objective(low, y, loss, held)
        else:
            value = small = self.objective(low, y, loss, held)
        narrow.add(gradients, torch.autograd.grad(small, narrow.parameters, allow_unused=True, materialize_grads=True))
        with torch.no_grad():
            self.move(slot.parameters, gradients, slot.memory, rate)
        return value.detach()

    def learned(self, low: Tensor, scores: Tensor, held: Tensor | None) -> Tensor:
        """How far the drawn width's answers are from the whole sub-model's: T² · KL at temperature T."""
        if held is not None:
            low, scores = (masked(each, held, self.mask) for each in (low, scores))
        t = self.temperature
        said = (low / t).log_softmax(-1)
        return t * t * kl_div(said.flatten(0, -2), (scores / t).softmax(-1).flatten(0, -2), reduction="batchmean")


def fjord(
    client: LocalTraining,
    *,
    widths: Sequence[Fraction],
    distil: bool = True,
    alpha: float = 1.0,
    temperature: float = 1.0,
) -> Method:
    """Widths are drawn from ``widths``, among which all capacities must be."""
    plain = {each.name: getattr(client, each.name) for each in fields(LocalTraining)}
    work = OrderedDropout(**{**plain, "widths": tuple(widths)}, distil=distil, alpha=alpha, temperature=temperature)
    return Method(name="fjord", scheme=Ordered(widths=widths), client=work, weighting="samples")
