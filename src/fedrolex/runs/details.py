"""What a finished run is worth to single clients and to every capacity: ``details.json`` in its folder."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from fedrolex.core import FedrolexError, in_one_line
from fedrolex.core.threads import spread_over, threads_for
from fedrolex.models import by_batch
from fedrolex.recipes import Recipe
from fedrolex.runs import checkpoint
from fedrolex.runs.callbacks import Callback
from fedrolex.runs.model import Models
from fedrolex.runs.training import Training
from fedrolex.tasks import Measure


class Details(Callback):
    """Measures a run's models once more at its end, where a round would pay for it again and again.

    The file has ``submodels``, the score of every capacity's sub-model as a part of one; ``local``, where the task has
    accuracies of single clients, see :func:`local_accuracies`; and ``offsets``, where it has classes: what the model
    and its sub-models would be with offsets of their classes, see :mod:`fedrolex.models.offsets`. Where one of the last
    two could not be measured, ``not_measured`` has the reason.
    """

    _folder: Path | None = None

    def begin(self, training: Training, folder: Path | None) -> None:
        """Keep the folder."""
        self._folder = folder

    def end(self, training: Training) -> None:
        """Measure and write, if the run is finished."""
        if self._folder is None or not _is_finished(self._folder, training):
            return
        training.say(f"measuring what {self._folder} is worth to every capacity and client")
        measure = replace(training.measure, submodels=True, offsets=False)
        submodels = _measured(training, measure).get("submodels", {})
        found: dict[str, Any] = {"rounds": training.server.round, "submodels": submodels}
        more: dict[str, Callable[[], dict[str, Any]]] = {
            "local": lambda: local_accuracies(Models.of(training)(), training),
            "offsets": lambda: _with_offsets(training, measure),
        }
        for name, measured in more.items():
            try:
                found[name] = measured()
            except FedrolexError as error:  # the task has no accuracies of clients, or no classes
                found.setdefault("not_measured", {})[name] = str(error)
        checkpoint.write_whole(self._folder / "details.json", f"{json.dumps(found)}\n".encode())


def _measured(training: Training, measure: Measure) -> dict[str, Any]:
    with spread_over(threads_for(training.server.parameters)):
        return training.method.evaluate(training.judged, measure)


def _with_offsets(training: Training, measure: Measure) -> dict[str, Any]:
    """The accuracies that offsets of classes change."""
    measured = _measured(training, replace(measure, offsets=True))
    kept = ("global_accuracy", "rare_accuracy", "submodels")
    return {key: measured[key] for key in kept if key in measured}


def _is_finished(folder: Path, training: Training) -> bool:
    """Whether the last round is done, and told: a run that was given more rounds has a summary of fewer."""
    path = folder / "summary.json"
    rounds = {training.server.round, Recipe.read(folder / "recipe.yaml").rounds}
    return path.is_file() and rounds == {json.loads(path.read_text())["rounds"]}


def local_accuracies(model: nn.Module, training: Training) -> dict[str, list[Any]]:
    """Accuracy of a run's model on every client's own test examples, plain and masked, in one order of clients.

    Clients are those whose local accuracy a run measures, at most 1000; those without test examples are left out.
    """
    task = training.server.task
    threads = threads_for(sum(parameter.numel() for parameter in model.parameters()))
    failed = "the run's model does not answer single clients' examples"  # FedGKT's takes feature maps
    with in_one_line(failed), spread_over(threads):
        apart = any(by_batch(model, task.example()))
        found = task.by_client(model, batch=training.measure.batch, apart=apart)
    if found is None:
        raise FedrolexError(f"{task.name} measures no accuracy of single clients")
    fleet, own = training.server.fleet, {client: each for client, each in found.items() if each.examples}
    return {
        "clients": list(own),
        "capacities": [] if fleet.redrawn else [str(fleet.capacity(client)) for client in own],
        "plain": [round(each.right / each.examples, 4) for each in own.values()],
        "masked": [round(each.right_masked / each.examples, 4) for each in own.values()],
    }
