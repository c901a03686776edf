"""``fedrolex paper``: the paper's tables and figures, trained cell by cell and collected."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, get_args

import typer

from fedrolex.cli.console import console, remark
from fedrolex.cli.costs import costs_command
from fedrolex.cli.lemmas import INDICES, TIMES, lemma_rows, show_lemmas
from fedrolex.cli.options import AsJson, DataFolder, Settings
from fedrolex.cli.paper.figures import CURVES
from fedrolex.cli.paper.listing import list_cells
from fedrolex.cli.paper.shelf import Shelf, summary_of
from fedrolex.cli.seeds import read_seeds
from fedrolex.cli.train import Planned, train_all
from fedrolex.core import FedrolexError, one_of
from fedrolex.recipes.paper import TABLES, Cell, cells
from fedrolex.recipes.paper_setups import Kind
from fedrolex.runs import Run

UNTRAINED = ("costs", "lemmas")
ALL = "all"
TRIALS = 2000


def paper_command(
    what: Annotated[str, typer.Argument(metavar="TABLE", help=f"{', '.join((*TABLES, *UNTRAINED))}; all, to list.")],
    kind: Annotated[str, typer.Option(help=f"{', '.join(get_args(Kind))}; see fedrolex show CELL@KIND.")] = "tuned",
    only: Annotated[
        list[str] | None, typer.Option("--cell", metavar="SETUP[/ROW]", help="Only these cells. Repeatable.")
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="A,B,C", help="One run of each cell a seed.")] = "1",
    scale: Annotated[float, typer.Option(help="Multiplies rounds, for a quick look; results are marked so.")] = 1.0,
    at_once: Annotated[int, typer.Option(metavar="N", min=1, help="Runs side by side.")] = 1,
    listed: Annotated[
        bool, typer.Option("--list", help="Name the cells, their costs, and which are done; train nothing.")
    ] = False,
    settings: Settings = None,
    data: DataFolder = None,
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/paper"),
    out: Annotated[Path, typer.Option(help="Folder of tables and figures.")] = Path("results/paper"),
    as_json: AsJson = False,
) -> None:
    """Reproduce a table, figure or lemma of the paper: train the cells that are missing, then collect all."""
    one_of("table", what, (*TABLES, *UNTRAINED, ALL))
    if what == "costs":
        costs_command("cifar10", as_json=as_json)
        return
    if what == "lemmas":
        rows = lemma_rows(INDICES, TIMES, TRIALS, 0)
        if as_json:
            typer.echo(json.dumps({"lemmas": [asdict(row) for row in rows]}, indent=1))
        else:
            show_lemmas(console(), rows, TRIALS)
        return
    one_of("--kind", kind, get_args(Kind))
    if not 0 < scale <= 1:
        raise FedrolexError(f"--scale is {scale}: give a part of the rounds, above 0 and at most 1")
    if what == ALL and (only or not listed):
        raise FedrolexError(f"all is for --list, without --cell: give one of {', '.join(TABLES)}")
    names = [what] if what != ALL else [name for name in TABLES if any(kind in cell.kinds for cell in cells(name))]
    shelves = [Shelf(name, kind, scale, tuple(settings or ()), runs) for name in names]  # type: ignore[arg-type]
    if listed:
        every = {shelf: _chosen(shelf.table, kind, only or []) for shelf in shelves}
        list_cells(every, UNTRAINED if what == ALL else (), read_seeds(seeds)[0], out, as_json)
        return
    (shelf,) = shelves
    chosen = _chosen(what, kind, only or [])
    plans = [plan for cell in chosen for plan in _plans(shelf, cell, read_seeds(seeds), data)]
    missing = [plan for plan in plans if not _is_finished(plan)]
    if missing:
        shelf.collected(out)  # what cannot be read or written is said before anything is trained
    try:
        if missing:
            train_all(missing, at_once, as_json, _opened)
    finally:
        collected = shelf.collected(out)
        written = [*collected.write(), *collected.draw(CURVES.get(what))]
    if as_json:
        typer.echo(json.dumps(collected.found, indent=1))
        return
    screen = console()
    collected.show(screen)
    if scale != 1:
        remark(screen, f"Scaled: rounds are {scale:g} of the cell's own.")
    if "changed" in shelf.label:
        remark(screen, f"Changed: {', '.join(shelf.settings)}.")
    screen.print(f"written: {', '.join(map(str, written))}", highlight=False, soft_wrap=True)


# --- what is to be trained ---


def _chosen(what: str, kind: str, only: Sequence[str]) -> list[Cell]:
    """The cells of a table that are asked for and have the kind; all where nothing is asked for."""
    every = cells(what)
    for word in only:
        if not any(_is_asked(cell, word) for cell in every):
            some = ", ".join(f"{cell.setup}/{cell.row}" for cell in every[:6])
            raise FedrolexError(f"--cell {word!r} is not in {what}: there are {some} …; --list names all")
    asked = [cell for cell in every if not only or any(_is_asked(cell, word) for word in only)]
    found = [cell for cell in asked if kind in cell.kinds]
    if not found:
        first = asked[0]
        why = ", since the paper quotes it from another one" if first.quoted else ""
        raise FedrolexError(f"{first.name} has no kind {kind}{why}: use --kind {' or '.join(first.kinds)}")
    return found


def _is_asked(cell: Cell, word: str) -> bool:
    return word in (cell.setup, f"{cell.setup}/{cell.row}")


def _plans(shelf: Shelf, cell: Cell, seeds: Sequence[int], data: str | None) -> list[Planned]:
    """A run a seed."""
    recipe = replace(shelf.recipe(cell), data=data and str(Path(data).absolute()))
    folders = [shelf.folder(cell) / f"seed-{seed}" for seed in seeds]
    label = f"{cell.setup}/{cell.row}"
    return [
        Planned(label, folder, replace(recipe, seed=seed), folder, folder)
        for folder, seed in zip(folders, seeds, strict=True)
    ]


def _is_finished(plan: Planned) -> bool:
    """Whether a run is there and done; a run of another recipe is refused."""
    if not (plan.folder / "recipe.yaml").exists():
        return False
    return summary_of(Run.open(plan.folder), plan.recipe) is not None


def _opened(plan: Planned) -> Run:
    there = (plan.folder / "recipe.yaml").exists()
    return Run.open(plan.folder) if there else Run.create(plan.folder, plan.recipe)
