"""``fedrolex paper``: the paper's tables and figures, trained cell by cell and collected."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, get_args

import typer

from fedrolex.cli.console import console
from fedrolex.cli.costs import costs_command
from fedrolex.cli.lemmas import INDICES, TIMES, lemma_rows, show_lemmas
from fedrolex.cli.options import AsJson, DataFolder, Settings
from fedrolex.cli.paper.figures import CURVES
from fedrolex.cli.paper.listing import list_cells
from fedrolex.cli.paper.orders import Order, read_orders
from fedrolex.cli.paper.shelf import Made, Shelf, summary_of
from fedrolex.cli.seeds import read_seeds
from fedrolex.cli.train import Planned, train_all
from fedrolex.core import FedrolexError, one_of
from fedrolex.recipes.paper import TABLES, Cell, cells
from fedrolex.recipes.paper_setups import Kind
from fedrolex.runs import Run

UNTRAINED = ("costs", "lemmas")
ALL = "all"
FILES = (".yaml", ".yml")
TRIALS = 10_000
WHAT = f"{', '.join((*TABLES, *UNTRAINED))}; all, to list; or a YAML file with several."


def paper_command(
    what: Annotated[str, typer.Argument(metavar="TABLE", help=WHAT)],
    kind: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(get_args(Kind))}; see fedrolex show CELL@KIND.", show_default="tuned"),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--cell", metavar="[TABLE/]SETUP[/ROW]", help="Only these cells. Repeatable.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="One run of each cell a seed.", show_default="1")
    ] = None,
    scale: Annotated[float, typer.Option(help="Multiplies rounds, for a quick look; results are marked so.")] = 1.0,
    at_once: Annotated[int, typer.Option(metavar="N", min=1, help="Runs side by side.")] = 1,
    listed: Annotated[
        bool, typer.Option("--list", help="Name the cells, their costs, and which are done; train nothing.")
    ] = False,
    missing: Annotated[
        bool, typer.Option("--missing", help="Leave out what is in the tables already, wherever it was trained.")
    ] = False,
    settings: Settings = None,
    data: DataFolder = None,
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/paper"),
    out: Annotated[Path, typer.Option(help="Folder of tables and figures.")] = Path("results/paper"),
    as_json: AsJson = False,
) -> None:
    """Reproduce a table, figure or lemma of the paper: train the cells that are missing, then collect all."""
    if what in UNTRAINED:
        if kind or only or seeds or settings or scale != 1 or at_once != 1 or missing:
            raise FedrolexError(f"{what} is computed, without any run: leave out what chooses runs")
        _computed(what, as_json)
        return
    from_file = what.lower().endswith(FILES)
    if from_file and (kind or only or seeds):
        raise FedrolexError(f"{what} says which cells, kinds and seeds: leave --cell, --kind and --seeds out")
    if what == ALL and (only or not listed):
        raise FedrolexError(f"all is for --list, without --cell: give one of {', '.join(TABLES)}")
    if from_file:
        orders = read_orders(Path(what), scale, settings or [])
    else:
        chosen, each = _kind(kind or "tuned"), read_seeds(seeds or "1")
        orders = [
            Order(table=name, cells=only or [], kind=chosen, seeds=each, scale=scale, settings=list(settings or ()))
            for name in _tables(what, chosen)
        ]
    shelves = {order.shelf(runs).name: order.shelf(runs) for order in orders}
    if missing and not out.is_dir():
        print(f"--missing: there are no tables in {out} yet", file=sys.stderr)
    made = {name: shelf.in_table(out) if missing else frozenset[Made]() for name, shelf in shelves.items()}
    if listed:
        every: dict[str, dict[str, tuple[Cell, list[int]]]] = {name: {} for name in shelves}
        for order in orders:
            name = order.shelf(runs).name
            for cell, each in order.lacking(made[name]):
                _, known = every[name].setdefault(cell.label, (cell, []))
                known += [seed for seed in each if seed not in known]
        lists = [(shelf, list(every[name].values())) for name, shelf in shelves.items()]
        list_cells(lists, UNTRAINED if what == ALL else (), out, as_json)
        return
    folder = data and str(Path(data).absolute())
    plans: dict[Path, Planned] = {}
    for order in orders:
        for plan in order.plans(runs, folder, made[order.shelf(runs).name]):
            if plans.setdefault(plan.folder, plan).recipe != plan.recipe:
                raise FedrolexError(f"{plan.what} is asked for by two recipes of one name: order their settings alike")
    _train(plans.values(), shelves.values(), at_once, out, as_json)
    _report(shelves.values(), out, as_json, listed=from_file)


def _kind(word: str) -> Kind:
    one_of("--kind", word, get_args(Kind))
    return word  # type: ignore[return-value]


def _tables(what: str, kind: Kind) -> list[str]:
    """A table, or all that have cells of a kind."""
    one_of("table", what, (*TABLES, *UNTRAINED, ALL))
    return [what] if what != ALL else [name for name in TABLES if any(kind in cell.kinds for cell in cells(name))]


def _computed(what: str, as_json: bool) -> None:
    """What needs no training."""
    if what == "costs":
        costs_command("cifar10", as_json=as_json)
        return
    rows = lemma_rows(INDICES, TIMES, TRIALS, 0)
    if as_json:
        typer.echo(json.dumps({"lemmas": [asdict(row) for row in rows]}, indent=1))
    else:
        show_lemmas(console(), rows, TRIALS)


# --- training ---


def _train(plans: Iterable[Planned], shelves: Iterable[Shelf], at_once: int, out: Path, quiet: bool) -> None:
    """Train what is not done; whatever stops it, what is done is collected."""
    waiting = [plan for plan in plans if not _is_finished(plan)]
    if not waiting:
        return
    for shelf in shelves:
        shelf.collected(out)  # what cannot be read or written is said before anything is trained
    try:
        train_all(waiting, at_once, quiet, _opened, "the same command")
    except BaseException:
        for shelf in shelves:
            collected = shelf.collected(out)
            collected.write()
            collected.draw(CURVES.get(shelf.table))
        raise


def _is_finished(plan: Planned) -> bool:
    """Whether a run is there and done; a run of another recipe is refused."""
    if not (plan.folder / "recipe.yaml").exists():
        return False
    return summary_of(Run.open(plan.folder), plan.recipe) is not None


def _opened(plan: Planned) -> Run:
    there = (plan.folder / "recipe.yaml").exists()
    return Run.open(plan.folder) if there else Run.create(plan.folder, plan.recipe)


# --- what comes of it ---


def _report(shelves: Iterable[Shelf], out: Path, as_json: bool, *, listed: bool) -> None:
    """Write every table and figure and show it; as JSON the one table, or a list of tables."""
    screen, found = console(), []
    for shelf in shelves:
        collected = shelf.collected(out)
        written = [*collected.write(), *collected.draw(CURVES.get(shelf.table))]
        found.append(collected.found)
        if as_json:
            continue
        collected.show(screen)
        said = f"written: {', '.join(map(str, written))}" if written else "no result yet: nothing is written"
        screen.print(said, highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(found if listed else found[0], indent=1))
