"""A network of your own on arrays of your own, over devices of three sizes; then what the smallest runs, without us.

python examples/own_model.py                       # half a minute on two cores
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import mkdtemp

import torch
from sklearn.datasets import load_digits
from torch import nn

from fedrolex import ClientRecipe, Examples, FleetRecipe, Recipe, Task, export, train
from fedrolex.methods import Columns


def network(scale: int) -> nn.Module:
    """Any module; ``scale`` times as wide where the server's model is to be larger than every device's."""
    return nn.Sequential(
        nn.Conv2d(1, 32 * scale, 3, padding=1),
        nn.BatchNorm2d(32 * scale, track_running_stats=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * scale * 16, 10),
    )


def main(out: Path, rounds: int = 20) -> tuple[float, float]:
    """Accuracy on test examples of the whole model, and of what a device of a quarter is given, in plain PyTorch."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    task = Task.split(build=network, train=Examples(x[:1400], y[:1400]), test=Examples(x[1400:], y[1400:]), clients=12)
    fleet = FleetRecipe(clients=12, cohort=6, capacities=["1", "1/2", "1/4"])
    client = ClientRecipe(lr=0.05, momentum=0.9, batch=16)
    done = train(Recipe(rounds=rounds, method=Columns(), fleet=fleet, client=client), task, out=out / "run")
    export(out / "run", "1/4", out / "quarter", task=task)

    program = torch.export.load(out / "quarter" / "model.pt2").module()  # nothing of fedrolex
    right = program(x[1400:]).argmax(1) == y[1400:]
    return done.summary["global_accuracy"], right.double().mean().item()


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(mkdtemp())
    whole, quarter = main(place)
    print(f"the whole model {whole:.1%}, a device of a quarter {quarter:.1%}; in {place}")
