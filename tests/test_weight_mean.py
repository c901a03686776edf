"""The mean of the server's weights over rounds: what it is, that training does not see it, and that a run keeps it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_runs import RECIPE, finished, same

from fedrolex import FedrolexError, Recipe, Run, Training, load, prepare, train
from fedrolex.clients.messages import MODEL
from fedrolex.rounds.server import State
from fedrolex.rounds.weight_mean import COUNTED, WeightMean, with_means

FEW = RECIPE.with_settings(["rounds=4", "checkpoint_every=2", "evaluate_every=4", "callbacks=[]", "mean_over=3"])


def states(made: Training, rounds: int) -> list[State]:
    found = []
    for _ in range(rounds):
        made.run_round()
        found.append({key: dict(tensors) for key, tensors in made.server.state.items()})
    return found


@pytest.mark.parametrize("method", ["fedrolex", "columns"])
def test_it_is_an_exponential_mean_that_begins_as_a_plain_one(method: str) -> None:
    made = prepare(FEW.with_settings([f"method={method}"]))
    seen = states(made, 4)
    sections = [key for key in seen[0] if key == MODEL or key.startswith("column")]
    assert len(sections) == (1 if method == "fedrolex" else len(made.server.fleet.levels) - 1)
    for section in sections:
        for name in seen[0][section]:
            one, two, three, four = (state[section][name].double() for state in seen)
            expected = (one + two + three) / 3 * 2 / 3 + four / 3
            torch.testing.assert_close(made.server.state[f"mean.{section}"][name].double(), expected)


def test_training_does_not_see_it() -> None:
    with_mean, without = states(prepare(FEW), 3), states(prepare(FEW.with_settings(["mean_over=1"])), 3)
    assert "mean.model" in with_mean[-1]
    assert "mean.model" not in without[-1]
    assert all(torch.equal(with_mean[-1][MODEL][name], tensor) for name, tensor in without[-1][MODEL].items())


def test_what_is_judged_is_the_mean() -> None:
    made = prepare(FEW)
    states(made, 4)
    found = made.evaluate()
    plain = prepare(FEW.with_settings(["mean_over=1"]))
    plain.server.state = {MODEL: made.server.state["mean.model"]}
    plain.server.round = made.server.round
    assert found == plain.evaluate()
    made.server.state = {MODEL: made.server.state[MODEL]}
    assert found["loss"] != made.evaluate()["loss"]


def test_whole_numbers_are_those_of_the_last_round() -> None:
    state = {MODEL: {"w": torch.tensor([2.0]), "n": torch.tensor(5)}}
    begun: State = {**state, **WeightMean(2).begin({MODEL: {"w": torch.zeros(1), "n": torch.tensor(1)}}, [MODEL])}
    begun[COUNTED] = {"rounds": torch.tensor([7])}
    moved = WeightMean(2).moved(begun)
    assert moved == {
        "mean.model": {"w": torch.tensor([1.0]), "n": torch.tensor(5)}, COUNTED: {"rounds": torch.tensor([8])}
    }  # fmt: skip
    assert with_means({**begun, **moved})[MODEL] == moved["mean.model"]


def test_void_rounds_leave_no_untrained_weights_in_the_mean() -> None:
    """The first round that counts is all of the mean, however many were void before it."""
    few = ["mean_over=5", "fleet.cohort=2", "quorum=2", "fleet.availability=0.3", "seed=3"]
    made, again = (prepare(FEW.with_settings(few)) for _ in range(2))
    void = [made.run_round()["void"] for _ in range(8)]
    first = void.index(False)
    assert first > 0
    for _ in range(first + 1):
        again.run_round()
    assert all(torch.equal(mean, again.server.state[MODEL][n]) for n, mean in again.server.state["mean.model"].items())
    assert int(made.server.state[COUNTED]["rounds"]) == void.count(False)


def test_a_run_that_goes_on_has_the_same_mean(tmp_path: Path) -> None:
    train(FEW, out=tmp_path / "whole")
    train(FEW.with_settings(["rounds=2"]), out=tmp_path / "halves")
    train(FEW, out=tmp_path / "halves", resume=True)
    whole, halves = finished(tmp_path / "whole"), finished(tmp_path / "halves")
    assert "mean.model:conv1.weight" in whole[0]
    assert same((whole[0], whole[1][-1:]), (halves[0], halves[1][-1:]))


def test_what_a_run_gives_away_is_the_mean(tmp_path: Path) -> None:
    trained = train(FEW, out=tmp_path / "run")
    mean = finished(tmp_path / "run")[0]["mean.model:conv1.weight"]
    for model in (trained.model, trained.whole, load(tmp_path / "run"), trained.submodel("1")):
        found = model.get_parameter("conv1.weight").detach()
        assert torch.equal(found.flatten().sort().values, mean.flatten().sort().values)  # windows have rolled on


def test_it_begins_at_given_weights(tmp_path: Path) -> None:
    train(FEW, out=tmp_path / "run")
    made = prepare(FEW.with_settings([f"weights={tmp_path / 'run' / 'checkpoint.safetensors'}"]))
    weights = finished(tmp_path / "run")[0]["model:conv1.weight"]
    assert torch.equal(made.server.state["mean.model"]["conv1.weight"], weights)


def test_a_run_keeps_the_mean_it_was_begun_with(tmp_path: Path) -> None:
    train(FEW, out=tmp_path / "run")
    with pytest.raises(FedrolexError, match="mean_over"):
        train(FEW.with_settings(["mean_over=5", "rounds=5"]), out=tmp_path / "run", resume=True)


def test_fewer_than_one_round_is_refused() -> None:
    with pytest.raises(FedrolexError, match="mean_over is 0: give at least 1"):
        Recipe().with_settings(["mean_over=0"])


def test_details_are_measured_once_a_run_is_finished(tmp_path: Path) -> None:
    recipe = FEW.with_settings(["callbacks=[details]", "rounds=2"])
    summary = train(recipe, out=tmp_path / "run").summary
    found = json.loads((tmp_path / "run" / "details.json").read_text())
    assert set(found["submodels"]) == {str(level) for level in recipe.fleet.build(1).levels}
    assert found["submodels"]["1"] == pytest.approx(summary["global_accuracy"])
    local, task = found["local"], prepare(recipe).server.task
    assert len(local["clients"]) == len(local["masked"]) == len(local["capacities"]) == task.clients
    with pytest.raises(FedrolexError):
        Run.create(tmp_path / "broken", recipe.with_settings(["quorum=5", "deadline=0.000001"])).go(
            prepare(recipe.with_settings(["quorum=5", "deadline=0.000001"]))
        )
    assert not (tmp_path / "broken" / "details.json").exists()
