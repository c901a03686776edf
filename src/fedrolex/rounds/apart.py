"""Tensors of which every capacity keeps a copy of its own: scales and shifts of norms, or all, if a method says so.

They are part of the server's state under ``tensor@capacity``, whole; a client gets, and moves, its capacity's.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedrolex.core.errors import FedrolexError
from fedrolex.engines import Job
from fedrolex.models.norms import norm_parameters
from fedrolex.slicing.axes import Axes
from fedrolex.slicing.fold import Fold, Normaliser, Rows
from fedrolex.slicing.windows import Window


@dataclass(frozen=True)
class Apart:
    """Which tensors, and for which capacities; none is the usual case.

    Attributes:
        names: of the tensors.
        capacities: that keep them apart.
        leads: whether the largest capacity's copy is the model's own; otherwise the server has its own.
    """

    names: Sequence[str] = ()
    capacities: Sequence[Fraction] = ()
    leads: bool = True

    @staticmethod
    def norms(model: nn.Module, capacities: Sequence[Fraction]) -> Apart:
        """The norms of a model, for these capacities."""
        names = norm_parameters(model)
        if not names:
            raise FedrolexError("method.norms is per_capacity, but this model has no norms with scales and shifts")
        return Apart(names, capacities)

    def added(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state with a copy for every capacity that has none yet."""
        extra = {f"{name}@{capacity}": state[name].clone() for capacity in self.capacities for name in self.names}
        return {**extra, **state} if extra else dict(state)

    def shared(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's tensors, without the copies and without what a method remembers."""
        return {name: tensor for name, tensor in state.items() if "@" not in name}

    @staticmethod
    def statistics(model: nn.Module, capacities: Sequence[Fraction]) -> Apart:
        """The running statistics of a model's batch norms; nothing where it keeps none."""
        norms = {path for path, module in model.named_modules() if isinstance(module, _BatchNorm)}
        names = [name for name, _ in model.named_buffers() if name.rpartition(".")[0] in norms]
        return Apart(names, capacities) if names else Apart()

    def own(self, state: Mapping[str, Tensor], capacity: Fraction) -> dict[str, Tensor]:
        """A capacity's copies, under the names the model has for them."""
        return {name: state[f"{name}@{capacity}"] for name in self.names if f"{name}@{capacity}" in state}


class Folds:
    """The selective averages of one round: of what is shared, and of what each capacity keeps apart.

    Args:
        axes: the model's axes.
        state: the server's tensors.
        apart: which of them are kept apart.
        normaliser: what averages divide by.
        jobs: the cohort, in the order to fold it in.
        together: updates of one window come at once (:meth:`add_all`), in an order of their own.
    """

    def __init__(
        self,
        axes: Axes,
        state: Mapping[str, Tensor],
        apart: Apart,
        normaliser: Normaliser,
        jobs: Sequence[Job],
        together: bool = False,
    ) -> None:
        self.state, self.apart = state, apart
        self.together = together
        shared = {name: tensor for name, tensor in apart.shared(state).items() if name not in apart.names}
        self._shared = Fold(
            axes, shared, normaliser=normaliser, order=None if together else [job.client for job in jobs]
        )
        self._own = {
            capacity: Fold(
                axes,
                apart.own(state, capacity),
                normaliser=normaliser,
                order=None if together else [job.client for job in jobs if capacity in _widths(job)],
            )
            for capacity in dict.fromkeys(width for job in jobs for width in _widths(job))
            if apart.names
        }

    @property
    def clients(self) -> list[Hashable]:
        """Whose updates were taken in."""
        return self._shared.clients

    def add(
        self,
        job: Job,
        part: Mapping[str, Tensor],
        weight: float,
        rows: Rows | None,
        narrower: Mapping[Fraction, Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Fold in one update; a bad one raises and changes nothing."""
        if not self._own:
            self._shared.add(job.client, part, job.window, weight, rows)
            return
        own = {name: tensor for name, tensor in part.items() if name in self.apart.names}
        rest = {name: tensor for name, tensor in part.items() if name not in own}
        kept: dict[Fraction, tuple[Mapping[str, Tensor], Window]] = {job.capacity: (own, job.window)}
        kept |= {width: ((narrower or {})[width], window) for width, (window, _) in job.narrower.items()}
        for width, (tensors, window) in kept.items():
            self._own[width].check(job.client, tensors, window, weight)
        self._shared.add(job.client, rest, job.window, weight, rows)
        for width, (tensors, window) in kept.items():
            self._own[width].add(job.client, tensors, window, weight)

    def add_all(
        self,
        jobs: Sequence[Job],
        parts: Sequence[Mapping[str, Tensor]],
        weights: Sequence[float],
        rows: Sequence[Rows] | None,
    ) -> None:
        """Fold in updates of one window and capacity at once; a bad one raises and changes nothing."""
        clients, window = [job.client for job in jobs], jobs[0].window
        own = [{name: part[name] for name in self.apart.names if name in part} for part in parts]
        rest = [
            {name: t for name, t in part.items() if name not in mine} for part, mine in zip(parts, own, strict=True)
        ]
        self._shared.add_all(clients, rest, window, weights, rows)
        if self._own:
            self._own[jobs[0].capacity].add_all(clients, own, window, weights)

    def skip(self, job: Job) -> None:
        """Say that a client will not report."""
        if self.together:
            return
        self._shared.skip(job.client)
        for width in _widths(job) if self._own else ():
            self._own[width].skip(job.client)

    def average(self) -> dict[str, Tensor]:
        """The server's new tensors; the model's own norms are those of the largest capacity."""
        new = {**self.state, **self._shared.average()}
        for capacity, fold in self._own.items():
            new |= {f"{name}@{capacity}": tensor for name, tensor in fold.average().items()}
        if self.apart.names and self.apart.leads:
            new |= {name: tensor.clone() for name, tensor in self.apart.own(new, max(self.apart.capacities)).items()}
        return new


def _widths(job: Job) -> tuple[Fraction, ...]:
    """All widths a client trains."""
    return (job.capacity, *job.narrower)
