"""PreResNet for 32×32 images, the paper's image model.

He et al., "Identity Mappings in Deep Residual Networks" (ECCV 2016), with the stem and widths used by
HeteroFL and FedRolex: a 3×3 stem without pooling, four stages of 64, 128, 256 and 512 channels, convolutions
without bias, and projection shortcuts that read the pre-activated input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fedrolex.slicing.trace import Hints


class Block(nn.Module):
    """Norm, ReLU, 3×3, norm, ReLU, 3×3, plus the shortcut.

    Args:
        inputs: channels in.
        inner: channels between the two convolutions.
        outputs: channels out.
        stride: of the first convolution and of the shortcut.
        project: use a 1×1 convolution as the shortcut instead of the identity.
    """

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int, project: bool) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, inner, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if project else None

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, inputs, h, w)`` to ``(batch, outputs, h / stride, w / stride)``."""
        active = torch.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(active)
        inner = self.conv1(active)
        y: Tensor = self.conv2(torch.relu(self.norm2(inner))) + shortcut
        return y


class PreResNet(nn.Module):
    """Pre-activation residual network; every width can be set on its own.

    Args:
        blocks: blocks in each of the four stages.
        classes: size of the output.
        channels: image channels.
        sizes: axis name to width: ``stream0`` … ``stream3`` for the stages' residual streams,
            ``inner0.0`` … for the insides of their blocks. Missing ones have the paper's width.
    """

    def __init__(
        self,
        blocks: Sequence[int] = (2, 2, 2, 2),
        classes: int = 10,
        channels: int = 3,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        sizes = sizes or {}
        self.plan = (tuple(blocks), classes, channels)
        widths = (64, 128, 256, 512)
        streams = [sizes.get(f"stream{stage}", width) for stage, width in enumerate(widths)]
        self.stem = nn.Conv2d(channels, streams[0], 3, padding=1, bias=False)
        self.stages = nn.ModuleList()
        before = streams[0]
        for stage, count in enumerate(blocks):
            layers: list[nn.Module] = []
            for block in range(count):
                inner = sizes.get(f"inner{stage}.{block}", widths[stage])
                first = block == 0 and stage > 0
                layers.append(Block(before, inner, streams[stage], 2 if first else 1, project=first))
                before = streams[stage]
            self.stages.append(nn.Sequential(*layers))
        self.norm = nn.BatchNorm2d(before)
        self.head = nn.Linear(before, classes)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(batch, channels, h, w)`` to scores ``(batch, classes)``."""
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        scores: Tensor = self.head(torch.relu(self.norm(x)).mean((2, 3)))
        return scores

    def slicing_example(self) -> Tensor:
        """Two images of the size the model is made for."""
        return torch.randn(2, self.plan[2], 32, 32, generator=torch.Generator().manual_seed(0))

    def slicing_hints(self) -> Hints:
        """Axes are derived by tracing; here they only get their names and a factory."""
        blocks, classes, channels = self.plan
        names = {"stem.weight:0": "stream0"}
        for stage, count in enumerate(blocks):
            if stage:
                names[f"stages.{stage}.0.shortcut.weight:0"] = f"stream{stage}"
            for block in range(count):
                names[f"stages.{stage}.{block}.conv1.weight:0"] = f"inner{stage}.{block}"
        return Hints(name=names, factory=partial(_build, blocks, classes, channels))


def _build(blocks: Sequence[int], classes: int, channels: int, sizes: Mapping[str, int]) -> PreResNet:
    return PreResNet(blocks, classes, channels, sizes)


def preresnet18(classes: int = 10, channels: int = 3) -> PreResNet:
    """The paper's model: 11,172,170 parameters with ten classes."""
    return PreResNet((2, 2, 2, 2), classes, channels)


def preresnet34(classes: int = 10, channels: int = 3) -> PreResNet:
    """The deeper variant, blocks 3, 4, 6, 3."""
    return PreResNet((3, 4, 6, 3), classes, channels)
