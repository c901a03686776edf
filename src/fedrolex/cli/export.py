"""``fedrolex export``: what each device runs of a trained model."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from torch import Tensor

from fedrolex.cli.console import console, remark, table
from fedrolex.cli.options import AsJson, DataFolder
from fedrolex.cli.progress import working
from fedrolex.core import FedrolexError
from fedrolex.data.images import load_images
from fedrolex.data.where import data_folder
from fedrolex.recipes import ImagesRecipe
from fedrolex.runs import Run
from fedrolex.runs.exports.export import Exported, Exporter, Options
from fedrolex.runs.exports.folder import refuse
from fedrolex.runs.exports.formats import FORMATS, MISSING, can_write
from fedrolex.slicing import exact


def export_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    capacities: Annotated[
        list[str] | None,
        typer.Option("--capacity", help="Of the devices. Repeatable.", show_default="all that there is a model for"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A new folder, with a folder for each of several capacities.", show_default="RUN/exports"),
    ] = None,
    windows: Annotated[int, typer.Option(help="Most windows to try, on examples that are no test examples.")] = 16,
    distil: Annotated[bool, typer.Option("--distil", help="Teach the sub-model what the whole model says.")] = False,
    public: Annotated[
        str | None,
        typer.Option(metavar="SET", help="Images to distil on: a data set or a folder.", show_default="the task's own"),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of the distillation.")] = 500,
    one_model: Annotated[
        bool, typer.Option("--one-model", help="Distil into one part of the network, e.g. in place of columns.")
    ] = False,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help="Beside safetensors: pt2 or onnx. Repeatable.", show_default="both"),
    ] = None,
    offsets: Annotated[
        bool, typer.Option("--offsets", help="Add an offset to every class's score, fitted on held examples.")
    ] = False,
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Write the model that a device of a capacity runs: chosen, calibrated, measured."""
    opened = Run.open(run)
    if opened.own_task():
        raise FedrolexError(f"{run} trains a task given in Python: export it with export({str(run)!r}, task=task)")
    wanted = list(dict.fromkeys(exact(capacity) for capacity in capacities or ()))
    folder = None if data is None else str(Path(data).absolute())
    images = _images(opened, public, folder)
    options = Options(windows, distil or images is not None, images, steps, one_model, formats, offsets)
    if out is not None:
        refuse(out)
    with working() as say:
        exporter = Exporter.of(run, options, data=folder, say=say)
        wanted = wanted or exporter.capacities
        places = [exporter.folder_for(level, out, alone=len(wanted) == 1) for level in wanted]
        for place in places:
            refuse(place)
        done = [exporter(level, place) for level, place in zip(wanted, places, strict=True)]
    if as_json:
        told = [{**one.report, "folder": str(one.folder)} for one in done]
        typer.echo(json.dumps({"run": str(run), "exports": told}, indent=1))
    else:
        _show(console(), run, done)


def _images(opened: Run, public: str | None, data: str | None) -> Tensor | None:
    """The images of a set to distil on."""
    if public is None:
        return None
    recipe = opened.recipe()
    size = recipe.task.size if isinstance(recipe.task, ImagesRecipe) else None
    return load_images(public, data_folder(data or recipe.data), recipe.seed, size).train_x


def _show(screen: Console, run: Path, done: list[Exported]) -> None:
    """Tables: every window on examples to choose by, then what was chosen on the test examples."""
    rows = [
        (one.report["capacity"], str(each["round"]), _said(each["before"]), _said(each["after"]), _mark(one, each))
        for one in done
        for each in one.report["windows"]
    ]
    on = done[0].report["chosen_on"]
    title = f"windows on {on['count']:,} {on['examples']} examples"
    headings = ("capacity", "window of round", "before calibration", "after", "")
    screen.print(table(headings, rows, title))
    taught = any(one.report["test"]["distilled"] is not None for one in done)
    tests = [
        (one.report["capacity"], f"{one.report['parameters']:,}", _said(test["before"]), _said(test["after"]))
        + ((_said(test["distilled"]),) * taught)
        for one in done
        for test in (one.report["test"],)
    ]
    whole = _said(done[0].report["test"]["whole"])
    title = f"{run}: chosen windows on test examples; the whole model has {whole}"
    shown = ("capacity", "parameters", "before calibration", "after", *(["distilled"] * taught))
    screen.print(table(shown, tests, title))
    for one in done:
        screen.print(f"{one.report['capacity']}: {one.folder}", highlight=False, soft_wrap=True)
    if not all(map(can_write, FORMATS)):
        remark(screen, f"no model.onnx: {MISSING}")


def _said(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _mark(one: Exported, window: dict[str, Any]) -> str:
    return "chosen" if window["round"] == one.report["round"] else ""
