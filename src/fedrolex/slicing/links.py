"""Blocks of the axes without weights between them: several networks, or nested ones, in one.

With ``reach="own"`` a block reads only itself (block-diagonal: independent columns); with
``reach="before"`` it also reads the blocks before it (block-triangular: every prefix is a network of its
own). The weights in between are zero in the model, in every cut, during training and after every fold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedrolex.core.errors import FedrolexError
from fedrolex.slicing import layout as layouts
from fedrolex.slicing.windows import Arc, Window, exact

if TYPE_CHECKING:
    from fedrolex.slicing.axes import Axes, Axis


@dataclass(frozen=True)
class Links:
    """Which blocks of the axes are connected.

    Attributes:
        shares: the part of every axis each block takes, in order; what they leave over is one more block.
        reach: ``own`` (block-diagonal) or ``before`` (block-triangular).
    """

    shares: tuple[Fraction, ...]
    reach: Literal["own", "before"] = "own"

    def __init__(self, shares: Sequence[Fraction | str | float], reach: Literal["own", "before"] = "own") -> None:
        parts = tuple(exact(share) for share in shares)
        if not parts or sum(parts) > 1:
            raise FedrolexError(
                f"shares {', '.join(map(str, shares))} must be one or more fractions that add up to at most 1"
            )
        if reach not in ("own", "before"):
            raise FedrolexError(f"reach {reach!r} is unknown: use own or before")
        object.__setattr__(self, "shares", parts)
        object.__setattr__(self, "reach", reach)

    def bounds(self, size: int) -> list[int]:
        """First index of every block of an axis of this size, and the size itself at the end."""
        edges, total = [0], Fraction(0)
        for share in self.shares:
            total += share
            edges.append(int(total * size))
        return edges if edges[-1] == size else [*edges, size]

    def span(self, axis: Axis, first: int, last: int | None = None) -> Arc:
        """Blocks ``first`` to ``last`` (included) of an axis as a window."""
        edges = self.bounds(axis.size)
        stop = edges[(first if last is None else last) + 1]
        return Arc(edges[first], stop - edges[first], axis.size)

    def window(self, axes: Axes, first: int, last: int | None = None) -> Window:
        """Blocks ``first`` to ``last`` (included) of every axis."""
        return Window({axis.name: self.span(axis, first, last) for axis in axes.cut_axes})

    def mask(self, axes: Axes, tensor: str) -> Tensor | None:
        """Which weights of a tensor exist: 1 or 0 in the tensor's full shape; None where all do.

        A weight exists if the block it writes to may read the block it reads from. Dimensions without
        blocks (inputs, classes) are connected to everything.
        """
        layout = axes.tensors[tensor]
        if not layout.floating or not layout.reads:
            return None
        blocks = [layouts.labels(dim, axes.full, lambda name: self._labels(axes, name)) for dim in layout.dims]
        exists = np.ones(axes.shape(tensor), dtype=bool)
        for out in range(len(blocks)):
            for read in layout.reads:
                if out in layout.reads or out == read:
                    continue
                a, b = _along(blocks[out], out, len(blocks)), _along(blocks[read], read, len(blocks))
                linked = (a == b) if self.reach == "own" else (b <= a)
                exists &= linked | (a < 0) | (b < 0)
        return None if exists.all() else torch.from_numpy(exists)

    def _labels(self, axes: Axes, name: str) -> NDArray[np.int64] | None:
        axis = axes.axes[name]
        if axis.kind != "width":
            return None
        edges = np.asarray(self.bounds(axis.size)[1:-1])
        return np.searchsorted(edges, np.arange(axis.size), side="right")

    def masks(self, axes: Axes) -> dict[str, Tensor]:
        """The masks of all tensors that miss weights."""
        found = {name: self.mask(axes, name) for name in axes.tensors}
        return {name: mask for name, mask in found.items() if mask is not None}

    def unlink(self, axes: Axes, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Set the weights that do not exist to zero, in place; returns ``state``."""
        with torch.no_grad():
            for name, mask in self.masks(axes).items():
                state[name].mul_(mask.to(state[name].device))
        return state

    def hold(self, axes: Axes, module: nn.Module, window: Window) -> None:
        """Zero a sub-model's missing weights and keep them zero while it trains."""
        masks = axes.take(self.masks(axes), window)
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, mask in masks.items():
                parameters[name].mul_(mask.to(parameters[name].device))
        module.register_forward_pre_hook(_KeepZero({n: m for n, m in masks.items() if not bool(m.all())}))


def _along(values: NDArray[np.int64], dim: int, rank: int) -> NDArray[np.int64]:
    return values.reshape([-1 if d == dim else 1 for d in range(rank)])


class _KeepZero:
    """Before each forward: make sure the missing weights of the module (or of its copy) get no gradient."""

    def __init__(self, masks: Mapping[str, Tensor]) -> None:
        self.masks = dict(masks)

    def __call__(self, module: nn.Module, args: Any) -> None:
        parameters = dict(module.named_parameters())
        for name, mask in self.masks.items():
            parameter = parameters[name]
            if parameter.requires_grad and not getattr(parameter, "keeps_zero", False):
                parameter.register_hook(partial(_masked, mask))
                parameter.keeps_zero = True  # type: ignore[attr-defined]


def _masked(mask: Tensor, grad: Tensor) -> Tensor:
    return grad * mask.to(grad)
