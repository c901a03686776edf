"""What a client does with its sub-model: start, step, and what it sends back.

The three are functions of the slot's tensors, the batch and numbers that are fixed for the round. A step
changes the slot's tensors in place, reads nothing back to the host, and has shapes that depend on the widths
alone, so an engine may run it eagerly, compile it, or capture it once and replay it for every round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, isfinite
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn

from fedrolex.clients.optimizer import Memory, Rate, adam, sgd
from fedrolex.core.errors import FedrolexError

if TYPE_CHECKING:
    from fedrolex.engines.narrow import Narrow
    from fedrolex.engines.rewriting import Descent

Mask = Literal["none", "zero", "neg_inf"]
Precision = Literal["fp32", "tf32", "bf16"]
Optimizer = Literal["sgd", "adam"]


def masked(scores: Tensor, held: Tensor, mask: Mask) -> Tensor:
    """Scores with those of classes the client does not hold taken out.

    Args:
        scores: ``(…, classes)``.
        held: bool ``(classes,)``.
        mask: ``zero`` puts 0 in their place, as HeteroFL and FedRolex do (an absent class still has weight
            e⁰ in the softmax, and wins where all present ones are negative); ``neg_inf`` removes them.
    """
    if mask == "none":
        return scores
    return torch.where(held, scores, 0.0 if mask == "zero" else -torch.inf)


def in_precision(forward: Callable[[Tensor], Tensor], x: Tensor, precision: Precision) -> Tensor:
    """Scores of a model that is run in a precision; they themselves are not of a lower one than float32."""
    if precision != "bf16":
        return forward(x)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        low = forward(x)
    return low.float()


@dataclass
class Slot:
    """A sub-model and the optimiser's memory, used again for every client of the same widths.

    Attributes:
        module: the sub-model.
        precision: ``bf16`` runs it in bfloat16, its parameters stay as they are.
        descent: layers that can take their own steps, if there are any.
        narrower, drawn: models of the first nodes of it, and the one to train the next batch at.
    """

    module: nn.Module
    precision: Precision = "fp32"
    descent: Descent | None = None
    names: list[str] = field(init=False)
    parameters: list[Tensor] = field(init=False)
    memory: Memory = field(init=False)
    narrower: dict[Fraction, Narrow] = field(default_factory=dict)
    drawn: Narrow | None = None

    def scores(self, x: Tensor) -> Tensor:
        """What the sub-model says, in its parameters' precision."""
        return in_precision(self.module, x, self.precision)

    def __post_init__(self) -> None:
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.names, self.parameters = list(trained), list(trained.values())
        self.memory = Memory.of(self.parameters)

    def parameters_but(self, names: Collection[str]) -> list[Tensor]:
        """What is trained, without some."""
        return [p for name, p in zip(self.names, self.parameters, strict=True) if name not in names]


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Epochs of training from the received sub-model; the optimiser starts anew in every round.

    Attributes:
        epochs: passes over the client's examples.
        batch: examples a step; the last batch of an epoch may be smaller.
        optimizer: ``sgd`` or ``adam``.
        lr: learning rate in round 0.
        momentum: of SGD.
        weight_decay: added to the gradient, after clipping.
        clip: largest norm of the gradient, or None.
        milestones: rounds from which the rate is ``decay`` times smaller again.
        decay: factor at each milestone.
        mask: what the loss does with the scores of classes the client does not hold; see :func:`masked`.
        proximal: μ of FedProx: the gradient of μ/2 · ‖w − received‖² is part of every gradient.
        gradient: also tell the mean gradient of the received model over all examples.
        widths: that batches are trained at; see :mod:`fedrolex.methods.fjord`.
    """

    epochs: int = 1
    batch: int = 16
    optimizer: Optimizer = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    milestones: Sequence[int] = ()
    decay: float = 0.1
    mask: Mask = "none"
    proximal: float = 0.0
    gradient: bool = False
    widths: Sequence[Fraction] = ()

    def __post_init__(self) -> None:
        for name, low in (("epochs", 1), ("batch", 1), ("momentum", 0), ("weight_decay", 0), ("proximal", 0)):
            if getattr(self, name) < low:
                raise FedrolexError(f"client.{name} is {getattr(self, name)}: give at least {low}")
        for name in ("lr", "clip", "decay"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and isfinite(value)):
                raise FedrolexError(f"client.{name} is {value}: give a number above 0")
        if not all(isfinite(each) for each in (self.momentum, self.weight_decay, self.proximal)):
            raise FedrolexError("client.momentum, client.weight_decay and method.mu must be finite")
        if self.momentum >= 1:
            raise FedrolexError(f"client.momentum is {self.momentum}: give 0 or more, below 1")
        if any(milestone < 0 for milestone in self.milestones):
            raise FedrolexError(f"client.milestones is {list(self.milestones)}: give rounds, 0 or more")
        if self.optimizer not in get_args(Optimizer):
            raise FedrolexError(f"client.optimizer is {self.optimizer!r}: use one of {', '.join(get_args(Optimizer))}")
        if self.mask not in get_args(Mask):
            raise FedrolexError(f"client.mask is {self.mask!r}: use one of {', '.join(get_args(Mask))}")

    def rate(self, round: int) -> float:
        """The learning rate of a round."""
        return float(self.lr * self.decay ** sum(round >= milestone for milestone in self.milestones))

    def steps(self, examples: int, part: float = 1.0) -> int:
        """How many steps a client takes; a straggler only does a part of them, at least one."""
        return max(1, ceil(part * self.epochs * -(-examples // self.batch)))

    def start(self, slot: Slot, correction: Mapping[str, Tensor] | None = None) -> None:
        """Make ready: the sub-model is loaded, the optimiser remembers nothing; gradients may be corrected."""
        slot.module.train()
        self.begin(slot.memory, slot.parameters, [correction[name] for name in slot.names] if correction else ())

    def begin(self, memory: Memory, parameters: Sequence[Tensor], correction: Sequence[Tensor] = ()) -> None:
        """The optimiser remembers nothing but what it needs of the received parameters."""
        adam = self.optimizer == "adam"
        memory.begin(
            parameters,
            means=adam or self.momentum > 0,
            squares=adam,
            receive=self.proximal > 0,
            correction=correction,
        )

    def step(
        self,
        slot: Slot,
        x: Tensor,
        y: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
        rate: Rate,
        held: Tensor | None = None,
    ) -> Tensor:
        """One batch; returns its loss, still on the device.

        ``held`` marks the client's classes, for ``mask``; ``rate`` may be a tensor, which a captured step reads anew.
        """
        value = self.objective(slot.scores(x), y, loss, held)
        parameters = slot.parameters
        going: AbstractContextManager[None] = nullcontext()
        if slot.descent is not None and isinstance(rate, float) and self.plain(slot.memory):
            parameters = slot.parameters_but(slot.descent.weights)
            going = slot.descent.going(rate, self.weight_decay)
        with going:
            gradients = list(torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True))
        with torch.no_grad():
            self.move(parameters, gradients, slot.memory, rate)
        return value.detach()

    def plain(self, memory: Memory) -> bool:
        """Whether a step is the rate times the gradient and the weight decay, tensor by tensor."""
        return self.optimizer == "sgd" and not (
            self.momentum or self.clip is not None or self.proximal or memory.correction
        )

    def objective(
        self, scores: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], held: Tensor | None
    ) -> Tensor:
        """What a step makes smaller."""
        return loss(scores if held is None else masked(scores, held, self.mask), y)

    def pull(self, parameters: list[Tensor], gradients: list[Tensor], memory: Memory) -> None:
        """Add FedProx's part of the gradients, in place."""
        if self.proximal:
            torch._foreach_add_(gradients, torch._foreach_sub(parameters, memory.received), alpha=self.proximal)

    def move(self, parameters: list[Tensor], gradients: list[Tensor], memory: Memory, rate: Rate) -> None:
        """Change parameters and the optimiser's memory in place, by gradients that are used up."""
        self.pull(parameters, gradients, memory)
        if self.clip is not None:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            torch._foreach_mul_(gradients, torch.clamp(self.clip / (norm + 1e-6), max=1.0))
        self.descend(parameters, gradients, memory, rate)

    def descend(self, parameters: list[Tensor], gradients: list[Tensor], memory: Memory, rate: Rate) -> None:
        """The same, by gradients that are pulled and clipped."""
        if self.weight_decay:
            torch._foreach_add_(gradients, parameters, alpha=self.weight_decay)
        if memory.correction:
            torch._foreach_add_(gradients, memory.correction)
        if self.optimizer == "adam":
            adam(parameters, gradients, memory, rate)
        else:
            sgd(parameters, gradients, memory, rate, self.momentum)
