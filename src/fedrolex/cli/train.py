"""``fedrolex train`` and ``fedrolex resume``."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from fedrolex.cli.console import console, remark
from fedrolex.cli.options import AsJson, DataFolder, Settings
from fedrolex.cli.progress import Watch, shown
from fedrolex.cli.results import draw, show_results, still_rising, verdict
from fedrolex.cli.seeds import over_seeds, read_seeds
from fedrolex.core import ENGINES, FedrolexError
from fedrolex.core.allocator import keep_memory
from fedrolex.core.device import pick_device
from fedrolex.recipes import Recipe, find_recipe
from fedrolex.runs import Run, prepare
from fedrolex.runs.prepare import beside
from fedrolex.runs.side_by_side import QUEUES, ReadyRun, side_by_side
from fedrolex.runs.standing import standing
from fedrolex.runs.training import to_stderr
from fedrolex.tasks.metrics import short

QUICKSTART = "digits"
OF_A_SEED = re.compile("seed-[0-9]+")
"""The folder of a run that is one of several seeds: all of them are compared together."""


@dataclass(frozen=True)
class Planned:
    """A run to be made.

    Attributes:
        what: its name in tables.
        folder, recipe: where, and what.
        resumed_by: the folder to give to ``fedrolex resume``: its own, that of all seeds, or of the run that it is
            compared with.
        top: the folder that its recipe's runs were given.
    """

    what: str
    folder: Path
    recipe: Recipe
    resumed_by: Path
    top: Path


def train_command(
    context: typer.Context,
    recipes: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE", help="Recipes' names or YAML files.", show_default="the quickstart"),
    ] = None,
    settings: Settings = None,
    engine: Annotated[
        str | None, typer.Option(help=f"How client work runs: {', '.join(ENGINES.names())}, or package.module:Name.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto.")] = None,
    seed: Annotated[int | None, typer.Option(help="Key of every random choice.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="A,B,C", help="Several runs of each, one a seed.")] = None,
    at_once: Annotated[int, typer.Option(metavar="N", min=1, help="Runs side by side.")] = 1,
    data: DataFolder = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the run, or for the runs of several recipes.", show_default="runs/NAME-N"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train one recipe or several; with none, the quickstart."""
    if seed is not None and seeds is not None:
        raise FedrolexError("give --seed or --seeds, not both")
    options = {"engine": engine, "device": device, "seed": seed, "data": data and str(Path(data).absolute())}
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    names = recipes or [QUICKSTART]
    bases = [replace(find_recipe(name).with_settings(settings or []), **given).with_whole_paths() for name in names]
    groups = []
    for label, folder, base in zip(*_places(names, bases, out), bases, strict=True):
        groups.append(_plans(base.method.name if len(bases) == 1 else label, folder, base))
    context.call_on_close(lambda: _drop_unused(groups, out))
    for plan in (plan for group in groups for plan in group):
        Run.refuse(plan.folder)
    if seeds is not None:
        groups = [_by_seed(group, read_seeds(seeds)) for group in groups]
    every = [plan for group in groups for plan in group]

    def created(plan: Planned) -> Run:
        """The run of a plan; with the first of several seeds come the others, so that all can be resumed."""
        for each in every:
            if each.top == plan.top and not (each.folder / "recipe.yaml").exists():
                Run.create(each.folder, each.recipe)
        return Run.open(plan.folder)

    _report(groups, train_all(every, at_once, as_json, _created if seeds is None else created), as_json)


def resume_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or one with runs of several seeds.")],
    settings: Settings = None,
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Go on from the last checkpoint, bit for bit; --set rounds=N for more rounds."""
    of_seeds = [] if (run / "recipe.yaml").exists() else [Run(path.parent) for path in run.glob("seed-*/recipe.yaml")]
    opened = of_seeds[0] if of_seeds else Run.open(run)
    if opened.own_task():
        how = f"train(None, task, out={str(run)!r}, resume=True)"
        raise FedrolexError(f"{run} trains a task given in Python: go on with {how}")
    recipe = opened.recipe().with_settings(settings or [])
    opened.check(recipe)
    recipe = recipe if data is None else replace(recipe, data=str(Path(data).absolute()))
    compared = replace(recipe, compare=recipe.compare and not OF_A_SEED.fullmatch(run.name))
    plans = _plans(recipe.method.name, run, compared)
    if of_seeds:
        plans = _by_seed(plans, sorted(each.recipe().seed for each in of_seeds))

    def resumed(plan: Planned) -> Run:
        if not plan.folder.is_dir() or not any(plan.folder.iterdir()):
            return _created(plan)
        found = Run.open(plan.folder)
        if settings or found.recipe().rounds != plan.recipe.rounds:
            found.change(plan.recipe)
        return found

    for plan in plans if not settings else ():
        if (plan.folder / "recipe.yaml").exists() and standing(Run.open(plan.folder))["state"] == "finished":
            print(f"{plan.folder} is finished: its files are checked, nothing is trained", file=sys.stderr)
    _report([plans], train_all(plans, 1, as_json, resumed), as_json)


def _created(plan: Planned) -> Run:
    return Run.create(plan.folder, plan.recipe)


# --- what is to be trained, and where ---


def _places(names: Sequence[str], bases: Sequence[Recipe], out: Path | None) -> tuple[list[str], list[Path]]:
    """A label and a folder for every recipe, each its own."""
    labels: list[str] = []
    for name, base in zip(names, bases, strict=True):
        plain = f"{Path(name).stem}-{short(base.method.name)}"
        label, number = plain, 2
        while label in labels:
            label, number = f"{plain}-{number}", number + 1
        labels.append(label)
    if out is not None:
        return labels, [out] if len(labels) == 1 else [out / label for label in labels]
    return labels, [_fresh(label) for label in labels]


def _fresh(name: str) -> Path:
    """A new folder, empty as yet: whoever makes it has the name, also where several commands begin at once."""
    number = 1
    while True:
        path = Path("runs", f"{name}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
        except OSError as error:
            raise FedrolexError(f"cannot make {path}: {error.strerror}") from error


def _drop_unused(groups: Sequence[Sequence[Planned]], out: Path | None) -> None:
    """Remove the folders of :func:`_fresh` in which no run has begun."""
    for folder in [group[0].top for group in groups] if out is None else ():
        with suppress(OSError):  # there is something in it
            folder.rmdir()
            folder.parent.rmdir()


def _plans(label: str, folder: Path, recipe: Recipe) -> list[Planned]:
    """A run and, where it is to be compared, what the fleet could do without it."""
    others = [Planned(what, place, other, folder, folder) for what, place, other in beside(folder, recipe)]
    return [Planned(label, folder, recipe, folder, folder), *others]


def _by_seed(plans: Sequence[Planned], seeds: Sequence[int]) -> list[Planned]:
    """Every plan for every seed; several seeds have a folder each."""
    return [
        replace(
            plan,
            folder=plan.folder / f"seed-{seed}" if len(seeds) > 1 else plan.folder,
            recipe=replace(plan.recipe, seed=seed),
        )
        for plan in plans
        for seed in seeds
    ]


def of_one_precision(plans: Sequence[Planned]) -> Iterator[list[Planned]]:
    """Plans in groups that may be trained at once: of one precision, which is a switch of the whole process."""
    for _, some in groupby(plans, key=lambda plan: plan.recipe.precision):
        yield list(some)


# --- training ---


def train_all(
    plans: Sequence[Planned], at_once: int, quiet: bool, opened: Callable[[Planned], Run], again: str | None = None
) -> dict[Path, dict[str, Any]]:
    """Train all runs, so many at once; their summaries by folder.

    Args:
        quiet: show no progress.
        opened: gives the folder of a run that begins.
        again: what to do after a stop, where it is not to resume each run by itself. A run that fails then leaves those
            after it alone.
    """
    if at_once > 1:
        os.environ.setdefault(*QUEUES)
    if all(pick_device(plan.recipe.device).type == "cpu" for plan in plans):
        keep_memory()
    begun: list[Planned] = []
    try:
        with shown(quiet) as watched:
            return _trained(plans, at_once, lambda plan: _ready(plan, opened, begun, watched), again is not None)
    except KeyboardInterrupt:
        if not begun:
            raise
        _say_stopped(plans, begun, again)
        raise SystemExit(130) from None
    except BaseException:
        if len(plans) > 1:
            _say_stopped(plans, begun, again)
        raise


def _ready(plan: Planned, opened: Callable[[Planned], Run], begun: list[Planned], watched: Watch) -> ReadyRun:
    """A run that begins."""
    begun.append(plan)
    training, run = prepare(plan.recipe), opened(plan)
    return run, training, watched(plan.what, plan.recipe, run.rows())


def _trained(
    plans: Sequence[Planned], at_once: int, ready: Callable[[Planned], ReadyRun], patient: bool
) -> dict[Path, dict[str, Any]]:
    """Runs of one precision side by side, which is a switch of the whole process; their summaries by folder.

    Where somebody is ``patient``, runs that fail in one line leave the others alone, and are told again in the end.
    """
    found, failed = dict[Path, dict[str, Any]](), list[FedrolexError]()
    groups = list(of_one_precision(plans)) if at_once > 1 else [[plan] for plan in plans]
    for some in groups:
        names = [f"{plan.what}, seed {plan.recipe.seed}," for plan in some]
        try:
            if len(some) > 1:
                summaries = side_by_side([partial(ready, plan) for plan in some], at_once, names)
            else:
                run, training, step = ready(some[0])
                summaries = [run.go(training, step)]
        except FedrolexError as error:
            if not patient or len(groups) == 1:
                raise
            why = str(error)
            if len(some) == 1:  # side_by_side has named them already
                to_stderr(f"{names[0]} has failed{', the others go on' * (some is not groups[-1])}: {error}")
                why = f"{names[0]} failed: {error}"
            failed.append(FedrolexError(why))  # the error itself would keep the run's memory
        else:
            found |= {plan.folder: each for plan, each in zip(some, summaries, strict=True)}
    if failed:
        raise failed[0]
    return {plan.folder: {**found[plan.folder], "method": plan.what} for plan in plans}


def _say_stopped(plans: Sequence[Planned], begun: Sequence[Planned], again: str | None) -> None:
    """Where runs stand that were not finished, and how to go on with them."""
    made = [plan for plan in begun if (plan.folder / "recipe.yaml").exists()]
    standings = [(plan, standing(Run.open(plan.folder))) for plan in made]
    stopped = [(plan, found["rounds"]) for plan, found in standings if found["state"] != "finished"]
    for plan, rounds in stopped if again is None else ():
        what = "" if plan.resumed_by == plan.folder else f" of {plan.folder} ({plan.what})"
        how = f"go on with: fedrolex resume {quote(str(plan.resumed_by))}"
        print(f"stopped after round {rounds}{what}; {how}", file=sys.stderr)
    waiting = [plan for plan in plans if plan not in begun]
    if again is not None:
        for plan, rounds in stopped:
            print(f"stopped after round {rounds} of {plan.recipe.rounds}: {plan.what}, {plan.folder}", file=sys.stderr)
        print(f"not begun: {len(waiting)}. To go on, give {again} again", file=sys.stderr)
    elif waiting and any(plan.top not in {each.top for each in begun} for plan in waiting):
        print(f"not begun: {', '.join(f'{plan.what} ({plan.folder})' for plan in waiting)}", file=sys.stderr)


def _report(groups: Sequence[Sequence[Planned]], results: dict[Path, dict[str, Any]], as_json: bool) -> None:
    """What is said in the end; a group is a recipe's runs, with what they are compared with."""
    every = [results[plan.folder] for group in groups for plan in group]
    means = [mean for group in groups for mean in over_seeds([results[plan.folder] for plan in group])]
    if as_json:
        typer.echo(json.dumps({"runs": every, "over_seeds": means}, indent=1))
        return
    screen = console()
    metrics = [short(name) for group in groups for name in group[0].recipe.evaluation.metrics]
    show_results(screen, every, list(dict.fromkeys(metrics)), means)
    for group in groups:
        if group[0].recipe.compare:
            found = [results[plan.folder] for plan in group]
            screen.print(verdict(found, list(dict.fromkeys(plan.what for plan in group))), highlight=False)
            picture = group[0].top / "accuracy.png"
            draw(found, picture)
            screen.print(f"picture: {picture}", highlight=False)
    if len(every) == 1 and (said := still_rising(Run.open(groups[0][0].folder))):
        remark(screen, said)
    first = groups[0][0]
    hinted = len(groups) == 1 and not first.recipe.compare and not OF_A_SEED.fullmatch(first.top.name)
    if hinted and not first.recipe.method.needs.one_size:
        others = len(every) * len(list(beside(first.folder, replace(first.recipe, compare=True))))
        again = f"fedrolex resume {quote(str(first.top))} --set compare=true"
        remark(screen, f"What this fleet could do without it, {others} more trainings: {again}")
