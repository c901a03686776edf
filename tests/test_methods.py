"""Every method: resumes bit for bit, is refused early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from methods_shared import SMALL, small
from safetensors.torch import load_file

from fedrolex import Classification, FedrolexError, Recipe, train
from fedrolex.methods.fedgkt import MAPS
from fedrolex.runs import Run, prepare

# --- every method: trains, resumes bit for bit, is refused early ---

FAMILIES = "task.models={1/2: resnet8:4}"
METHODS = {
    "fedprox": ["method=fedprox", "fleet.stragglers=0.3"],
    "scaffold": ["method=scaffold", "method.denominator=momentum"],
    "scaffold I": ["method=scaffold", "method.option=I"],
    "fjord": ["method=fjord"],
    "fedbe": ["method=fedbe", "method.ensemble={epochs: 4, average_from: 3, average_every: 1}"],
    "dsfl": ["method=dsfl", "method.labels={epochs: 2}"],
    "fedet": ["method=fedet", "method.transfer={steps: 10}"],
    "fedselect": ["method=fedselect", "task.partition={name: labels, labels: 2}"],
    "fedgkt": ["method=fedgkt", "method.knowledge={server_epochs: 1}"],
    "feddf": ["method=feddf", "method.distillation={steps: 10, judge_every: 5}"],
    "families, feddf": ["method=feddf", FAMILIES, "method.distillation={steps: 6, judge_every: 3}"],
    "families, fedet": ["method=fedet", FAMILIES, "method.transfer={steps: 6}"],
    "families, dsfl": ["method=dsfl", FAMILIES, "method.labels={epochs: 2}", "engine=auto"],
    "fedrolex, adam": ["method=fedrolex", "method.server={name: adam, lr: 0.01, momentum: 0.9}"],
}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_is_interrupted_goes_on_to_the_same_bits(method: str, tmp_path: Path) -> None:
    recipe = Recipe(device="cpu").with_settings([*SMALL, *METHODS[method], "rounds=5", "checkpoint_every=2"])
    whole, broken = Run.create(tmp_path / "whole", recipe), Run.create(tmp_path / "broken", recipe)
    whole.go(prepare(recipe))

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 2:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        broken.go(prepare(recipe), stop)
    broken.go(prepare(recipe))
    one, other = load_file(whole.checkpoint), load_file(broken.checkpoint)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)

    def timeless(run: Run) -> list[dict[str, Any]]:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in run.rows()]

    assert json.dumps(timeless(whole)) == json.dumps(timeless(broken))


@pytest.mark.parametrize("method", METHODS)
def test_from_python_a_trained_model_comes_back(method: str) -> None:
    """With it, the accuracy that was measured; where everyone trains one width, of that part of it."""
    recipe = Recipe(device="cpu").with_settings([*SMALL, *METHODS[method], "rounds=2", "evaluation.batch=300"])
    done = train(recipe)
    again = prepare(recipe)
    task, model, width = again.task, done.model, again.method.width
    assert isinstance(task, Classification)
    if method == "fedgkt":  # the server's part takes feature maps, which clients' first layers make
        assert model(torch.zeros(2, MAPS, 8, 8)).shape == (2, 10)
        return
    if width is not None:
        model = done.axes.cut(model, again.window(0, width))
    right = (model.eval()(task.inputs(task.test.x)).argmax(1) == task.test.y).double().mean()
    assert float(right) == pytest.approx(done.summary["global_accuracy"])


def test_two_runs_write_the_same_file(tmp_path: Path) -> None:
    recipe = Recipe(device="cpu").with_settings([*SMALL, "rounds=1"])
    files = []
    for name in ("a", "b"):
        run = Run.create(tmp_path / name, recipe)
        run.go(prepare(recipe))
        files.append(run.checkpoint.read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize("method", ["scaffold", "dsfl", "fedgkt"])
def test_a_round_that_fails_at_its_end_is_made_again(method: str, tmp_path: Path) -> None:
    """Clients' states had already changed: the last checkpoint stands."""
    recipe = Recipe(device="cpu").with_settings(
        [*SMALL, *METHODS[method], "rounds=5", "checkpoint_every=2", "evaluate_every=1"]
    )
    whole, broken = Run.create(tmp_path / "whole", recipe), Run.create(tmp_path / "broken", recipe)
    whole.go(prepare(recipe))
    training = prepare(recipe)
    evaluate = training.evaluate

    def fail() -> dict[str, Any]:
        if training.round == 4:
            raise FedrolexError("out of luck")
        return evaluate()

    training.evaluate = fail  # type: ignore[method-assign]
    with pytest.raises(FedrolexError, match="out of luck"):
        broken.go(training)
    broken.go(prepare(recipe))
    one, other = load_file(whole.checkpoint), load_file(broken.checkpoint)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_ctrl_c_keeps_the_clients_states(tmp_path: Path) -> None:
    recipe = Recipe(device="cpu").with_settings([*SMALL, *METHODS["scaffold"], "rounds=4", "checkpoint_every=4"])
    whole, broken = Run.create(tmp_path / "whole", recipe), Run.create(tmp_path / "broken", recipe)
    whole.go(prepare(recipe))

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken.go(prepare(recipe), stop)
    training = prepare(recipe)
    broken.go(training)
    one, other = load_file(whole.checkpoint), load_file(broken.checkpoint)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_scaffold_sends_twice_as_much() -> None:
    one, two = (small(f"method={name}", "method.denominator=momentum").run_round() for name in ("fedavg", "scaffold"))
    assert [two["bytes_down"], two["bytes_up"]] == [2 * one["bytes_down"], 2 * one["bytes_up"]]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["method=scaffold"], "say by what option II divides"),
        (["method=scaffold", "client.optimizer=adam"], "needs client.optimizer sgd"),
        (["method=scaffold", "method.denominator=steps", "method.rows=true"], "method.rows does not go with scaffold"),
        (["method=fedbe", "task.public=0"], "fedbe needs public examples"),
        (["method=feddf", "task.validation=0"], "feddf needs held-out examples"),
        (["method=feddf", "task.public=digits"], "which is what is learned"),
        (["method=feddf", "method.server={name: adam}"], "method.server does not go with feddf"),
        (["method=fedbe", "method.ensemble={posterior: uniform}"], "use one of gaussian, released, dirichlet"),
        (["method=dsfl", "task.public=0"], "dsfl needs public examples"),
        (["method=dsfl", "method.labels={reduce: more}"], "use one of era, power, none"),
        (["method=fedbe", "method.ensemble={batch: 0}"], "method.ensemble.batch is 0: give a number of at least 2"),
        (["method=feddf", "method.distillation={temperature: -1}"], "give a number above 0"),
        (["method=fedet", "method.transfer={lr: .nan}"], "method.transfer.lr is nan: give a number above 0"),
        (["method=fedgkt", "method.knowledge={server_epochs: 0}"], "give a number of at least 1"),
        (["method=dsfl", "fleet.redrawn=true"], "dsfl clients keep their models"),
        (["method=fedgkt", "deadline=1"], "cannot interrupt clients"),
        (["method=feddf", "fleet.server=2"], "nodes that nobody trains"),
        (["method=fjord", "fleet.server=2"], "nodes that nobody trains"),
        (["method=fjord", "method.norms=per_capacity"], "does not go with fjord"),
        (["method=scaffold", "client.momentum=1"], "client.momentum is 1.0: give 0 or more, below 1"),
        (["method=fedselect", "client.mask=zero"], "needs client.mask none"),
        (["method=fedselect", "method.rows=true"], "does not go with fedselect"),
        (["method=fedselect", "method.keys=1"], "give at least 2"),
        (["method=fedet", "task.public=0"], "fedet needs public examples"),
        (["method=fjord", 'method.widths=["1/4", "1"]'], "method.widths has no 1/2"),
        (["method=fjord", "method.alpha=2"], "between 0 and 1"),
        (["method=fedprox", "method.mu=-1"], "give 0 or more"),
        (["method=fedrolex", "method.server={name: sgd, momentum: 1}"], "give 0 or more, below 1"),
        (["method=fedavg", "fleet.stragglers=2"], "give a chance between 0 and 1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings: list[str], said: str) -> None:
    with pytest.raises(FedrolexError, match=said) as error:
        small(*settings)
    assert "\n" not in str(error.value)
