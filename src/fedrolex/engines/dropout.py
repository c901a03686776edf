"""Dropout that draws from a generator of its own, so that clients can be trained on several threads.

PyTorch's dropout draws from the one generator of the process. Inside an :class:`OwnDropout` it draws the same numbers
from another: seeded alike, the masks are those that a client trained alone would get.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

DROPOUTS = (nn.functional.dropout, torch.dropout, torch.ops.aten.dropout.default)


class OwnDropout(TorchFunctionMode):
    """While it is entered, plain dropout on this thread draws from a stream of its own.

    Args:
        seed: of the stream.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Everything else is done as it would be."""
        return (self._dropout if func in DROPOUTS else func)(*args, **(kwargs or {}))

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
    ) -> Tensor:
        if not (training and train) or p == 0 or input.numel() == 0:
            return input
        if p == 1:
            return input * 0
        mask = torch.empty_like(input).bernoulli_(1 - p, generator=self.generator).div_(1 - p)
        return input * mask


def has_dropout(model: nn.Module) -> bool:
    """Whether a model has a dropout layer."""
    return any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules())
