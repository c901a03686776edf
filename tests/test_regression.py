"""Numbers to predict instead of classes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from own_data import RECIPE, network
from told import told
from torch import Tensor
from typer.testing import CliRunner

from fedrolex import (
    ClientRecipe,
    Examples,
    Fjord,
    Fleet,
    FleetRecipe,
    Regression,
    Task,
    TaskRecipe,
    train,
)
from fedrolex.cli.app import app
from fedrolex.tasks import Mask
from fedrolex.tasks.metrics import mean_absolute_error, r2


def linear(rows: int = 300) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))
    return x, x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 3


def numbers(outputs: int = 1) -> Task:
    x, y = linear()
    return Task.split(network(outputs), Examples(x[:200], y[:200]), Examples(x[200:], y[200:]), clients=4)


def test_errors_by_hand() -> None:
    said, y = torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([[1.0], [3.0], [5.0]])
    assert mean_absolute_error(said, y) == pytest.approx(2 / 3)
    assert r2(said, y) == 1 - 2 / 8
    assert r2(y, y) == 1
    assert r2(torch.full_like(y, 3.0), y) == 0
    same = torch.ones(3, 1)
    assert [r2(same, same), r2(said, same)] == [1.0, 0.0]
    both = torch.cat([y, 10 * y], 1)  # 8 and 800 of variance, 2 and 0 of error
    assert r2(torch.cat([said, 10 * y], 1), both) == pytest.approx(1 - 2 / 808)


@pytest.mark.parametrize("engine", ["loop", "crew"])
def test_numbers_are_learned(engine: str, tmp_path: Path) -> None:
    recipe = replace(RECIPE, rounds=15, engine=engine, client=ClientRecipe(lr=0.02), callbacks=["drift", "tensorboard"])
    task = numbers()
    assert isinstance(task, Regression)
    done = train(recipe, task, out=tmp_path / "run")
    last = done.rows[-1]
    assert last["r2"] > 0.75
    assert last["mean_absolute_error"] < 1
    assert {key: done.summary[key] for key in ("loss", "mean_absolute_error", "r2")} == {
        key: last[key] for key in ("loss", "mean_absolute_error", "r2")
    }
    assert done.summary["best_r2"] == max(row["r2"] for row in done.rows if "r2" in row)
    assert not any("accuracy" in key for key in done.summary)
    with torch.no_grad():
        said = done.model.eval()(task.test.x)
    assert float((said - task.test.y).square().mean()) == pytest.approx(last["loss"], rel=1e-5)
    assert last["mean_absolute_error"] == mean_absolute_error(said, task.test.y)


def test_methods_of_classes_do_not_take_numbers() -> None:
    for recipe, says in (
        (RECIPE.with_settings(["method=feddf"]), "feddf compares scores of classes"),
        (RECIPE.with_settings(["method=fedgkt"]), "fedgkt compares scores of classes"),
        (RECIPE.with_settings(["method=fedselect"]), "fedselect needs one axis for the 0 classes"),
        (RECIPE.with_settings(["method.rows=true"]), "method.rows needs one axis for the 0 classes"),
        (RECIPE.with_settings(["client.mask=zero"]), "client.mask is zero, but task has no classes to mask"),
        (RECIPE.with_settings(["method=fjord"]), "method.distil compares scores of classes, which task has not"),
        (RECIPE.with_settings(["evaluation.metrics=[top5]", "evaluate_every=1"]), "metric top5 failed"),
    ):
        assert says in told(lambda recipe=recipe: train(recipe, numbers()))  # type: ignore[misc]
    assert train(replace(RECIPE, method=Fjord(distil=False)), numbers()).summary["r2"] < 1


@dataclass(frozen=True, kw_only=True)
class Line(TaskRecipe):
    """A task of numbers, as a section of a recipe."""

    def open(self, fleet: FleetRecipe, *, seed: int, folder: Path, mask: Mask) -> tuple[Task, Fleet]:
        return numbers(), fleet.build(seed)


def test_a_comparison_of_numbers_on_the_command_line(tmp_path: Path) -> None:
    words = ["task=test_regression:Line", "fleet.clients=4", "fleet.cohort=2", "rounds=2", "compare=true", "device=cpu",
             "evaluation.submodels=true", "client.lr=0.02"]  # fmt: skip
    settings = [word for each in words for word in ("--set", each)]
    done = CliRunner().invoke(app, ["train", *settings, "--out", str(tmp_path / "run")], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    for said in ("mean absolute error", "R²", "sub-models of fedrolex, R²: 1: ", "in R²."):
        assert said in done.stdout
    assert "accuracy" not in done.stdout.replace("accuracy.png", "")
    assert (tmp_path / "run" / "accuracy.png").is_file()
