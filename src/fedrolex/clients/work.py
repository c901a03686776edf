"""What a client does with its sub-model: before training, one step, and what it sends back.

A subclass changes a hook; an engine runs what it knows of a class and refuses the rest (:attr:`LocalTraining.changed`
says which hooks a class changes). Steps change the slot's tensors in place, read nothing back to the host, and have
shapes that depend on the widths alone: an engine may run a step eagerly, for many clients at once, or capture it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from fedrolex.clients.optimizer import Memory, Rate, adam, sgd
from fedrolex.clients.slot import Slot
from fedrolex.clients.visit import Visit
from fedrolex.core import FedrolexError, check_numbers, check_words
from fedrolex.tasks import Mask, masked

Optimizer = Literal["sgd", "adam"]
Loss = Callable[[Tensor, Tensor], Tensor]
Hook = TypeVar("Hook", bound=Callable[..., None])
ELEMENTWISE = "elementwise"


def elementwise(hook: Hook) -> Hook:
    """Mark a ``pull`` or ``correct`` that treats every value alone: sums, products and the like of equal places.

    Engines may give such a hook the tensors of many clients at once, stacked along a new first dimension. One that
    looks at a client's tensors as wholes (a norm, a mean, a shape) must not be marked; it is given one client's.
    """
    setattr(hook, ELEMENTWISE, True)
    return hook


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

    constants: ClassVar[tuple[str, ...]] = ()
    """Names of what :meth:`before` puts into ``visit.constants`` for :meth:`pull` and :meth:`correct` to read."""

    def __post_init__(self) -> None:
        least = {"epochs": 1, "batch": 1, "momentum": 0, "weight_decay": 0}
        positive = ("lr", "decay") if self.clip is None else ("lr", "decay", "clip")
        check_numbers("client", self, least=least, positive=positive)
        check_words("client", self)
        if self.momentum >= 1:
            raise FedrolexError(f"client.momentum is {self.momentum}: give 0 or more, below 1")
        if any(milestone < 0 for milestone in self.milestones):
            raise FedrolexError(f"client.milestones is {list(self.milestones)}: give rounds, 0 or more")

    @cached_property
    def changed(self) -> frozenset[str]:
        """Names of the methods that this class defines otherwise than :class:`LocalTraining`."""
        plain = {name for name, value in vars(LocalTraining).items() if callable(value) and not name.startswith("_")}
        return frozenset(name for name in plain if getattr(type(self), name) is not getattr(LocalTraining, name))

    @cached_property
    def looks_at_wholes(self) -> str | None:
        """Why steps of several clients cannot be taken as one: a hook that is not :func:`elementwise`; or None."""
        own = sorted(self.changed & {"pull", "correct"})
        found = next((name for name in own if not getattr(getattr(type(self), name), ELEMENTWISE, False)), None)
        return found and f"{found}() of {type(self).__name__} is not marked @elementwise"

    # --- hooks: a client's round ---

    def before(self, visit: Visit) -> None:
        """Get ready, before any step: may replace ``visit.received`` and fill ``visit.constants``."""

    def train(self, visit: Visit, slot: Slot) -> None:
        """All steps of a client, one after the other, in a slot loaded with ``visit.received``."""
        self.start(slot, visit)
        held, rate = visit.held(self.mask), self.rate(visit.plan.round)
        total: Tensor | None = None
        for x, y in visit.batches(self.epochs, self.batch, self.steps(len(visit.examples), visit.job.part)):
            loss = self.step(slot, x, y, visit.plan.task.loss, rate, held)
            total = loss if total is None else total + loss
            visit.steps += 1
        visit.loss = float("nan") if total is None else float(total) / visit.steps

    def after(self, visit: Visit) -> None:
        """Look at ``visit.trained``; may fill ``visit.sent`` (for the server) and ``visit.kept`` (for later rounds)."""

    # --- hooks: a step ---

    def step(self, slot: Slot, x: Tensor, y: Tensor, loss: Loss, rate: Rate, held: Tensor | None = None) -> Tensor:
        """One batch; returns its loss, still on the device.

        Args:
            slot: what is trained, in place.
            x, y: inputs and targets.
            loss: of (scores, targets), the mean over a batch.
            rate: learning rate; a tensor is read anew by a captured step.
            held: marks the client's classes, for ``mask``.
        """
        value = self.objective(slot.scores(x), y, loss, held)
        gradients = list(torch.autograd.grad(value, slot.parameters, allow_unused=True, materialize_grads=True))
        with torch.no_grad():
            self.move(slot.parameters, gradients, slot.memory, rate)
        return value.detach()

    def objective(self, scores: Tensor, y: Tensor, loss: Loss, held: Tensor | None) -> Tensor:
        """What a step makes smaller."""
        return loss(scores if held is None else masked(scores, held, self.mask), y)

    def pull(self, parameters: list[Tensor], gradients: list[Tensor], memory: Memory) -> None:
        """Change gradients in place before they are clipped; see :func:`elementwise`."""

    def correct(self, parameters: list[Tensor], gradients: list[Tensor], memory: Memory) -> None:
        """Change gradients in place after clipping and weight decay, before the optimiser; see :func:`elementwise`."""

    # --- numbers of a round ---

    def rate(self, round: int) -> float:
        """The learning rate of a round."""
        return float(self.lr * self.decay ** sum(round >= milestone for milestone in self.milestones))

    def steps(self, examples: int, part: float = 1.0) -> int:
        """How many steps a client takes; a straggler only does a part of them, at least one."""
        return max(1, ceil(part * self.epochs * -(-examples // self.batch)))

    # --- the optimiser ---

    def start(self, slot: Slot, visit: Visit) -> None:
        """Make a loaded slot ready for the first step: the optimiser remembers nothing."""
        slot.module.train()
        visit.check_constants(self.constants, slot.names)
        constants = {what: [values[name] for name in slot.names] for what, values in visit.constants.items()}
        self.begin(slot.memory, slot.parameters, constants)

    def begin(
        self, memory: Memory, parameters: Sequence[Tensor], constants: Mapping[str, Sequence[Tensor]] | None = None
    ) -> None:
        """The optimiser remembers nothing but the round's constants."""
        adam = self.optimizer == "adam"
        memory.begin(constants or {}, means=adam or self.momentum > 0, squares=adam)

    def move(self, parameters: list[Tensor], gradients: list[Tensor], memory: Memory, rate: Rate) -> None:
        """Change parameters and the optimiser's memory in place, by gradients that are used up."""
        self.pull(parameters, gradients, memory)
        if self.clip is not None:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            torch._foreach_mul_(gradients, torch.clamp(self.clip / (norm + 1e-6), max=1.0))
        self.descend(parameters, gradients, memory, rate)

    def descend(self, parameters: list[Tensor], gradients: list[Tensor], memory: Memory, rate: Rate) -> None:
        """The part of :meth:`move` after clipping."""
        if self.weight_decay:
            torch._foreach_add_(gradients, parameters, alpha=self.weight_decay)
        self.correct(parameters, gradients, memory)
        if self.optimizer == "adam":
            adam(parameters, gradients, memory, rate)
        else:
            sgd(parameters, gradients, memory, rate, self.momentum)
