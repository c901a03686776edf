"""Every n-th node of a layer instead of neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from fedrolex import Axis, Scheme, pick
from fedrolex.slicing import Span


@dataclass(frozen=True, kw_only=True)
class Striped(Scheme):
    """Nodes at equal distances, one further in every round.

    Attributes:
        step: how many nodes the stripes move in a round.
    """

    step: int = 1

    def span(self, axis: Axis, place: int, round: int, beta: Fraction, client: int) -> Span:
        """The nodes of one axis."""
        width = self.width(axis, beta)
        apart = axis.size // width
        return pick(sorted((self.step * round + apart * number) % axis.size for number in range(width)), axis.size)
