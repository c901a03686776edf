"""Between server and cohort: every client's window out of the server's tensors, and the selective average back.

One launch each way, whatever the windows: their :mod:`maps <.maps>` say what lies where. A filter is addressed by
(tap, input channel, output channel).
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedrolex.engines.gpu.ragged.cohort import Cohort
from fedrolex.engines.gpu.ragged.exchange_kernels import deal, merge
from fedrolex.engines.gpu.ragged.maps import Maps
from fedrolex.engines.gpu.ragged.matrices import matrices
from fedrolex.slicing import Axes, Window

SIZE = 1024
IDLE = -1


class CohortExchange:
    """Carries parameters between the server, whose model has these axes, and cohorts, in the order of their places."""

    def __init__(self, axes: Axes, cohorts: Sequence[Cohort]) -> None:
        found = matrices(axes)
        assert found is not None, "the engine has looked"
        self.axes, self.tensors = axes, found
        self.device = cohorts[0].device
        places = [(cohort, client) for cohort in cohorts for client in range(cohort.clients)]
        self.places = len(places)
        parts: list[tuple[int, ...]] = []
        deals: list[tuple[int, ...]] = []
        for place, (cohort, client) in enumerate(places):
            for t, name in enumerate(found):
                begin, stored, real = cohort.parameters.matrix(client, name)
                address = cohort.parameters.values.data_ptr() + 4 * begin
                deals += [(place, t, len(parts), first) for first in range(0, prod(stored), SIZE)]
                parts.append((address, stored[1], stored[2], *real, prod(stored), 0, 0))
        merges = [(t, first) for t, tensor in enumerate(found.values()) for first in range(0, tensor.elements, SIZE)]
        self._parts, self._deals, self._merges = self._table(parts), self._table(deals), self._table(merges)
        self._sums = torch.zeros(len(merges), self.places, 3, device=self.device)
        self._windows = torch.full((self.places,), IDLE, dtype=torch.int64, device=self.device)
        self._first = torch.zeros_like(self._windows)  # every place is given the first home
        self._lengths = [tensor.elements for tensor in found.values()]
        self._offsets = np.cumsum([0, *self._lengths[:-1]], dtype=np.int64) * 4
        self._labels: dict[str | None, Tensor] = {}
        self._kinds: dict[bool, tuple[Maps, Tensor]] = {}  # plain and wired maps, with the tensors' layouts in them
        self._known: dict[tuple[Maps, Window], NDArray[np.int32]] = {}

    def _table(self, rows: Sequence[Sequence[int]] | Sequence[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64).to(self.device)

    def get_ready(self, windows: Iterable[Window]) -> None:
        """Windows that will be dealt next."""
        coming = list(dict.fromkeys(windows))
        maps, _ = self._kind(coming)
        self._known = {(maps, window): maps.row(window) for window in coming}

    def deal(
        self, homes: Sequence[Mapping[str, Tensor]], windows: Sequence[Window | None], of: Sequence[int] = ()
    ) -> None:
        """Every place's window of the server's tensors into its cohort; None leaves a place idle.

        ``homes`` are tensors of the same shapes, such as several models of one network; ``of`` says which of them each
        place is given, by default the first.
        """
        different = list(dict.fromkeys(window for window in windows if window is not None))
        numbers = {window: number for number, window in enumerate(different)}
        self._windows.copy_(torch.tensor([IDLE if w is None else numbers[w] for w in windows]))
        maps, self._layouts = self._kind(different)
        rows = [
            self._known[maps, window] if (maps, window) in self._known else maps.row(window) for window in different
        ]
        self._length, self._maps = maps.length, torch.from_numpy(np.concatenate(rows)).to(self.device)
        self._old = [{name: state[name].contiguous() for name in self.tensors} for state in homes]
        self._servers = self._table([[tensor.data_ptr() for tensor in old.values()] for old in self._old])
        deal[(len(self._deals),)](
            self._deals, self._parts, self._layouts, self._servers, self._table(of) if any(of) else self._first,
            self._windows, self._maps, len(self.tensors), self._length, SIZE=SIZE,
        )  # fmt: skip

    def average(
        self, weights: Sequence[float], label_axis: str | None = None, rows: Tensor | None = None, home: int = 0
    ) -> tuple[dict[str, Tensor], list[list[float]], bool]:
        """The server's new tensors; for every place sums of change · average change, of both squared; is all finite?

        A weight of 0 leaves a place out; places of other homes than ``home`` must have it. ``rows``, ``(places,
        classes)``, say which classes of ``label_axis`` a place holds.
        """
        flat = torch.empty(sum(self._lengths), device=self.device)
        if label_axis not in self._labels:
            which = [tensor.label(label_axis) for tensor in self.tensors.values()]
            self._labels[label_axis] = torch.tensor(which).to(self.device)
        places = torch.from_numpy(flat.data_ptr() + self._offsets).to(self.device)
        merge[(len(self._merges),)](
            self._merges, self._parts, self._layouts, self._servers[home], places, self._windows, self._maps,
            torch.tensor(weights, dtype=torch.float32).to(self.device), self._windows if rows is None else rows,
            self._labels[label_axis], self._sums, self.places, len(self.tensors), self._length,
            1 if rows is None else rows.shape[1], ROWS=rows is not None, SIZE=SIZE,
        )  # fmt: skip
        parts = flat.split(self._lengths)
        new = {name: part.view(self._old[home][name].shape) for name, part in zip(self.tensors, parts, strict=True)}
        told = torch.cat([self._sums.sum(0, dtype=torch.float64).flatten(), flat.sum().double()[None]]).tolist()
        return new, [told[at : at + 3] for at in range(0, len(told) - 1, 3)], isfinite(told[-1])

    def _kind(self, windows: Iterable[Window]) -> tuple[Maps, Tensor]:
        """The maps that windows need, and every tensor's layout in them."""
        wired = any(window.wiring for window in windows)
        if wired not in self._kinds:
            maps = Maps(self.axes, self.tensors, wired)
            layouts = [
                (*maps.begins(name), *tensor.apart, *tensor.sizes, tensor.elements, *[0] * 8)
                for name, tensor in self.tensors.items()
            ]
            self._kinds[wired] = maps, self._table(layouts)
        return self._kinds[wired]
