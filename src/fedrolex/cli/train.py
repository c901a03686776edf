"""``fedrolex train``, ``resume``, ``list`` and ``show``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedrolex.cli.console import console
from fedrolex.cli.results import draw, show_results, verdict
from fedrolex.core.errors import FedrolexError
from fedrolex.data.images import NAMES
from fedrolex.methods.needs import TABLE, Needs
from fedrolex.recipes.recipe import ENGINES, METHODS, TASKS, Recipe
from fedrolex.recipes.task_recipe import TEXTS, WordsRecipe
from fedrolex.rounds.intake import LATE
from fedrolex.runs.compare import alternatives
from fedrolex.runs.prepare import prepare
from fedrolex.runs.run import Progress as RoundDone
from fedrolex.runs.run import Run
from fedrolex.runs.side_by_side import QUEUES, fits, side_by_side
from fedrolex.runs.training import Training

QUICKSTART = "digits"
NAMED = 8  # clients of a round, in one line
SILENCE = 20  # seconds without a word in a pipe
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe, e.g. client.lr=0.05. Repeatable."),
]
DataFolder = Annotated[
    str | None,
    typer.Option("--data", metavar="DIR", help="Folder of the data sets.", show_default="FEDROLEX_DATA"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def recipes() -> list[str]:
    """Names of the embedded recipes."""
    return sorted(
        p.name.removesuffix(".yaml") for p in resources.files("fedrolex.recipes").iterdir() if p.name.endswith(".yaml")
    )


def find_recipe(name: str) -> Recipe:
    """An embedded recipe by name, or a file."""
    if name in recipes():
        return Recipe.decode(yaml.safe_load((resources.files("fedrolex.recipes") / f"{name}.yaml").read_text()))
    if not Path(name).is_file():
        raise FedrolexError(f"no recipe {name!r}: give a YAML file or one of {', '.join(recipes())}")
    return Recipe.read(Path(name))


def train_command(
    recipe: Annotated[
        str, typer.Argument(metavar="[RECIPE]", help="A recipe's name or YAML file.", show_default="the quickstart")
    ] = QUICKSTART,
    settings: Settings = None,
    engine: Annotated[str | None, typer.Option(help="How client work runs.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto.")] = None,
    seed: Annotated[int | None, typer.Option(help="Key of every random choice.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="A,B,C", help="Several runs, one a seed.")] = None,
    at_once: Annotated[int, typer.Option(metavar="N", min=1, help="Runs side by side.")] = 1,
    data: DataFolder = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the run.", show_default="runs/NAME-N")] = None,
    as_json: AsJson = False,
) -> None:
    """Train; with no recipe, the quickstart."""
    base = find_recipe(recipe).with_settings(settings or [])
    base = replace(
        base,
        engine=base.engine if engine is None else engine,
        device=base.device if device is None else device,
        seed=base.seed if seed is None else seed,
        data=base.data if data is None else str(Path(data).resolve()),
    )
    if seed is not None and seeds is not None:
        raise FedrolexError("give --seed or --seeds, not both")
    base = _with_whole_paths(base)
    chosen = [base.seed] if seeds is None else _seeds(seeds)
    folder = out or _fresh(f"{Path(recipe).stem}-{base.method.name}")
    plans = _plans(folder, base)
    for where, _ in plans.values():
        if where.exists():
            raise FedrolexError(f"{where} exists already: give another --out, or go on with: fedrolex resume {where}")
    every = [
        (what, where if len(chosen) == 1 else where / f"seed-{one}", replace(plan, seed=one))
        for what, (where, plan) in plans.items()
        for one in chosen
    ]
    if at_once > 1:
        os.environ.setdefault(*QUEUES)
    results: list[dict[str, Any]] = []
    for start in range(0, len(every), at_once):
        results += _train(every[start : start + at_once], as_json, folder if len(chosen) == 1 else None)
    _report(results, base, plans, folder, as_json)


def resume_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Go on from the last checkpoint, bit for bit."""
    opened = Run.open(run)
    if opened.own_task():
        raise FedrolexError(
            f"{run} trains a task given in Python: go on with train(None, task, out={str(run)!r}, resume=True)"
        )
    recipe = opened.recipe()
    recipe = recipe if data is None else replace(recipe, data=str(Path(data).resolve()))
    compared = replace(recipe, compare=recipe.compare and not run.name.startswith("seed-"))
    plans = _plans(run, compared)
    results = [
        summary
        for what, (folder, plan) in plans.items()
        for summary in _train([(what, folder, plan)], as_json, run, again=folder.exists())
    ]
    _report(results, compared, plans, run, as_json)


def _plans(folder: Path, recipe: Recipe) -> dict[str, tuple[Path, Recipe]]:
    """A run and, where it is to be compared, what the fleet could do without it: folders and recipes by name."""
    plans = {recipe.method.name: (folder, recipe)}
    for number, (what, other) in enumerate((alternatives(recipe) if recipe.compare else {}).items(), 1):
        plans[what] = (folder.with_name(f"{folder.name}-alone-{number}"), other)
    return plans


def _report(
    results: list[dict[str, Any]],
    recipe: Recipe,
    plans: Mapping[str, tuple[Path, Recipe]],
    folder: Path,
    as_json: bool,
) -> None:
    """What is said in the end."""
    if as_json:
        typer.echo(json.dumps(results[0] if len(results) == 1 else results, indent=1))
        return
    show_results(console(), results)
    if recipe.compare:
        console().print(verdict(results, list(plans)), highlight=False)
        picture = folder / "accuracy.png"
        draw(results, picture)
        console().print(f"picture: {picture}", highlight=False)
    else:
        console().print("What this fleet could do without it: add --set compare=true.", style="dim", highlight=False)


def list_command(as_json: AsJson = False) -> None:
    """Methods, tasks, recipes, engines."""
    found = {"methods": list(METHODS), "tasks": list(TASKS), "recipes": recipes(), "engines": list(ENGINES)}
    if as_json:
        typer.echo(json.dumps({**found, "needs": {name: asdict(needs) for name, needs in TABLE.items()}}))
        return
    console().print(_table_of_methods())
    for kind, names in list(found.items())[1:]:
        console().print(f"[bold]{kind}[/bold]: {', '.join(names)}", highlight=False)


def _table_of_methods() -> Table:
    """The paper's Table 1 as it holds here."""
    columns: dict[str, Callable[[Needs], bool]] = {
        "clients of several sizes": lambda needs: not needs.one_size,
        "networks of several families": lambda needs: needs.families,
        "server larger than all clients": lambda needs: needs.larger_server,
        "secure aggregation possible": lambda needs: needs.secure_aggregation,
        "needs public data": lambda needs: needs.public,
        "needs validation data": lambda needs: needs.validation,
        "clients keep state": lambda needs: needs.client_state,
    }
    table = Table("method", *columns)
    for name, needs in TABLE.items():
        table.add_row(name, *("yes" if holds(needs) else "" for holds in columns.values()))
    return table


def show_command(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name or YAML file.")],
    settings: Settings = None,
) -> None:
    """The fully resolved recipe, every default visible."""
    typer.echo(yaml.safe_dump(find_recipe(recipe).with_settings(settings or []).encode(), sort_keys=False), nl=False)


def _with_whole_paths(recipe: Recipe) -> Recipe:
    """The recipe with its files named in full, so that a run can be resumed from anywhere."""

    def whole(path: str | None) -> str | None:
        return str(Path(path).expanduser().resolve()) if path is not None and Path(path).expanduser().exists() else path

    task: Any = recipe.task
    known = TEXTS if isinstance(task, WordsRecipe) else NAMES
    changed = {} if task.data in known else {"data": whole(task.data)}
    if isinstance(task, WordsRecipe):
        changed["word_list"] = whole(task.word_list)
    return replace(recipe, weights=whole(recipe.weights), task=replace(task, **changed))


def _seeds(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise FedrolexError(f"--seeds {text!r} is not a list of numbers: give e.g. 1,2,3") from None
    if len(set(found)) != len(found):
        raise FedrolexError(f"--seeds {text!r} names a seed twice")
    return found


def _fresh(name: str) -> Path:
    number = 1
    while Path("runs", f"{name}-{number}").exists():
        number += 1
    return Path("runs", f"{name}-{number}")


def _train(
    every: Sequence[tuple[str, Path, Recipe]], quiet: bool, first: Path | None, *, again: bool = False
) -> list[dict[str, Any]]:
    """Train recipes into folders; several go side by side, if they can.

    Args:
        every: names, folders and recipes.
        quiet: show no progress.
        first: the folder to resume, if interrupted; None is each its own.
        again: the folders are there already.
    """
    trainings = [prepare(recipe) for _, _, recipe in every]
    runs = [Run.open(folder) if again else Run.create(folder, recipe) for _, folder, recipe in every]
    names = [what for what, _, _ in every]
    if len(every) > 1 and all(fits(training) for training in trainings):
        found = _go(names, runs, trainings, quiet, first)
    else:
        if len(every) > 1:
            why = "dropout and engines with threads of their own share what one process has once"
            print(f"--at-once: these runs go one after the other ({why})", file=sys.stderr)
        each = zip(names, runs, trainings, strict=True)
        found = [_go([name], [run], [one], quiet, first)[0] for name, run, one in each]
    return [{**summary, "method": what} for summary, what in zip(found, names, strict=True)]


def _go(
    names: Sequence[str], runs: Sequence[Run], trainings: Sequence[Training], quiet: bool, first: Path | None
) -> list[dict[str, Any]]:
    """Train runs to their ends, side by side if there are several."""
    try:
        with _progress(names, [run.recipe() for run in runs], quiet) as steps:
            if len(runs) == 1:
                return [runs[0].go(trainings[0], steps[0])]
            return side_by_side(list(zip(runs, trainings, steps, strict=True)))
    except KeyboardInterrupt:
        for name, run, training in zip(names, runs, trainings, strict=True):
            what = "" if first in (None, run.folder) else f" of what it is compared with ({name})"
            said = f"stopped after round {training.round}{what}; go on with: fedrolex resume {first or run.folder}"
            print(said, file=sys.stderr)
        raise SystemExit(130) from None


@contextmanager
def _progress(names: Sequence[str], recipes: Sequence[Recipe], quiet: bool) -> Iterator[list[RoundDone]]:
    """Rounds, time left and accuracy of every run on a terminal; in a pipe a line now and then."""
    screen = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[accuracy]}"),
    )
    with Progress(*columns, console=screen, disable=quiet or not screen.is_terminal) as bar:
        yield [_step(bar, screen, name, recipe, quiet) for name, recipe in zip(names, recipes, strict=True)]


def _step(bar: Progress, screen: Console, name: str, recipe: Recipe, quiet: bool) -> RoundDone:
    """What is shown of a run after every round."""
    what = f"{name}, seed {recipe.seed}"
    task = bar.add_task(what, total=recipe.rounds, accuracy="")
    last = time.monotonic()

    def step(row: dict[str, Any]) -> None:
        nonlocal last
        for said in dropped(row):
            screen.print(said, highlight=False, markup=False, soft_wrap=True)
        bar.update(task, completed=row["round"] + 1)
        accuracy = f"{row['global_accuracy']:.1%}" if "global_accuracy" in row else ""
        if accuracy:
            bar.update(task, accuracy=accuracy)
        if not (quiet or screen.is_terminal) and time.monotonic() - last > SILENCE:
            last = time.monotonic()
            screen.print(f"{what}: round {row['round'] + 1} of {recipe.rounds} {accuracy}".rstrip(), highlight=False)

    return step


def dropped(row: Mapping[str, Any]) -> list[str]:
    """Whose answers of a round were not used, a line for every reason but for stragglers, who were asked for."""
    reasons: dict[str, list[str]] = {}
    for client, why in row["dropped"].items():
        if why != LATE:
            reasons.setdefault(why, []).append(client)
    return [
        f"round {row['round']}: client{'s' * (len(who) > 1)} {', '.join(who[:NAMED])}"
        f"{f' and {len(who) - NAMED} more' if len(who) > NAMED else ''} dropped: {why}"
        for why, who in reasons.items()
    ]
