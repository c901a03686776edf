"""The optimiser's step, in place on lists of tensors: nothing is read back, so it can be captured and compiled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


@dataclass
class Memory:
    """What an optimiser remembers from step to step.

    Attributes:
        parameters: what the optimiser moves.
        count: steps done, a number on the device.
        first: velocity (SGD) or mean gradient (Adam), one for each parameter; empty where steps use none.
        second: mean squared gradient (Adam), one for each parameter; empty where steps use none.
        constants: what the steps of a round read, by name, one tensor for each parameter.
    """

    parameters: Sequence[Tensor]
    count: Tensor
    first: list[Tensor] = field(default_factory=list)
    second: list[Tensor] = field(default_factory=list)
    constants: dict[str, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, parameters: Sequence[Tensor]) -> Self:
        """Empty, for these parameters."""
        device = parameters[0].device if parameters else None
        return cls(list(parameters), torch.zeros((), dtype=torch.float64, device=device))

    def begin(self, constants: Mapping[str, Sequence[Tensor]], *, means: bool = True, squares: bool = True) -> None:
        """A new round; tensors stay where they are, so that a captured step reads the new values.

        Args:
            constants: copied into tensors that are made the first time.
            means, squares: whether steps use ``first`` and ``second``, which are made the first time; an optimiser
                that uses neither takes no memory.
        """
        if means:
            self.first = _zeroed(self.first, self.parameters)
        if squares:
            self.second = _zeroed(self.second, self.parameters)
        self.count.zero_()
        for name, values in constants.items():
            if name in self.constants:
                torch._foreach_copy_(self.constants[name], list(values))
            else:
                self.constants[name] = [value.detach().clone() for value in values]


def _zeroed(tensors: list[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, all zero; new ones where there are none yet."""
    if not tensors:
        return [torch.zeros_like(each) for each in like]
    torch._foreach_zero_(tensors)
    return tensors


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
