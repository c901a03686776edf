"""Plain SGD in which large linear layers move on the way back, without their gradient ever being stored.

Where batches are small, a large layer's step is all memory: its gradient is written and read again, and the weight read
and written. Added to the weight as the product that it is, it takes a fraction of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

LARGE = 2**16  # weights, from which it pays
LINEARS = (F.linear, torch.ops.aten.linear.default)


class Descent(TorchFunctionMode):
    """While it is entered, large linear layers on this thread move in the backward pass; their weights get no gradient.

    A weight that is used elsewhere, too, is given those gradients as any other, or else the backward pass fails, since
    autograd notices that a tensor it needs was changed. So there is no wrong step.

    Args:
        rate: how far, in gradients.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Everything else is done as it would be."""
        if func in LINEARS and torch.is_grad_enabled():
            return self._linear(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, func: Callable[..., Any], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        moves = weight.is_leaf and weight.requires_grad and weight.numel() >= LARGE
        found: Tensor = _Linear.apply(input, weight, bias, self.rate) if moves else func(input, weight, bias)
        return found


def pays(model: nn.Module) -> bool:
    """Whether a model has a linear layer that is large enough."""
    return any(isinstance(module, nn.Linear) and module.weight.numel() >= LARGE for module in model.modules())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rate: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rate = rate
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (gradient,) = outputs
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        back = gradient @ weight if ctx.needs_input_grad[0] else None
        weight.t().addmm_(x.reshape(-1, x.shape[-1]).t(), rows, alpha=-ctx.rate)
        return back, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None
