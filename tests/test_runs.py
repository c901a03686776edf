"""Runs on disk: they survive being killed, and say in one line what is wrong with them."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from typer.testing import CliRunner

from fedrolex import (
    ENGINES,
    Callback,
    Classification,
    Examples,
    FedAvg,
    FedrolexError,
    FleetRecipe,
    Recipe,
    Round,
    Run,
    Server,
    Task,
    Training,
    Upload,
    prepare,
    train,
)
from fedrolex.cli.app import app
from fedrolex.recipes import find_recipe
from fedrolex.rounds.server import State
from fedrolex.runs import checkpoint as checkpoints
from fedrolex.tasks.partition import even

SETTINGS = ["task.width=8", "fleet.clients=10", "fleet.cohort=5", "rounds=12", "checkpoint_every=3", "evaluate_every=4"]
RECIPE = Recipe(device="cpu").with_settings(SETTINGS)


def finished(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Final weights and metrics of a run, timings aside."""
    tensors, _ = checkpoints.read(folder / "checkpoint.safetensors")
    return tensors, [{k: v for k, v in row.items() if k != "seconds"} for row in Run(folder).rows()]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs") / "whole"
    Run.create(folder, RECIPE).go(prepare(RECIPE))
    return finished(folder)


def same(a: tuple[dict[str, Any], list[dict[str, Any]]], b: tuple[dict[str, Any], list[dict[str, Any]]]) -> bool:
    return a[0].keys() == b[0].keys() and all(torch.equal(a[0][n], b[0][n]) for n in a[0]) and a[1] == b[1]


class Killed(BaseException):
    """Stands for SIGKILL at an exact place."""


@pytest.mark.parametrize(
    ("place", "when"),
    [("before", 2), ("writing", 1), ("writing", 2), ("writing", 3), ("flushed", 2), ("replaced", 2), ("round", 2)],
)
def test_killed_anywhere_in_a_checkpoint_it_resumes_to_the_same_bits(
    place: str, when: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Any
) -> None:
    folder = tmp_path / "run"
    run = Run.create(folder, RECIPE)
    calls = {"n": 0}

    def die(name: str) -> None:
        if name == place:
            calls["n"] += 1
            if calls["n"] == when:
                raise Killed

    real_replace, real_fsync, real_write = os.replace, os.fsync, checkpoints.write
    with monkeypatch.context() as patch:

        def write(*args: Any) -> None:
            die("before")
            real_write(*args)

        patch.setattr(checkpoints, "write", write)

        def replace(a: Any, b: Any) -> None:
            if "checkpoint" in str(b):
                die("flushed")
            real_replace(a, b)
            if "checkpoint" in str(b):
                die("replaced")

        def fsync(descriptor: int) -> None:
            die("writing")
            real_fsync(descriptor)

        patch.setattr(os, "replace", replace)
        patch.setattr(os, "fsync", fsync)
        training = prepare(RECIPE)
        with pytest.raises(Killed):
            run.go(training, lambda row: die("round"))
    Run.open(folder).go(prepare(RECIPE))
    assert same(finished(folder), reference)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "fedrolex", *words]


def settings(recipe: list[str]) -> list[str]:
    return [word for setting in recipe for word in ("--set", setting)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 20))])
def test_killed_with_sigkill_it_resumes_to_the_same_bits(seed: int, tmp_path: Path) -> None:
    long = [
        "task.width=4",
        "fleet.clients=10",
        "fleet.cohort=2",
        "rounds=24",
        "checkpoint_every=2",
        "evaluate_every=10",
    ]
    long += ["compare=false", "device=cpu", "callbacks=[]"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    recipe = find_recipe("digits").with_settings(long)
    Run.create(whole, recipe).go(prepare(recipe))
    chance = random.Random(seed)
    started = subprocess.Popen(
        command("train", *settings(long), "--out", str(broken)),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for again in (True, False):
        rounds = chance.randrange(1, 20)
        while started.poll() is None and not (broken.is_dir() and len(Run(broken).rows()) >= rounds):
            time.sleep(0.01)
        started.send_signal(signal.SIGKILL)
        started.wait()
        if again:
            started = subprocess.Popen(
                command("resume", str(broken)), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
    assert CliRunner().invoke(app, ["resume", str(broken)]).exit_code == 0
    assert same(finished(broken), finished(whole))


def test_ctrl_c_keeps_the_rounds_done_and_says_how_to_go_on(tmp_path: Path, reference: Any) -> None:
    folder = tmp_path / "run"

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Run.create(folder, RECIPE).go(prepare(RECIPE), stop)
    _, about = checkpoints.read(folder / "checkpoint.safetensors")
    assert about["round"] == "5"
    result = CliRunner().invoke(app, ["resume", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    assert same(finished(folder), reference)


def test_killed_before_its_first_checkpoint_it_starts_again(tmp_path: Path, reference: Any) -> None:
    folder = tmp_path / "run"
    run = Run.create(folder, RECIPE)
    (folder / "metrics.jsonl").write_text('{"round": 0, "half a li')
    run.go(prepare(RECIPE))
    assert same(finished(folder), reference)


# --- one clear line each ---


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"ronuds": 3}, "unknown key 'ronuds': did you mean 'rounds'?"),
        ({"client": {"learning_rate": 1}}, "unknown key 'client.learning_rate'"),
        ({"client": {"lr": "fast"}}, "recipe key client.lr is 'fast' (str): expected float"),
        ({"rounds": True}, "recipe key rounds is True (bool): expected int"),
        ({"rounds": 0}, "rounds is 0: give at least 1"),
        ({"rounds": 10**30}, f"rounds is {10**30}: give at most 1,000,000,000"),
        ({"client": 3}, "recipe client is 3"),
        ({"format": 3}, "recipe has format 3; this version reads 1 and 2"),
        ({"client": {"optimizer": "adm"}}, "client.optimizer is 'adm' (did you mean 'adam'?)"),
        ({"evaluation": {"statistics": "none"}}, "evaluation.statistics is 'none'"),
        ({"callbacks": "drift"}, "recipe key callbacks is 'drift' (str): expected list[str]"),
        ({"engine": "lop"}, "engine is 'lop' (did you mean 'loop'?)"),
        ({"quorum": 99}, "quorum 99 is above the cohort"),
        ([1], "expected keys and values"),
    ],
)
def test_a_bad_recipe(data: Any, says: str) -> None:
    with pytest.raises(FedrolexError) as caught:
        Recipe.decode(data)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "--set", "method=fedrolx"], "method.name is 'fedrolx' (did you mean 'fedrolex'?)"),
        (["train", "--set", "rounds"], "is not KEY=VALUE"),
        (["train", "--set", "client.speed.x=1"], "no section 'client.speed'"),
        (["train", "--set", "fleet.capacities=[0]"], "capacity 0 is outside"),
        (["train", "--set", "fleet.cohort=99"], "a cohort of 99 of 20 clients"),
        (["train", "--set", "task.partition.labels=0"], "task.partition.labels is 0: give a number of at least 1"),
        (["train", "--seeds", "1,x"], "--seeds '1,x'"),
        (["train", "--device", "tpu"], "device is 'tpu'"),
        (["train", "nothing.yaml"], "no recipe 'nothing.yaml'"),
        (["train", "--set", "weights=nothing.safetensors"], "there is no file nothing.safetensors"),
        (["resume", "nowhere"], "nowhere is not a run"),
        (["train", "--device", "cpu", "--set", "compiled=true"], "unknown key 'compiled'"),
        (["train", "--device", "cpu", "--engine", "graph"], "needs a CUDA device: use auto, loop or crew on a CPU"),
        (["show", "nothing"], "no recipe 'nothing'"),
    ],
)
def test_a_bad_command(words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, FedrolexError), result.output
    assert says in str(result.exception)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


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


def spoil(folder: Path, how: str) -> None:
    path = folder / "checkpoint.safetensors"
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "foreign":
        from safetensors.torch import save_file

        save_file({"a": torch.zeros(1)}, path)
    elif how == "newer":
        tensors, about = checkpoints.read(path)
        from safetensors.torch import save_file

        save_file(tensors, path, {checkpoints.ABOUT: json.dumps({**about, "format": "9"})})
    elif how == "other model":
        checkpoints.write(path, {"other:a": torch.zeros(1)}, {"round": "1"})
    elif how == "garbage":
        path.write_bytes(b"not a checkpoint")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("truncated", "is damaged or not a safetensors file"),
        ("garbage", "is damaged or not a safetensors file"),
        ("foreign", "is not a checkpoint of a fedrolex run"),
        ("newer", "has format 9; this version reads 1 and 2"),
        ("other model", "the checkpoint does not fit this run: tensor model:conv1.bias"),
    ],
)
def test_a_bad_checkpoint(how: str, says: str, tmp_path: Path) -> None:
    recipe = RECIPE.with_settings(["rounds=1", "checkpoint_every=1"])
    folder = tmp_path / "run"
    Run.create(folder, recipe).go(prepare(recipe))
    spoil(folder, how)
    before = (folder / "checkpoint.safetensors").read_bytes()
    with pytest.raises(FedrolexError) as caught:
        Run.open(folder).go(prepare(recipe))
    assert says in str(caught.value)
    assert (folder / "checkpoint.safetensors").read_bytes() == before
    assert len(Run(folder).rows()) == 1


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Any) -> None:
    folder = tmp_path / "run"
    writes = {"n": 0}
    real = os.fsync

    def full(descriptor: int) -> None:
        writes["n"] += 1
        if writes["n"] == 7:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(FedrolexError, match=r"cannot write .*No space left on device"):
            Run.create(folder, RECIPE).go(prepare(RECIPE))
    assert checkpoints.read(folder / "checkpoint.safetensors")[1]["round"] == "3"
    assert not list(folder.glob(".checkpoint*"))
    Run.open(folder).go(prepare(RECIPE))
    assert same(finished(folder), reference)


# --- the command line ---


def test_train_ends_in_a_table_beside_what_the_fleet_could_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", *settings([*SETTINGS[:3], "rounds=2"])])
    assert result.exit_code == 0, result.output
    for text in ("fedrolex", "everyone trains 1/16", "only who can trains 1/4", "a bound: they cannot", "picture:"):
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
    for compare, methods in (("false", 1), ("true", 4)):
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
    assert len(runs) == 8
    below = [line for line in below if "2 seeds" in line]
    assert [" ".join(line.split()[1:3]) for line in below] == [
        "fedrolex │",
        "everyone trains",
        "only who",
        "everyone trains",
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


@pytest.mark.parametrize("words", [["--engine", "lop"], ["--set", "engine=lop"]])
def test_a_wrong_engine_says_which_there_are(words: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", *words, "--out", str(tmp_path / "x")])
    every = ", ".join(ENGINES.own())
    assert str(result.exception).startswith(f"engine is 'lop' (did you mean 'loop'?): use one of {every}")
    told = re.sub(r"[│\s]+", " ", CliRunner().invoke(app, ["train", "--help"], terminal_width=200).stdout)
    assert f"How client work runs: {every}, or package.module:Name." in told


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


def test_start_from_given_weights(tmp_path: Path) -> None:
    first = RECIPE.with_settings(["rounds=2"])
    Run.create(tmp_path / "a", first).go(prepare(first))
    second = first.with_settings([f"weights={tmp_path / 'a' / 'checkpoint.safetensors'}"])
    made = prepare(second)
    tensors, _ = checkpoints.read(tmp_path / "a" / "checkpoint.safetensors")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in made.tensors().items())


def test_training_from_python_with_a_model_and_data_of_ones_own() -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 6)
    y = (x[:, 0] * x[:, 1] > 0).long()
    parts = even(y[:300], 5, seed=0)
    task = Classification(
        "mine",
        lambda scale: nn.Sequential(nn.Linear(6, 32 * scale), nn.ReLU(), nn.Linear(32 * scale, 2)),
        Examples(x[:300], y[:300]),
        Examples(x[300:], y[300:]),
        parts,
    )
    recipe = Recipe(rounds=25, device="cpu", fleet=FleetRecipe(clients=5, cohort=5, capacities=["1", "1/2"]))
    done = train(recipe, task)
    assert done.summary["global_accuracy"] > 0.85
    assert len(done.rows) == 25


# --- found by an attack ---


def test_interrupted_while_evaluating_no_round_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Any
) -> None:
    folder = tmp_path / "run"
    training = prepare(RECIPE)
    real = training.evaluate
    calls = {"n": 0}

    def evaluate() -> dict[str, Any]:
        calls["n"] += 1
        if calls["n"] == 2:
            raise KeyboardInterrupt
        return real()

    monkeypatch.setattr(training, "evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt):
        Run.create(folder, RECIPE).go(training)
    assert [row["round"] for row in Run(folder).rows()] == list(range(7))
    Run.open(folder).go(prepare(RECIPE))
    assert same(finished(folder), reference)


@pytest.mark.parametrize("damage", ["deleted", "first line", "a number", "bytes"])
def test_damaged_metrics_are_not_papered_over(damage: str, tmp_path: Path) -> None:
    recipe = RECIPE.with_settings(["rounds=3"])
    folder = tmp_path / "run"
    Run.create(folder, recipe).go(prepare(recipe))
    path = folder / "metrics.jsonl"
    text = path.read_text()
    if damage == "deleted":
        path.unlink()
    elif damage == "first line":
        path.write_text("oops" + text)
    elif damage == "a number":
        path.write_text("1\n" + text)
    else:
        path.write_bytes(b"\xff\xfe" + text.encode())
    with pytest.raises(FedrolexError, match="does not hold rounds 0 to 2"):
        Run.open(folder).go(prepare(recipe))
    if damage != "deleted":
        assert text.encode() in path.read_bytes(), "what is left is untouched"


@pytest.mark.parametrize("setting", ["method=heterofl", "seed=9", "client.lr=0.5", "rounds=2"])
def test_a_recipe_changed_under_a_run_is_refused(setting: str, tmp_path: Path) -> None:
    recipe = RECIPE.with_settings(["rounds=3"])
    folder = tmp_path / "run"
    Run.create(folder, recipe).go(prepare(recipe))
    changed = recipe.with_settings([setting])
    changed.write(folder / "recipe.yaml")
    with pytest.raises(FedrolexError, match="was changed since the checkpoint"):
        Run.open(folder).go(prepare(changed))


def test_a_run_may_go_on_for_more_rounds(tmp_path: Path, reference: Any) -> None:
    folder = tmp_path / "run"
    first = RECIPE.with_settings(["rounds=4"])
    Run.create(folder, first).go(prepare(first))
    RECIPE.write(folder / "recipe.yaml")
    Run.open(folder).go(prepare(RECIPE))
    assert same(finished(folder), reference)


def own_task() -> Task:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    build = lambda scale: nn.Sequential(nn.Linear(4, 8 * scale), nn.ReLU(), nn.Linear(8 * scale, 2))  # noqa: E731
    return Task.split(build, Examples(x[:40], (x[:40, 0] > 0).long()), Examples(x[40:], (x[40:, 0] > 0).long()), 4)


def test_a_task_of_ones_own_is_resumed_from_python_only(tmp_path: Path) -> None:
    recipe = Recipe(rounds=2, device="cpu", fleet=FleetRecipe(clients=4, cohort=2))
    train(recipe, own_task(), out=tmp_path / "own")
    result = CliRunner().invoke(app, ["resume", str(tmp_path / "own")])
    assert "resume=True" in str(result.exception)
    assert train(None, own_task(), out=tmp_path / "own", resume=True).summary["rounds"] == 2


@pytest.mark.parametrize(
    ("settings_", "says"),
    [
        (["fleet.clients=3000", "task.partition=labels"], "would have none"),
        (["method=fedavg", "method.width=abc"], "capacity 'abc'"),
        (["method=fed_dropout", "method.scope=x"], "method.scope is 'x'"),
        (["fleet.shares=[abc,1,1,1,1]"], "share 'abc' is not a number"),
        (["fleet.shares=[2,-1,0,0,0]"], "at least 0 and add up to 1"),
        (["fleet.trace=[]"], "trace is empty"),
        (["fleet.trace=[[-3,1]]"], "names client -3"),
        (["task.width=-2"], "task.width is -2"),
        (["client.lr=.inf"], "client.lr is inf"),
        (["client.momentum=.nan"], "momentum"),
        (["deadline=-1"], "deadline is -1"),
        (
            ["method=fedavg", "method.width=1", "method.able_only=true", "fleet.capacities=['1/2']"],
            "nobody in the fleet can hold",
        ),
        (["seed=2020-13-45"], "--set seed is not YAML"),
        (["client.milestones=[a]"], "expected list[int]"),
        (["client.milestones=3"], "expected list[int]"),
    ],
)
def test_more_bad_settings(settings_: list[str], says: str) -> None:
    with pytest.raises(FedrolexError) as caught:
        prepare(RECIPE.with_settings(settings_))
    assert says in str(caught.value)


def test_a_run_in_which_no_round_counted_says_so(tmp_path: Path) -> None:
    recipe = RECIPE.with_settings(["rounds=2", "fleet.trace=[[]]"])
    with pytest.raises(FedrolexError, match="no round counted: fewer than 1 clients were there"):
        Run.create(tmp_path / "run", recipe).go(prepare(recipe))


def test_numbers_as_people_write_them() -> None:
    assert RECIPE.with_settings(["client.lr=1e-3"]).client.lr == 0.001
    assert RECIPE.with_settings(["fleet.capacities=[1, 0.5]"]).fleet.capacities == ["1", "0.5"]


def test_a_mistake_in_yaml_is_shown_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("rounds: 3\nfleet: {clients: 4\nseed: 1\n")
    with pytest.raises(FedrolexError, match=r"is not YAML in line [34]: expected ',' or '}'"):
        Recipe.read(path)


def test_yaml_cannot_run_code(tmp_path: Path) -> None:
    path = tmp_path / "evil.yaml"
    path.write_text(f"seed: !!python/object/apply:os.mkdir ['{tmp_path / 'gotcha'}']\n")
    with pytest.raises(FedrolexError, match="is not YAML"):
        Recipe.read(path)
    assert not (tmp_path / "gotcha").exists()


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"conv1.bias": torch.zeros(8)}, tmp_path / "some.safetensors")
    with pytest.raises(FedrolexError, match="there is no tensor"):
        prepare(RECIPE.with_settings([f"weights={tmp_path / 'some.safetensors'}"]))


@pytest.mark.parametrize(("dtype", "factor", "finite"), [("float8_e4m3fn", 1, True), ("float64", 1e300, False)])
def test_weights_are_finite_in_the_models_own_precision(
    dtype: str, factor: float, finite: bool, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    own = prepare(RECIPE).server.state["model"]
    given = {name: (tensor.double() * factor).to(getattr(torch, dtype)) for name, tensor in own.items()}
    save_file(given, tmp_path / "some.safetensors")
    recipe = RECIPE.with_settings([f"weights={tmp_path / 'some.safetensors'}"])
    if finite:
        found = prepare(recipe).server.state["model"]
        assert all(torch.equal(found[name], tensor.to(own[name].dtype)) for name, tensor in given.items())
    else:
        with pytest.raises(FedrolexError, match="is not finite: nothing can be trained from it"):
            prepare(recipe)


def test_bytes_are_what_is_sent() -> None:
    training = prepare(RECIPE.with_settings(["fleet.cohort=10"]))
    row = training.run_round()
    parameters = sum(training.server.main.axes.parameters(c) for c in ("1", "1/2", "1/4", "1/8", "1/16")) * 2
    assert row["bytes_down"] == row["bytes_up"] == 4 * parameters


def test_compared_runs_have_the_same_seeds(tmp_path: Path) -> None:
    words = [*settings([*SETTINGS[:3], "rounds=1"]), "--seeds", "7,8", "--out", str(tmp_path / "x"), "--json"]
    found = json.loads(CliRunner().invoke(app, ["train", *words]).stdout)
    assert [one["seed"] for one in found["runs"]] == [7, 8] * 4
    assert [one["seeds"] for one in found["over_seeds"]] == [[7, 8]] * 4


# --- callbacks ---


class Spy(Callback):
    """Writes down what it is told, adds a number to the metrics, and fails where it is asked to."""

    def __init__(self, fails_in: str = "", at: int = 0, why: str = "no disk") -> None:
        self.told: list[str] = []
        self._fails_in, self._at, self._why = fails_in, at, why

    def _tell(self, hook: str, round: int) -> None:
        self.told.append(hook)
        if hook == self._fails_in and round == self._at:
            raise RuntimeError(self._why)

    def begin(self, training: Training, folder: Path | None) -> None:
        self._tell("begin", training.server.round)

    def round_begins(self, round: Round) -> None:
        self._tell("round_begins", round.number)

    def folded(self, round: Round, uploads: Sequence[Upload]) -> None:
        self._tell("folded", round.number)

    def round_ends(self, round: Round, new: State, row: dict[str, Any]) -> None:
        self._tell("round_ends", round.number)
        row["seen"] = len(new["model"])

    def row(self, training: Training, row: dict[str, Any]) -> None:
        self._tell("row", row["round"])

    def end(self, training: Training) -> None:
        self._tell("end", training.server.round)


FEW = RECIPE.with_settings(["rounds=3", "checkpoint_every=9", "evaluate_every=9", "callbacks=[drift]"])


def test_a_callback_is_told_of_everything_and_may_add_to_the_metrics(tmp_path: Path) -> None:
    spy = Spy()
    Run.create(tmp_path / "run", FEW).go(prepare(FEW, callbacks=[spy]))
    one = ["round_begins", *["folded"] * 5, "round_ends", "row"]
    assert spy.told == ["begin", *one * 3, "end"]
    rows = Run(tmp_path / "run").rows()
    assert [row["seen"] for row in rows] == [10] * 3
    assert all("drift" in row for row in rows)
    assert not (tmp_path / "run" / "tensorboard").exists()


@pytest.mark.parametrize(("hook", "kept"), [("round_begins", 1), ("folded", 1), ("round_ends", 1), ("row", 2)])
@pytest.mark.parametrize("method", ["fedrolex", "scaffold"])
def test_a_callback_that_fails_is_one_line_and_loses_no_finished_round(
    hook: str, kept: int, method: str, tmp_path: Path
) -> None:
    recipe = FEW.with_settings([f"method={method}"])
    whole = Run.create(tmp_path / "whole", recipe)
    whole.go(prepare(recipe, callbacks=[Spy()]))
    broken = Run.create(tmp_path / "broken", recipe)
    with pytest.raises(FedrolexError) as caught:
        broken.go(prepare(recipe, callbacks=[Spy(hook, 1)]))
    assert str(caught.value) == f"callback Spy failed in {hook}(): RuntimeError: no disk"
    assert len(broken.rows()) == kept
    assert checkpoints.read(broken.checkpoint)[1]["round"] == str(kept)
    broken.go(prepare(recipe, callbacks=[Spy()]))
    assert same(finished(broken.folder), finished(whole.folder))


def test_metrics_that_are_no_json_are_one_line(tmp_path: Path) -> None:
    class Wrong(Callback):
        def round_ends(self, round: Round, new: State, row: dict[str, Any]) -> None:
            row["tensor"] = new["model"]

    run = Run.create(tmp_path / "run", FEW)
    with pytest.raises(FedrolexError, match="the metrics of round 0 cannot be written as JSON"):
        run.go(prepare(FEW, callbacks=[Wrong()]))
    assert run.rows() == []


def test_callbacks_in_python_need_no_name() -> None:
    spy = Spy()
    done = train(FEW.with_settings(["rounds=1"]), callbacks=[spy])
    assert spy.told[-1] == "end"
    assert done.rows[0]["seen"] == 10


def test_all_numbers_are_on_the_board(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    recipe = FEW.with_settings(["callbacks=[drift, tensorboard]", "evaluation.metrics=[top5]", "rounds=2"])
    Run.create(tmp_path / "run", recipe).go(prepare(recipe))
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    tags = set(board.Tags()["scalars"])
    assert {"train_loss", "loss", "global_accuracy", "top5", "drift/1", "clients"} <= tags
    assert {"bytes_down", "bytes_up", "seconds"} <= tags
    assert not {"round", "void", "dropped"} & tags
    assert [event.step for event in board.Scalars("train_loss")] == [0, 1]


# --- the model that comes out ---


class Both(nn.Module):
    """Two networks as one."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts]).sum(0)


class Ensemble(FedAvg):
    """Judged by a module of its own."""

    def judged(self, server: Server) -> nn.Module:
        return Both(server.loaded(), server.loaded())


def test_what_comes_out_is_what_was_measured_and_the_whole_is_there_too() -> None:
    recipe = FEW.with_settings(["rounds=1", "method=fedavg", "method.width=1/2"])
    part = train(recipe)
    assert part.axes.parameters("1/2") == sum(p.numel() for p in part.model.parameters())
    assert part.axes.parameters() == sum(p.numel() for p in part.whole.parameters())
    assert isinstance(train(replace(recipe, method=Ensemble())).model, Both)
