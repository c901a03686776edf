"""Everything a recipe describes, made ready for its first round; what does not go together is refused here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedrolex.cli.allocator import keep_memory
from fedrolex.clients.work import Mask
from fedrolex.core.errors import FedrolexError
from fedrolex.core.streams import words
from fedrolex.data.where import data_folder
from fedrolex.engines import Auto, Crew, Engine, Graph, Loop, Stack
from fedrolex.engines.gpu.precision import use_tf32
from fedrolex.methods import Method
from fedrolex.methods.fedgkt import MAPS
from fedrolex.methods.needs import TABLE
from fedrolex.models.represented import TOP
from fedrolex.recipes.recipe import Recipe
from fedrolex.recipes.task_recipe import WordsRecipe
from fedrolex.rounds.fleet import Fleet
from fedrolex.runs import checkpoint
from fedrolex.runs.families import Families
from fedrolex.runs.knowledge import GroupTraining
from fedrolex.runs.training import Training, pick_device
from fedrolex.slicing.axes import Axes
from fedrolex.slicing.capture import one_line
from fedrolex.slicing.layout import refs
from fedrolex.slicing.trace import trace
from fedrolex.slicing.windows import exact
from fedrolex.tasks import Classification, Task


def prepare(recipe: Recipe, task: Task | None = None) -> Training:
    """Everything a recipe describes, ready for its first round.

    Args:
        recipe: the run.
        task: data and model of one's own instead of the recipe's.
    """
    device = pick_device(recipe.device)
    if device.type == "cpu":
        keep_memory()
    client = recipe.client.build()
    recipe = recipe.with_parts()
    task, fleet = _open(recipe, client.mask) if task is None else (task, recipe.fleet.build(recipe.seed))
    if task.clients != fleet.clients:
        raise FedrolexError(f"the task has data for {task.clients} clients, the fleet has {fleet.clients}")
    method = recipe.method.build(client, fleet, recipe.fleet.server, recipe.seed)
    _given(method, task)
    _allowed(recipe, method, fleet)
    if method.able_only and method.width is not None and max(fleet.levels) < method.width:
        raise FedrolexError(
            f"nobody in the fleet can hold width {recipe.method.width}: the largest is {recipe.fleet.capacities[0]}"
        )
    example = task.example().cpu()
    on_device = task.to(device)

    def made(model: nn.Module, axes: Axes, kind: type[Training] = Training, **options: Any) -> Training:
        model.to(device)
        return kind(
            on_device,
            fleet,
            method,
            make_engine(recipe, model, device),
            model,
            axes,
            seed=recipe.seed,
            quorum=recipe.quorum,
            deadline=recipe.deadline,
            measure=recipe.evaluation.build(),
            **options,
        )

    own = {}
    for capacity, build in task.models.items() if isinstance(task, Classification) else ():
        level = exact(capacity) / recipe.fleet.server
        model = _weighted(build, recipe.seed, "weights", str(level))
        own[level] = made(model, _axes(method, task, model, example, whole=True), levels=[level], whole=True)
    _have_families(method, fleet, own, recipe.fleet.server)
    if method.knowledge is not None:
        model = _weighted(lambda: _server_part(task, recipe.fleet.server), recipe.seed, "weights")
        maps = torch.zeros(2, MAPS, *example.shape[2:])
        training = made(model, trace(model, maps, whole=True).freeze(*task.frozen), GroupTraining)
    else:
        model = _weighted(lambda: task.build(recipe.fleet.server), recipe.seed, "weights")
        axes = _axes(method, task, model, example, whole=method.width == 1)
        left = [level for level in fleet.levels if level not in own]
        training = made(model, axes, Families, levels=left, others=own) if own else made(model, axes)
    if recipe.weights is not None:
        try:
            training.start_from(checkpoint.read_weights(Path(recipe.weights)))
        except FedrolexError as error:
            raise FedrolexError(f"weights {recipe.weights}: {error}") from None
    return training


def _weighted(build: Callable[[], nn.Module], seed: int, *key: str) -> nn.Module:
    """A model whose weights are drawn from a stream of their own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(words(1, seed, *key)[0] >> 1))
        try:
            return build()
        except (RuntimeError, MemoryError) as error:
            raise FedrolexError(f"the model cannot be made: {one_line(error)}") from error


def _axes(method: Method, task: Task, model: nn.Module, example: Tensor, *, whole: bool) -> Axes:
    """Of a model that clients train, or a part of it."""
    axes = trace(model, example, whole=whole).freeze(*task.frozen)
    if method.server_model and not all(name in axes.tensors and whole_at_every_width(axes, name) for name in TOP):
        raise FedrolexError(
            f"{method.name} needs a last layer of one shape at every width: set task.representation, or wrap a "
            "network of your own in fedrolex.models.Represented"
        )
    return axes


def _have_families(method: Method, fleet: Fleet, own: Mapping[Fraction, Training], server: int) -> None:
    """Refuse models of their own for capacities that the fleet does not have, or a method cannot bring together."""
    strange = next((level for level in own if level not in fleet.levels), None)
    if strange is not None:
        raise FedrolexError(f"task.models has a model for capacity {strange * server}, which nobody in the fleet has")
    if own and not method.needs.families:
        able = ", ".join(name for name, needs in TABLE.items() if needs.families)
        raise FedrolexError(f"{method.name} brings clients together by their weights: task.models needs one of {able}")


def _given(method: Method, task: Task) -> None:
    """Refuse a method whose needs a task does not meet."""
    needs = method.needs
    if (needs.public or needs.uploads or method.knowledge) and not isinstance(task, Classification):
        raise FedrolexError(f"{method.name} compares scores of classes: it needs a task of images, not {task.name}")
    if isinstance(task, Classification):
        if needs.public and not task.public:
            raise FedrolexError(
                f"{method.name} needs public examples: set task.public to a share, a set or a folder; in Python, "
                "public= of Classification or Task.split"
            )
        if needs.validation and not task.validation:
            raise FedrolexError(
                f"{method.name} needs held-out examples to judge by: set task.validation to a share; in Python, "
                "validation= of Classification or Task.split"
            )


def _server_part(task: Task, scale: int) -> nn.Module:
    """The server's network of FedGKT: the task's, for feature maps."""
    if not isinstance(task, Classification) or task.build_for is None:
        raise FedrolexError("fedgkt cuts a network for images in two: it needs a bundled task of images")
    return task.build_for(MAPS, scale)


def whole_at_every_width(axes: Axes, name: str) -> bool:
    """Whether no capacity cuts a tensor."""
    return not any(axes.axes[axis].kind == "width" for dim in axes.tensors[name].dims for axis in refs(dim))


def _allowed(recipe: Recipe, method: Method, fleet: Fleet) -> None:
    """Refuse what a method does not go together with."""
    if recipe.fleet.redrawn and method.labels is not None:
        raise FedrolexError(f"{method.name} clients keep their models: capacities cannot be redrawn every round")
    if recipe.deadline is not None and method.knowledge is not None:
        raise FedrolexError(f"{method.name} cannot interrupt clients: leave deadline at null")
    if method.width is None and not method.needs.larger_server and max(fleet.levels) < 1:
        raise FedrolexError(
            f"with {method.name} a server larger than every client has nodes that nobody trains: leave fleet.server "
            "at 1 and let the largest capacity be 1, or use fedrolex"
        )


def make_engine(recipe: Recipe, model: nn.Module, device: torch.device) -> Engine:
    """The engine a recipe asks for; ``graph`` without a GPU is refused; ``auto`` is ``graph`` with one."""
    precision: Any = recipe.precision
    if device.type == "cuda":
        use_tf32(precision != "fp32")
    elif precision == "tf32":
        raise FedrolexError("precision tf32 needs a CUDA device: use fp32 or bf16 on a CPU")
    if recipe.compiled and (recipe.engine not in ("graph", "auto") or device.type != "cuda"):
        raise FedrolexError("compiled is for the engine graph, on a CUDA device: leave it at false")
    if recipe.engine == "loop":
        return Loop(model, precision=precision)
    if recipe.engine == "stack":
        return Stack(model, precision=precision)
    if recipe.engine == "crew":
        return Crew(model, precision=precision)
    if recipe.engine == "auto" and device.type == "cpu":
        return Auto(model, precision=precision, rounds=recipe.rounds)
    if device.type != "cuda":
        raise FedrolexError("engine graph needs a CUDA device: use auto, loop, stack or crew on a CPU")
    return Graph(model, precision=precision, compiled=recipe.compiled)


def _open(recipe: Recipe, mask: Mask) -> tuple[Task, Fleet]:
    """The recipe's data and fleet; text says how many users there are, images are spread over the fleet."""
    folder = data_folder(recipe.data)
    if isinstance(recipe.task, WordsRecipe):
        task = recipe.task.build(recipe.fleet.clients, recipe.seed, folder)
        return task, recipe.fleet.build(recipe.seed, task.clients)
    fleet = recipe.fleet.build(recipe.seed)
    return recipe.task.build(fleet, recipe.fleet.server, recipe.seed, folder, mask), fleet
