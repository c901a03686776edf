"""``fedrolex paper``: the paper's tables and figures, trained cell by cell and collected."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, get_args
from zlib import crc32

import typer
from rich.console import Console

from fedrolex.cli.console import console, remark, table
from fedrolex.cli.costs import costs_command
from fedrolex.cli.lemmas import INDICES, TIMES, lemma_rows, show_lemmas
from fedrolex.cli.options import AsJson, DataFolder, Settings
from fedrolex.cli.paper_table import COLLECTED, CURVES, PaperTable, result
from fedrolex.cli.seeds import read_seeds
from fedrolex.cli.train import Planned, train_all
from fedrolex.core import FedrolexError, one_of
from fedrolex.recipes.paper import TABLES, Cell, cells
from fedrolex.recipes.paper_setups import Kind
from fedrolex.recipes.recipe import FREE, Recipe
from fedrolex.runs import Run
from fedrolex.runs.standing import standing

UNTRAINED = ("costs", "lemmas")
TRIALS = 2000
UNCOUNTED = frozenset(FREE) - {"weights", "evaluation"}
"""Keys of a recipe that change no result."""


@dataclass(frozen=True)
class Shelf:
    """Where the runs and results of one table in one kind are.

    Attributes:
        table, kind, scale: of all cells.
        settings: what was changed beside, ``key=value``.
        runs: the folder for all runs of the paper.
    """

    table: str
    kind: Kind
    scale: float
    settings: tuple[str, ...]
    runs: Path

    @property
    def label(self) -> str:
        """The kind, and whether rounds were shortened or settings changed: such results stay apart."""
        scaled = "" if self.scale == 1 else f"-x{self.scale:g}"
        counting = sorted(word for word in self.settings if re.split(r"[=.]", word)[0] not in UNCOUNTED)
        return f"{self.kind}{scaled}" + (f"-changed-{crc32(repr(counting).encode()):08x}" if counting else "")

    def folder(self, cell: Cell) -> Path:
        """Of a cell's runs, one a seed."""
        return self.runs / self.table / self.label / cell.setup / cell.row

    def recipe(self, cell: Cell) -> Recipe:
        """Of a cell's runs, but for the seed."""
        return cell.recipe(self.kind, self.scale).with_settings(self.settings).with_whole_paths()

    def known_recipe(self, cell: Cell) -> Recipe | None:
        """The same; None where a cell has not the kind, or its method not the settings that were changed."""
        try:
            return self.recipe(cell) if self.kind in cell.kinds else None
        except FedrolexError:
            return None

    def finished(self, cell: Cell) -> list[dict[str, Any]]:
        """The results of a cell's runs that have done all their rounds, by seed; those of other recipes are named."""
        found: dict[int, dict[str, Any]] = {}
        for path in self.folder(cell).glob("seed-*/summary.json"):
            try:
                run = Run.open(path.parent)
                seed = run.recipe().seed
                summary = _summary(run, replace(self.recipe(cell), seed=seed))
            except FedrolexError as error:
                print(f"left out: {error}", file=sys.stderr)
                continue
            if summary is not None:
                found[seed] = result(run, summary)
        return [found[seed] for seed in sorted(found)]


def paper_command(
    what: Annotated[str, typer.Argument(metavar="TABLE", help=f"{', '.join((*TABLES, *UNTRAINED))}.")],
    kind: Annotated[str, typer.Option(help=f"{', '.join(get_args(Kind))}; see fedrolex show CELL@KIND.")] = "tuned",
    only: Annotated[
        list[str] | None, typer.Option("--cell", metavar="SETUP[/ROW]", help="Only these cells. Repeatable.")
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="A,B,C", help="One run of each cell a seed.")] = "1",
    scale: Annotated[float, typer.Option(help="Multiplies rounds, for a quick look; results are marked so.")] = 1.0,
    at_once: Annotated[int, typer.Option(metavar="N", min=1, help="Runs side by side.")] = 1,
    listed: Annotated[bool, typer.Option("--list", help="Name the cells, and which are done; train nothing.")] = False,
    settings: Settings = None,
    data: DataFolder = None,
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/paper"),
    out: Annotated[Path, typer.Option(help="Folder of tables and figures.")] = Path("results/paper"),
    as_json: AsJson = False,
) -> None:
    """Reproduce a table, figure or lemma of the paper: train the cells that are missing, then collect all."""
    one_of("table", what, (*TABLES, *UNTRAINED))
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
    shelf = Shelf(what, kind, scale, tuple(settings or ()), runs)  # type: ignore[arg-type]
    chosen = _chosen(what, kind, only or [])
    if listed:
        _list(console(), shelf, chosen, as_json)
        return
    plans = [plan for cell in chosen for plan in _plans(shelf, cell, read_seeds(seeds), data)]
    missing = [plan for plan in plans if not _is_finished(plan)]
    if missing:
        _collected(shelf, out)  # what cannot be read or written is said before anything is trained
    try:
        if missing:
            train_all(missing, at_once, as_json, _opened)
    finally:
        collected = _collected(shelf, out)
        written = collected.write()
        if any(row["seeds"] for row in collected.rows):
            written += [collected.draw_traffic(), *([collected.draw(CURVES[what])] if what in CURVES else [])]
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
    return _summary(Run.open(plan.folder), plan.recipe) is not None


def _summary(run: Run, recipe: Recipe) -> dict[str, Any] | None:
    """What a run of a recipe said in the end, None where it is not done; a run of another recipe is refused."""
    there = run.recipe()
    mine, theirs = ({key: each.encode()[key] for key in ("rounds", "evaluation")} for each in (recipe, there))
    changed = next((key for key in mine if mine[key] != theirs[key]), None) or recipe.differs_from(there)
    if changed is not None:
        raise FedrolexError(f"{run.folder} is a run of another recipe ({changed}): move it away, or give other --runs")
    if standing(run)["state"] != "finished":
        return None
    found: dict[str, Any] = json.loads((run.folder / "summary.json").read_text())
    return found if found.keys() >= COLLECTED else None


def _opened(plan: Planned) -> Run:
    there = (plan.folder / "recipe.yaml").exists()
    return Run.open(plan.folder) if there else Run.create(plan.folder, plan.recipe)


def _collected(shelf: Shelf, out: Path) -> PaperTable:
    """All cells of a table with all finished runs, those in the table's file among them."""
    command = f"fedrolex paper {shelf.table} --kind {shelf.kind}" + f" --scale {shelf.scale:g}" * (shelf.scale != 1)
    command += "".join(f" --set {quote(word)}" for word in shelf.settings) + " --cell SETUP/ROW --seeds A,B,C"
    found = PaperTable(out / f"{shelf.table}-{shelf.label}.json", f"{shelf.table}, {shelf.label}", command)
    for cell in cells(shelf.table):
        recipe = shelf.known_recipe(cell)
        found.add(cell, recipe, [] if recipe is None else shelf.finished(cell))
    return found


def _list(screen: Console, shelf: Shelf, chosen: Sequence[Cell], as_json: bool) -> None:
    """Every cell, whether it was run, and what it would cost."""
    found: list[dict[str, Any]] = []
    for cell in chosen:
        recipe = shelf.recipe(cell)
        seeds = [summary["seed"] for summary in shelf.finished(cell)]
        found.append({"cell": cell.name, "rounds": recipe.rounds, "clients_a_round": recipe.fleet.cohort,
                      "batch": recipe.client.batch, "seeds_done": seeds, "beside": cell.beside})  # fmt: skip
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    rows = [
        (each["cell"], str(each["rounds"]), str(each["clients_a_round"]), str(each["batch"]),
         ", ".join(map(str, each["seeds_done"])) or "–")
        for each in found
    ]  # fmt: skip
    screen.print(
        table(["cell", "rounds", "clients a round", "batch", "seeds done"], rows, f"{shelf.table}, {shelf.label}")
    )
    total = sum(each["rounds"] for each in found)
    remark(screen, f"{len(found)} cells, {total:,} rounds a seed; fedrolex show CELL@{shelf.kind} prints a recipe.")
