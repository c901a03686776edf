"""A row of models that answer together."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedrolex.core import FedrolexError


class ColumnModel(nn.Module):
    """Models side by side that share nothing but their input; every score is the mean of theirs.

    Where some columns have never seen some (*rare*) classes, scores come in two stages. Columns that have seen every
    class say how likely a rare class is, and which: rare classes have the mean scores of these columns. All columns
    together share out what is left among the common classes. Where no column has seen every class, a class's score is
    the mean over the columns that have seen the class, or over all columns where none has.

    Args:
        columns: the models; all take the same input and give scores of one shape.
        seen: which classes each column was trained on, bool ``(columns, classes)``; None is all.
        weights: how much each column counts in a mean, above 0, ``(columns,)``; None is as much as every other.
    """

    seen: Tensor | None
    weights: Tensor | None

    def __init__(self, columns: Sequence[nn.Module], seen: Tensor | None = None, weights: Tensor | None = None) -> None:
        super().__init__()
        self.columns = nn.ModuleList(columns)
        if weights is not None and not (
            weights.shape == (len(columns),) and bool((weights > 0).all() & weights.isfinite().all())
        ):
            raise FedrolexError(f"weights of {len(columns)} columns are {weights.tolist()}: give one each, above 0")
        self.register_buffer("weights", weights)
        told = seen is not None and bool((seen.any(0) & ~seen.all(0)).any())
        self.register_buffer("seen", seen if told else None)
        self._one_has_seen_all = seen is not None and bool(seen.all(1).any())

    def forward(self, x: Tensor) -> Tensor:
        """Scores, of the shape of a column's."""
        scores = torch.stack([column(x) for column in self.columns])
        if self.seen is None:
            return self._mean(scores)
        common = self.seen.all(0)
        if not self._one_has_seen_all:
            return self._mean(scores, self.seen | ~self.seen.any(0))
        wise, every = self._mean(scores, self.seen.all(1)[:, None]), self._mean(scores)
        before, after = (each.masked_fill(~common, -torch.inf).logsumexp(-1, True) for each in (every, wise))
        return torch.where(common, every - before + after, wise)

    def _mean(self, scores: Tensor, heard: Tensor | None = None) -> Tensor:
        """The mean over the columns that are ``heard``, ``(columns, classes)`` or ``(columns, 1)``; None is all."""
        if heard is None and self.weights is None:
            return scores.mean(0)
        counted = scores.new_ones(len(scores), 1) if heard is None else heard.to(scores)
        if self.weights is not None:
            counted = counted * self.weights.to(scores)[:, None]
        counted = counted.view(len(counted), *(1,) * (scores.dim() - 2), -1)
        return (scores * counted).sum(0) / counted.sum(0)
