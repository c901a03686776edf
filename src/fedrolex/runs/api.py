"""Training from Python: one function."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedrolex.recipes.recipe import Recipe
from fedrolex.runs.prepare import prepare
from fedrolex.runs.run import Progress, Run
from fedrolex.slicing.axes import Axes
from fedrolex.tasks import Task


@dataclass(frozen=True)
class Trained:
    """A finished run.

    Attributes:
        model: the server's model.
        axes: its axes, to cut deployable sub-models.
        summary: final metrics.
        rows: metrics of every round.
    """

    model: nn.Module
    axes: Axes
    summary: dict[str, Any]
    rows: list[dict[str, Any]]


def train(
    recipe: Recipe | None = None,
    task: Task | None = None,
    *,
    out: Path | str | None = None,
    progress: Progress | None = None,
    resume: bool = False,
) -> Trained:
    """Train a recipe, on its own task or on one given.

    Args:
        recipe: the run; the default one if None.
        task: model and data of one's own.
        out: folder for the run; a temporary one, deleted afterwards, if None.
        progress: called with the metrics of every round.
        resume: go on with the run in ``out``, by its own recipe.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(out) if out is not None else Path(scratch) / "run"
        run = Run.open(folder) if resume else None
        recipe = run.recipe() if run is not None else recipe or Recipe()
        training = prepare(recipe, task)
        run = run or Run.create(folder, recipe, own_task=task is not None)
        summary = run.go(training, progress)
        if out is None:
            summary["run"] = None
        model, axes = training.trained()
        return Trained(model, axes, summary, run.rows())
