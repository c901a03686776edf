"""Client drift: how far the updates of one round point apart where they overlap.

For the clients of one capacity, with Δ the change each made and Δ̄ the average change at the same positions,

    drift = 1 − Σ⟨Δ, Δ̄⟩ / √(Σ‖Δ‖² · Σ‖Δ̄‖²)

0 where all pull the same way, 1 where they are unrelated to the average. It is gathered while updates are
folded: one sum and one count a capacity, whatever the cohort.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from fedrolex.slicing import Axes, Fold, Window

DriftSums = dict[Fraction, tuple[float, float, float]]
"""By capacity: Σ⟨Δ, Δ̄⟩, Σ‖Δ̄‖² and Σ‖Δ‖²."""


class Drift:
    """The drift of one round, in progress; ``state`` are the server's tensors the clients started from."""

    def __init__(self, axes: Axes, state: Mapping[str, Tensor]) -> None:
        self.axes = axes
        self.state = {n: t for n, t in state.items() if axes.tensors[n].role == "parameter" and t.is_floating_point()}
        self._changes: dict[Fraction, Fold] = {}
        self._groups: list[tuple[Fraction, Window, Tensor, int]] = []
        self._squares: dict[Fraction, Tensor | float] = {}

    def add(self, client: int, capacity: Fraction, tensors: Mapping[str, Tensor], window: Window) -> None:
        """Take in what one client sends back."""
        before = self.axes.take(self.state, window)
        change = {name: tensors[name] - base for name, base in before.items()}
        self._changes.setdefault(capacity, Fold(self.axes, self.state)).add(client, change, window)
        norms = torch._foreach_norm(list(change.values()))
        self._squares[capacity] = self._squares.get(capacity, 0.0) + torch.stack(norms).double().square().sum()

    def add_all(self, capacity: Fraction, parts: Sequence[Mapping[str, Tensor]], window: Window) -> None:
        """Take in what several clients of one window send back; its sum is kept, not put into its place."""
        base = self.axes.take(self.state, window)
        before = [torch.empty_like(parts[0][name]).copy_(tensor) for name, tensor in base.items()]  # laid out alike
        total = torch._foreach_sub([parts[0][name] for name in base], before)
        norms = list(torch._foreach_norm(total))
        for part in parts[1:]:
            change = torch._foreach_sub([part[name] for name in base], before)
            norms += torch._foreach_norm(change)
            torch._foreach_add_(total, change)
            del change  # the next one gets its memory, which is quicker than memory that was never used
        squares = torch.stack(norms).double().square().sum()
        self._squares[capacity] = self._squares.get(capacity, 0.0) + squares
        self._groups.append((capacity, window, _flat(total), len(parts)))

    def by_capacity(self, new: Mapping[str, Tensor]) -> dict[str, float]:
        """Drift by capacity, given the server's new tensors; the device is asked once."""
        return drift_of(self.sums(new))

    def sums(self, new: Mapping[str, Tensor]) -> DriftSums:
        """The three sums by capacity, given the server's new tensors; sums of parts of a cohort may be added."""
        changes = torch._foreach_sub([new[name] for name in self.state], list(self.state.values()))
        moved = dict(zip(self.state, changes, strict=True))
        sums: dict[Fraction, Tensor] = {}
        for capacity, fold in self._changes.items():
            along = torch.stack([(fold.sum(name) * change).sum() for name, change in moved.items()])
            mean = torch.stack([(fold.count(name) * change.square()).sum() for name, change in moved.items()])
            sums[capacity] = torch.stack([along.double().sum(), mean.double().sum()])
        for capacity, window, total, clients in self._groups:
            part = _flat(list(self.axes.take(moved, window).values()))
            both = torch.stack([torch.dot(total, part), clients * torch.dot(part, part)]).double()
            sums[capacity] = sums[capacity] + both if capacity in sums else both
        if not sums:
            return {}
        squares = [torch.as_tensor(self._squares[c], dtype=torch.float64, device=p.device) for c, p in sums.items()]
        rows = torch.stack([torch.cat([p, s[None]]) for p, s in zip(sums.values(), squares, strict=True)]).tolist()
        return {capacity: (row[0], row[1], row[2]) for capacity, row in zip(sums, rows, strict=True)}


def drift_of(sums: DriftSums) -> dict[str, float]:
    """Drift by capacity, the largest first."""
    return {
        str(capacity): 1 - along / (mean * square) ** 0.5 if mean * square > 0 else 0.0
        for capacity, (along, mean, square) in sorted(sums.items(), reverse=True)
    }


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """All values one after the other, in the tensors' logical order."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
