"""Runs that are killed, stopped, damaged or changed: they go on to the same bits, or say in one line why not."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import RECIPE, command, finished, same, settings
from typer.testing import CliRunner

from fedrolex import (
    FedrolexError,
    Run,
    prepare,
)
from fedrolex.cli.app import app
from fedrolex.recipes import find_recipe
from fedrolex.runs import checkpoint as checkpoints


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs") / "whole"
    Run.create(folder, RECIPE).go(prepare(RECIPE))
    return finished(folder)


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
