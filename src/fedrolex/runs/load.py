"""``load(run)``: a model of a run, from its folder."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from fedrolex.core import FedrolexError
from fedrolex.rounds import ClientStates
from fedrolex.runs import checkpoint, format1
from fedrolex.runs.model import Models
from fedrolex.runs.prepare import prepare
from fedrolex.runs.run import Run, same_data
from fedrolex.runs.training import Training
from fedrolex.slicing import Capacity
from fedrolex.tasks import Task

Device = Literal["auto", "cpu", "cuda"]


@torch.inference_mode(False)
@torch.enable_grad()
def load(
    run: Path | str, capacity: Capacity | None = None, *, task: Task | None = None, device: Device = "cpu"
) -> nn.Module:
    """The model that a run measured, in evaluation mode: it predicts as it was measured, at any batch size.

    A finished run has it as a file. What has none (a run that is not finished, a sub-model where
    ``evaluation.submodels`` is false) is made from the checkpoint, recalibrated on the same training examples.

    Args:
        run: the run's folder.
        capacity: of the sub-model wanted, one of the fleet's; None is the model itself.
        task: model and data, where the run was given them in Python; else the recipe's data must be there.
        device: where the model is put: cpu, cuda or auto.
    """
    if not isinstance(run, str | Path):
        raise FedrolexError(f"load() was given a {type(run).__name__} where it takes the path of a run's folder")
    if task is not None and not isinstance(task, Task):
        raise FedrolexError(f"load() was given a {type(task).__name__} where it takes a Task or None")
    opened = Run.open(Path(run))
    if task is None and opened.own_task():
        raise FedrolexError(f"{run} trains a task given in Python: give it, load({str(run)!r}, task=task)")
    training = made_again(opened, task, device)
    return model_of(opened, training, capacity)


def made_again(run: Run, task: Task | None = None, device: Device = "cpu") -> Training:
    """What a run trains, before its first round: to look at, not to go on with."""
    recipe = replace(run.recipe(), device=device, engine="loop", precision="fp32", callbacks=[], weights=None)
    return prepare(recipe, task)


def model_of(run: Run, training: Training, capacity: Capacity | None = None) -> nn.Module:
    """The model of a run, see :func:`load`; ``training``, what :func:`made_again` gave, is put where the run stands."""
    tensors, about = checkpoint.read(run.checkpoint)
    if about["format"] == "1":
        tensors = format1.in_sections(tensors, training.server.state)
    said = about.get("round", "")
    if not (said.isascii() and said.isdigit() and len(said) < 19):
        raise FedrolexError(f"checkpoint {run.checkpoint} does not say its round: there is no model to load")
    training.restore(tensors, int(said))
    models = Models.of(training)
    found = models.read(run.folder, capacity, about)
    if found is not None:
        return found
    if not same_data(about, training.server.task.fingerprint()):
        changed = f"the data of {run.folder} has changed since its checkpoint"
        raise FedrolexError(f"{changed}: static norms cannot be recalibrated")
    if training.server.clients is not None:
        training.server.clients = ClientStates(run.folder / "clients")
    return models(capacity)
