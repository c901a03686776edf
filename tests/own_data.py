"""Small data of one's own, and a network for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedrolex import (
    Examples,
    FleetRecipe,
    Recipe,
    Task,
)

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
FLEET = FleetRecipe(clients=4, cohort=2, capacities=["1", "1/2"])
RECIPE = Recipe(rounds=1, device="cpu", engine="loop", callbacks=[], fleet=FLEET)


def network(outputs: int = 2) -> Callable[[int], nn.Module]:
    return lambda scale: nn.Sequential(nn.Linear(4, 8 * scale), nn.ReLU(), nn.Linear(8 * scale, outputs))


def split(x: Any = X, y: Any = Y, **changed: Any) -> Task:
    """The examples spread over four clients, with twenty of them to test on."""
    given: dict[str, Any] = {
        "build": network(),
        "train": Examples(x[:40], y[:40]),
        "test": Examples(x[40:], y[40:]),
        "clients": 4,
    }
    return Task.split(**given | changed)
