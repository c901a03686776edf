"""Small runs on disk, whole ones and stopped ones, that tests of run folders share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from methods_shared import SMALL

from fedrolex import Recipe, Run, prepare
from fedrolex.runs import checkpoint

RECIPE = Recipe(device="cpu", engine="loop", rounds=4, checkpoint_every=2, evaluate_every=2).with_settings(SMALL)


def whole(folder: Path, *settings: str) -> Run:
    """A run from its first round to its last."""
    recipe = RECIPE.with_settings(settings)
    run = Run.create(folder, recipe)
    run.go(prepare(recipe))
    return run


def stopped(folder: Path, *settings: str, rounds: int = 2) -> Run:
    """A run that was stopped after so many rounds."""

    def stop(row: dict[str, Any]) -> None:
        if row["round"] + 1 == rounds:
            raise KeyboardInterrupt

    recipe = RECIPE.with_settings(settings)
    run = Run.create(folder, recipe)
    with pytest.raises(KeyboardInterrupt):
        run.go(prepare(recipe), stop)
    return run


def resumed(run: Run) -> Run:
    """The same run at its end."""
    run.go(prepare(run.recipe()))
    return run


def same(one: Run, other: Run) -> bool:
    """Whether two runs have the same tensors, bit for bit, and the same metrics but for their seconds."""
    first, second = (checkpoint.read(run.checkpoint)[0] for run in (one, other))
    rows = [[{k: v for k, v in row.items() if k != "seconds"} for row in run.rows()] for run in (one, other)]
    equal = first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    return equal and rows[0] == rows[1]


def files(folder: Path) -> dict[str, bytes]:
    """All that a run has on disk."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
