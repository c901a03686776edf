"""The server's tensors as matrices of lines and columns, with taps where they are filters."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from fedrolex.slicing import Axes, Fixed, Ref


@dataclass(frozen=True)
class Matrix:
    """How a tensor of the server is addressed, by lines and columns.

    Attributes:
        axes: theirs; None where they are never cut.
        dims: the tensor's dimensions that they are; a vector is a single line, which is none, so that 0 stands for it.
        sizes: how many there are.
        apart: elements from tap to tap, line to line and column to column.
        elements: in all.
    """

    axes: tuple[str | None, str | None]
    dims: tuple[int, int]
    sizes: tuple[int, int]
    apart: tuple[int, int, int]
    elements: int

    def label(self, axis: str | None) -> int:
        """Whether lines (1) or columns (2) lie along an axis, or neither (0)."""
        return 0 if axis is None else 1 if self.axes[0] == axis else 2 if self.axes[1] == axis else 0


@lru_cache(maxsize=8)
def matrices(axes: Axes) -> dict[str, Matrix] | None:
    """How a model's parameters are addressed; None where a dimension is made of several axes."""
    found = {}
    for name, tensor in axes.tensors.items():
        if tensor.role != "parameter" or not all(isinstance(dim, Ref | Fixed) for dim in tensor.dims):
            return None
        of = [dim.axis if isinstance(dim, Ref) else None for dim in tensor.dims]
        shape = axes.shape(name)
        if len(shape) == 4:  # output channels are columns, input channels lines
            taps = shape[2] * shape[3]
            found[name] = Matrix((of[1], of[0]), (1, 0), (shape[1], shape[0]), (1, taps, shape[1] * taps), prod(shape))
        elif len(shape) == 2:
            found[name] = Matrix((of[0], of[1]), (0, 1), (shape[0], shape[1]), (0, shape[1], 1), prod(shape))
        elif len(shape) == 1:
            found[name] = Matrix((None, of[0]), (0, 0), (1, shape[0]), (0, 0, 1), prod(shape))
        else:
            return None
    return found
