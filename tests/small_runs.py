"""Small runs on disk that tests of runs share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from fedrolex import (
    Recipe,
    Run,
)
from fedrolex.runs import checkpoint as checkpoints

SETTINGS = ["task.width=8", "fleet.clients=10", "fleet.cohort=5", "rounds=12", "checkpoint_every=3", "evaluate_every=4"]
RECIPE = Recipe(device="cpu").with_settings(SETTINGS)


def finished(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Final weights and metrics of a run, timings aside."""
    tensors, _ = checkpoints.read(folder / "checkpoint.safetensors")
    return tensors, [{k: v for k, v in row.items() if k != "seconds"} for row in Run(folder).rows()]


def same(a: tuple[dict[str, Any], list[dict[str, Any]]], b: tuple[dict[str, Any], list[dict[str, Any]]]) -> bool:
    return a[0].keys() == b[0].keys() and all(torch.equal(a[0][n], b[0][n]) for n in a[0]) and a[1] == b[1]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "fedrolex", *words]


def settings(recipe: list[str]) -> list[str]:
    return [word for setting in recipe for word in ("--set", setting)]


FEW = RECIPE.with_settings(["rounds=3", "checkpoint_every=9", "evaluate_every=9", "callbacks=[drift]"])
