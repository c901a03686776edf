"""Areas: the positions of a model that the same devices of a cohort train.

Sub-models overlap in parts. Two positions are in one area where exactly the same devices hold them, so that a sum
over an area is a sum over all its devices, and a device sends the areas it holds, not the whole model padded with
zeros. Windows that grow with capacity, as those of FedRolex, make as many areas as there are capacities.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedrolex.clients import Job, Network, Tensors
from fedrolex.core import FedrolexError
from fedrolex.slicing import Axes, Window

MOST_WINDOWS = 62  # bits of a mark
MOST_AREAS = 256


@dataclass(frozen=True)
class Area:
    """Positions of one section that the same devices hold.

    Attributes:
        section: of the server's state.
        mark: which windows of the section cover the positions, a bit each.
        members: the devices that hold them.
        size: how many values.
    """

    section: str
    mark: int
    members: frozenset[int]
    size: int


@dataclass(frozen=True)
class Areas:
    """All areas of a round that enough devices hold; the same wherever they are computed.

    Attributes:
        found: in order.
        left_out: how many values too few devices hold.
    """

    found: tuple[Area, ...]
    left_out: int
    _marks: Mapping[str, Mapping[str, Tensor]] = field(repr=False)
    _axes: Mapping[str, Axes] = field(repr=False)

    @staticmethod
    def of(jobs: Sequence[Job], networks: Mapping[str, Network], state: Mapping[str, Tensors], least: int) -> "Areas":
        """The areas of a round's jobs that at least ``least`` devices hold."""
        windows: dict[str, dict[Window, set[int]]] = {}
        axes: dict[str, Axes] = {}
        known: set[tuple[int, str]] = set()
        for job in jobs:
            if len(job.sections) > 1:
                raise FedrolexError("secure sums need one section a job: leave method.norms at shared")
            (section,) = job.sections
            if (job.client, section) in known:
                twice = f"client {job.client} has two jobs in section {section!r}"
                raise FedrolexError(f"{twice}: secure sums need a section of its own for each")
            known.add((job.client, section))
            windows.setdefault(section, {}).setdefault(job.window, set()).add(job.client)
            axes[section] = networks[job.network].axes
        marks: dict[str, dict[str, Tensor]] = {}
        found, left_out = [], 0
        for section, held in windows.items():
            if len(held) > MOST_WINDOWS:
                remedy = f"{MOST_WINDOWS} are the most that secure sums keep apart, use windows by capacity"
                raise FedrolexError(f"{len(held)} different windows in one round: {remedy}")
            own, layout = marks.setdefault(section, {}), axes[section]
            sizes: dict[int, int] = {}
            for name in sorted(n for n in state[section] if layout.tensors[n].floating):
                own[name] = _marks(layout, name, list(held))
                times = _values(layout, name) // max(1, own[name].numel())
                for mark, count in zip(*(each.tolist() for each in own[name].unique(return_counts=True)), strict=True):
                    sizes[mark] = sizes.get(mark, 0) + count * times
            for mark, size in sorted(sizes.items()):
                members = frozenset().union(*(who for bit, who in enumerate(held.values()) if mark >> bit & 1))
                if len(members) >= least:
                    found.append(Area(section, mark, members, size))
                elif members:
                    left_out += size
        if len(found) > MOST_AREAS:
            raise FedrolexError(f"{len(found)} areas in one round: {MOST_AREAS} are the most, use windows by capacity")
        return Areas(tuple(found), left_out, marks, axes)

    def taken(self, job: Job, change: Tensors) -> dict[int, Tensor]:
        """The values of a device's change, by area, each in the order of the whole model's positions."""
        (section,) = job.sections
        mine = {place: area for place, area in enumerate(self.found) if self._holds(area, job)}
        parts: dict[int, list[Tensor]] = {place: [] for place in mine}
        for name, marks in self._marks[section].items():
            region = self._axes[section].region(name, job.window)
            whole = torch.zeros(region.full, dtype=torch.float64)
            region.put(whole, change[name].double().cpu())
            wide = marks.expand(region.full)
            for place, area in mine.items():
                parts[place].append(whole[wide == area.mark])
        return {place: torch.cat(each) for place, each in parts.items()}

    def put(self, place: int, values: Tensor, into: dict[str, Tensor]) -> None:
        """Add the values of an area to whole tensors of its section, in place."""
        area, done = self.found[place], 0
        for name, marks in self._marks[area.section].items():
            where = marks.expand(into[name].shape) == area.mark
            count = int(where.sum())
            into[name][where] += values[done : done + count].to(into[name].device, into[name].dtype)
            done += count

    def _holds(self, area: Area, job: Job) -> bool:
        return area.section == job.sections[0] and job.client in area.members


def _marks(axes: Axes, name: str, windows: Sequence[Window]) -> Tensor:
    """For every position of a tensor, the windows that cover it, a bit each; broadcasts against the tensor."""
    full = axes.region(name, windows[0], counts=True).full
    marks = torch.zeros(full, dtype=torch.int64)
    for bit, window in enumerate(windows):
        axes.region(name, window, counts=True).add_constant(marks, 1 << bit)
    return marks


def _values(axes: Axes, name: str) -> int:
    return int(torch.Size(axes.shape(name)).numel())
