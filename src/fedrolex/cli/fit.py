"""``fedrolex fit``: which capacity a device can train, by its memory. Needs no data."""

import json
from dataclasses import asdict
from fractions import Fraction
from typing import Annotated, Any

import typer
from torch import nn

from fedrolex.cli.arguments import build_model, read_inputs
from fedrolex.cli.console import console, remark, table
from fedrolex.cli.options import Arguments, AsJson, Settings
from fedrolex.cli.slice import CAPACITIES
from fedrolex.core import FedrolexError
from fedrolex.recipes import Recipe, find_recipe
from fedrolex.slicing import Static, exact, trace
from fedrolex.slicing.inputs import Inputs
from fedrolex.theory.memory import StepMemory, in_bytes, training_memory

BATCH = 16
COLUMNS = ("weights", "gradients", "optimizer", "activations", "temporary", "total")


def fit_command(
    what: Annotated[str, typer.Argument(metavar="RECIPE|MODULE:FACTORY", help="A recipe, or what makes a model.")],
    memory: Annotated[str, typer.Option(help="What a device has for training, e.g. 512MB or 256MiB.")],
    capacities: Annotated[
        list[str] | None,
        typer.Option("--capacity", help="A capacity to try. Repeatable.", show_default="the fleet's, or 1 to 1/16"),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Examples a step.", show_default="the recipe's, or 16")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="sgd, momentum or adam.", show_default="the recipe's, or sgd")
    ] = None,
    example: Annotated[
        list[str] | None,
        typer.Option(
            "--example", "--input", metavar="[NAME=]SHAPE[:DTYPE[:HIGH]]", help="An input of the model. Repeatable."
        ),
    ] = None,
    arguments: Arguments = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """The largest capacity whose training step fits into a device's memory."""
    room = in_bytes(memory)
    recipe = None if ":" in what else find_recipe(what).with_settings(settings or [])
    if recipe is None and settings:
        raise FedrolexError(f"--set {settings[0]} is for recipes, and {what} makes a model: leave it out")
    if recipe is not None and arguments:
        raise FedrolexError(f"--arg {arguments[0]} is for MODULE:FACTORY, and {what} is a recipe: leave it out")
    read_inputs(example or [])
    model = build_model(what, arguments or []) if recipe is None else recipe.task.make_model(recipe.fleet.server_scale)
    names = list(capacities or (CAPACITIES if recipe is None else recipe.fleet.capacities))
    if batch is None:
        batch = BATCH if recipe is None else recipe.client.batch
    optimizer = optimizer or ("sgd" if recipe is None else _optimizer(recipe))
    taken = _taken(model, read_inputs(example or [], model), names, recipe, batch, optimizer)
    fitting = [name for name, one in taken.items() if one.total <= room]
    best = max(fitting, key=exact, default=None)
    if as_json:
        rows = [
            {"capacity": name, **asdict(one), "total": one.total, "fits": one.total <= room}
            for name, one in taken.items()
        ]
        told = {"model": what, "memory": room, "batch": batch, "optimizer": optimizer, "capacities": rows}
        typer.echo(json.dumps({**told, "largest": best}, indent=1))
    else:
        _show(what, taken, room, batch, optimizer, best)
    if best is None:
        least = min(one.total for one in taken.values())
        remedy = "try a smaller --batch or --capacity"
        raise FedrolexError(f"no capacity fits into {memory}: the smallest takes {_mb(least)} MB; {remedy}")


def _taken(
    model: nn.Module, example: Any, names: list[str], recipe: Recipe | None, batch: int, optimizer: str
) -> dict[str, StepMemory]:
    """What a step takes at every capacity; a capacity is a part of what the largest client trains."""
    scale = 1 if recipe is None else recipe.fleet.server_scale
    own: dict[Fraction, nn.Module] = {} if recipe is None else recipe.task.make_models()
    parts = {name: exact(name) for name in names}
    axes = trace(model, example).freeze(*(() if recipe is None else recipe.task.frozen_axes()))
    scheme, inputs, found = Static(), Inputs.of(model, example), {}
    for name, part in parts.items():
        module = own.get(part)
        if module is None:
            module = axes.cut(model, scheme.window(axes, round=0, capacity=part / scale))
        found[name] = training_memory(module, inputs, batch, optimizer)
    return found


def _optimizer(recipe: Recipe) -> str:
    plain = recipe.client.optimizer
    return "momentum" if plain == "sgd" and recipe.client.momentum else plain


def _show(what: str, taken: dict[str, StepMemory], room: int, batch: int, optimizer: str, best: str | None) -> None:
    screen = console()
    rows = [
        (name, f"{one.parameters:,}", *(_mb(getattr(one, column)) for column in COLUMNS), "yes" * (one.total <= room))
        for name, one in taken.items()
    ]
    title = f"{what}: MB of a training step, batch {batch}, {optimizer}"
    screen.print(table(("capacity", "parameters", *COLUMNS, f"fits {_mb(room)}"), rows, title))
    if best is not None:
        screen.print(f"largest that fits: {best}", highlight=False)
    counted = "Tensors alone, measured by a step on this machine"
    remark(screen, f"{counted}: the program itself, and what its libraries keep, come on top.")


def _mb(size: int) -> str:
    mb = size / 1e6
    return f"{mb:,.1f}" if mb >= 1 else f"{mb:.2g}"
