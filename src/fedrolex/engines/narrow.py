"""Narrower models inside a client's sub-model: the first nodes of every layer of it (FjORD)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedrolex.slicing.axes import Axes
from fedrolex.slicing.regions import Region, regions
from fedrolex.slicing.windows import Run, Window


@dataclass
class Narrow:
    """A model of the first nodes of another, with parameters of its own that are copies of theirs.

    Attributes:
        module: of the narrower width.
        parameters: its trainable parameters, in the order of the wider model's.
        places: where each lies in the wider model's.
        buffers: its own statistics, which it shares with no other width.
    """

    module: nn.Module
    parameters: list[Tensor]
    places: list[Region]
    buffers: dict[str, Tensor]

    @staticmethod
    def inside(axes: Axes, module: nn.Module, names: Sequence[str], wide: Window, narrow: Window) -> Narrow:
        """A module of the window ``narrow`` inside a sub-model of the window ``wide``, both of first nodes."""
        widths, inner = axes.widths(wide), axes.widths(narrow)
        within = Window({name: Run(0, inner[name], widths[name]) for name in widths if inner[name] < widths[name]})
        own = dict(module.named_parameters())
        places = [regions(name, axes.tensors[name].dims, widths, within) for name in names]
        return Narrow(module, [own[name] for name in names], places, dict(module.named_buffers()))

    @torch.no_grad()
    def load(self, wider: Sequence[Tensor]) -> None:
        """Take over the wider model's parameters."""
        for own, place, parameter in zip(self.parameters, self.places, wider, strict=True):
            place.take(parameter, own)

    def add(self, total: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Add gradients of its parameters to those of the wider model's."""
        for wide, place, gradient in zip(total, self.places, gradients, strict=True):
            place.add(wide, gradient, 1.0)

    def start(self, statistics: Mapping[str, Tensor], axes: Axes, window: Window) -> None:
        """Begin a round with this width's statistics, given as whole tensors."""
        self.module.train()
        axes.take(statistics, window, {name: self.buffers[name] for name in statistics})
