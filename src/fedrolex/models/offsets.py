"""Class offsets: a number added to every class's score, so that classes which no client has compared can be compared.

A client with two classes learns to tell these two apart; nobody learns how their scores compare with those of a class
that it does not hold. What is missing is mostly one number a class, and it is found after training, from a few labelled
examples of all classes. Nobody needs to have them all: a step of the search looks at sums over examples, to which
devices may each add their own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

OFFSETS = "class_offsets"  # the tensor's name
STEPS, HALVINGS = 100, 30
DONE = 1e-6  # a step that moves no offset by more is the last: what is left to gain is lost in rounding
SMALL = 1e-3  # weight of the squares that keep what the examples do not decide near where it was


class WithOffsets(nn.Module):
    """A model of classes whose scores have offsets added, float ``(classes,)``."""

    class_offsets: Tensor

    def __init__(self, model: nn.Module, offsets: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer(OFFSETS, offsets)
        self.train(model.training)

    def forward(self, x: Tensor) -> Tensor:
        """Scores ``(batch, classes)``."""
        scores: Tensor = self.model(x)
        return scores + self.class_offsets


@dataclass(frozen=True)
class OffsetSums:
    """What examples say about offsets, all that a search for better ones looks at: sums over examples, in float64.

    Attributes:
        examples: how many there are of each class, ``(classes,)``.
        loss: their cross-entropy.
        gradient: of the loss, ``(classes,)``.
        curvature: its second derivatives, ``(classes, classes)``.
    """

    examples: Tensor
    loss: Tensor
    gradient: Tensor
    curvature: Tensor

    @classmethod
    def of(cls, scores: Tensor, targets: Tensor, offsets: Tensor) -> Self:
        """Of examples with scores ``(n, classes)`` and targets ``(n,)``; a class whose offset is −∞ is left out."""
        logs = (scores.detach().double().cpu() + offsets).log_softmax(1)
        likely, targets = logs.exp(), targets.long().cpu()
        examples = torch.bincount(targets, minlength=len(offsets)).double()
        loss = -logs[torch.arange(len(targets)), targets].sum()
        return cls(examples, loss, likely.sum(0) - examples, likely.sum(0).diag() - likely.T @ likely)

    def __add__(self, other: "OffsetSums") -> "OffsetSums":
        """Of both's examples."""
        summed = (mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))
        return OffsetSums(*summed)


def find_offsets(ask: Callable[[Tensor], OffsetSums], classes: int) -> Tensor:
    """The offsets with the least mean cross-entropy, float64 ``(classes,)``, by Newton's method.

    They have the mean 0; a class of which there is no example has 0.

    Args:
        ask: the sums over all examples with given offsets. A server adds up what every device says of its own.
    """
    known = ask(torch.zeros(classes, dtype=torch.float64)).examples > 0
    offsets = torch.zeros(classes, dtype=torch.float64).where(known, -torch.inf)
    count = int(known.sum())

    def cost(offsets: Tensor, sums: OffsetSums) -> Tensor:
        return sums.loss / sums.examples.sum() + SMALL * offsets[known].square().mean()

    now = ask(offsets)
    for _ in range(STEPS):
        total = now.examples.sum()
        slope = now.gradient[known] / total + 2 * SMALL / count * offsets[known]
        bend = now.curvature[known][:, known] / total + 2 * SMALL / count * torch.eye(count, dtype=torch.float64)
        step = torch.zeros_like(offsets)
        step[known] = -torch.linalg.solve(bend, slope)
        if float(step.abs().max()) < DONE:
            offsets = offsets + step
            break
        for _ in range(HALVINGS):
            then = ask(offsets + step)
            if cost(offsets + step, then) <= cost(offsets, now):
                offsets, now = offsets + step, then
                break
            step = step / 2
        else:
            break
    return (offsets - offsets[known].mean()).where(known, 0.0)


def class_offsets(scores: Tensor, targets: Tensor) -> Tensor:
    """The offsets with which scores explain their targets best, by cross-entropy, see :func:`find_offsets`.

    Args:
        scores: ``(n, classes)``, finite.
        targets: ``(n,)``, int64.
    """
    known, y = targets.long().cpu().unique(return_inverse=True)
    x = scores.detach().double().cpu()[:, known]
    found = torch.zeros(scores.shape[1], dtype=torch.float64)
    found[known] = find_offsets(lambda offsets: OffsetSums.of(x, y, offsets), len(known))
    return found.to(scores.device, torch.promote_types(scores.dtype, torch.float32))
