"""Images channels last, on the way back too."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

LAST = torch.channels_last


def channels_last(module: nn.Module) -> nn.Module:
    """The module, its convolutions' weights laid out channels last, and so the gradients of what it pools.

    A flattening hands its gradient back channel by channel; a pooling would then copy its input and its result, which
    are among the largest tensors of a step.
    """
    for part in module.modules():
        if isinstance(part, nn.MaxPool2d):
            part.register_forward_hook(_same_way_back)
    return module.to(memory_format=LAST)


def _same_way_back(_: nn.Module, __: tuple[Tensor, ...], pooled: Tensor | tuple[Tensor, Tensor]) -> None:
    if isinstance(pooled, Tensor) and pooled.requires_grad and pooled.dim() == 4:
        pooled.register_hook(partial(Tensor.contiguous, memory_format=LAST))
