"""Training from Python: one function."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedrolex.recipes import Recipe
from fedrolex.runs.callbacks import Callback
from fedrolex.runs.prepare import prepare
from fedrolex.runs.run import Progress, Run
from fedrolex.runs.training import Training
from fedrolex.slicing import Axes
from fedrolex.tasks import Task


@dataclass(frozen=True)
class Trained:
    """A finished run.

    Attributes:
        model: the model that was measured; where that is a part of the server's model, all of it.
        axes: of the server's model, to cut deployable sub-models.
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
    callbacks: Sequence[Callback] = (),
    out: Path | str | None = None,
    progress: Progress | None = None,
    resume: bool = False,
) -> Trained:
    """Train a recipe, on its own task or on one given.

    Args:
        recipe: the run; the default one if None.
        task: model and data of one's own.
        callbacks: told of the run, beside those that the recipe names.
        out: folder for the run; a temporary one, deleted afterwards, if None.
        progress: called with the metrics of every round.
        resume: go on with the run in ``out``, by its own recipe.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(out) if out is not None else Path(scratch) / "run"
        run = Run.open(folder) if resume else None
        recipe = run.recipe() if run is not None else recipe or Recipe()
        training = prepare(recipe, task, callbacks=callbacks)
        run = run or Run.create(folder, recipe, own_task=task is not None)
        summary = run.go(training, progress)
        if out is None:
            summary["run"] = None
        return Trained(*_result(training), summary, run.rows())


def _result(training: Training) -> tuple[nn.Module, Axes]:
    """The model that is measured and its axes; of a part of the server's model, the whole."""
    server, method = training.server, training.method
    name = method.leading(server)
    network, judged = server.networks[name], method.judged(server)
    same = [dict(module.named_parameters()).keys() for module in (network.module, judged)]
    part = judged is not network.module and same[0] == same[1]
    return server.loaded(network=name) if part else judged, network.axes
