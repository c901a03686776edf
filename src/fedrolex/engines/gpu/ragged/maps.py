"""Maps: which index each place of a window holds, and at which place each index is held."""

from collections.abc import Mapping
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from fedrolex.engines.gpu.ragged.matrices import Matrix
from fedrolex.slicing import Axes, Window


class Maps:
    """A window's maps in one row: a stretch for every axis, and a last one for all that is never cut.

    Args:
        axes: of the server's model.
        tensors: its parameters.
        wired: a stretch for every dimension of every tensor instead, for windows that cut the dimensions of an axis
            apart, as the published random baseline does.
    """

    def __init__(self, axes: Axes, tensors: Mapping[str, Matrix], wired: bool) -> None:
        self._dims: dict[str | tuple[str, int], tuple[str, int, str]] = {}  # of every stretch: a tensor's, its axis
        self._of: dict[str, list[str | tuple[str, int] | None]] = {}  # stretches of a tensor's lines and columns
        for name, tensor in tensors.items():
            self._of[name] = []
            for axis, dim in zip(tensor.axes, tensor.dims, strict=True):
                stretch = axis if axis is None or not wired else (name, dim)
                self._of[name].append(stretch)
                if axis is not None and stretch is not None:
                    self._dims.setdefault(stretch, (name, dim, axis))
        self._sizes = {stretch: axes.axes[axis].size for stretch, (_, _, axis) in self._dims.items()}
        ends = accumulate(self._sizes.values(), initial=0)
        self._begins: dict[str | tuple[str, int] | None, int] = dict(zip([*self._sizes, None], ends, strict=True))
        self.length = self._begins[None] + max(max(tensor.sizes) for tensor in tensors.values())

    def begins(self, tensor: str) -> tuple[int, int]:
        """Where the stretches of a tensor's lines and columns begin."""
        lines, columns = self._of[tensor]
        return self._begins[lines], self._begins[columns]

    def row(self, window: Window) -> NDArray[np.int32]:
        """In every stretch the index at each place; then the place of each index, or -1; ``(2 · length,)``."""
        found = np.full((2, self.length), -1, dtype=np.int32)
        found[:, self._begins[None] :] = np.arange(self.length - self._begins[None])
        for stretch, (tensor, dim, axis) in self._dims.items():
            begin, span = self._begins[stretch], window.span(tensor, dim, axis)
            held = np.arange(self._sizes[stretch]) if span is None else span.indices()
            found[0, begin : begin + len(held)] = held
            found[1, begin + held] = np.arange(len(held))
        return found.reshape(-1)
