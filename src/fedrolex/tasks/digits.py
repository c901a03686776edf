"""Scikit-learn's handwritten digits: 1,797 images of 8×8, bundled, quick on any CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedrolex.errors import FedrolexError
from fedrolex.streams import shuffle
from fedrolex.tasks.partition import alike, by_label, even
from fedrolex.tasks.task import Examples, Task

HELD_OUT = 450


class DigitsNet(nn.Module):
    """Two convolutions and a linear layer.

    Args:
        width: channels of the first convolution; the second has twice as many.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(1, width)
        self.conv2, self.norm2 = nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(1, 2 * width)
        self.head = nn.Linear(2 * width * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(batch, 1, 8, 8)`` to scores ``(batch, 10)``."""
        x = nn.functional.max_pool2d(torch.relu(self.norm1(self.conv1(x))), 2)
        x = nn.functional.max_pool2d(torch.relu(self.norm2(self.conv2(x))), 2)
        scores: Tensor = self.head(x.flatten(1))
        return scores


def digits(clients: int, labels_per_client: int = 10, width: int = 32, seed: int = 0) -> Task:
    """The digits spread over clients.

    Args:
        clients: how many.
        labels_per_client: 10 is an even random split; fewer makes clients differ.
        width: of the largest client's model.
        seed: key of the split.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise FedrolexError("the digits task needs scikit-learn: pip install scikit-learn") from None
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    order = torch.from_numpy(shuffle(len(y), seed, "held out"))
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    train_set, test_set = Examples(x[train], y[train]), Examples(x[test], y[test])
    if labels_per_client >= 10:
        parts = even(len(train_set), clients, seed)
    else:
        parts = by_label(train_set.y, clients, labels_per_client, seed)
    return Task(
        name="digits",
        build=lambda scale: DigitsNet(width * scale),
        train=train_set,
        test=test_set,
        parts=parts,
        test_parts=alike(train_set.y, parts, test_set.y),
    )
