"""A small convolutional network for small images: quick on any CPU."""

import torch
from torch import Tensor, nn


class ConvNet(nn.Module):
    """Two convolutions, of ``width`` and twice as many channels, with norms and pooling, and a linear layer.

    ``size`` is the height and width of the images, at least 4.
    """

    def __init__(self, classes: int = 10, channels: int = 1, size: tuple[int, int] = (8, 8), width: int = 32) -> None:
        super().__init__()
        self.shape = (channels, *size)
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(1, width)
        self.conv2, self.norm2 = nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(1, 2 * width)
        self.head = nn.Linear(2 * width * (size[0] // 4) * (size[1] // 4), classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(batch, channels, h, w)`` to scores ``(batch, classes)``."""
        x = nn.functional.max_pool2d(torch.relu(self.norm1(self.conv1(x))), 2)
        x = nn.functional.max_pool2d(torch.relu(self.norm2(self.conv2(x))), 2)
        scores: Tensor = self.head(x.flatten(1))
        return scores

    def slicing_example(self) -> Tensor:
        """Two images of the size the model is made for."""
        return torch.randn(2, *self.shape, generator=torch.Generator().manual_seed(0))
