"""VGG-11 for small images.

Simonyan, Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition" (ICLR 2015), configuration A,
as it is used for CIFAR: norms after the convolutions, one linear layer instead of three.
"""

import torch
from torch import Tensor, nn

from fedrolex.models.norms import Norm, make_norm

STAGES = ((1,), (2,), (4, 4), (8, 8), (8, 8))  # convolutions between poolings, channels as multiples of the width


class VGG(nn.Module):
    """Eight convolutions: 9,228,362 parameters for ten classes of colour images.

    Images of ``size`` × ``size`` are pooled by two as long as two are left; ``width`` is the channels of the first
    convolution. For ``norm`` see :func:`~fedrolex.models.norms.make_norm`.
    """

    def __init__(
        self, classes: int = 10, channels: int = 3, size: int = 32, width: int = 64, norm: Norm = "static"
    ) -> None:
        super().__init__()
        self.shape = (channels, size, size)
        layers: list[nn.Module] = []
        before, left = channels, size
        for stage in STAGES:
            for times in stage:
                convolution = nn.Conv2d(before, width * times, 3, padding=1, bias=norm == "none")  # norms have one
                layers += [convolution, make_norm(norm, width * times), nn.ReLU()]
                before = width * times
            if left >= 2:
                layers.append(nn.MaxPool2d(2))
                left //= 2
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(batch, channels, size, size)`` to scores ``(batch, classes)``."""
        scores: Tensor = self.head(self.features(x).mean((2, 3)))
        return scores

    def slicing_example(self) -> Tensor:
        """Two images of the size the model is made for."""
        return torch.randn(2, *self.shape, generator=torch.Generator().manual_seed(0))
