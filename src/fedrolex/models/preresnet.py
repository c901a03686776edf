"""PreResNet for 32×32 images, the paper's image model.

He et al., "Identity Mappings in Deep Residual Networks" (ECCV 2016), with the stem and widths used by
HeteroFL and FedRolex: a 3×3 stem without pooling, four stages of 64, 128, 256 and 512 channels, convolutions
without bias, and projection shortcuts that read the pre-activated input.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from fedrolex.core import FedrolexError, one_of
from fedrolex.models.norms import GROUPS, Norm, make_norm
from fedrolex.slicing import Hints

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a PreResNet is made of.

    Attributes:
        blocks: blocks in each of the four stages.
        classes: size of the output.
        channels: image channels.
        width: channels of the first stage; each later one has twice as many as the one before.
        norm: ``static`` is batch norm that keeps no running statistics (HeteroFL's; see
            :mod:`fedrolex.models.norms` for evaluation), ``batch`` keeps them, ``group`` has four groups
            (sub-models keep the groups and cut inside them), ``none`` has no norms.
        scaler: divide by width over full width before each norm while training, as HeteroFL does.
            Batch and group norm undo it (up to their ε); without norms it matters.
        size: height and width of the images.
    """

    blocks: tuple[int, ...] = (2, 2, 2, 2)
    classes: int = 10
    channels: int = 3
    width: int = 64
    norm: Norm = "static"
    scaler: bool = False
    size: int = 32
    groups: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        one_of("norm", self.norm, get_args(Norm))
        object.__setattr__(self, "groups", GROUPS if self.norm == "group" else 1)
        if self.width < 1 or (self.groups > 1 and (self.width % self.groups or self.width == self.groups)):
            wanted = f"a multiple of {self.groups} above it" if self.groups > 1 else "1 or more"
            raise FedrolexError(f"width {self.width} with norm {self.norm!r}: give {wanted}")
        if self.scaler and self.norm == "batch":
            raise FedrolexError("the scaler would spoil running statistics: use norm 'static', 'group' or 'none'")


class Scaler(nn.Module):
    """HeteroFL's scaler: divides by ``rate`` while training."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """``x`` divided by the rate while training, else ``x``; same shape."""
        return x / self.rate if self.training and self.rate != 1 else x


def _scaler(plan: Plan, own: int, full: int) -> nn.Module:
    return Scaler(own / full) if plan.scaler else nn.Identity()


class PreactivationBlock(nn.Module):
    """Norm, ReLU, 3×3, norm, ReLU, 3×3, plus the shortcut: the identity or, to ``project``, a 1×1 convolution.

    Channels in, between the two convolutions, and out are pairs: (own, full).
    """

    def __init__(self, plan: Plan, inputs: Pair, inner: Pair, outputs: Pair, stride: int, project: bool) -> None:
        super().__init__()
        self.scale1, self.norm1 = _scaler(plan, *inputs), make_norm(plan.norm, inputs[0])
        self.conv1 = nn.Conv2d(inputs[0], inner[0], 3, stride, padding=1, bias=False)
        self.scale2, self.norm2 = _scaler(plan, *inner), make_norm(plan.norm, inner[0])
        self.conv2 = nn.Conv2d(inner[0], outputs[0], 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs[0], outputs[0], 1, stride, bias=False) if project else None

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, inputs, h, w)`` to ``(batch, outputs, h / stride, w / stride)``."""
        active = torch.relu(self.norm1(self.scale1(x)))
        shortcut = x if self.shortcut is None else self.shortcut(active)
        y: Tensor = self.conv2(torch.relu(self.norm2(self.scale2(self.conv1(active))))) + shortcut
        return y


class PreResNet(nn.Module):
    """Pre-activation residual network; every width can be set on its own.

    Args:
        plan: the server's model.
        sizes: axis name to width, for sub-models: ``stream0`` … ``stream3`` for the stages' residual
            streams, ``inner0.0`` … for the insides of their blocks; with group norm ``stream0.2`` …, the
            width of one group.
    """

    def __init__(self, plan: Plan | None = None, sizes: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.plan = plan = plan or Plan()
        sizes = sizes or {}

        def wide(axis: str, full: int) -> Pair:
            inside = axis if plan.groups == 1 else f"{axis}.2"  # with groups, `axis` counts them
            return sizes.get(inside, full // plan.groups) * plan.groups, full

        widths = [plan.width * 2**stage for stage in range(len(plan.blocks))]
        streams = [wide(f"stream{stage}", full) for stage, full in enumerate(widths)]
        self.stem = nn.Conv2d(plan.channels, streams[0][0], 3, padding=1, bias=False)
        self.stages = nn.ModuleList()
        before = streams[0]
        for stage, count in enumerate(plan.blocks):
            layers: list[nn.Module] = []
            for block in range(count):
                inner = wide(f"inner{stage}.{block}", widths[stage])
                first = block == 0 and stage > 0
                layers.append(PreactivationBlock(plan, before, inner, streams[stage], 2 if first else 1, project=first))
                before = streams[stage]
            self.stages.append(nn.Sequential(*layers))
        self.scale, self.norm = _scaler(plan, *before), make_norm(plan.norm, before[0])
        self.head = nn.Linear(before[0], sizes.get("head", plan.classes))
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(batch, channels, h, w)`` to scores ``(batch, classes)``."""
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        scores: Tensor = self.head(torch.relu(self.norm(self.scale(x))).mean((2, 3)))
        return scores

    def slicing_example(self) -> Tensor:
        """Two images of the size the model is made for."""
        plan = self.plan
        return torch.randn(2, plan.channels, plan.size, plan.size, generator=torch.Generator().manual_seed(0))

    def slicing_hints(self) -> Hints:
        """Axes are derived by tracing; here they only get their names and a factory."""
        names = {"stem.weight:0": "stream0"}
        for stage, count in enumerate(self.plan.blocks):
            if stage:
                names[f"stages.{stage}.0.shortcut.weight:0"] = f"stream{stage}"
            for block in range(count):
                names[f"stages.{stage}.{block}.conv1.weight:0"] = f"inner{stage}.{block}"
        return Hints(name=names, factory=partial(PreResNet, self.plan))


def preresnet18(classes: int = 10, **options: Any) -> PreResNet:
    """The paper's model: 11,172,170 parameters with ten classes. ``options`` are those of :class:`Plan`."""
    return PreResNet(Plan(classes=classes, **options))


def preresnet34(classes: int = 10, **options: Any) -> PreResNet:
    """The deeper variant, blocks 3, 4, 6, 3."""
    return PreResNet(Plan(blocks=(3, 4, 6, 3), classes=classes, **options))
