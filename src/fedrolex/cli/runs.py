"""``fedrolex runs`` and ``fedrolex compare``: what was trained, and how runs differ."""

import json
import re
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from fedrolex.cli.console import console, remark, table
from fedrolex.cli.options import AsJson
from fedrolex.cli.results import NAMES
from fedrolex.core import FedrolexError
from fedrolex.runs import Run
from fedrolex.runs.standing import flat, standing
from fedrolex.tasks.metrics import SCORES

DEEPEST = 5  # folders down to a run: those of ``fedrolex paper`` are TABLE/KIND/SETUP/ROW/seed-1


def runs_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where runs lie.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List runs: their state, rounds, accuracy, method and task."""
    if not folder.is_dir():
        raise FedrolexError(f"there is no folder {folder}: give the one in which your runs are")
    depths = ("/".join("*" * depth) for depth in range(1, DEEPEST + 1))
    found = [path.parent for depth in depths for path in folder.glob(f"{depth}/recipe.yaml") if path.is_file()]
    seen = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    once = {path.resolve(): path for path in reversed(seen)}  # links may lead to a run in many ways: the shortest
    every = [_standing(Run(path)) for path in sorted(once.values(), key=_in_order)]
    if as_json:
        typer.echo(json.dumps(every, indent=1))
        return
    screen = console()
    if not every:
        screen.print(f"no runs in {folder}", highlight=False)
        return
    rows = [
        (
            each["run"],
            each["state"],
            f"{each['rounds']} of {each['of']}" if "of" in each else "",
            _scored(each.get("measured", {})),
            each.get("method", each.get("why", "")),
            each.get("task", ""),
            str(each.get("seed", "")),
        )
        for each in every
    ]
    screen.print(table(("run", "state", "rounds", "accuracy", "method", "task", "seed"), rows, words=2))
    remark(screen, "One of them: fedrolex evaluate RUN. Several: fedrolex compare RUN RUN. Go on: fedrolex resume RUN.")


def compare_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs' folders, two or more.")],
    as_json: AsJson = False,
) -> None:
    """How good runs are side by side, and in which settings of their recipes they differ."""
    if len(runs) < 2:
        raise FedrolexError(f"one run, {runs[0]}, cannot be compared: give two or more")
    opened = [Run.open(run) for run in runs]
    every = [standing(run) for run in opened]
    recipes = [dict(flat(run.recipe().encode())) for run in opened]
    keys = list(dict.fromkeys(key for recipe in recipes for key in recipe))
    settings = {key: [recipe.get(key) for recipe in recipes] for key in keys}
    settings = {key: values for key, values in settings.items() if any(value != values[0] for value in values)}
    numbers = [numbers_of({**each["measured"], "bytes": each["bytes"], "seconds": each["seconds"]}) for each in every]
    names = list(dict.fromkeys(name for each in numbers for name in each))
    found = {name: [each.get(name) for each in numbers] for name in names}
    if as_json:
        typer.echo(json.dumps({"runs": every, "metrics": found, "settings": settings}, indent=1))
        return
    rows = [("state", *(f"{each['state']}, {each['rounds']} of {each['of']} rounds" for each in every))]
    rows += [
        (NAMES.get(name, name.replace("_", " ")), said(name, first), *(said(name, n, first) for n in others))
        for name, (first, *others) in found.items()
    ]
    rows += [(key, *(json.dumps(value) for value in values)) for key, values in settings.items()]
    screen = console()
    screen.print(table(("", *map(str, runs)), rows, words=1, ends=[0, len(found)]))
    remark(screen, "In brackets: the difference from the first run, of accuracies in points.")


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among metrics, also those one level below."""
    return {k: n for k, n in flat(metrics) if isinstance(n, int | float) and not isinstance(n, bool) and isfinite(n)}


def said(name: str, value: float | None, before: float | None = None) -> str:
    """A metric in words, with its difference from another one."""
    if value is None:
        return ""
    share = "accuracy" in name
    text = f"{value:.1%}" if share else f"{value:,.0f}" if name in ("bytes", "seconds") else f"{value:.4g}"
    if before is None:
        return text
    apart = f"{100 * (value - before):+.1f}" if share else f"{value / before - 1:+.0%}" if before else ""
    return f"{text} ({apart})" if apart else text


def _standing(run: Run) -> dict[str, Any]:
    try:
        return standing(run)
    except FedrolexError as error:
        return {"run": str(run.folder), "state": "damaged", "why": str(error)}


def _scored(measured: Mapping[str, Any]) -> str:
    """What a model is judged by: its accuracy, or what else the task measures."""
    name = next((name for name in SCORES if measured.get(name) is not None), "")
    return f"{said(name, measured.get(name))} {'' if 'accuracy' in name else name}".strip()


def _in_order(path: Path) -> list[Any]:
    """Runs by name, numbers in it as numbers."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"(\d+)", str(path))]
