"""Several runs in one process: the same results as one after the other, and nothing lost when one stops."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedrolex import FedrolexError, Recipe
from fedrolex.cli.app import app
from fedrolex.runs import checkpoint, prepare
from fedrolex.runs.run import Run
from fedrolex.runs.side_by_side import fits, side_by_side

SMALL = ["rounds=3", "task.limit=200", "fleet.clients=8", "fleet.cohort=4", "task.width=8", "compare=false"]


def jobs(folder: Path, seeds: list[int]) -> list[Any]:
    base = Recipe(device="cpu", engine="loop").with_settings(SMALL)
    recipes = [replace(base, seed=seed) for seed in seeds]
    return [(Run.create(folder / str(r.seed), r), prepare(r), None) for r in recipes]


def test_runs_side_by_side_are_those_one_after_the_other(tmp_path: Path) -> None:
    found = side_by_side(jobs(tmp_path / "at-once", [1, 2, 3]))
    for run, training, _ in jobs(tmp_path / "alone", [1, 2, 3]):
        run.go(training)
    assert [summary["seed"] for summary in found] == [1, 2, 3]
    for seed in (1, 2, 3):
        one, other = (
            checkpoint.read(tmp_path / where / str(seed) / "checkpoint.safetensors")[0]
            for where in ("at-once", "alone")
        )
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_one_that_fails_stops_the_others_which_can_be_resumed(tmp_path: Path) -> None:
    made = jobs(tmp_path, [1, 2])
    made[1][1].run_round = _broken
    with pytest.raises(FedrolexError, match="broken"):
        side_by_side(made)
    run = Run.open(tmp_path / "1")
    summary = run.go(prepare(run.recipe()))
    (again, training, _) = jobs(tmp_path / "alone", [1])[0]
    wanted = again.go(training)
    assert summary["global_accuracy"] == wanted["global_accuracy"]


def _broken() -> dict[str, Any]:
    raise FedrolexError("broken")


def test_what_would_not_give_the_same_bits_goes_alone() -> None:
    training = prepare(Recipe(device="cpu", engine="loop").with_settings(SMALL))
    assert fits(training)
    training.model.add_module("extra", torch.nn.Dropout(0.1))
    assert not fits(training)
    assert not fits(prepare(Recipe(device="cpu", engine="crew").with_settings(SMALL)))


def test_from_the_command_line(tmp_path: Path) -> None:
    settings = [part for setting in SMALL for part in ("--set", setting)]
    words = ["train", *settings, "--seeds", "1,2", "--at-once", "2", "--out", str(tmp_path / "run"), "--json"]
    done = CliRunner().invoke(app, words)
    found = json.loads(done.stdout)
    assert [summary["seed"] for summary in found] == [1, 2]
    assert (tmp_path / "run" / "seed-2" / "summary.json").is_file()


def test_runs_that_cannot_go_side_by_side_say_so(tmp_path: Path) -> None:
    settings = [part for setting in SMALL for part in ("--set", setting)]
    words = ["train", *settings, "--engine", "crew", "--seeds", "1,2", "--at-once", "2", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    assert "one after the other" in done.stderr
