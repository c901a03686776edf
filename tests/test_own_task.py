"""A task of one's own: what it says is checked, and counts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_data import RECIPE, X, Y, split
from told import told
from torch import nn

from fedrolex import (
    Callback,
    Classification,
    ClientRecipe,
    Examples,
    FedAvg,
    Run,
    load,
    train,
)
from fedrolex.runs.callbacks import tell_row
from fedrolex.runs.run import same_data
from fedrolex.tasks.metrics import measured


@dataclass(frozen=True)
class Odd(Classification):
    """Says something odd about its data, or about a model."""

    print_: object = "data"
    accuracy: object = 0.5
    said: object = None

    def fingerprint(self) -> Any:
        if isinstance(self.print_, Exception):
            raise self.print_
        return self.print_

    def evaluate(self, model: nn.Module, **how: Any) -> dict[str, Any]:
        return {**super().evaluate(model, **how), "global_accuracy": self.accuracy}

    def facts(self) -> dict[str, Any]:
        return {"said": self.said}


def odd(**changes: Any) -> Odd:
    plain = split()
    assert isinstance(plain, Classification)
    return Odd(**{each.name: getattr(plain, each.name) for each in fields(plain)} | {"name": "own", **changes})


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"print_": None}, "fingerprint() of task own gives a NoneType: give text"),
        ({"print_": 7}, "fingerprint() of task own gives a int: give text"),
        ({"print_": KeyError("x")}, "fingerprint() of task own failed: KeyError: 'x'"),
        ({"accuracy": "good"}, "task own gives global_accuracy 'good': give a number"),
        ({"said": object}, "facts() of task own failed: TypeError: Object of type type is not JSON serializable"),
    ],
)
def test_what_a_task_of_ones_own_says_is_checked(changes: dict[str, Any], line: str) -> None:
    assert line in told(lambda: train(RECIPE, odd(**changes)))


def test_a_run_goes_on_by_the_part_of_a_fingerprint_before_the_plus(tmp_path: Path) -> None:
    """A task that hashes more than the version which began the run."""
    train(RECIPE, odd(print_="a"), out=tmp_path / "run")
    train(None, odd(print_="a+b"), out=tmp_path / "run", resume=True)
    said = told(lambda: train(None, odd(print_="a+c"), out=tmp_path / "run", resume=True))
    assert "has changed since its checkpoint" in said
    assert not any(same_data({"data": "a"}, other) for other in ("ab", "b", "", "b+a"))


def test_examples_put_aside_count_in_a_fingerprint_after_a_plus() -> None:
    plain = split(validation=0.2, public=0.2)
    assert isinstance(plain, Classification)
    assert plain.public is not None
    other = replace(plain, public=Examples(plain.public.x + 1, plain.public.y))
    assert plain.fingerprint() != other.fingerprint()
    assert plain.fingerprint().partition("+")[0] == other.fingerprint().partition("+")[0]
    assert "+" not in split().fingerprint()


@dataclass(frozen=True, kw_only=True)
class Holding(FedAvg):
    """A method with a setting of any kind."""

    what: Any = None


def test_a_recipe_holds_numbers_of_numpy_and_no_objects(tmp_path: Path) -> None:
    rate = np.float64(0.125)
    train(replace(RECIPE, client=ClientRecipe(lr=rate)), split(), out=tmp_path / "run")
    assert Run.open(tmp_path / "run").recipe().client.lr == 0.125

    said = told(lambda: train(replace(RECIPE, method=Holding(what=print)), split(), out=tmp_path / "other"))
    assert "a recipe cannot hold <built-in function print>" in said
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_a_path_that_nothing_can_have_is_one_line(name: str) -> None:
    assert "a run's folder cannot be " in told(lambda: train(RECIPE, split(), out=name))
    assert "a run's folder cannot be " in told(lambda: load(name))


def test_autocast_around_a_training_changes_nothing() -> None:
    seen: list[bool] = []
    with torch.autocast("cpu", torch.bfloat16):
        train(RECIPE, split(), progress=lambda row: seen.append(torch.is_autocast_enabled("cpu")))
    assert seen == [False]


class Late(Callback):
    """Changes the metrics when they are complete."""

    def row(self, training: Any, row: dict[str, Any]) -> None:
        row["dropped"]["0"] = object()


def test_complete_metrics_are_not_changed() -> None:
    row = {"round": 0, "dropped": {}}
    said = told(lambda: tell_row([Callback(), Late()], Any, row))  # type: ignore[arg-type]
    assert "callback Late changed the metrics of a round in row(), when they are complete: add to them in" in said
    assert row == {"round": 0, "dropped": {}}


def test_a_metric_gives_a_number_and_no_text() -> None:
    said = told(lambda: measured({"mine": lambda *_: "0.5"}, X, Y, {}))  # type: ignore[dict-item]
    assert said == "metric mine failed: TypeError: it gives text, not a number"
