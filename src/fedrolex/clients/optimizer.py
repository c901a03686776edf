"""The optimiser's step, in place on lists of tensors: nothing is read back, so it can be captured and compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


@dataclass
class Memory:
    """What an optimiser remembers from step to step.

    Attributes:
        first: velocity (SGD) or mean gradient (Adam), one for each parameter.
        second: mean squared gradient (Adam).
        count: steps done, a number on the device.
        received: the parameters a round began with, where they are asked for.
        correction: added to every gradient of the round, where there is one.
    """

    first: list[Tensor]
    second: list[Tensor]
    count: Tensor
    received: list[Tensor] = field(default_factory=list)
    correction: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of(parameters: Sequence[Tensor]) -> Memory:
        """Empty, for these parameters."""
        zeros = [torch.zeros_like(p) for p in parameters]
        count = torch.zeros((), dtype=torch.float64, device=parameters[0].device if parameters else None)
        return Memory(zeros, [torch.zeros_like(p) for p in parameters], count)

    def begin(
        self,
        parameters: Sequence[Tensor],
        *,
        means: bool = True,
        squares: bool = True,
        receive: bool = False,
        correction: Sequence[Tensor] = (),
    ) -> None:
        """A new round from these parameters; tensors stay where they are, so a captured step reads the new ones.

        Args:
            parameters: as received.
            means, squares: whether ``first`` and ``second`` are used at all; those that are not stay zero.
            receive: keep the parameters.
            correction: of the gradients.
        """
        if means:
            torch._foreach_zero_(self.first)
        if squares:
            torch._foreach_zero_(self.second)
        self.count.zero_()
        if receive:
            _keep(self.received, [p.detach() for p in parameters])
        _keep(self.correction, correction)


def _keep(kept: list[Tensor], values: Sequence[Tensor]) -> None:
    """Values into tensors that are made the first time."""
    if not kept:
        kept.extend(value.clone() for value in values)
    elif values:
        torch._foreach_copy_(kept, list(values))


Rate = float | Tensor | list[Tensor]
"""A learning rate: a number, one on the device, or one for each parameter that broadcasts against it."""


def sgd(parameters: list[Tensor], gradients: list[Tensor], memory: Memory, rate: Rate, momentum: float) -> None:
    """Stochastic gradient descent with momentum; gradients are used up."""
    if momentum:
        torch._foreach_mul_(memory.first, momentum)
        torch._foreach_add_(memory.first, gradients)
        gradients = memory.first
    if isinstance(rate, int | float):
        torch._foreach_add_(parameters, gradients, alpha=-rate)
    else:
        torch._foreach_sub_(parameters, torch._foreach_mul(gradients, rate))


def adam(parameters: list[Tensor], gradients: list[Tensor], memory: Memory, rate: Rate) -> None:
    """Adam (Kingma and Ba, 2015) with its usual constants."""
    memory.count.add_(1)
    torch._foreach_lerp_(memory.first, gradients, 1 - BETA1)
    torch._foreach_mul_(memory.second, BETA2)
    torch._foreach_addcmul_(memory.second, gradients, gradients, 1 - BETA2)
    dtype = parameters[0].dtype
    size = torch._foreach_sqrt(memory.second)
    torch._foreach_div_(size, (1 - BETA2**memory.count).sqrt().to(dtype))
    torch._foreach_add_(size, EPSILON)
    change = torch._foreach_div(memory.first, size)
    start = 1 - BETA1**memory.count
    if isinstance(rate, list):
        torch._foreach_mul_(change, [(each / start).to(dtype) for each in rate])
    else:
        torch._foreach_mul_(change, (rate / start).to(dtype))
    torch._foreach_sub_(parameters, change)
