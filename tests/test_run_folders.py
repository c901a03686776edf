"""Run folders: each belongs to one process at a time, and no two commands choose the same one."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import Result
from methods_shared import SMALL
from run_folders import RECIPE, resumed, same, stopped, whole
from told import told
from typer.testing import CliRunner

from fedrolex import Callback, Run, load, prepare, train
from fedrolex.cli.app import app
from fedrolex.runs import lock


def test_while_a_run_goes_on_nobody_else_can_train_it(tmp_path: Path) -> None:
    run, said, statuses = Run.create(tmp_path / "run", RECIPE), [], []

    def meanwhile(row: dict[str, Any]) -> None:
        if row["round"] == 1:
            words = [sys.executable, "-m", "fedrolex", "resume", str(run.folder)]
            done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            statuses.append(done.returncode)
            said.append(done.stderr)
            assert lock.in_use(run.folder)

    run.go(prepare(RECIPE), meanwhile)
    assert statuses == [2]
    assert said == [f"error: {run.folder} is being trained by another process: wait for it, or stop it first\n"]
    assert not lock.in_use(run.folder)
    assert same(run, whole(tmp_path / "alone"))


def test_within_one_process_too_and_a_run_that_stopped_is_free(tmp_path: Path) -> None:
    run = stopped(tmp_path / "run")
    with lock.locked(run.folder):
        assert "is being trained by another process" in told(lambda: resumed(run))
        assert "is being trained by another process" in told(lambda: run.change(RECIPE))
    assert resumed(run).rows()[-1]["round"] == 3


def test_where_there_are_no_locks_runs_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "fcntl", None)
    with lock.locked(tmp_path), lock.locked(tmp_path):
        assert not lock.in_use(tmp_path)


def test_a_pipe_in_the_place_of_a_lock_is_not_waited_for(tmp_path: Path) -> None:
    """Here its other end is open, so that even to open it would not wait."""
    os.mkfifo(tmp_path / lock.NAME)
    end = os.open(tmp_path / lock.NAME, os.O_RDWR)
    with open(tmp_path / lock.NAME, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not lock.in_use(tmp_path)
    assert f"{tmp_path / lock.NAME} is a pipe and no file: delete it" in told(lambda: lock.locked(tmp_path).__enter__())
    os.close(end)


class Second(Callback):
    """While a run is being prepared, the same command is given a second time."""

    words: ClassVar[list[str]] = []
    results: ClassVar[list[Result]] = []

    def __init__(self) -> None:
        words, Second.words = Second.words, []
        if words:
            Second.results = [CliRunner().invoke(app, words)]


def train_twice(*words: str) -> list[Result]:
    settings = [*SMALL, "callbacks=[test_run_folders:Second]", "rounds=1", "compare=false", "engine=loop"]
    Second.words = ["train", "--device", "cpu", *(w for s in settings for w in ("--set", s)), *words]
    return [CliRunner().invoke(app, Second.words), *Second.results]


def test_two_commands_at_once_choose_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [result.exit_code for result in train_twice()] == [0, 0]
    assert sorted(path.name for path in Path("runs").iterdir()) == ["digits-fedrolex-1", "digits-fedrolex-2"]
    assert all(len(Run.open(path).rows()) == 1 for path in Path("runs").iterdir())


def test_of_two_commands_with_one_folder_the_slower_is_refused(tmp_path: Path) -> None:
    slow, quick = train_twice("--out", str(tmp_path / "run"))
    assert quick.exit_code == 0
    assert f"{tmp_path}/run exists already" in str(slow.exception)


def test_a_folder_that_is_empty_is_taken(tmp_path: Path) -> None:
    assert Run.create(tmp_path, RECIPE).recipe() == RECIPE
    assert "exists already" in told(lambda: Run.create(tmp_path, RECIPE))


@pytest.mark.parametrize("compare", ["false", "true"])
@pytest.mark.parametrize("folder", [".", "", "..", "/"])
def test_a_new_run_has_a_name(folder: str, compare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "name its folder" in told(lambda: train(RECIPE.with_settings([f"compare={compare}"]), out=folder))
    assert not list(tmp_path.iterdir())


def test_a_folder_need_not_have_a_name_in_utf_8(tmp_path: Path) -> None:
    run = stopped(tmp_path / os.fsdecode(b"r\x80"), "method=scaffold")
    assert same(resumed(run), whole(tmp_path / "whole", "method=scaffold"))
    assert load(run.folder).state_dict()
    run.change(run.recipe().with_settings(["callbacks=[tensorboard]"]))
    assert "TensorBoard writes into no folder whose name is not UTF-8: rename it, or" in told(lambda: resumed(run))


def test_a_run_goes_on_from_inside_with_what_it_is_compared_with_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stopped(tmp_path / "run", "compare=true", "rounds=1", rounds=1).folder)
    assert CliRunner().invoke(app, ["resume", "."]).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", *(f"run-alone-{n}" for n in (1, 2, 3, 4))]
