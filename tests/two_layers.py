"""Two layers, for tests of tracing to build odd models from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

X = torch.randn(3, 10)


class Two(nn.Module):
    """Two linear layers and something in between."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(10, width), nn.Linear(width, 4)

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Any:
        y: Tensor = self.o(self.between(self.a(x)))
        return y
