"""Which rows of an axis a client trained, however that is said: indices or a mask; a list, an array or a tensor."""

import reprlib
from collections.abc import Mapping, Sequence, Set
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedrolex.core import FedrolexError
from fedrolex.slicing.axes import Axes
from fedrolex.slicing.axis import Axis

Indices = Sequence[int] | Sequence[bool] | Set[int] | Tensor | NDArray[Any]
"""Indices of an axis in any order, or a mask: as many booleans as the axis has indices."""

Rows = Mapping[str, Indices]
"""Axis name to the indices that a client trained."""


def trained_rows(rows: Rows | None, axes: Axes) -> dict[str, list[int]] | None:
    """Axis name to a list of indices; None where all count. What is no index of its axis raises, in one line."""
    if rows is None:
        return None
    if not isinstance(rows, Mapping):
        raise FedrolexError(f"rows is a {type(rows).__name__}: give indices by axis, e.g. {{'head': [0, 3]}}")
    return {name: _indices(given, axes[name]) for name, given in rows.items()}


def _indices(given: Indices, axis: Axis) -> list[int]:
    """Indices of an axis, or a mask over the axis, as a list of indices."""
    found = _array(given)
    if found is None:
        wanted = f"whole numbers from 0 to {axis.size - 1}, or a mask of {axis.size} booleans"
        raise FedrolexError(f"rows of {axis.name} are {reprlib.repr(given)}: give {wanted}")
    if found.dtype == bool:
        if len(found) != axis.size:
            raise FedrolexError(f"rows of {axis.name} are a mask of {len(found)} booleans: give {axis.size}")
        found = np.flatnonzero(found)
    if len(found) and not 0 <= found.min() <= found.max() < axis.size:
        raise FedrolexError(f"rows of {axis.name} name an index outside 0..{axis.size - 1}")
    return [int(index) for index in found]


def _array(given: object) -> NDArray[Any] | None:
    """One row of whole numbers or of booleans as an array; None for anything else."""
    try:
        if isinstance(given, Tensor):
            found = given.cpu().numpy()
        elif isinstance(given, np.ndarray):
            found = given
        elif (
            isinstance(given, Sequence | Set)
            and not isinstance(given, bytes)
            and _of_one_kind({type(value) for value in given})
        ):
            found = np.asarray(list(given))
        else:
            return None
    except (TypeError, ValueError, RuntimeError):  # no array: ragged, sparse, without values
        return None
    whole = found.dtype.kind in "iub" or not found.size
    return found if found.ndim == 1 and whole else None


def _of_one_kind(kinds: set[type]) -> bool:
    """Whether NumPy would not turn some values into others: True beside 2 into 1."""
    return len(kinds) < 2 or (bool not in kinds and all(issubclass(kind, Integral) for kind in kinds))
