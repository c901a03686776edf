"""``fedrolex data``: get data sets from their publishers, and see which are there."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from fedrolex.cli.console import console, table
from fedrolex.cli.options import AsJson, DataFolder, Group
from fedrolex.data.get import CATALOGUE, find_source, get, lacking
from fedrolex.data.where import data_folder

data_app = typer.Typer(
    name="data", cls=Group, help="Get data sets, and see which are there.", no_args_is_help=True, add_completion=False
)


@data_app.command("get")
def get_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(CATALOGUE)}.")],
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Download a data set, check it and unpack it. Interrupted? Run it again: it goes on."""
    folder = data_folder(data)
    place = folder / find_source(name).folder
    err = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=err, transient=True, disable=as_json or not err.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def show(file: str, there: int, total: int) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file, total=total)
            bars.update(tasks[file], completed=there)

        new = get(name, folder, show)
    if as_json:
        typer.echo(json.dumps({"name": name, "folder": str(place), "downloaded": new}))
    else:
        typer.echo(f"{name} is in {place}" if new else f"{name} is already in {place}")


@data_app.command("list")
def list_command(data: DataFolder = None, as_json: AsJson = False) -> None:
    """Which data sets there are, and which of them are on this machine."""
    folder = data_folder(data)
    rows: list[dict[str, Any]] = []
    for name, source in CATALOGUE.items():
        lack = lacking(source, folder)
        state = "there" if lack is None else "incomplete" if (folder / source.folder).exists() else "absent"
        rows.append({"name": name, "state": state, "folder": str(folder / source.folder), "lacking": lack})
    rows.append({"name": "digits", "state": "there", "folder": None, "lacking": None})
    if as_json:
        typer.echo(json.dumps({"data": str(folder), "sets": rows}, indent=1))
        return
    cells = [(row["name"], row["state"], _how_to_get(row)) for row in rows]
    console().print(table(("name", "state", "how to get it"), cells, f"data sets in {folder}", words=3))


def _how_to_get(row: dict[str, Any]) -> str:
    """What to do for a data set that is not there."""
    if row["state"] == "there":
        return "comes with scikit-learn" if row["folder"] is None else ""
    if CATALOGUE[row["name"]].files:
        return f"fedrolex data get {row['name']}" if row["state"] == "absent" else str(row["lacking"])
    return f"put {CATALOGUE[row['name']].about} into {row['folder']}"
