"""Sums that do not depend on the order of their terms, nor on who added up which of them.

Floating-point addition rounds, so sums of the same terms in another order differ in their last bits. Here every term is
first rounded to a multiple of a quantum that its own size says; sums of such multiples in float64 are exact as long as
there are not too many. Terms of very different sizes have different quanta, and a sum for each.
"""

from collections.abc import Collection, Mapping
from math import frexp
from typing import Any

import torch
from torch import Tensor

from fedrolex.core import FedrolexError
from fedrolex.slicing.axes import Axes
from fedrolex.slicing.fold import Fold
from fedrolex.slicing.regions import Region
from fedrolex.slicing.windows import WHOLE, Window

GRADE = 4  # binary orders of magnitude that share a quantum
ROOM = 16  # bits for the sum of many terms: MOST of them
BITS = 52 - ROOM  # of a term that count, from the top of its grade
MOST = 2**ROOM
"""Most terms of a sum."""

Grades = Mapping[int, Tensor]
"""Sums of one tensor, float64, by the grade of their terms."""


class ExactSum:
    """The sum of parts of one tensor, in progress: the same bits whatever the order, and whoever adds up.

    A term is taken to 32 bits below its largest value, or more; one in float64 to 68.

    Args:
        shape: of the whole tensor.
        device: where the sum is.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.grades: dict[int, Tensor] = {}

    def add(self, region: Region, part: Tensor, weight: float) -> None:
        """Add ``weight · part`` in its place."""
        term = part.to(self.device, torch.float64) * weight
        grade = grade_of(float(torch.linalg.vector_norm(term, torch.inf)) if term.numel() else 0.0)
        for _ in range(2 if part.dtype == torch.float64 else 1):
            step = 1.5 * 2.0 ** (grade + 52 - BITS)  # next to it, numbers of float64 are a quantum apart
            rounded = (term + step).sub_(step)
            self._place(grade, region, rounded)
            term, grade = term - rounded, grade - BITS

    def merge(self, region: Region, grades: Grades) -> None:
        """Add the sums that somebody else has of a part."""
        for grade, part in grades.items():
            self._place(grade, region, part.to(self.device))

    def _place(self, grade: int, region: Region, part: Tensor) -> None:
        if grade not in self.grades:
            self.grades[grade] = torch.zeros(self.shape, dtype=torch.float64, device=self.device)
        region.add(self.grades[grade], part, 1.0)

    def total(self) -> Tensor:
        """The sum, float64; the smallest grades are added first."""
        total = torch.zeros(self.shape, dtype=torch.float64, device=self.device)
        for grade in sorted(self.grades):
            total += self.grades[grade]
        return total


def grade_of(largest: float) -> int:
    """The grade of a term whose largest value is this: an exponent of 2 above it, of which grades are some apart."""
    grade = -(-frexp(largest)[1] // GRADE) * GRADE
    if not -900 < grade < 900:
        raise FedrolexError(f"values of a size of {largest:g} cannot be added up")
    return grade


class ExactFold(Fold):
    """The sums of a selective average over some of its clients, the same bits in whatever order they are added.

    Args:
        axes, base, options: see :class:`~fedrolex.slicing.fold.Fold`.
    """

    def __init__(self, axes: Axes, base: Mapping[str, Tensor], **options: Any) -> None:
        super().__init__(axes, base, **options)
        self._exact = {name: ExactSum(tuple(sums.shape), sums.device) for name, sums in self._sums.items()}
        self._sums.clear()
        self.windows: set[Window] = set()  # of all clients

    def _place(self, name: str, part: Tensor | None, window: Window, weight: float, count: float) -> None:
        """Add ``weight · part`` where it belongs; clients are counted by who has all sums."""
        assert part is not None
        self.windows.add(window)
        self._exact[name].add(self.axes.region(name, window), part, weight)

    def grades(self, window: Window) -> dict[str, Grades]:
        """The sums by tensor and grade, cut to a window that all clients lie in."""
        return {
            name: {grade: self.axes.region(name, window).take(sums) for grade, sums in exact.grades.items()}
            for name, exact in self._exact.items()
        }

    def merge(self, sums: Mapping[str, Grades], window: Window) -> None:
        """Add sums that another fold has (:meth:`grades`), cut to a window."""
        for name, grades in sums.items():
            self._exact[name].merge(self.axes.region(name, window), grades)

    def totals(self) -> dict[str, Tensor]:
        """The sums, float64 and whole."""
        return {name: exact.total() for name, exact in self._exact.items()}

    def hull(self) -> Window:
        """The window of one client that the windows of all others lie in; where there is none, everything."""
        return hull(self.axes, self.windows)


def hull(axes: Axes, windows: Collection[Window]) -> Window:
    """That one of ``windows`` which all others lie in; where there is none, everything."""
    widest = max(windows, key=axes.parameters, default=WHOLE)
    return widest if all(_inside(window, widest) for window in windows) else WHOLE


def _inside(window: Window, other: Window) -> bool:
    """Whether all indices of a window are among those of another."""
    if window.wiring or other.wiring:
        return window == other
    return all(axis in window and _indices(window, axis) <= _indices(other, axis) for axis in other)


def _indices(window: Window, axis: str) -> frozenset[int]:
    return frozenset(window[axis].indices().tolist())
