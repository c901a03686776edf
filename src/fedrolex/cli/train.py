"""``fedrolex train``, ``resume``, ``list`` and ``show``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
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
from fedrolex.data.images import NAMES
from fedrolex.errors import FedrolexError
from fedrolex.methods.needs import TABLE, Needs
from fedrolex.runs.compare import alternatives
from fedrolex.runs.prepare import prepare
from fedrolex.runs.recipe import ENGINES, METHODS, TASKS, Recipe
from fedrolex.runs.run import Progress as RoundDone
from fedrolex.runs.run import Run
from fedrolex.runs.side_by_side import QUEUES, fits, side_by_side
from fedrolex.runs.task_recipe import TEXTS, WordsRecipe
from fedrolex.runs.training import Training

QUICKSTART = "digits"
ACCURACIES = {
    "global_accuracy": "global accuracy",
    "local_accuracy": "local accuracy",
    "local_accuracy_masked": "local, masked",
    "rare_accuracy": "rare classes",
    "validation_accuracy": "validation",
    "accuracy_no_oov": "without unknown words",
    "accuracy_no_oov_no_eos": "and ends",
}
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
    plans = {base.method.name: (folder, base)}
    for number, (what, other) in enumerate((alternatives(base) if base.compare else {}).items(), 1):
        plans[what] = (folder.with_name(f"{folder.name}-alone-{number}"), other)
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
        results += _train(every[start : start + at_once], as_json)
    if as_json:
        typer.echo(json.dumps(results[0] if len(results) == 1 else results, indent=1))
        return
    show_results(console(), results)
    if base.compare:
        console().print(verdict(results, list(plans)), highlight=False)
        picture = folder / "accuracy.png"
        draw(results, picture)
        console().print(f"picture: {picture}", highlight=False)
    else:
        console().print("What this fleet could do without it: add --set compare=true.", style="dim", highlight=False)


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
    (summary,) = _go([recipe.method.name], [opened], [prepare(recipe)], as_json)
    if as_json:
        typer.echo(json.dumps(summary, indent=1))
    else:
        show_results(console(), [summary])


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


def _train(every: Sequence[tuple[str, Path, Recipe]], quiet: bool) -> list[dict[str, Any]]:
    """Train recipes into folders; several go side by side, if they can."""
    trainings = [prepare(recipe) for _, _, recipe in every]
    runs = [Run.create(folder, recipe) for _, folder, recipe in every]
    names = [what for what, _, _ in every]
    if len(every) > 1 and all(fits(training) for training in trainings):
        found = _go(names, runs, trainings, quiet)
    else:
        if len(every) > 1:
            why = "dropout and engines with threads of their own share what one process has once"
            print(f"--at-once: these runs go one after the other ({why})", file=sys.stderr)
        found = [_go([name], [run], [one], quiet)[0] for name, run, one in zip(names, runs, trainings, strict=True)]
    return [{**summary, "method": what} for summary, what in zip(found, names, strict=True)]


def _go(names: Sequence[str], runs: Sequence[Run], trainings: Sequence[Training], quiet: bool) -> list[dict[str, Any]]:
    """Train runs to their ends, side by side if there are several."""
    try:
        with _progress(names, [run.recipe() for run in runs], quiet) as steps:
            if len(runs) == 1:
                return [runs[0].go(trainings[0], steps[0])]
            return side_by_side(list(zip(runs, trainings, steps, strict=True)))
    except KeyboardInterrupt:
        for run, training in zip(runs, trainings, strict=True):
            print(f"stopped after round {training.round}; go on with: fedrolex resume {run.folder}", file=sys.stderr)
        raise SystemExit(130) from None


@contextmanager
def _progress(names: Sequence[str], recipes: Sequence[Recipe], quiet: bool) -> Iterator[list[RoundDone]]:
    """Rounds, time left and accuracy of every run on a terminal; nothing in a pipe."""
    screen = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[accuracy]}"),
    )
    with Progress(*columns, console=screen, disable=quiet or not screen.is_terminal) as bar:
        yield [_step(bar, screen, name, recipe) for name, recipe in zip(names, recipes, strict=True)]


def _step(bar: Progress, screen: Console, name: str, recipe: Recipe) -> RoundDone:
    """What is shown of a run after every round."""
    task = bar.add_task(f"{name}, seed {recipe.seed}", total=recipe.rounds, accuracy="")

    def step(row: dict[str, Any]) -> None:
        for client, why in row["dropped"].items():
            said = f"round {row['round']}: client {client} dropped: {why}"
            screen.print(said, highlight=False, markup=False, soft_wrap=True)
        bar.update(task, completed=row["round"] + 1)
        if "global_accuracy" in row:
            bar.update(task, accuracy=f"{row['global_accuracy']:.1%}")

    return step


def show_results(screen: Console, results: list[dict[str, Any]]) -> None:
    """A table of finished runs."""
    table = Table()
    shown = {key: heading for key, heading in ACCURACIES.items() if any(result.get(key) for result in results)}
    if all(result.get("local_accuracy_masked") == result.get("local_accuracy") for result in results):
        shown.pop("local_accuracy_masked", None)  # every client holds every class
    for heading in ("", "seed", *shown.values(), "sent", "of full-model training", "training seconds"):
        table.add_column(heading, justify="left" if not heading else "right")
    for result in results:
        found = [result.get(key) for key in shown]
        table.add_row(
            str(result["method"]),
            str(result["seed"]),
            *("" if value is None else f"{value:.1%}" for value in found),
            f"{result['bytes'] / 2**20:.1f} MiB",
            f"{result['bytes'] / max(1, result['bytes_of_full_model']):.1%}",
            f"{result['seconds']:.0f}",
        )
    screen.print(table)
    for result in results:
        if "submodels" in result:
            parts = ", ".join(f"{capacity}: {value:.1%}" for capacity, value in result["submodels"].items())
            screen.print(f"sub-models of {result['method']}, global accuracy: {parts}", highlight=False)
    first = results[0]
    remarks = [f"batch norm statistics: {first['statistics']}"] if first.get("statistics") else []
    if first.get("unused_examples"):
        remarks.append(f"{first['unused_examples']:,} examples are with nobody")
    if first.get("labels_per_client"):
        remarks.append(f"{first['labels_per_client']:.2f} labels a client")
    if remarks:
        screen.print("; ".join(remarks), style="dim", highlight=False)
    screen.print(f"run: {first['run']}", style="dim", highlight=False, soft_wrap=True)


def verdict(results: list[dict[str, Any]], methods: list[str]) -> str:
    """One line: did the first method beat what the fleet could do without it? The last one is out of reach."""

    def mean(what: str) -> float:
        found = [float(result["global_accuracy"]) for result in results if result["method"] == what]
        return sum(found) / len(found)

    best = max(methods[1:-1], key=mean)
    gap = 100 * (mean(methods[0]) - mean(best))
    if gap > 0:
        return f"{methods[0]} beats the best this fleet could do without it ({best}) by {gap:.1f} points."
    return f"Here the fleet does better without it: {best}, by {-gap:.1f} points."


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Accuracy over rounds of several runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for place, result in enumerate(results):
        rows = [row for row in Run.open(Path(result["run"])).rows() if "global_accuracy" in row]
        style = {"linewidth": 2.2} if place == 0 else {"linewidth": 1.2, "linestyle": "--"}
        places, values = [r["round"] + 1 for r in rows], [r["global_accuracy"] for r in rows]
        axes.plot(places, values, label=result["method"], marker="o", markersize=3, **style)
    axes.set(xlabel="round", ylabel="accuracy on unseen examples", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#eeeeee")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
