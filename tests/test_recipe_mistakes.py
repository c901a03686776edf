"""Mistakes in recipes and commands: one clear line each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from small_runs import RECIPE
from typer.testing import CliRunner

from fedrolex import (
    ENGINES,
    FedrolexError,
    Recipe,
    prepare,
)
from fedrolex.cli.app import app


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


@pytest.mark.parametrize("words", [["--engine", "lop"], ["--set", "engine=lop"]])
def test_a_wrong_engine_says_which_there_are(words: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", *words, "--out", str(tmp_path / "x")])
    every = ", ".join(ENGINES.own())
    assert str(result.exception).startswith(f"engine is 'lop' (did you mean 'loop'?): use one of {every}")
    told = re.sub(r"[│\s]+", " ", CliRunner().invoke(app, ["train", "--help"], terminal_width=200).stdout)
    assert f"How client work runs: {every}, or package.module:Name." in told


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
