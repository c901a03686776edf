"""What axes are made of, as plain data: an axis, the layout of a tensor, a note for the user."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedrolex.slicing.layout import Layout, refs

Role = Literal["parameter", "buffer", "constant"]
Kind = Literal["width", "heads", "groups", "factor", "rows", "outputs"]
KINDS: dict[str, str] = {
    "width": "cut to the client's capacity",
    "heads": "independent products, kept: the dimensions inside are cut",
    "groups": "independent groups, kept: the channels inside are cut",
    "factor": "one of several factors of a dimension, kept: the largest is cut",
    "rows": "looked up by number, kept unless a window selects from them",
    "outputs": "classes, kept unless a window selects from them",
}


@dataclass(frozen=True)
class Axis:
    """Indices that several dimensions share.

    Attributes:
        name: unique in its model.
        size: number of indices K.
        kind: ``width`` axes are cut by capacity; the others stay whole unless a window selects from them.
        members: the (tensor, dimension) pairs the axis appears in, in the model's order.
    """

    name: str
    size: int
    kind: Kind
    members: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of the model.

    Attributes:
        dims: what each dimension is made of.
        role: ``parameter``, ``buffer`` (state of the module) or ``constant`` (made by its code).
        reads: dimensions that are summed over when the tensor is used, i.e. its input side.
        floating: whether its values are real numbers (others are never averaged).
    """

    dims: tuple[Layout, ...]
    role: Role
    reads: tuple[int, ...] = ()
    floating: bool = True


@dataclass(frozen=True)
class Note:
    """Something the trace wants its user to know: a frozen dimension, a scalar, a limit."""

    about: str
    what: str


def members_of(tensors: Mapping[str, TensorLayout]) -> dict[str, tuple[tuple[str, int], ...]]:
    """Axis name to the (tensor, dimension) pairs that mention it."""
    found: dict[str, dict[tuple[str, int], None]] = {}
    for name, tensor in tensors.items():
        for dim, layout in enumerate(tensor.dims):
            for axis in refs(layout):
                found.setdefault(axis, {})[name, dim] = None
    return {axis: tuple(pairs) for axis, pairs in found.items()}
