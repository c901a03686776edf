"""A row of models whose scores are averaged."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ColumnModel(nn.Module):
    """Models side by side that share nothing but their input; every score is the mean of theirs.

    Args:
        columns: the models; all take the same input and give scores of one shape.
    """

    def __init__(self, columns: Sequence[nn.Module]) -> None:
        super().__init__()
        self.columns = nn.ModuleList(columns)

    def forward(self, x: Tensor) -> Tensor:
        """Scores, of the shape of a column's."""
        return torch.stack([column(x) for column in self.columns]).mean(0)
