"""A separate package brings one of everything: installed, named in recipes and on the command line, and trained."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_cluster import two_nodes
from typer.testing import CliRunner

from fedrolex import FedrolexError, FleetRecipe, Recipe, train
from fedrolex.cli.app import app, main
from fedrolex.core.registry import ENGINES, METHODS, REGISTRIES
from fedrolex.runs.prepare import prepare

PLUGIN = Path(__file__).parent / "plugin"
SMALL = ["fleet.clients=6", "fleet.cohort=4", "fleet.capacities=[1, 1/2, 1/4]", "rounds=2", "compare=false"]
BROUGHT = {
    "methods": "clipped", "schemes": "striped", "engines": "backwards", "models": "perceptron", "data sets": "stripes",
    "metrics": "confidence", "callbacks": "diary",
}  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, installed into a folder of its own."""
    folder, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source") / "plugin"
    shutil.copytree(PLUGIN, source)  # building leaves files behind
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(folder), str(source)], check=True)
    return folder


@pytest.fixture
def brought(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package can be imported, and its entry points are found, in this process."""
    monkeypatch.syspath_prepend(str(installed))
    return installed


def fedrolex(*words: str, path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, which finds the package as users' processes do."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "fedrolex", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, check=False)


def settings(*words: str) -> list[str]:
    return [part for word in (*SMALL, *words) for part in ("--set", word)]


def test_list_shows_what_is_brought_and_from_where(brought: Path, tmp_path: Path) -> None:
    done = fedrolex("list", "--json", path=brought, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    origins = json.loads(done.stdout)["origins"]
    assert {kind: origins[kind][name] for kind, name in BROUGHT.items()} == dict.fromkeys(BROUGHT, "fedrolex-plugin")
    assert origins["methods"]["fedrolex"] == "fedrolex"
    assert "clipped" in CliRunner().invoke(app, ["list"]).stdout


@pytest.mark.parametrize("by", ["entry point", "module"])
def test_everything_trains_from_the_command_line(brought: Path, tmp_path: Path, by: str) -> None:
    def name(short: str, place: str) -> str:
        return short if by == "entry point" else f"fedrolex_plugin.{place}"

    words = settings(
        f"method={name('clipped', 'clipped:Clipped')}",
        "method.most=2.0",
        f"task.model={name('perceptron', 'bring:perceptron')}",
        f"task.data={name('stripes', 'bring:stripes')}",
        f"evaluation.metrics=[{name('confidence', 'bring:confidence')}]",
        f"callbacks=[drift, {name('diary', 'bring:Diary')}]",
        f"engine={name('backwards', 'backwards:Backwards')}",
    )
    done = fedrolex("train", *words, "--out", "run", "--json", path=brought, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (summary,) = json.loads(done.stdout)["runs"]
    assert summary["rounds"] == 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    metric = next(key for key in rows[-1] if "confidence" in key)
    assert 0 < rows[-1][metric] <= 1
    assert (tmp_path / "run" / "diary.txt").read_text() == "2 rounds\n"
    again = fedrolex("resume", "run", path=brought, cwd=tmp_path)  # here, another test's method may have the name
    assert again.returncode == 0, again.stderr


def test_a_scheme_of_ones_own_is_trained_and_analysed(brought: Path, tmp_path: Path) -> None:
    words = settings("method=submodels", "method.scheme=striped", "method.options={step: 2}", "task.width=8")
    done = fedrolex("train", *words, "--out", "run", "--json", path=brought, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = ["coverage", "small:Residual", "--input", "2x3x8x8", "--scheme", "striped", "--capacity", "1/4", "--json"]
    covered = CliRunner().invoke(app, [*words, "--rounds", "8"])
    assert covered.exit_code == 0, covered.output
    assert "striped" in covered.stdout


@pytest.mark.usefixtures("brought")
@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("method=clippd", "did you mean 'clipped'"),
        ("method=fedrolex_plugin.clipped:Cliped", "did you mean 'Clipped'"),
        ("method=fedrolex_plugin.missing:Clipped", "fedrolex_plugin.missing"),
        ("method=fedrolex_plugin.bring:perceptron", "method"),
        ("callbacks=[fedrolex_plugin.bring:confidence]", "callback"),
        ("engine=fedrolex_plugin.clipped:Clipped", "engine"),
        ("task.model=fedrolex_plugin.bring:nothing", "nothing"),
    ],
)
def test_a_wrong_name_is_one_line(
    word: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fedrolex", "train", *settings(word), "--out", str(tmp_path / "run")])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert told in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def tiny(method: Any, engine: str) -> Recipe:
    words = ["task.width=8", "task.limit=200", *SMALL, f"engine={engine}"]
    return replace(Recipe().with_settings(words), method=method)


def engines() -> list[str]:
    return [*ENGINES.own(), "backwards"]


def made(method: Any, engine: str) -> Any:
    """A training on an engine; where the engine cannot be made on this machine, the test is skipped with its reason."""
    if engine == "ray":
        two_nodes()
    try:
        return prepare(tiny(method, engine))
    except FedrolexError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("brought")
@pytest.mark.parametrize("engine", engines())
def test_its_method_gives_the_same_on_every_engine_that_says_it_can(engine: str) -> None:
    method = METHODS.find("fedrolex_plugin.clipped:Clipped")(most=2.0)
    plain, other = made(method, "loop"), made(method, engine)
    told: list[str] = []
    other.say = told.append
    for training in (plain, other):
        for _ in range(2):
            training.run_round()
    why = other.engine.supports(other.plan(method.jobs(other.server, 2)))
    assert told == ([] if why is None else [f"engine: loop ({why})"])
    for name, tensor in plain.server.state["model"].items():
        torch.testing.assert_close(other.server.state["model"][name].cpu(), tensor.cpu(), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("brought")
@pytest.mark.parametrize("engine", engines())
def test_a_step_that_does_nothing_moves_nothing(engine: str) -> None:
    from fedrolex_plugin.idle import Idle

    training = made(Idle(), engine)
    told: list[str] = []
    training.say = told.append
    before = {name: tensor.clone() for name, tensor in training.server.state["model"].items()}
    row = training.run_round()
    assert row["clients"] == 4
    assert all(torch.equal(training.server.state["model"][name], tensor) for name, tensor in before.items())
    if training.engine.supports(training.plan(training.method.jobs(training.server, 1))) is not None:
        assert told == ["engine: loop (Resting has its own step)"]


@pytest.mark.usefixtures("brought")
def test_an_engine_that_cannot_is_not_used_and_says_why() -> None:
    recipe = replace(tiny(METHODS.find("fedrolex_plugin.clipped:Clipped")(), "backwards"), deadline=100.0)
    training = prepare(recipe)
    told: list[str] = []
    training.say = told.append
    training.run_round()
    assert told == ["engine: loop (backwards does not look at the clock)"]


def test_decorators_register_and_taken_names_are_refused() -> None:
    @METHODS.register("mine, for this test")
    class Mine(METHODS.find("fedrolex")):  # type: ignore[misc]
        pass

    assert METHODS.find("mine, for this test") is Mine
    assert Mine().name == "mine, for this test"
    with pytest.raises(FedrolexError, match="already"):
        METHODS.register("fedavg")(Mine)
    done = train(Recipe(rounds=1, method=Mine(), fleet=FleetRecipe(clients=2, cohort=1)))
    assert done.summary["method"] == "mine, for this test"


@pytest.mark.parametrize("kind", REGISTRIES)
def test_everything_of_the_package_itself_is_found(kind: str) -> None:
    registry = REGISTRIES[kind]
    for name in registry.own():
        try:
            assert registry.find(name) is not None
        except FedrolexError as error:  # an engine whose library is not on this machine
            assert "triton" in str(error).lower()
