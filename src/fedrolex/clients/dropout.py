"""Dropout on a CPU that draws from a stream of its own, so that clients can be trained on several threads.

PyTorch's dropout draws from the one generator of the process, number by number, which takes as long as a layer. Inside
an :class:`OwnDropout` four masks' values come from one random word of the client's own stream.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PARTS = 2**16  # a chance of dropping is a multiple of one in so many

DROPOUTS = (nn.functional.dropout, torch.dropout, torch.ops.aten.dropout.default)


class OwnDropout(TorchFunctionMode):
    """While the mode is entered, plain dropout on this thread draws from a stream of its own.

    Args:
        seeds: of the stream; for clients that are stacked, of every client's.

    Attributes:
        places: how many of the stacked clients take the next step: the first so many.
        place: inside ``vmap``, which of the stacked clients a value belongs to, int64 ``()``.
    """

    def __init__(self, *seeds: int) -> None:
        super().__init__()
        self.generators = [np.random.Philox(key=seed) for seed in seeds]
        self.places = len(seeds)
        self.place: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Everything else is done as it would be."""
        return (self._dropout if func in DROPOUTS else func)(*args, **(kwargs or {}))

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
    ) -> Tensor:
        kept = round((1 - p) * PARTS)
        if not (training and train) or kept == PARTS or input.numel() == 0:
            return input
        if kept == 0:
            return input * 0
        size = input.numel()
        drawing = self.generators[: self.places]
        drawn = [generator.random_raw(-(-size // 4)).view(np.int16)[:size] for generator in drawing]
        masks = torch.from_numpy(np.stack(drawn) < kept - PARTS // 2).view(-1, *input.shape)
        mask = masks[0] if self.place is None else masks.index_select(0, self.place.view(1))[0]
        return input * mask.to(input.dtype).mul_(PARTS / kept)


def has_dropout(model: nn.Module) -> bool:
    """Whether a model has a dropout layer."""
    return any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules())
