"""MLflow and Weights & Biases as callbacks: against small stand-ins, and MLflow itself where it is installed."""

from __future__ import annotations

import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_folders import RECIPE, resumed, stopped, whole

from fedrolex import FedrolexError, prepare
from fedrolex.runs.callbacks import numbers


def test_numbers_are_told_flat() -> None:
    row = {"round": 3, "void": False, "loss": 0.5, "macs": None, "drift": {"1/2": 0.25}, "statistics": "running"}
    assert numbers(row) == {"loss": 0.5, "drift/1/2": 0.25}


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_what_is_not_installed_is_refused_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(FedrolexError, match=f"callback {name} needs the package {name}: pip install {name}"):
        prepare(RECIPE.with_settings([f"callbacks=[{name}]"]))


class FakeClient:
    """What of MLflow's client the callback uses."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told

    def get_experiment_by_name(self, name: str) -> Any:
        return self.told["experiments"].get(name)

    def create_experiment(self, name: str) -> str:
        self.told["experiments"][name] = SimpleNamespace(experiment_id="7")
        return "7"

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.told["runs"].append((experiment, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def update_run(self, run: str, status: str) -> None:
        self.told["status"].append((run, status))

    def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
        assert run == "abc"
        assert len(params) <= 100
        self.told["metrics"] += metrics
        self.told["params"] += params

    def set_terminated(self, run: str, status: str) -> None:
        self.told["status"].append((run, status))


def test_mlflow_is_told_and_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {"experiments": {}, "runs": [], "metrics": [], "params": [], "status": []}
    entities = SimpleNamespace(Param=lambda *words: words, Metric=lambda *words: words)
    fake = SimpleNamespace(MlflowClient=lambda: FakeClient(told), entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    run = stopped(tmp_path / "run", "callbacks=[mlflow]")
    assert told["runs"] == [("7", "run")]
    assert dict(told["params"])["method.name"] == '"fedrolex"'
    assert told["status"] == [("abc", "KILLED")]
    resumed(run)
    assert told["runs"] == [("7", "run")]
    assert told["status"][1:] == [("abc", "RUNNING"), ("abc", "FINISHED")]
    accuracies = [(step, value) for name, value, _, step in told["metrics"] if name == "global_accuracy"]
    assert accuracies == [(row["round"], row["global_accuracy"]) for row in run.rows() if "global_accuracy" in row]
    assert {step for *_, step in told["metrics"]} == {0, 1, 2, 3}


def test_wandb_is_told_and_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, Any]] = []
    logged: dict[int, dict[str, float]] = defaultdict(dict)
    codes: list[int] = []

    def init(**words: Any) -> Any:
        begun.append(words)
        return SimpleNamespace(
            id="xyz",
            log=lambda numbers, step: logged[step].update(numbers),
            finish=lambda exit_code: codes.append(exit_code),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    run = stopped(tmp_path / "run", "callbacks=[wandb]")
    resumed(run)
    assert [(each["id"], each["name"]) for each in begun] == [(None, "run"), ("xyz", "run")]
    assert begun[0]["config"]["method"]["name"] == "fedrolex"
    assert codes == [1, 0]
    assert [logged[row["round"]]["bytes_up"] for row in run.rows()] == [row["bytes_up"] for row in run.rows()]


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow (pip install mlflow)")
def test_mlflow_itself_keeps_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "small")
    run = whole(tmp_path / "run", "callbacks=[mlflow]")
    from mlflow import MlflowClient

    kept = (tmp_path / "run" / "mlflow.txt").read_text().strip()
    client = MlflowClient()
    found = client.get_run(kept)
    assert found.info.status == "FINISHED"
    assert found.data.params["rounds"] == "4"
    history = [(each.step, each.value) for each in client.get_metric_history(kept, "global_accuracy")]
    assert history == [(row["round"], row["global_accuracy"]) for row in run.rows() if "global_accuracy" in row]
