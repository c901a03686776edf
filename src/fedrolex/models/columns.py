"""A row of models that answer together."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ColumnModel(nn.Module):
    """Models side by side that share nothing but their input; every score is the mean of theirs.

    Where some columns have never seen some (*rare*) classes, scores come in two stages. Columns that have seen every
    class, the *complete* ones, say how likely a rare class is, and which. All columns together share out what is left
    among the common classes. With a and b the mean scores of all and of the complete columns, and C the common classes,
    a class's score is::

        b                                        of a rare class
        a − log Σ_C exp(a) + log Σ_C exp(b)      of a common class

    Where no column is complete, a class's score is the mean over the columns that have seen it, or over all columns
    where none has.

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
        self._one_is_complete = seen is not None and bool(seen.all(1).any())

    def forward(self, x: Tensor) -> Tensor:
        """Scores, of the shape of a column's."""
        scores = torch.stack([column(x) for column in self.columns])
        if self.seen is None:
            return scores.mean(0)
        common = self.seen.all(0)
        if not self._one_is_complete:
            heard = self.seen | ~self.seen.any(0)
            counted = heard.view(len(heard), *(1,) * (scores.dim() - 2), -1).to(scores)
            return (scores * counted).sum(0) / counted.sum(0)
        of_all, of_complete = scores.mean(0), scores[self.seen.all(1)].mean(0)
        mass, wanted = (each.masked_fill(~common, -torch.inf).logsumexp(-1, True) for each in (of_all, of_complete))
        return torch.where(common, of_all - mass + wanted, of_complete)
