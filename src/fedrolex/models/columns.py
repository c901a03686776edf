"""A row of models that answer together."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ColumnModel(nn.Module):
    """Models side by side that share nothing but their input; every score is the mean of theirs.

    Where some columns have never seen some (*rare*) classes, scores come in two stages. Columns that have seen every
    class say how likely a rare class is, and which: rare classes have the mean scores of these columns. All columns
    together share out what is left among the common classes. Where no column has seen every class, a class's score is
    the mean over the columns that have seen the class, or over all columns where none has.

    Args:
        columns: the models; all take the same input and give scores of one shape.
        seen: which classes each column was trained on, bool ``(columns, classes)``; None is all.
    """

    seen: Tensor | None

    def __init__(self, columns: Sequence[nn.Module], seen: Tensor | None = None) -> None:
        super().__init__()
        self.columns = nn.ModuleList(columns)
        told = seen is not None and bool((seen.any(0) & ~seen.all(0)).any())
        self.register_buffer("seen", seen if told else None)
        self._one_has_seen_all = seen is not None and bool(seen.all(1).any())

    def forward(self, x: Tensor) -> Tensor:
        """Scores, of the shape of a column's."""
        scores = torch.stack([column(x) for column in self.columns])
        if self.seen is None:
            return scores.mean(0)
        common = self.seen.all(0)
        if not self._one_has_seen_all:
            heard = self.seen | ~self.seen.any(0)
            counted = heard.view(len(heard), *(1,) * (scores.dim() - 2), -1).to(scores)
            return (scores * counted).sum(0) / counted.sum(0)
        wise, every = scores[self.seen.all(1)].mean(0), scores.mean(0)
        before, after = (each.masked_fill(~common, -torch.inf).logsumexp(-1, True) for each in (every, wise))
        return torch.where(common, every - before + after, wise)
