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
    recipe = replace(opened.recipe(), device=device, engine="loop", precision="fp32", callbacks=[], weights=None)
    training = prepare(recipe, task)
    tensors, about = checkpoint.read(opened.checkpoint)
    if about["format"] == "1":
        tensors = format1.in_sections(tensors, training.server.state)
    said = about.get("round", "")
    if not (said.isascii() and said.isdigit() and len(said) < 19):
        raise FedrolexError(f"checkpoint {opened.checkpoint} does not say its round: there is no model to load")
    training.restore(tensors, int(said))
    models = Models.of(training)
    found = models.read(opened.folder, capacity, about)
    if found is not None:
        return found
    if not same_data(about, training.server.task.fingerprint()):
        raise FedrolexError(f"the data of {run} has changed since its checkpoint: static norms cannot be recalibrated")
    if training.server.clients is not None:
        training.server.clients = ClientStates(opened.folder / "clients")
    return models(capacity)
