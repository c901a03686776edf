"""Every cell of the paper is trained to its end and collected: many hours on a GPU should not be the first to try."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner
from word_tasks import WORDS, corpus

from fedrolex.cli.app import app
from fedrolex.recipes.paper import TABLES, cells
from fedrolex.recipes.paper_setups import Kind

IMAGES = [
    "task.data=digits", "task.model=convnet", "task.width=16", "task.limit=400", "fleet.clients=20", "fleet.cohort=5",
    "task.public=0.2",
]  # fmt: skip
TRAINED = ("cifar10-high", "cifar10-rare", "blogs")  # the other set-ups have the same rows
ASKED = [
    pytest.param(table, kind, setup, marks=() if table == "overall" else pytest.mark.slow)
    for table in TABLES
    for kind in get_args(Kind)
    for setup in TRAINED
    if any(cell.setup == setup and kind in cell.kinds for cell in cells(table))
]


@pytest.mark.parametrize(("table", "kind", "setup"), ASKED)
def test_every_cell_is_trained_to_its_end_and_collected(table: str, kind: Kind, setup: str, tmp_path: Path) -> None:
    asked = [cell.row for cell in cells(table) if cell.setup == setup and kind in cell.kinds]
    small = IMAGES
    if setup == "blogs":
        rounding = "method.rounding=ceil"
        small = [word for word in WORDS if word not in ("task=words", "rounds=6", rounding)]
        small += [f"task.data={corpus(tmp_path / 'users.jsonl')}", "fleet.server_scale=1"]
    settings = [*small, "precision=fp32", "device=cpu", "evaluate_every=1"]
    words = ["paper", table, "--kind", kind, "--scale", "0.001", "--json"]
    words += [part for row in asked for part in ("--cell", f"{setup}/{row}")]
    words += [part for setting in settings for part in ("--set", setting)]
    words += ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"{done.exception!r} {done.output[-2000:]}"
    found = json.loads(done.stdout)["cells"]
    assert [cell["row"] for cell in found if cell["seeds"]] == asked
