"""``fedrolex paper``: the paper's tables and figures, trained cell by cell and collected."""

import json
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from statistics import mean, stdev
from typing import Annotated, Any, get_args
from zlib import crc32

import torch
import typer
from rich.console import Console

from fedrolex.cli.console import console, remark, table
from fedrolex.cli.costs import costs_command
from fedrolex.cli.figures import COLOURS, page
from fedrolex.cli.lemmas import INDICES, TIMES, lemma_rows, show_lemmas
from fedrolex.cli.options import AsJson, DataFolder, Settings
from fedrolex.cli.seeds import read_seeds
from fedrolex.cli.train import Planned, train_all
from fedrolex.core import FedrolexError, one_of
from fedrolex.core.version import VERSION
from fedrolex.recipes.paper import TABLES, Cell, Kind, cells
from fedrolex.recipes.recipe import FREE, Recipe
from fedrolex.runs import Run
from fedrolex.runs.standing import standing

UNTRAINED = ("costs", "lemmas")
TRIALS = 2000
UNCOUNTED = frozenset(FREE) - {"weights", "evaluation"}
"""Keys of a recipe that change no result."""

COLLECTED = frozenset({"global_accuracy", "local_accuracy_masked", "rounds", "bytes"})
"""What the summary of a finished run has at least."""

CURVES = {"rho": "share of clients that hold the whole model, ρ", "gamma": "server's width over the clients', γ",
          "overlap": "overlap of consecutive windows, r"}  # fmt: skip


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

    def finished(self, cell: Cell) -> list[dict[str, Any]]:
        """The summaries of a cell's runs that have done all their rounds, by seed; those of other recipes are named."""
        found = {}
        for path in self.folder(cell).glob("seed-*/summary.json"):
            try:
                run = Run.open(path.parent)
                seed = run.recipe().seed
                summary = _summary(run, replace(self.recipe(cell), seed=seed))
            except FedrolexError as error:
                print(f"left out: {error}", file=sys.stderr)
                continue
            if summary is not None:
                found[seed] = {**summary, "seed": seed}
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
        train_all(missing, at_once, as_json, _opened)
    found = _collected(shelf, cells(what))
    written = _write(out, shelf, found)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    screen = console()
    _show(screen, shelf, found)
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
        raise FedrolexError(f"{asked[0].name} is quoted by the paper from another one: there is only --kind tuned")
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


# --- what came of it ---


def _collected(shelf: Shelf, every: Sequence[Cell]) -> dict[str, Any]:
    """All finished runs of a table, cell by cell, beside what the paper prints; accuracies in per cent."""
    rows = []
    for cell in every:
        done = shelf.finished(cell)
        row: dict[str, Any] = {"setup": cell.setup, "row": cell.row, "beside": cell.beside, "quoted": cell.quoted}
        row["paper"] = None if cell.printed is None else vars(cell.printed)
        row["seeds"] = [summary["seed"] for summary in done]
        if done:
            row["global"] = _spread([100 * summary["global_accuracy"] for summary in done])
            row["local"] = _spread([100 * summary["local_accuracy_masked"] for summary in done])
            row["rounds"], row["gib"] = done[0]["rounds"], mean(summary["bytes"] for summary in done) / 2**30
            row["difference"] = None if cell.printed is None else row["global"]["mean"] - cell.printed.mean
        rows.append(row)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    command = f"fedrolex paper {shelf.table} --kind {shelf.kind}" + f" --scale {shelf.scale:g}" * (shelf.scale != 1)
    command += "".join(f" --set {quote(word)}" for word in shelf.settings) + " --cell SETUP/ROW --seeds A,B,C"
    return {"command": command, "version": VERSION, "collected_on": gpu, "label": shelf.label, "cells": rows}


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {"mean": mean(values), "std": stdev(values) if len(values) > 1 else None}


def _in_words(value: dict[str, float | None] | None) -> str:
    return "" if value is None else " ± ".join(f"{each:.2f}" for each in value.values() if each is not None)


def _lines(found: dict[str, Any], setup: str) -> tuple[list[str], list[tuple[str, ...]]]:
    """The table of one set-up, as text."""
    headings = ["", "seeds", "global %", "paper", "difference", "local, masked %", "GiB sent", "rounds"]
    rows: list[tuple[str, ...]] = []
    for row in found["cells"]:
        if row["setup"] != setup or not (row["seeds"] or row["paper"]):
            continue
        paper = row["paper"] and f"{row['paper']['mean']:.2f} ± {row['paper']['std']:.2f}{' (quoted)' * row['quoted']}"
        away = row.get("difference")
        rows.append((
            row["row"], str(len(row["seeds"]) or "–"), _in_words(row.get("global")), paper or "",
            "" if away is None else f"{away:+.2f}", _in_words(row.get("local")),
            f"{row['gib']:.1f}" if row["seeds"] else "", str(row.get("rounds", "")),
        ))  # fmt: skip
    return headings, rows


def _show(screen: Console, shelf: Shelf, found: dict[str, Any]) -> None:
    for setup in dict.fromkeys(row["setup"] for row in found["cells"]):
        headings, rows = _lines(found, setup)
        if rows:
            screen.print(table(headings, rows, f"{shelf.table}, {setup}, {shelf.label}", words=1))
    if shelf.scale != 1:
        remark(screen, f"Scaled: rounds are {shelf.scale:g} of the cell's own.")
    if "changed" in shelf.label:
        remark(screen, f"Changed: {', '.join(shelf.settings)}.")


def _write(out: Path, shelf: Shelf, found: dict[str, Any]) -> list[Path]:
    """The results as JSON, as Markdown, and where there is a curve as a figure."""
    name = f"{shelf.table}-{shelf.label}"
    text = [f"# {shelf.table}, {shelf.label}", "", f"`{found['command']}`, fedrolex {found['version']}", ""]
    for setup in dict.fromkeys(row["setup"] for row in found["cells"]):
        headings, rows = _lines(found, setup)
        if rows:
            text += [f"## {setup}", "", f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
            text += [f"| {' | '.join(row)} |" for row in rows] + [""]
    written = [out / f"{name}.json", out / f"{name}.md"]
    try:
        out.mkdir(parents=True, exist_ok=True)
        written[0].write_text(json.dumps(found, indent=1) + "\n")
        written[1].write_text("\n".join(text))
    except OSError as error:
        raise FedrolexError(f"cannot write into {out}: {error.strerror}") from error
    if shelf.table in CURVES and any(row["seeds"] for row in found["cells"]):
        written.append(out / f"{name}.png")
        _draw(written[-1], shelf, found)
    return written


def _draw(path: Path, shelf: Shelf, found: dict[str, Any]) -> None:
    """Accuracy along the figure's axis, a line for every row and set-up."""
    done = [row for row in found["cells"] if row["seeds"]]
    setups = list(dict.fromkeys(row["setup"] for row in done))
    with page(path, len(setups), (4.8 * len(setups), 4.2), squeeze=False) as sides:
        for side, setup in zip(sides[0], setups, strict=True):
            mine = [row for row in done if row["setup"] == setup]
            lines: dict[str, list[tuple[float, dict[str, Any]]]] = {}
            for row in mine:
                line, _, at = row["row"].rpartition("-")
                lines.setdefault(line, []).append((float(at), row["global"]))
            for colour, (line, points) in zip(COLOURS, lines.items(), strict=False):
                places, values = zip(*sorted(points, key=lambda point: point[0]), strict=True)
                means, spreads = [each["mean"] for each in values], [each["std"] or 0 for each in values]
                side.errorbar(places, means, spreads, color=colour, fmt="o-", markersize=3.5, capsize=3, label=line)
            side.set_xticks(sorted({at for points in lines.values() for at, _ in points}))
            side.set(xlabel=CURVES[shelf.table], ylabel="global accuracy, %")
            side.set_title(f"{setup}, {shelf.label}", loc="left", fontsize=10)
            side.legend(frameon=False, fontsize=8)


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
