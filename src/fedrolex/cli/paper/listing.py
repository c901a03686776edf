"""``fedrolex paper --list``: every cell, whether it was run, and what it would cost."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

import typer
from rich.console import Console

from fedrolex.cli.console import console, remark, table
from fedrolex.cli.paper.costs import Needed, PaperCosts
from fedrolex.cli.paper.shelf import Shelf
from fedrolex.cli.paper.table import PaperTable
from fedrolex.recipes.paper import Cell
from fedrolex.recipes.paper_setups import SETUPS

WIDE = 150  # columns of a screen on which names of cells have room
Row = dict[str, Any]
Asked = tuple[Cell, list[int]]
"""A cell, and the seeds of the runs that are asked for."""

HEADINGS = ("cell", "the paper %", "seeds asked for", "rounds", "clients", "batch", "PMACs", "GiB", "seconds", "on",
            "seeds done here", "seeds in the table")  # fmt: skip


def list_cells(
    shelves: Sequence[tuple[Shelf, Sequence[Asked]]], computed: Sequence[str], out: Path, as_json: bool
) -> None:
    """Print the cells of tables with what a run of each costs; ``computed`` are names of what needs no run."""
    costs = PaperCosts()
    found = [(shelf, _listed(shelf, asked, costs, out)) for shelf, asked in shelves if asked]
    every = [row for _, rows in found for row in rows]
    if as_json:
        nothing = {"rounds": 0, **asdict(Needed(0, 0))}
        typer.echo(json.dumps([*every, *({"cell": name, **nothing} for name in computed)], indent=1))
        return
    screen = console()
    if not every:
        screen.print("Nothing is missing: every run that is asked for is in its table.", highlight=False)
        return
    for shelf, rows in found:
        wide = screen.width >= WIDE
        screen.print(table(HEADINGS, map(_line, rows), f"{shelf.table}, {shelf.label}", words=1, unbroken=wide))
        for said in shelf.remarks:
            remark(screen, said)
    if computed:
        remark(screen, f"Computed, without any run: {', '.join(f'fedrolex paper {name}' for name in computed)}.")
    _remark_totals(screen, every, {shelf.kind: None for shelf, _ in found})


def _listed(shelf: Shelf, asked: Sequence[Asked], costs: PaperCosts, out: Path) -> list[Row]:
    collected = shelf.collected(out)
    rows = {(row["setup"], row["row"]): row for row in collected.rows}
    found = []
    for cell, seeds in asked:
        recipe = shelf.recipe(cell)
        done = [each["seed"] for each in shelf.finished(cell)]
        row = {"cell": cell.name, "seeds": seeds, "rounds": recipe.rounds, "clients_a_round": recipe.fleet.cohort,
               "batch": recipe.client.batch, "seeds_done": done, "beside": cell.beside}  # fmt: skip
        known = rows[cell.setup, cell.row]
        row |= {"seeds_in_table": known["seeds"], "paper": known["paper"]}
        needed = costs.needed(replace(recipe, seed=seeds[0]))
        own = known["runs"]
        time = _time(own or _alike(cell, collected), recipe.rounds)
        found.append({**row, **asdict(needed), **time, "about": bool(time["on"] and not own)})
    return found


def _alike(cell: Cell, collected: PaperTable) -> list[Row]:
    """Runs of the cell by an earlier recipe; else of the same row on another split of the same data."""
    data = SETUPS[cell.setup].recipe
    setups = [cell.setup, *(setup for setup in SETUPS if SETUPS[setup].recipe == data)]
    return next((runs for setup in setups if (runs := collected.earlier(setup, cell.row))), [])


def _time(runs: Sequence[Row], rounds: int) -> Row:
    """Seconds that so many rounds take, by runs on one machine, and the machine; None where there are none."""
    timed = [run for run in runs if run.get("seconds") and run.get("rounds") and run.get("on")]
    machine = timed[-1]["on"] if timed else None
    of_a_round = [run["seconds"] / run["rounds"] for run in timed if run["on"] == machine]
    return {"seconds": round(mean(of_a_round) * rounds, 1) if timed else None, "on": machine}


def _line(row: Row) -> tuple[str, ...]:
    about, paper = "about " * row["about"], f"{row['paper']['mean']:.2f}" if row["paper"] else ""
    return (
        row["cell"], paper, _seeds(row["seeds"]), str(row["rounds"]), str(row["clients_a_round"]), str(row["batch"]),
        _number(row["macs"], 1e15), _number(row["bytes"], 2**30),
        "–" if row["seconds"] is None else f"{about}{row['seconds']:,.0f}", row["on"] or "",
        _seeds(row["seeds_done"]), _seeds(row["seeds_in_table"]),
    )  # fmt: skip


def _number(value: int | None, unit: float) -> str:
    return "–" if value is None else f"{value / unit:,.3g}" if value < 100 * unit else f"{value / unit:,.0f}"


def _seeds(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds)) or "–"


def _remark_totals(screen: Console, rows: Sequence[Row], kinds: Iterable[str]) -> None:
    known = [row for row in rows if row["macs"] is not None]
    runs, rounds = sum(len(row["seeds"]) for row in rows), sum(len(row["seeds"]) * row["rounds"] for row in rows)
    macs = _number(sum(len(row["seeds"]) * row["macs"] for row in known), 1e15)
    sent = _number(sum(len(row["seeds"]) * row["bytes"] for row in known), 2**30)
    remark(
        screen,
        f"Cells {len(rows)}, runs {runs}, rounds {rounds:,}; fedrolex show CELL@{' or @'.join(kinds)} prints a recipe.",
    )
    if known:
        remark(
            screen,
            "What clients compute (PMACs) and what is sent (GiB) in all rounds of one run, by the first seed, counted "
            f"from the recipe; {macs} and {sent} for all runs of the {len(known)} cells that have both.",
        )
    remark(screen, "A dash: not known without the data, or without a run. GiB of text: by shares of the capacities.")
    if any(row["about"] for row in rows):
        remark(screen, "about: by the rounds of runs with an earlier recipe, or on another split of the same data.")
