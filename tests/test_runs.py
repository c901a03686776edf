"""Runs on disk: they survive being killed, and say in one line what is wrong with them."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fedrolex import FedrolexError
from fedrolex.cli.app import app
from fedrolex.runs import FleetRecipe, Recipe, Run, prepare, train
from fedrolex.runs import checkpoint as checkpoints
from fedrolex.tasks import Examples, Task
from fedrolex.tasks.partition import alike, by_label, even

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


@pytest.mark.parametrize("place", ["before", "writing", "flushed", "replaced", "round"])
@pytest.mark.parametrize("when", [1, 2, 3])
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


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(s, marks=pytest.mark.slow) for s in range(2, 20))])
def test_killed_with_sigkill_it_resumes_to_the_same_bits(seed: int, tmp_path: Path) -> None:
    long = [*SETTINGS[:3], "rounds=60", "checkpoint_every=2", "evaluate_every=10", "compare=false", "device=cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run(
        command("train", *settings(long), "--out", str(whole), "--json"),
        check=True,
        capture_output=True,
        env=environment,
    )
    chance = random.Random(seed)
    started = subprocess.Popen(
        command("train", *settings(long), "--out", str(broken)),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for _ in range(2):
        rounds = chance.randrange(1, 50)
        while started.poll() is None and not (broken.is_dir() and len(Run(broken).rows()) >= rounds):
            time.sleep(0.001)
        started.send_signal(signal.SIGKILL)
        started.wait()
        started = subprocess.Popen(
            command("resume", str(broken)), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    assert started.wait() == 0
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
        ({"client": 3}, "recipe client is 3"),
        ({"format": 2}, "recipe has format 2"),
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
        (["train", "--set", "task.labels_per_client=0"], "0 labels a client"),
        (["train", "--seeds", "1,x"], "--seeds '1,x'"),
        (["train", "--device", "tpu"], "device is 'tpu'"),
        (["train", "nothing.yaml"], "no recipe 'nothing.yaml'"),
        (["train", "--set", "weights=nothing.safetensors"], "there is no file nothing.safetensors"),
        (["resume", "nowhere"], "nowhere is not a run"),
        (["show", "nothing"], "no recipe 'nothing'"),
    ],
)
def test_a_bad_command(words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, FedrolexError), result.output
    assert says in str(result.exception)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


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

        save_file(tensors, path, {**about, "format": "9"})
    elif how == "other model":
        checkpoints.write(path, {"a": torch.zeros(1)}, {"round": "1"})
    elif how == "garbage":
        path.write_bytes(b"not a checkpoint")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("truncated", "is damaged or not a safetensors file"),
        ("garbage", "is damaged or not a safetensors file"),
        ("foreign", "is not a checkpoint of a fedrolex run"),
        ("newer", "has format 9; this version reads 1"),
        ("other model", "the model has no tensor 'a'"),
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
        if writes["n"] == 5:
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
    assert [one["seed"] for one in found] == [4, 5]
    assert found[0]["method"] == "heterofl"
    assert (tmp_path / "x" / "seed-5" / "recipe.yaml").is_file()


def test_list_and_show() -> None:
    listed = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)
    assert listed["methods"] == ["fedrolex", "heterofl", "fed_dropout", "fedavg"]
    assert listed["recipes"] == ["digits"]
    shown = CliRunner().invoke(app, ["show", "digits", "--set", "client.lr=0.5"]).stdout
    import yaml

    data = yaml.safe_load(shown)
    assert data["client"]["lr"] == 0.5
    assert data["deadline"] is None
    assert Recipe.decode(data).encode() == data


def test_start_from_given_weights(tmp_path: Path) -> None:
    first = RECIPE.with_settings(["rounds=2"])
    Run.create(tmp_path / "a", first).go(prepare(first))
    second = first.with_settings([f"weights={tmp_path / 'a' / 'checkpoint.safetensors'}"])
    made = prepare(second)
    tensors, _ = checkpoints.read(tmp_path / "a" / "checkpoint.safetensors")
    assert all(torch.equal(made.state[n], tensors[n]) for n in tensors)


def test_training_from_python_with_a_model_and_data_of_ones_own() -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 6)
    y = (x[:, 0] * x[:, 1] > 0).long()
    parts = even(300, 5, seed=0)
    task = Task(
        "mine",
        lambda scale: nn.Sequential(nn.Linear(6, 32 * scale), nn.ReLU(), nn.Linear(32 * scale, 2)),
        Examples(x[:300], y[:300]),
        Examples(x[300:], y[300:]),
        parts,
        alike(y[:300], parts, y[300:]),
    )
    recipe = Recipe(rounds=25, device="cpu", fleet=FleetRecipe(clients=5, cohort=5, capacities=["1", "1/2"]))
    done = train(recipe, task)
    assert done.summary["global_accuracy"] > 0.85
    assert len(done.rows) == 25


def test_partitions_are_disjoint_and_hold_what_they_say() -> None:
    labels = torch.arange(1000) % 10
    parts = by_label(labels, 20, 3, seed=1)
    rows = torch.cat(parts)
    assert len(rows) == len(rows.unique()) == 1000
    assert {len(labels[part].unique()) for part in parts} == {3}
    assert [part[:3].tolist() for part in even(10, 3, seed=5)] == [part[:3].tolist() for part in even(10, 3, seed=5)]
