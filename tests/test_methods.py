"""Every method: resumes bit for bit, gives a trained model back, is refused early."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from methods_shared import SMALL, answered, small, states
from safetensors.torch import load_file

from fedrolex import Classification, FedrolexError
from fedrolex.core.registry import METHODS as REGISTERED
from fedrolex.methods import FedRolex, SubModels
from fedrolex.methods.fedgkt import MAPS
from fedrolex.methods.needs import Needs
from fedrolex.recipes.recipe import Recipe
from fedrolex.runs.callbacks import Callback
from fedrolex.runs.prepare import prepare, train
from fedrolex.runs.run import Run
from fedrolex.runs.training import Training

FAMILIES = "task.models={1/2: resnet8:4}"
METHODS = {
    "fedprox": ["method=fedprox", "fleet.stragglers=0.3"],
    "scaffold": ["method=scaffold"],
    "scaffold I": ["method=scaffold", "method.option=I"],
    "fjord": ["method=fjord"],
    "fedbe": ["method=fedbe", "method.epochs=4", "method.average_from=3", "method.average_every=1"],
    "dsfl": ["method=dsfl", "method.epochs=2"],
    "fedet": ["method=fedet", "method.steps=10"],
    "fedselect": ["method=fedselect", "task.partition={name: labels, labels: 2}"],
    "fedgkt": ["method=fedgkt", "method.server_epochs=1"],
    "feddf": ["method=feddf", "method.steps=10", "method.judge_every=5"],
    "families, feddf": ["method=feddf", FAMILIES, "method.steps=6", "method.judge_every=3"],
    "families, fedet": ["method=fedet", FAMILIES, "method.steps=6"],
    "families, dsfl": ["method=dsfl", FAMILIES, "method.epochs=2"],
    "fedrolex, adam": ["method=fedrolex", "method.server_optimizer={name: adam, lr: 0.01, momentum: 0.9}"],
    "submodels": ["method=submodels", "method.scheme=random"],
}


def same_files(one: Run, other: Run) -> None:
    """Both runs wrote the same tensors and the same metrics."""
    first, second = load_file(one.checkpoint), load_file(other.checkpoint)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)

    def timeless(run: Run) -> list[dict[str, Any]]:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in run.rows()]

    assert json.dumps(timeless(one)) == json.dumps(timeless(other))


def stop_at(round: int, error: BaseException) -> Callable[[dict[str, Any]], None]:
    """Fails once a round is done."""

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == round:
            raise error

    return stop


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_is_interrupted_goes_on_to_the_same_bits(method: str, tmp_path: Path) -> None:
    recipe = Recipe(device="cpu").with_settings([*SMALL, *METHODS[method], "rounds=3", "checkpoint_every=2"])
    whole, broken = Run.create(tmp_path / "whole", recipe), Run.create(tmp_path / "broken", recipe)
    whole.go(prepare(recipe))
    with pytest.raises(RuntimeError, match="killed"):
        broken.go(prepare(recipe), stop_at(2, RuntimeError("killed")))
    broken.go(prepare(recipe))
    same_files(whole, broken)


class Seen(Callback):
    """Shows the training of a run."""

    training: Training

    def begin(self, training: Training, folder: Path | None) -> None:
        self.training = training


@pytest.mark.parametrize("method", METHODS)
def test_from_python_a_trained_model_comes_back(method: str) -> None:
    """Its accuracy is the one that was measured."""
    recipe = Recipe(device="cpu").with_settings([*SMALL, *METHODS[method], "rounds=2", "evaluation.batch=300"])
    seen = Seen()
    done = train(recipe, callbacks=[seen])
    task, model = seen.training.server.task, done.model
    assert isinstance(task, Classification)
    if method == "fedgkt":  # the server's part takes feature maps, which clients' first layers make
        assert model(torch.zeros(2, MAPS, 8, 8)).shape == (2, 10)
        return
    right = (model(task.inputs(task.test.x)).argmax(1) == task.test.y).double().mean()
    assert float(right) == pytest.approx(done.summary["global_accuracy"])


def test_two_runs_write_the_same_file(tmp_path: Path) -> None:
    recipe = Recipe(device="cpu").with_settings([*SMALL, "rounds=1"])
    files = []
    for name in ("a", "b"):
        run = Run.create(tmp_path / name, recipe)
        run.go(prepare(recipe))
        files.append(run.checkpoint.read_bytes())
    assert files[0] == files[1]


class OutOfLuck(Callback):
    """Fails at the end of one round, when the clients keep what they keep already."""

    def __init__(self, round: int) -> None:
        self.round = round

    def row(self, training: Training, row: dict[str, Any]) -> None:
        if row["round"] == self.round:
            raise FedrolexError("out of luck")


@pytest.mark.parametrize("method", ["scaffold", "dsfl", "fedgkt"])
def test_a_round_that_fails_at_its_end_is_made_again(method: str, tmp_path: Path) -> None:
    """What clients keep has changed already, and the run goes on to the same bits."""
    recipe = Recipe(device="cpu").with_settings(
        [*SMALL, *METHODS[method], "rounds=4", "checkpoint_every=2", "evaluate_every=1"]
    )
    whole, broken = Run.create(tmp_path / "whole", recipe), Run.create(tmp_path / "broken", recipe)
    whole.go(prepare(recipe))
    with pytest.raises(FedrolexError, match="out of luck"):
        broken.go(prepare(recipe, callbacks=[OutOfLuck(2)]))
    broken.go(prepare(recipe))
    same_files(whole, broken)


def test_a_ctrl_c_keeps_the_clients_states(tmp_path: Path) -> None:
    recipe = Recipe(device="cpu").with_settings([*SMALL, *METHODS["scaffold"], "rounds=4", "checkpoint_every=4"])
    whole, broken = Run.create(tmp_path / "whole", recipe), Run.create(tmp_path / "broken", recipe)
    whole.go(prepare(recipe))
    with pytest.raises(KeyboardInterrupt):
        broken.go(prepare(recipe), stop_at(1, KeyboardInterrupt()))
    broken.go(prepare(recipe))
    same_files(whole, broken)


@pytest.mark.parametrize("method", ["scaffold", "dsfl", "fedgkt", "fedselect"])
def test_asking_for_jobs_changes_nothing(method: str) -> None:
    """The jobs of a round are a pure function of the server: asking twice, or for a later round, trains nobody."""
    made, plain = small(*METHODS[method]), small(*METHODS[method])
    for training in (made, plain):
        training.run_round()
    for round in (1, 3, 1):
        made.plan(made.method.jobs(made.server, round))
    one, other = states(made, 1), states(plain, 1)
    assert all(torch.equal(one[tensor], other[tensor]) for tensor in one)


def test_scaffold_sends_twice_as_much() -> None:
    one, two = (small(f"method={name}").run_round() for name in ("fedavg", "scaffold"))
    assert [two["bytes_down"], two["bytes_up"]] == [2 * one["bytes_down"], 2 * one["bytes_up"]]


# --- any scheme by name ---


@pytest.mark.parametrize(
    ("scheme", "method"),
    [
        (["method.scheme=rolling", "method.options={overlap: 0.5}"], ["method=fedrolex", "method.overlap=0.5"]),
        (["method.scheme=static"], ["method=heterofl"]),
        (["method.scheme=random", "method.options={scope: capacity}"], ["method=fed_dropout", "method.scope=capacity"]),
    ],
)
def test_a_scheme_by_name_is_the_method_that_uses_it(scheme: list[str], method: list[str]) -> None:
    one, other = states(small("method=submodels", *scheme)), states(small(*method))
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_scheme_without_a_method_is_trained() -> None:
    """Blocks: in every round, clients of one capacity hold the block whose turn it is."""
    made = small("method=submodels", "method.scheme=blocks", "method.options={per_client: true}")
    assert {upload.job.window for upload in answered(made)} == {
        made.server.window(0, job.capacity, job.client) for job in made.method.jobs(made.server, 0)
    }
    assert made.run_round()["dropped"] == {}
    with pytest.raises(FedrolexError, match=r"method\.options do not fit the scheme rolling.*overlapp"):
        SubModels(options={"overlapp": 1})
    with pytest.raises(FedrolexError, match="did you mean 'rolling'"):
        SubModels(scheme="roling")


def test_what_methods_need() -> None:
    """The table of the paper: who needs public examples, what clients keep, who allows secure aggregation."""
    ours = [name for name, origin in REGISTERED.origins().items() if origin == "fedrolex"]  # other tests bring more
    needs: dict[str, Needs] = {name: REGISTERED.find(name).needs for name in ours}
    assert {n for n, each in needs.items() if each.public} == {"fedbe", "feddf", "fedet", "dsfl"}
    assert {n for n, each in needs.items() if each.client_state} == {"scaffold", "fedgkt", "dsfl"}
    assert {n for n, each in needs.items() if each.families} == {"feddf", "fedet", "dsfl"}
    assert {n for n, each in needs.items() if not each.secure_aggregation} == {
        "fedbe", "fedgkt", "feddf", "fedet", "fedselect"
    }  # fmt: skip
    assert FedRolex().needs == Needs(larger_server=True)


# --- refused ---


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["method=scaffold", "client.optimizer=adam"], "needs client.optimizer sgd"),
        (["method=scaffold", "method.rows=true"], "scaffold has no rows"),
        (["method=fedbe", "task.public=0"], "fedbe needs public examples"),
        (["method=feddf", "task.validation=0"], "feddf needs held-out examples"),
        (["method=feddf", "task.public=digits"], "which is what is learned"),
        (["method=feddf", "method.server_optimizer={name: adam}"], "feddf has no server_optimizer"),
        (["method=fedbe", "method.posterior=uniform"], "use one of gaussian, released, dirichlet"),
        (["method=dsfl", "task.public=0"], "dsfl needs public examples"),
        (["method=dsfl", "method.reduce=more"], "use one of era, power, none"),
        (["method=fedbe", "method.batch=0"], "method.batch is 0: give a number of at least 2"),
        (["method=feddf", "method.temperature=-1"], "give a number above 0"),
        (["method=fedet", "method.lr=.nan"], "method.lr is nan: give a number above 0"),
        (["method=fedgkt", "method.server_epochs=0"], "give a number of at least 1"),
        (["method=dsfl", "fleet.redrawn=true"], "dsfl clients keep their models"),
        (["method=feddf", "fleet.server_scale=2"], "nodes that nobody trains"),
        (["method=fjord", "fleet.server_scale=2"], "nodes that nobody trains"),
        (["method=fjord", "method.norms=per_capacity"], "does not go with fjord"),
        (["method=scaffold", "client.momentum=1"], "client.momentum is 1.0: give 0 or more, below 1"),
        (["method=fedselect", "client.mask=zero"], "needs client.mask none"),
        (["method=fedselect", "method.rows=true"], "does not go with fedselect"),
        (["method=fedselect", "method.keys=1"], "give at least 2"),
        (["method=fedet", "task.public=0"], "fedet needs public examples"),
        (["method=fjord", 'method.widths=["1/4", "1"]'], "method.widths has no 1/2"),
        (["method=fjord", "method.alpha=2"], "between 0 and 1"),
        (["method=fedprox", "method.mu=-1"], "method.mu is -1.0: give a number of at least 0"),
        (["method=fedrolex", "method.server_optimizer={name: sgd, momentum: 1}"], "give 0 or more, below 1"),
        (["method=fedavg", "fleet.stragglers=2"], "give a chance between 0 and 1"),
        (["method=fedavg", "method.width=1", "method.able_only=true", 'fleet.capacities=["1/2"]'], "nobody in the"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings: list[str], said: str) -> None:
    with pytest.raises(FedrolexError, match=said) as error:
        small(*settings)
    assert "\n" not in str(error.value)


def test_fedavg_takes_the_width_everyone_can_hold() -> None:
    for settings, width in (([], Fraction(1, 2)), (["method.width=1"], Fraction(1))):
        made = small("method=fedavg", *settings)
        assert made.method.sizes(made.server) == [width]
