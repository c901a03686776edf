"""``load(run)``: a model of a run, or one that was exported, from its folder."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from fedrolex.core import FedrolexError
from fedrolex.core.device import pick_device
from fedrolex.rounds import ClientStates
from fedrolex.runs import checkpoint, format1
from fedrolex.runs.exports.folder import is_export, read_export
from fedrolex.runs.model import Models
from fedrolex.runs.prepare import prepare
from fedrolex.runs.run import Run, same_data
from fedrolex.runs.training import Training
from fedrolex.slicing import Capacity
from fedrolex.tasks import Task

DeviceName = Literal["auto", "cpu", "cuda"]


@torch.inference_mode(False)
@torch.enable_grad()
def load(
    run: Path | str, capacity: Capacity | None = None, *, task: Task | None = None, device: DeviceName = "cpu"
) -> nn.Module:
    """The model that a run measured, in evaluation mode: it predicts as it was measured, at any batch size.

    A finished run has it as a file. What has none (a run that is not finished, a sub-model where
    ``evaluation.submodels`` is false) is made from the checkpoint, recalibrated on the same training examples.

    Args:
        run: the run's folder, or that of an exported model.
        capacity: of the sub-model wanted, one of the fleet's; None is the model itself.
        task: model and data, where the run was given them in Python; else the recipe's data must be there.
        device: where the model is put: cpu, cuda or auto.
    """
    if not isinstance(run, str | Path):
        raise FedrolexError(f"load() was given a {type(run).__name__} where it takes the path of a run's folder")
    if task is not None and not isinstance(task, Task):
        raise FedrolexError(f"load() was given a {type(task).__name__} where it takes a Task or None")
    if is_export(Path(run)):
        if capacity is not None:
            raise FedrolexError(f"{run} is one exported model: load it without a capacity")
        return read_export(Path(run), task).to(pick_device(device))
    return restored(run, task, device).model(capacity)


@dataclass(frozen=True)
class Restored:
    """A run, its training where the newest checkpoint stands, and what the checkpoint says about itself."""

    run: Run
    training: Training
    about: dict[str, str]

    def model(self, capacity: Capacity | None = None) -> nn.Module:
        """The model that the run measured, or a sub-model of it; see :func:`load`."""
        models = Models.of(self.training)
        written = models.read(self.run.folder, capacity, self.about)
        if written is not None:
            return written
        self.check_data()
        return models(capacity)

    def check_data(self) -> None:
        """Raise, in one line, unless the data is that of the checkpoint."""
        if not same_data(self.about, self.training.server.task.fingerprint()):
            why = "static norms cannot be recalibrated"
            raise FedrolexError(f"the data of {self.run.folder} has changed since its checkpoint: {why}")


def restored(run: Path | str, task: Task | None, device: DeviceName, data: str | None = None) -> Restored:
    """A run from its folder; for the arguments see :func:`load`. ``data`` is where data sets lie, if not as it was."""
    opened = Run.open(Path(run))
    if task is None and opened.own_task():
        raise FedrolexError(f"{run} trains a task given in Python: give it, load({str(run)!r}, task=task)")
    return placed(opened, made_again(opened, task, device, data))


def made_again(run: Run, task: Task | None = None, device: DeviceName = "cpu", data: str | None = None) -> Training:
    """What a run trains, before its first round: to look at, not to go on with."""
    recipe = replace(run.recipe(), device=device, engine="loop", precision="fp32", callbacks=[], weights=None)
    return prepare(recipe if data is None else replace(recipe, data=data), task)


def placed(run: Run, training: Training) -> Restored:
    """``training``, as :func:`made_again` gave it, put where the run's newest checkpoint stands."""
    tensors, about = checkpoint.read(run.checkpoint)
    if about["format"] == "1":
        tensors = format1.in_sections(tensors, training.server.state)
    said = about.get("round", "")
    if not (said.isascii() and said.isdigit() and len(said) < 19):
        raise FedrolexError(f"checkpoint {run.checkpoint} does not say its round: there is no model to load")
    training.restore(tensors, int(said))
    if training.server.clients is not None:
        training.server.clients = ClientStates(run.folder / "clients")
    return Restored(run, training, about)
