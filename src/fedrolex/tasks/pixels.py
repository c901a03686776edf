"""Stored pixels to model inputs: normalised, and for training cropped and flipped at random.

Images stay one uint8 tensor wherever they are. One call serves a batch or a whole cohort: one random word an
image decides its crop and flip, so the result does not depend on what else is in the call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

Padding = Literal["black", "mean"]


@dataclass(frozen=True)
class Pixels:
    """How images of one data set become inputs.

    Attributes:
        scale, shift: input = pixel · scale + shift, a channel, shape ``(channels, 1, 1)``.
        pad: pixels added on every side before the random crop; 0 is no crop.
        flip: mirror every second image.
        padding: the colour of the added pixels: ``black``, or the ``mean`` colour, which becomes an input of 0.
    """

    scale: Tensor
    shift: Tensor
    pad: int = 0
    flip: bool = False
    padding: Padding = "black"

    @classmethod
    def of(
        cls, mean: Sequence[float], std: Sequence[float], pad: int = 0, flip: bool = False, padding: Padding = "black"
    ) -> Self:
        """From the mean and standard deviation of every channel, the largest pixel value being 1."""
        middle, spread = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]
        return cls(1 / (255 * spread), -middle / spread, pad, flip, padding)

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        return replace(self, scale=self.scale.to(device), shift=self.shift.to(device))

    @property
    def random(self) -> bool:
        """Whether training inputs are drawn."""
        return self.pad > 0 or self.flip

    def __call__(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        """uint8 ``(n, channels, h, w)`` to float32 of the same shape; ``draws`` int64 ``(n,)`` ≥ 0."""
        if draws is not None and self.random:
            x = self._moved(x, draws)
        return x * self.scale + self.shift

    def _moved(self, x: Tensor, draws: Tensor) -> Tensor:
        """Every image shifted by up to ``pad`` pixels and maybe mirrored, with the colour of ``padding`` around."""
        height, width = x.shape[2:]
        steps = 2 * self.pad + 1
        down = ((draws & 0xFFFF) * steps >> 16)[:, None] + torch.arange(height, device=x.device)
        right = ((draws >> 16 & 0xFFFF) * steps >> 16)[:, None] + torch.arange(width, device=x.device)
        if self.flip:
            right = torch.where((draws >> 32 & 1).bool()[:, None], right.flip(1), right)
        places = (down[:, :, None] * (width + 2 * self.pad) + right[:, None, :]).flatten(1)
        flat = self._padded(x).flatten(2)
        return flat.gather(2, places[:, None, :].expand(-1, x.shape[1], -1)).view(x.shape)

    def _padded(self, x: Tensor) -> Tensor:
        around = torch.nn.functional.pad(x, [self.pad] * 4)
        if self.padding == "mean" and self.pad:
            colour = (-self.shift / self.scale).round().to(x.dtype)
            inside = torch.nn.functional.pad(torch.ones_like(x[:1], dtype=torch.bool), [self.pad] * 4)
            around = torch.where(inside, around, colour)
        return around
