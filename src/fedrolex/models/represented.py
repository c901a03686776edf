"""Any classifier with a representation of a fixed size before its last layer, the same at every width."""

import torch
from torch import Tensor, nn

from fedrolex.slicing import Hints

TOP = ("top.weight", "top.bias")


class Represented(nn.Module):
    """A trunk that gives a representation, ``(batch, size)``, and a linear layer on top that no capacity cuts."""

    def __init__(self, trunk: nn.Module, size: int, classes: int) -> None:
        super().__init__()
        self.trunk, self.top = trunk, nn.Linear(size, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores ``(batch, classes)``."""
        scores: Tensor = self.top(torch.relu(self.trunk(x)))
        return scores

    def slicing_hints(self) -> Hints:
        """The representation is kept whole."""
        return Hints(freeze=("top.weight:1",))
