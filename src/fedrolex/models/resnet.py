"""The small residual networks of CIFAR-10: ResNet-8, 14, 20, …

He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (CVPR 2016, section 4.2): a 3×3 stem, three stages
of 16, 32 and 64 channels with as many blocks each, norms after the convolutions; depth 6n + 2. Where a stage
begins, the shortcut is a 1×1 convolution.
"""

import torch
from torch import Tensor, nn

from fedrolex.core import FedrolexError
from fedrolex.models.norms import Norm, make_norm


class ResidualBlock(nn.Module):
    """3×3, norm, ReLU, 3×3, norm, plus the shortcut, ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), make_norm(norm, outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), make_norm(norm, outputs)
        self.shortcut = None
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), make_norm(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, inputs, h, w)`` to ``(batch, outputs, h / stride, w / stride)``."""
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    """A residual network for small images: 272,474 parameters at depth 20 and 78,042 at depth 8, for ten classes.

    The first stage has ``width`` channels, each later one twice as many as the one before. ``size`` is the height and
    width of the images; for ``norm`` see :func:`~fedrolex.models.norms.make_norm`.
    """

    def __init__(
        self, depth: int, classes: int = 10, channels: int = 3, size: int = 32, width: int = 16, norm: Norm = "static"
    ) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise FedrolexError(f"a ResNet of depth {depth}: give 6n + 2, such as 8, 14, 20")
        self.shape = (channels, size, size)
        self.stem, self.norm = nn.Conv2d(channels, width, 3, padding=1, bias=False), make_norm(norm, width)
        layers: list[nn.Module] = []
        before = width
        for stage in range(3):
            for block in range((depth - 2) // 6):
                layers.append(ResidualBlock(before, width * 2**stage, 2 if stage and not block else 1, norm))
                before = width * 2**stage
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(batch, channels, size, size)`` to scores ``(batch, classes)``."""
        scores: Tensor = self.head(self.blocks(torch.relu(self.norm(self.stem(x)))).mean((2, 3)))
        return scores

    def slicing_example(self) -> Tensor:
        """Two images of the size the model is made for."""
        return torch.randn(2, *self.shape, generator=torch.Generator().manual_seed(0))
