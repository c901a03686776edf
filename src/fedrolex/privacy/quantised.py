"""Real numbers as whole ones, for sums modulo 2³²."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedrolex.core import FedrolexError

Words = NDArray[np.uint32]
FINEST = 2**24  # levels; more than a float32 has


@dataclass(frozen=True)
class Quantised:
    """Numbers between −``reach`` and ``reach``, of which ``most`` can be added.

    Rounding is to the nearest level, so a sum of n numbers is off by n · step / 2 at most, their mean by step / 2.
    """

    reach: float
    most: int

    @property
    def levels(self) -> int:
        """The largest whole number that stands for a number: ``most`` of them stay below 2³²."""
        return min(FINEST, (2**32 - 1) // self.most)

    @property
    def step(self) -> float:
        """Between two neighbouring levels."""
        return 2 * self.reach / self.levels

    def encoded(self, values: Tensor) -> Words:
        """Numbers as levels; one that is not finite or beyond ``reach`` raises, since nobody could see it later."""
        largest = float(values.abs().max()) if values.numel() else 0.0
        if not largest <= self.reach:
            raise FedrolexError(f"a change of {largest:.3g} is beyond ±{self.reach:g}: lower the learning rate")
        levels = ((values.double() + self.reach) / self.step).round().clamp(0, self.levels)
        return np.asarray(levels.to(torch.int64).numpy(), dtype=np.uint32)

    def possible(self, total: Words, count: int) -> bool:
        """Whether a sum of levels can be one of ``count`` numbers."""
        return not total.size or int(total.max()) <= count * self.levels

    def decoded(self, total: Words, count: int) -> Tensor:
        """The sum of ``count`` numbers, from the sum of their levels; float64."""
        if count > self.most:
            raise FedrolexError(f"a sum of {count} numbers: {self.most} are the most that fit")
        return torch.from_numpy(total.astype(np.float64)) * self.step - count * self.reach
