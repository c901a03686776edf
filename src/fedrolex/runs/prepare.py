"""From a recipe to a training, ready for its first round, and to its end; what does not go together is refused here."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedrolex.clients import LocalTraining
from fedrolex.core import CALLBACKS, ENGINES, FedrolexError, in_one_line
from fedrolex.data.where import data_folder
from fedrolex.engines.gpu.precision import use_tf32
from fedrolex.methods import Setup
from fedrolex.recipes import Recipe
from fedrolex.rounds import Engine, Server
from fedrolex.runs import checkpoint
from fedrolex.runs.callbacks import Callback
from fedrolex.runs.hooks import calling
from fedrolex.runs.run import Progress, Run
from fedrolex.runs.training import Training, pick_device
from fedrolex.slicing import Axes, one_line
from fedrolex.tasks import Task


def prepare(recipe: Recipe, task: Task | None = None, *, callbacks: Sequence[Callback] = ()) -> Training:
    """Everything a recipe describes, ready for its first round; for the arguments see :func:`train`."""
    device = pick_device(recipe.device)
    engine = make_engine(recipe, device)
    told = [make_callback(name) for name in recipe.callbacks]
    recipe = replace(recipe, task=recipe.task.completed(recipe.method.wants()))
    if task is None:
        folder = data_folder(recipe.data)
        task, fleet = recipe.task.open(recipe.fleet, seed=recipe.seed, folder=folder, mask=recipe.client.mask)
    else:
        fleet = recipe.fleet.build(recipe.seed)
    if task.clients != fleet.clients:
        raise FedrolexError(f"the task has data for {task.clients} clients, the fleet has {fleet.clients}")
    method, scale = recipe.method, recipe.fleet.server_scale
    setup = Setup(
        task.to(device), fleet, LocalTraining(**asdict(recipe.client)), scale, recipe.seed, device, recipe.deadline
    )
    with calling(method, "check"):
        method.check(setup)
    with calling(method, "work"):
        work = method.work(setup)
    if not isinstance(work, LocalTraining):
        raise FedrolexError(f"work() of method {method.name} gives a {type(work).__name__}: give a LocalTraining")
    with calling(method, "networks"):
        networks = method.networks(setup)
    server = Server(setup.task, fleet, networks, recipe.seed, scale)
    training = Training(
        server, method, work, engine, recipe.quorum, recipe.deadline, recipe.evaluation, [*told, *callbacks]
    )
    if recipe.weights is not None:
        try:
            training.start_from(checkpoint.read_any(Path(recipe.weights))[0])
        except FedrolexError as error:
            raise FedrolexError(f"weights {recipe.weights}: {error}") from None
    return training


def make_engine(recipe: Recipe, device: torch.device) -> Engine:
    """The engine that a recipe names, for a device."""
    if device.type == "cuda":
        use_tf32(recipe.precision != "fp32")
    elif recipe.precision == "tf32":
        raise FedrolexError("precision tf32 needs a CUDA device: use fp32 or bf16 on a CPU")
    make = ENGINES.find(recipe.engine)
    try:
        made = make(precision=recipe.precision, device=device)
    except TypeError as error:
        raise FedrolexError(f"engine {recipe.engine}: {one_line(error)}: give {ENGINES.expected}") from error
    if not isinstance(made, Engine):
        raise FedrolexError(f"engine {recipe.engine} gave a {type(made).__name__}: give {ENGINES.expected}")
    return made


def make_callback(name: str) -> Callback:
    """A callback by name."""
    make = CALLBACKS.find(name)
    with in_one_line(f"callback {name} cannot be made"):
        made: Callback = make()
        return made


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
