"""LeNet for colour images: two convolutions and three linear layers, no norms."""

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d


class LeNet(nn.Module):
    """The network of many federated benchmarks: 62,006 parameters for ten classes of 32 × 32 colour images.

    ``size`` is the height and width of the images, at least 16; ``width`` is the channels of the first convolution, and
    the other layers keep LeNet's proportions, 6 : 16 : 120 : 84.
    """

    def __init__(self, classes: int = 10, channels: int = 3, size: int = 32, width: int = 6) -> None:
        super().__init__()
        self.shape = (channels, size, size)
        second, third, fourth = (-(-n * width // 6) for n in (16, 120, 84))
        side = ((size - 4) // 2 - 4) // 2
        self.conv1, self.conv2 = nn.Conv2d(channels, width, 5), nn.Conv2d(width, second, 5)
        self.fc1, self.fc2 = nn.Linear(second * side * side, third), nn.Linear(third, fourth)
        self.head = nn.Linear(fourth, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(batch, channels, size, size)`` to scores ``(batch, classes)``."""
        x = max_pool2d(torch.relu(self.conv1(x)), 2)
        x = max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.fc2(torch.relu(self.fc1(x.flatten(1)))))
        scores: Tensor = self.head(x)
        return scores

    def slicing_example(self) -> Tensor:
        """Two images of the size the model is made for."""
        return torch.randn(2, *self.shape, generator=torch.Generator().manual_seed(0))
