"""``fedrolex train`` and its relatives: tables, JSON, seeds, folders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_runs import SETTINGS, settings
from typer.testing import CliRunner

from fedrolex import (
    FedrolexError,
    Recipe,
    Run,
    Training,
)
from fedrolex.cli.app import app
from fedrolex.runs import checkpoint as checkpoints


def test_a_folder_of_runs_says_which_there_are(tmp_path: Path) -> None:
    (tmp_path / "seed-1").mkdir()
    (tmp_path / "seed-1" / "recipe.yaml").write_text("")
    with pytest.raises(FedrolexError, match=r"it has no recipe.yaml; those in it are .*seed-1"):
        Run.open(tmp_path)


def test_a_folder_that_exists_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    result = CliRunner().invoke(app, ["train", "--out", str(tmp_path / "mine")])
    assert "exists already" in str(result.exception)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


def test_train_ends_in_a_table_beside_what_the_fleet_could_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", *settings([*SETTINGS[:3], "rounds=2"])])
    assert result.exit_code == 0, result.output
    for text in (
        "fedrolex",
        "everyone trains 1/16",
        "only who can trains 1/4",
        "a bound: they cannot",
        "columns 1/2, 1/4, 1/8, 1/16 one by one",
        "picture:",
    ):
        assert text in result.output
    folder = tmp_path / "runs" / "digits-fedrolex-1"
    names = {path.name for path in folder.iterdir()}
    assert {
        "recipe.yaml",
        "environment.json",
        "metrics.jsonl",
        "checkpoint.safetensors",
        "summary.json",
        "tensorboard",
        "accuracy.png",
    } <= names


def test_several_seeds_and_json(tmp_path: Path) -> None:
    words = [*settings([*SETTINGS[:3], "rounds=1", "compare=false", "method=heterofl"])]
    result = CliRunner().invoke(app, ["train", *words, "--seeds", "4,5", "--out", str(tmp_path / "x"), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [one["seed"] for one in found["runs"]] == [4, 5]
    assert found["runs"][0]["method"] == "heterofl"
    assert (tmp_path / "x" / "seed-5" / "recipe.yaml").is_file()
    (mean,) = found["over_seeds"]
    a, b = (one["global_accuracy"] for one in found["runs"])
    assert (mean["method"], mean["seeds"]) == ("heterofl", [4, 5])
    assert mean["global_accuracy"] == pytest.approx({"mean": (a + b) / 2, "std": abs(a - b) / 2**0.5})
    assert not {"seed", "rounds", "run", "task"} & set(mean)


def test_what_is_trained_does_not_change_the_shape_of_its_json(tmp_path: Path) -> None:
    """One run, with and without what it is compared with, and resumed."""
    words = settings([*SETTINGS[:3], "rounds=1", "task.limit=60"])
    for compare, methods in (("false", 1), ("true", 5)):
        folder = tmp_path / compare
        commands = (["train", *words, "--set", f"compare={compare}", "--out", str(folder)], ["resume", str(folder)])
        for command in commands:
            found = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
            assert list(found) == ["runs", "over_seeds"]
            assert [one["method"] for one in found["over_seeds"]] == [one["method"] for one in found["runs"]]
            assert len(found["runs"]) == methods
            first = found["runs"][0]["global_accuracy"]
            assert found["over_seeds"][0]["global_accuracy"] == {"mean": first, "std": None}


def test_several_seeds_that_were_stopped_are_resumed_by_their_folder(tmp_path: Path) -> None:
    words = [*settings([*SETTINGS[:3], "rounds=2", "compare=false"]), "--seeds", "5,4", "--json"]
    whole = json.loads(CliRunner().invoke(app, ["train", *words, "--out", str(tmp_path / "a")]).stdout)
    CliRunner().invoke(app, ["train", *words, "--out", str(tmp_path / "b")])
    for left in ("checkpoint.safetensors", "metrics.jsonl", "summary.json", "model.safetensors"):
        (tmp_path / "b" / "seed-4" / left).unlink()  # as if stopped before its first round
    result = CliRunner().invoke(app, ["resume", str(tmp_path / "b"), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["over_seeds"][0]["seeds"] == [4, 5]
    assert {one["seed"]: one["global_accuracy"] for one in found["runs"]} == {
        one["seed"]: one["global_accuracy"] for one in whole["runs"]
    }


def test_all_seeds_have_their_folders_from_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: Run, training: Training, progress: Any = None) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "go", stop)
    words = [*settings([*SETTINGS[:3], "rounds=1", "compare=false"]), "--seeds", "1,2,3", "--out", str(tmp_path / "x")]
    result = CliRunner().invoke(app, ["train", *words])
    assert result.exit_code == 130
    assert f"go on with: fedrolex resume {tmp_path / 'x'}\n" in result.output
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["seed-1", "seed-2", "seed-3"]


def test_the_table_ends_with_a_line_a_method_over_its_seeds(tmp_path: Path) -> None:
    words = settings([*SETTINGS[:3], "rounds=1", "task.limit=60"])
    result = CliRunner().invoke(app, ["train", *words, "--seeds", "4,5", "--out", str(tmp_path / "x")])
    assert result.exit_code == 0, result.output
    runs, below = [[line for line in part.splitlines() if "%" in line] for part in re.split("├.*┤", result.stdout)][-2:]
    assert len(runs) == 10
    below = [line for line in below if "2 seeds" in line]
    assert [" ".join(line.split()[1:3]) for line in below] == [
        "fedrolex │",
        "everyone trains",
        "only who",
        "everyone trains",
        "columns 1/2,",
    ]
    a, b = (json.loads((tmp_path / "x" / f"seed-{n}" / "summary.json").read_text())["global_accuracy"] for n in (4, 5))
    assert f"{(a + b) / 2:.1%} ± {abs(a - b) / 2**0.5:.1%}" in below[0]


def test_an_empty_folder_becomes_the_run(tmp_path: Path) -> None:
    words = settings([*SETTINGS[:3], "rounds=1", "task.limit=60", "compare=false"])
    for name, seeds in (("one", []), ("two", ["--seeds", "1,2"])):
        (tmp_path / name).mkdir()
        result = CliRunner().invoke(app, ["train", *words, *seeds, "--out", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
    assert (tmp_path / "one" / "summary.json").is_file()
    assert (tmp_path / "two" / "seed-2" / "summary.json").is_file()


def test_list_and_show() -> None:
    listed = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)
    assert {"fedrolex", "heterofl", "fed_dropout", "fedavg", "fedprox", "scaffold"} <= set(listed["methods"])
    assert listed["needs"]["fedbe"]["public"]
    assert {"digits", "cifar10", "stackoverflow"} <= set(listed["recipes"])
    assert {"top5": "fedrolex", "worst_class": "fedrolex"}.items() <= listed["origins"]["metrics"].items()
    plain = CliRunner().invoke(app, ["list"]).stdout
    assert "scaffold" in plain
    assert "callbacks: drift, tensorboard" in plain
    shown = CliRunner().invoke(app, ["show", "digits", "--set", "client.lr=0.5", "--set", "method=heterofl"]).stdout
    data = yaml.safe_load(shown)
    assert data["client"]["lr"] == 0.5
    assert data["deadline"] is None
    assert set(data["method"]) == {"name", "weighting", "norms", "rows", "server_optimizer", "rounding"}
    assert Recipe.decode(data).encode() == data


def test_several_recipes_have_folders_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("format: 2\nmethod: fedavg\n")
    small = settings([*SETTINGS[:3], "rounds=1", "compare=false", "task.limit=100"])
    names = ["digits", str(tmp_path / "mine.yaml"), "digits"]
    words = ["train", *names, *small, "--out", str(tmp_path / "x"), "--at-once", "3", "--json", "--device", "cpu"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    found = found["runs"]
    assert [one["method"] for one in found] == ["digits-fedrolex", "mine-fedavg", "digits-fedrolex-2"]
    assert [Path(one["run"]).name for one in found] == [one["method"] for one in found]
    first, again = (checkpoints.read(Path(found[n]["run"]) / "checkpoint.safetensors")[0] for n in (0, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_compared_runs_have_the_same_seeds(tmp_path: Path) -> None:
    words = [*settings([*SETTINGS[:3], "rounds=1"]), "--seeds", "7,8", "--out", str(tmp_path / "x"), "--json"]
    found = json.loads(CliRunner().invoke(app, ["train", *words]).stdout)
    assert [one["seed"] for one in found["runs"]] == [7, 8] * 5
    assert [one["seeds"] for one in found["over_seeds"]] == [[7, 8]] * 5
