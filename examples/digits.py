"""Ten devices of five sizes train one network on scikit-learn's digits: the whole loop, by hand.

    python examples/digits.py          # about ten seconds

Everything federated is in the loop below; slicing does the cutting and the averaging.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedrolex import Fold, Rolling, trace


def network() -> nn.Module:
    """A small convolutional network for 8×8 images."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(1, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(1, 64), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def train(module: nn.Module, x: Tensor, y: Tensor) -> None:
    """One epoch on one device."""
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for batch in torch.randperm(len(y)).split(16):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x[batch]), y[batch]).backward()
        optimiser.step()


def main(rounds: int = 25) -> float:
    """Train, printing the accuracy on images no device has; returns the last one."""
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    shuffled = torch.randperm(len(y))
    test, parts = shuffled[:400], shuffled[400:].chunk(10)
    capacities = ["1", "1/2", "1/4", "1/8", "1/16"] * 2

    model = network()
    axes = trace(model, x[:2])
    accuracy = 0.0
    for round in range(rounds):
        fold = Fold(axes, axes.state(model))
        for client, (capacity, part) in enumerate(zip(capacities, parts, strict=True)):
            window = Rolling().window(axes, round=round, capacity=capacity, client=client)
            small = axes.cut(model, window)
            train(small, x[part], y[part])
            fold.add(client, axes.state(small, window), window)
        axes.load(model, fold.average())
        with torch.no_grad():
            accuracy = float((model.eval()(x[test]).argmax(1) == y[test]).float().mean())
        if round % 5 == 4:
            print(f"round {round + 1:2d}: {accuracy:.1%} of {len(test)} unseen images")
    return accuracy


if __name__ == "__main__":
    main()
