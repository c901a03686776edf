"""Runs in Python: a model and data of one's own, weights to start from, and the model that comes out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import FEW, RECIPE
from torch import Tensor, nn
from typer.testing import CliRunner

from fedrolex import (
    Classification,
    Examples,
    FedAvg,
    FedrolexError,
    FleetRecipe,
    Recipe,
    Run,
    Server,
    Task,
    prepare,
    train,
)
from fedrolex.cli.app import app
from fedrolex.runs import checkpoint as checkpoints
from fedrolex.tasks.partition import even


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


def test_a_run_in_which_no_round_counted_says_so(tmp_path: Path) -> None:
    recipe = RECIPE.with_settings(["rounds=2", "fleet.trace=[[]]"])
    with pytest.raises(FedrolexError, match="no round counted: fewer than 1 clients were there"):
        Run.create(tmp_path / "run", recipe).go(prepare(recipe))


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
