"""Tables and figures of ``fedrolex paper``: every seed's result beside what the paper prints."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any
from zlib import crc32

from rich.console import Console

from fedrolex.cli.console import remark, table
from fedrolex.cli.paper.details import read_details, submodel_lines, submodels_over_seeds, with_offsets
from fedrolex.cli.paper.figures import draw_along, draw_local, draw_traffic, has_local
from fedrolex.cli.seeds import number, spread
from fedrolex.core import FedrolexError
from fedrolex.core.version import code_version
from fedrolex.recipes.paper import Cell
from fedrolex.recipes.recipe import FREE, Recipe
from fedrolex.runs import Run
from fedrolex.runs.checkpoint import write_whole

SHARES = {"global": "global_accuracy", "local": "local_accuracy_masked", "rare": "rare_accuracy"}
"""What is collected in per cent: its name in the table, and in a summary."""

COLLECTED = frozenset({"global_accuracy", "rounds", "bytes", "seconds"})
"""What the summary of a finished run has at least."""

HEADINGS = ("", "seeds", "global %", "paper", "difference", "global, with offsets %", "rare %",
            "rare, with offsets %", "local, masked %", "GiB sent", "client PMACs", "rounds")  # fmt: skip

SUBMODELS = "accuracy of every capacity's sub-model, %"

Row = dict[str, Any]


def fingerprint(recipe: Recipe) -> str:
    """Of what a recipe trains and how it is measured, whatever its seed and place.

    Settings that are as they are by default do not count: a version may have more of them.
    """
    usual = Recipe().with_settings([f"task={recipe.task.name}", f"method={recipe.method.name}"]).encode()
    free = {*FREE, "seed", "format"} - {"evaluation"}
    counting = {key: value for key, value in recipe.encode().items() if key not in free}
    names = {"task": recipe.task.name, "method": recipe.method.name}
    return f"{crc32(json.dumps([names, _unusual(counting, usual)], sort_keys=True).encode()):08x}"


def _unusual(found: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """What differs, section by section."""
    differing = {key: value for key, value in found.items() if value != usual.get(key)}
    return {
        key: _unusual(value, usual[key])
        if isinstance(value, Mapping) and isinstance(usual.get(key), Mapping)
        else value
        for key, value in differing.items()
    }


def result(run: Run, summary: Mapping[str, Any]) -> Row:
    """What one finished run adds to its cell; accuracies in per cent, ``curve`` and losses by rounds done."""
    found: Row = {name: 100 * summary[key] for name, key in SHARES.items() if key in summary}
    measured = [row for row in run.rows() if "global_accuracy" in row]
    curve = {row["round"] + 1: round(100 * row["global_accuracy"], 2) for row in measured}
    losses = {
        name: {row["round"] + 1: round(row[key], 4) for row in measured if row.get(key) is not None}
        for name, key in (("train_loss", "train_loss"), ("test_loss", "loss"))
    }
    on = run.environment()
    about = {"seed": run.recipe().seed, **{key: summary.get(key) for key in ("rounds", "bytes", "macs")}}
    return {**about, **found, "seconds": round(summary["seconds"], 1), "on": on.get("gpu") or on.get("machine"),
            "version": on.get("fedrolex"), "curve": curve, **losses, **read_details(run)}  # fmt: skip


class PaperTable:
    """One table in one kind: cell by cell the results of all seeds, those made on other machines among them.

    Args:
        path: of its JSON file; what is there already stays, but for seeds that are given anew and cells whose recipe
            has changed since.
        title, command: what it is, and what makes it again.
        remarks: sentences that belong below it.
    """

    def __init__(self, path: Path, title: str, command: str, remarks: Sequence[str] = ()) -> None:
        self.path, self.title, self.command, self.remarks = path, title, command, list(remarks)
        self.rows: list[Row] = []
        self._kept = {(row["setup"], row["row"]): row for row in self._read()}

    def add(self, cell: Cell, recipe: Recipe | None, results: Sequence[Row]) -> None:
        """A cell with the results of its finished runs; ``recipe`` is None where the cell has no such kind."""
        mark = recipe and fingerprint(recipe)
        kept = self._kept.get((cell.setup, cell.row), {})
        earlier = kept.get("runs", []) if kept.get("recipe") == mark else []
        runs = {each["seed"]: each for each in (*earlier, *results)}
        row: Row = {"setup": cell.setup, "row": cell.row, "beside": cell.beside, "quoted": cell.quoted}
        row |= {"paper": None if cell.printed is None else vars(cell.printed), "recipe": mark, "seeds": sorted(runs)}
        row["runs"] = [runs[seed] for seed in row["seeds"]]
        if runs:
            row |= _totals(row["runs"])
            row["difference"] = None if cell.printed is None else row["global"]["mean"] - cell.printed.mean
        self.rows.append(row)

    def earlier(self, setup: str, row: str) -> list[Row]:
        """A cell's runs as they were in the table's file, of whatever recipe."""
        found: list[Row] = self._kept.get((setup, row), {}).get("runs", [])
        return found

    @property
    def found(self) -> dict[str, Any]:
        """All of it, as it is written."""
        remarks = {"remarks": self.remarks} if self.remarks else {}
        about = {"command": self.command, "title": self.title, **remarks, "version": code_version()}
        return {**about, "cells": self.rows}

    def show(self, screen: Console) -> None:
        """The table on the screen, a part for every data set."""
        for setup, lines, (heading, *submodels) in self._parts():
            screen.print(table(list(HEADINGS), lines, f"{self.title}, {setup}", words=1))
            if submodels:
                screen.print(f"{setup}: {SUBMODELS}", style="bold", highlight=False)
                screen.print(table(heading, submodels, words=1))
        for said in self.remarks:
            remark(screen, said)

    def write(self) -> list[Path]:
        """The results as JSON and as Markdown; the files. Nothing is written where there never were any."""
        if not any(row["runs"] for row in self.rows) and not self.path.exists():
            return []
        text = [f"# {self.title}", "", f"`{self.command}`, fedrolex {code_version()}", ""]
        text += [" ".join(self.remarks), ""] if self.remarks else []
        for setup, lines, (heading, *submodels) in self._parts():
            text += [f"## {setup}", "", *_markdown(HEADINGS, lines)]
            text += [f"{SUBMODELS[0].upper()}{SUBMODELS[1:]}:", "", *_markdown(heading, submodels)] if submodels else []
        results = _flat(json.dumps(self.found, indent=1)) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FedrolexError(f"cannot write into {self.path.parent}: {error.strerror}") from error
        written = {self.path: results, self.path.with_suffix(".md"): "\n".join(text)}
        for path, content in written.items():
            write_whole(path, content.encode())
        return list(written)

    def draw(self, along: str | None) -> list[Path]:
        """Every figure that there is something to draw in; ``along`` is what the table's own figure has as its axis."""
        done = [row for row in self.rows if row["seeds"]]
        local = [row for row in done if has_local(row)]
        drawn = []
        if done:
            drawn.append(self.path.with_name(f"{self.path.stem}-traffic.png"))
            draw_traffic(done, self.title, drawn[-1])
        if done and along is not None:
            drawn.append(self.path.with_suffix(".png"))
            draw_along(along, done, self.title, drawn[-1])
        if local:
            drawn.append(self.path.with_name(f"{self.path.stem}-local.png"))
            draw_local(local, self.title, drawn[-1])
        return drawn

    def _parts(self) -> Iterable[tuple[str, list[tuple[str, ...]], list[tuple[str, ...]]]]:
        """Every data set with runs, or all where there are none: its table's lines, and those of its sub-models."""
        trained = dict.fromkeys(row["setup"] for row in self.rows if row["seeds"])
        for setup in trained or dict.fromkeys(row["setup"] for row in self.rows):
            rows = [row for row in self.rows if row["setup"] == setup and (row["seeds"] or row["paper"])]
            if rows:
                yield setup, [_line(row) for row in rows], submodel_lines(rows)

    def _read(self) -> list[Row]:
        if not self.path.exists():
            return []
        try:
            found: list[Row] = json.loads(self.path.read_text())["cells"]
            wanted = {"setup", "row", "recipe", "runs"}
            if all(wanted <= row.keys() for row in found):
                for row in found:
                    _check(row)
                    _totals(row["runs"])
                return found
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
            pass
        raise FedrolexError(
            f"{self.path} is not a table that fedrolex paper wrote: move it away, or give another --out"
        )


def _check(row: Row) -> None:
    """Raise where a cell of a file is not as one is written: names, then the numbers of its runs."""
    runs = row["runs"]
    texts = [row["setup"], row["row"], *(run["on"] for run in runs if run.get("on") is not None)]
    counts = [run[key] for run in runs for key in ("seed", "rounds")]
    shares = [run[name] for run in runs for name in SHARES if name in run]
    amounts = [run[key] for run in runs for key in ("bytes", "seconds", "macs") if run.get(key) is not None]
    for kinds, values in (((str,), texts), ((int,), counts), ((int, float), [*shares, *amounts])):
        if not all(isinstance(value, kinds) and not isinstance(value, bool) for value in values):
            raise TypeError
    if not (all(0 <= share <= 100 for share in shares) and all(0 <= number < inf for number in (*counts, *amounts))):
        raise ValueError


def _totals(runs: Sequence[Row]) -> Row:
    """What the runs of a cell come to; nothing for none."""
    if not runs:
        return {}
    found: Row = {}
    for name in SHARES:
        values = [float(each[name]) for each in runs if name in each or name == "global"]
        found |= {name: spread(values)} if values else {}
    found |= {"rounds": runs[0]["rounds"], "gib": mean(each["bytes"] for each in runs) / 2**30}
    computed = [each["macs"] for each in runs if each.get("macs")]
    found |= {"pmacs": mean(computed) / 1e15} if computed else {}
    more = {"submodels": submodels_over_seeds(runs), "offsets": with_offsets(runs)}
    return found | {name: each for name, each in more.items() if each}


def _line(row: Row) -> tuple[str, ...]:
    paper = row["paper"] and f"{row['paper']['mean']:.2f} ± {row['paper']['std']:.2f}{' (quoted)' * row['quoted']}"
    away = row.get("difference")
    shares, offset = (
        {name: number(each[name], ".2f") if name in each else "" for name in SHARES}
        for each in (row, row.get("offsets", {}))
    )
    return (
        row["row"], str(len(row["seeds"]) or "–"), shares["global"], paper or "",
        "" if away is None else f"{away:+.2f}", offset["global"], shares["rare"], offset["rare"], shares["local"],
        _amount(row["gib"], 1) if row["seeds"] else "", _amount(row["pmacs"], 2) if "pmacs" in row else "",
        str(row.get("rounds", "")),
    )  # fmt: skip


def _amount(value: float, digits: int) -> str:
    """With so many digits after the point, or as many as a small one needs."""
    return f"{value:.{digits}f}" if value * 10**digits >= 1 else f"{value:.1g}"


def _markdown(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    written = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return [*written, *(f"| {' | '.join(line)} |" for line in lines), ""]


def _flat(text: str) -> str:
    """JSON with every list of plain values on a line of its own: there are long ones, a number for each client."""
    return re.sub(
        r"\[\n[^][{}]+\]", lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), text
    )
