"""From a recipe to a training, ready for its first round, and to its end; what does not go together is refused here."""

import copy
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedrolex.clients import LocalTraining, Origin
from fedrolex.core import CALLBACKS, ENGINES, FedrolexError, in_one_line
from fedrolex.core.device import pick_device
from fedrolex.data.where import data_folder
from fedrolex.engines.gpu.precision import use_tf32
from fedrolex.methods import Columns, Setup
from fedrolex.recipes import Recipe, alternatives
from fedrolex.recipes.task import GivenInPython
from fedrolex.rounds import Engine, Server, WeightMean
from fedrolex.runs import checkpoint
from fedrolex.runs.callbacks import Callback
from fedrolex.runs.hooks import calling, networks_of
from fedrolex.runs.model import Models
from fedrolex.runs.run import UNNAMED, Progress, Run
from fedrolex.runs.training import Training
from fedrolex.slicing import Axes, Capacity, one_line
from fedrolex.tasks import Classification, Task


def prepare(recipe: Recipe, task: Task | None = None, *, callbacks: Sequence[Callback] = ()) -> Training:
    """Everything a recipe describes, ready for its first round; for the arguments see :func:`train`."""
    _check_given({"Recipe": (recipe, Recipe), "Task or None": (task, Task | None)}, callbacks, "prepare")
    origin, device = Origin("fedrolex.runs.elsewhere:planned", recipe, task), pick_device(recipe.device)
    engine = make_engine(recipe, device)
    told = [make_callback(name) for name in recipe.callbacks]
    recipe = replace(recipe, task=recipe.task.completed(recipe.method.wants()))
    if task is None:
        folder = data_folder(recipe.data)
        task, fleet = recipe.task.open(recipe.fleet, seed=recipe.seed, folder=folder, mask=recipe.client.mask)
    else:
        fleet = recipe.fleet.build(recipe.seed)
    with in_one_line(f"task {task.name} cannot be used"):
        held, moved = task.clients, task.to(device)
    if held != fleet.clients:
        remedy = f"set fleet.clients to {held}"
        raise FedrolexError(f"the task has data for {held} clients, the fleet has {fleet.clients}: {remedy}")
    if fleet.balanced:
        if not isinstance(moved, Classification):
            raise FedrolexError(f"fleet.balanced is for tasks of classes, not for {task.name}: leave it out")
        fleet = replace(fleet, classes=moved.classes_of_clients())
    method, scale = recipe.method, recipe.fleet.server_scale
    client, measure = LocalTraining(**asdict(recipe.client)), recipe.evaluation
    setup = Setup(moved, fleet, client, scale, recipe.seed, device, recipe.deadline, measure)
    measure.check(task)
    with calling(method, "check"):
        method.check(setup)
    with calling(method, "work"):
        work = method.work(setup)
    if not isinstance(work, LocalTraining):
        raise FedrolexError(f"work() of method {method.name} gives a {type(work).__name__}: give a LocalTraining")
    server = Server(setup.task, fleet, networks_of(method, setup), recipe.seed, scale)
    training = Training(
        server,
        method,
        work,
        engine,
        recipe.quorum,
        recipe.deadline,
        measure,
        [*told, *callbacks],
        WeightMean(recipe.mean_over),
    )
    training.origin = origin
    if recipe.weights is not None:
        try:
            training.start_from(checkpoint.read_any(Path(recipe.weights))[0])
        except FedrolexError as error:
            raise FedrolexError(f"weights {recipe.weights}: {error}") from None
    return training


def _check_given(given: Mapping[str, tuple[object, Any]], callbacks: object, to: str) -> None:
    """Raise, in one line, unless what a function was given is of the kinds that it takes."""
    for what, (value, kind) in given.items():
        if not isinstance(value, kind):
            raise FedrolexError(f"{to}() was given a {type(value).__name__} where it takes a {what}")
    if not isinstance(callbacks, Sequence) or not all(isinstance(each, Callback) for each in callbacks):
        said = f"{to}(): callbacks is {callbacks!r}"
        raise FedrolexError(f"{said}: give a list of Callback objects; names go into a recipe")


def make_engine(recipe: Recipe, device: torch.device) -> Engine:
    """The engine that a recipe names, for a device."""
    if device.type == "cuda":
        use_tf32(recipe.precision != "fp32")
    make = ENGINES.find(recipe.engine)
    try:
        made = make(precision=recipe.precision, device=device)
    except FedrolexError:
        raise
    except (Exception, SystemExit) as error:
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
        model: the model that was measured, in evaluation mode; it predicts as it was measured, at any batch size.
        axes: of the server's model, which is :attr:`whole`.
        summary: final metrics.
        rows: metrics of every round.
        compared: with ``compare`` in the recipe, the final metrics of what the fleet could do without partial training,
            by what it is.
        models: gives the run's models.
    """

    model: nn.Module
    axes: Axes = field(repr=False)
    summary: dict[str, Any]
    rows: list[dict[str, Any]] = field(repr=False)
    compared: dict[str, dict[str, Any]] = field(repr=False)
    models: Models = field(repr=False)

    def submodel(self, capacity: Capacity) -> nn.Module:
        """The sub-model of a capacity of the fleet, as :attr:`model` is: measured, with statistics of its own norms."""
        return self.models(capacity)

    @property
    def whole(self) -> nn.Module:
        """A copy of the server's model, of which a method may judge a part: to cut windows of one's own from.

        Static norms have no statistics in it, nor in what is cut from it.
        """
        server = self.models.server
        return copy.deepcopy(server.loaded(network=self.models.method.leading(server)))


@torch.inference_mode(False)
@torch.enable_grad()
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

    With ``compare`` in the recipe, what it is compared with is trained after it, each in a folder beside ``out``.

    Args:
        recipe: the run; the default one if None.
        task: model and data of one's own, instead of the recipe's.
        callbacks: told of the run, beside those that the recipe names.
        out: folder for the run; a temporary one, deleted afterwards, if None.
        progress: called with the metrics of every round of the run.
        resume: go on with the run in ``out``, by its own recipe; ``recipe`` may ask for more rounds, or change what
            changes no round.
    """
    given: dict[str, tuple[object, Any]] = {
        "Recipe or None": (recipe, Recipe | None),
        "Task or None": (task, Task | None),
        "path or None": (out, str | Path | None),
    }
    _check_given(given, callbacks, "train")
    if progress is not None and not callable(progress):
        raise FedrolexError(f"train(): progress is a {type(progress).__name__}: give a function of a round's metrics")
    if resume and out is None:
        raise FedrolexError("train(): resume=True goes on with a run that is there: give its folder as out")
    full = [torch.autocast(device, enabled=False) for device in ("cpu", "cuda")]  # precision is the recipe's to say
    with full[0], full[1], tempfile.TemporaryDirectory() as scratch:
        folder = Path(out) if out is not None else Path(scratch) / "run"
        recipe = _resumed(Run.open(folder), recipe, task) if resume else _new(recipe or Recipe(), task)
        others = list(beside(folder, recipe))
        for place in () if resume else (folder, *(place for _, place, _ in others)):
            Run.refuse(place)
        training = prepare(recipe, task, callbacks=callbacks)
        run = _at(folder, recipe, task)
        summary, compared = run.go(training, progress), {}
        plain = replace(task, models={}) if isinstance(task, Classification) else task
        for what, place, other in others:
            compared[what] = _at(place, other, task).go(prepare(other, plain))
        for found in (summary, *compared.values()) if out is None else ():
            found["run"] = None
        models = Models.of(training)
        axes = training.server.networks[training.method.leading(training.server)].axes
        return Trained(models.read(folder) or models(), axes, summary, run.rows(), compared, models)


def beside(folder: Path, recipe: Recipe) -> Iterator[tuple[str, Path, Recipe]]:
    """What a recipe is compared with, if it says so: what it is, its run's folder, and its recipe.

    Columns that have begun go on as they are: an earlier version did not train them one by one.
    """
    folder = folder if folder.name not in UNNAMED else folder.resolve()

    def place(number: int) -> Path:
        return folder.with_name(f"{folder.name}-alone-{number}")

    found = alternatives(recipe) if recipe.compare and folder.name else {}  # a run in / is refused where it is made
    if found and (begun := _columns_in(place(len(found)))) is not None:
        found = alternatives(recipe, begun)
    for number, (what, other) in enumerate(found.items(), 1):
        yield what, place(number), other


def _columns_in(folder: Path) -> Columns | None:
    """The method of the run there, or of the first seed's run, where it is columns."""
    there: list[Path] = []
    with suppress(OSError, ValueError):  # a name that no folder can have is refused where the run is made
        there = sorted((*folder.glob("recipe.yaml"), *folder.glob("seed-*/recipe.yaml")))
    method = Run(there[0].parent).recipe().method if there else None
    return method if isinstance(method, Columns) else None


def _new(recipe: Recipe, task: Task | None) -> Recipe:
    """The recipe of a new run, which says if its task is given in Python."""
    if task is None:
        return recipe
    if recipe.task not in (Recipe().task, GivenInPython()):
        raise FedrolexError(
            f"the recipe has a task of its own ({recipe.task.name}) beside the one given: leave one out"
        )
    return replace(recipe, task=GivenInPython())


def _resumed(run: Run, recipe: Recipe | None, task: Task | None) -> Recipe:
    """The recipe that a run goes on by: its own or, where that may be changed so, the one given."""
    if run.own_task() != (task is not None):
        wrong = "its recipe's own task: leave the task out" if task is not None else "a task given in Python: give it"
        raise FedrolexError(f"{run.folder} trains {wrong}")
    own = run.recipe()
    recipe = own if recipe is None else recipe if task is None else replace(recipe, task=own.task)
    run.check(recipe)
    return recipe


def _at(folder: Path, recipe: Recipe, task: Task | None) -> Run:
    """A run by a recipe: a new one or, where there is one, that one."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return Run.create(folder, recipe, own_task=task is not None)
    run = Run.open(folder)
    if recipe != run.recipe():
        run.change(recipe)
    return run
