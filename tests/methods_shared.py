"""Small runs and models that the tests of methods share."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor, nn

from fedrolex import Recipe
from fedrolex.methods.server_round import Group
from fedrolex.runs import Training, prepare

ONE = Fraction(1)
SMALL = ["task.width=8", "fleet.clients=6", "fleet.cohort=4", "task.limit=300", 'fleet.capacities=["1", "1/2"]',
         "client.batch=16"]  # fmt: skip


def small(*settings: str) -> Training:
    return prepare(Recipe(device="cpu").with_settings([*SMALL, *settings]))


def states(made: Training, rounds: int = 2) -> dict[str, Tensor]:
    for _ in range(rounds):
        made.run_round()
    return {name: tensor for name, tensor in made.state.items() if "@" not in name}


def group(*models: Tensor, weights: list[float] | None = None, sent: float = 0.0) -> Group:
    module = nn.Linear(models[0].shape[-1], models[0].shape[0], bias=False)
    weights = weights or [1.0] * len(models)
    mean = sum(w * m for w, m in zip(weights, models, strict=True)) / sum(weights)
    uploads = [{"weight": model} for model in models]
    assert isinstance(mean, Tensor)
    return Group(module, {"weight": torch.full_like(mean, sent)}, {"weight": mean}, uploads, weights)


def wordy(tmp_path: Path) -> list[str]:
    file = tmp_path / "users.jsonl"
    users = [{"user": f"u{i}", "sentences": [f"a b c w{i}", f"b c d v{i} w{i}"] * 4} for i in range(8)]
    file.write_text("".join(json.dumps(user) + "\n" for user in users))
    return ["task=words", f"task.data={file}", "task.fewest=1", "fleet.clients=null", "fleet.cohort=2"]
