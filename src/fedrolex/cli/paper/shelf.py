"""Where the runs and results of the paper's tables are, and which of them are done."""

import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any
from zlib import crc32

from fedrolex.cli.paper.table import COLLECTED, PaperTable, result
from fedrolex.core import FedrolexError
from fedrolex.recipes.paper import Cell, cells
from fedrolex.recipes.paper_setups import Kind
from fedrolex.recipes.recipe import FREE, Recipe
from fedrolex.runs import Run
from fedrolex.runs.standing import standing

Made = tuple[str, int]
"""A run of a table: its cell's label, and its seed."""

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

    @property
    def name(self) -> str:
        """Of the table's files; shelves with one name hold the same."""
        return f"{self.table}-{self.label}"

    @property
    def remarks(self) -> list[str]:
        """In which way its results are not those of the cells."""
        scaled = [f"Scaled: rounds are {self.scale:g} of the cell's own."] if self.scale != 1 else []
        return scaled + ([f"Changed: {', '.join(self.settings)}."] if "changed" in self.label else [])

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
                summary = summary_of(run, replace(self.recipe(cell), seed=seed))
                if summary is not None:
                    found[seed] = result(run, summary)
            except FedrolexError as error:
                print(f"left out: {error}", file=sys.stderr)
        return [found[seed] for seed in sorted(found)]

    def in_table(self, out: Path) -> frozenset[Made]:
        """The runs that are in the table's file, or finished here."""
        return frozenset(
            (f"{row['setup']}/{row['row']}", seed) for row in self.collected(out).rows for seed in row["seeds"]
        )

    def collected(self, out: Path) -> PaperTable:
        """All cells of the table with all finished runs, those in the table's file among them."""
        command = f"fedrolex paper {self.table} --kind {self.kind}" + f" --scale {self.scale:g}" * (self.scale != 1)
        command += "".join(f" --set {quote(word)}" for word in self.settings) + " --cell SETUP/ROW --seeds A,B,C"
        found = PaperTable(out / f"{self.name}.json", f"{self.table}, {self.label}", command, self.remarks)
        for cell in cells(self.table):
            recipe = self.known_recipe(cell)
            found.add(cell, recipe, [] if recipe is None else self.finished(cell))
        return found


def summary_of(run: Run, recipe: Recipe) -> dict[str, Any] | None:
    """What a run of a recipe said in the end, None where it is not done; a run of another recipe is refused."""
    there = run.recipe()
    mine, theirs = ({key: each.encode()[key] for key in ("rounds", "evaluation")} for each in (recipe, there))
    changed = next((key for key in mine if mine[key] != theirs[key]), None) or recipe.differs_from(there)
    if changed is not None:
        raise FedrolexError(f"{run.folder} is a run of another recipe ({changed}): move it away, or give other --runs")
    if standing(run, recipe.callbacks)["state"] != "finished":
        return None
    found: dict[str, Any] = json.loads((run.folder / "summary.json").read_text())
    return found if found.keys() >= COLLECTED else None
