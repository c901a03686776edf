"""Client drift: how far the updates of one round point apart where they overlap.

For the clients of one capacity, with Δ the change each made and Δ̄ the average change at the same positions,

    drift = 1 − Σ⟨Δ, Δ̄⟩ / √(Σ‖Δ‖² · Σ‖Δ̄‖²)

0 where all pull the same way, 1 where they are unrelated to the average. It is gathered while updates are
folded: one sum and one count a capacity, whatever the cohort.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from fedrolex.slicing.axes import Axes
from fedrolex.slicing.fold import Fold
from fedrolex.slicing.windows import Window


class Drift:
    """The drift of one round, in progress.

    Args:
        axes: the model's axes.
        state: the server's tensors the clients started from.
    """

    def __init__(self, axes: Axes, state: Mapping[str, Tensor]) -> None:
        self.axes = axes
        self.state = {n: t for n, t in state.items() if axes.tensors[n].role == "parameter" and t.is_floating_point()}
        self._changes: dict[Fraction, Fold] = {}
        self._squares: dict[Fraction, float] = {}

    def add(self, client: int, capacity: Fraction, tensors: Mapping[str, Tensor], window: Window) -> None:
        """Take in what one client sends back."""
        before = self.axes.take(self.state, window)
        change = {name: tensors[name] - base for name, base in before.items()}
        self._changes.setdefault(capacity, Fold(self.axes, self.state)).add(client, change, window)
        norms = torch._foreach_norm(list(change.values()))
        square = float(torch.stack(norms).double().square().sum())
        self._squares[capacity] = self._squares.get(capacity, 0.0) + square

    def by_capacity(self, new: Mapping[str, Tensor]) -> dict[str, float]:
        """Drift by capacity, given the server's new tensors."""
        result = {}
        for capacity, changes in sorted(self._changes.items(), reverse=True):
            along = mean = 0.0
            for name, base in self.state.items():
                change = new[name] - base
                along += float((changes.sum(name) * change).sum())
                mean += float((changes.count(name) * change.square()).sum())
            scale = (self._squares[capacity] * mean) ** 0.5
            result[str(capacity)] = 1 - along / scale if scale > 0 else 0.0
        return result
