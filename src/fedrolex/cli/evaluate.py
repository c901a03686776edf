"""``fedrolex evaluate``: a trained model measured again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fedrolex.cli.console import console, table
from fedrolex.cli.options import AsJson, DataFolder, Settings
from fedrolex.cli.results import NAMES
from fedrolex.cli.runs import numbers_of
from fedrolex.core import FedrolexError
from fedrolex.runs import Run, prepare


def evaluate_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    best: Annotated[bool, typer.Option("--best", help="The model that did best on validation examples.")] = False,
    settings: Settings = None,
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Measure the model of a run's newest checkpoint again, beside what was reported for its round."""
    opened = Run.open(run)
    if opened.own_task():
        how = f"Run.open(Path({str(run)!r})).evaluate(prepare(recipe, task))"
        raise FedrolexError(f"{run} trains a task given in Python: measure it with {how}")
    recipe = opened.recipe().with_settings(settings or [])
    opened.check(recipe)
    recipe = recipe if data is None else replace(recipe, data=str(Path(data).absolute()))
    found = opened.evaluate(prepare(replace(recipe, callbacks=[])), best=best)
    row = next((row for row in opened.rows() if row["round"] == found["round"]), {})
    rounds, measured = found.pop("round") + 1, numbers_of(found)
    reported = {name: number for name, number in numbers_of(row).items() if name in measured}
    if as_json:
        told = {"run": str(run), "rounds": rounds, "reported": reported, "measured": measured}
        typer.echo(json.dumps(told, indent=1))
        return
    rows = [
        (NAMES.get(name, name.replace("_", " ")), _said(name, reported.get(name)), _said(name, number))
        for name, number in measured.items()
    ]
    console().print(table(("", "reported", "measured now"), rows, f"{run} after {rounds} rounds", words=1))


def _said(name: str, number: float | None) -> str:
    return "" if number is None else f"{number:.2%}" if "accuracy" in name else f"{number:.6g}"
