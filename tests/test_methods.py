"""The methods beside FedRolex: closed forms, reductions, oracles, resuming, mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedrolex import Classification, Examples, FedrolexError, Recipe
from fedrolex.client import LocalTraining
from fedrolex.methods import ServerOptimizer
from fedrolex.methods.fedbe import BayesianEnsemble
from fedrolex.methods.feddf import EnsembleDistillation
from fedrolex.methods.scaffold import Controls
from fedrolex.methods.server_round import Group, ServerRound
from fedrolex.runs import Run, Training, prepare
from fedrolex.runs.controls import ControlBook

ONE = Fraction(1)
SMALL = ["task.width=8", "fleet.clients=6", "fleet.cohort=4", "task.limit=300", 'fleet.capacities=["1", "1/2"]',
         "client.batch=16"]  # fmt: skip


# --- two clients with a parabola each: a = (1, 3), b = (0, 4), K = 5 full gradients of rate 0.1 ---


def half_squares(said: Tensor, y: Tensor) -> Tensor:
    return (said - y).square().mean() / 2


def point(scale: int = 1) -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def parabolas(*settings: str, cohort: int = 2, clients: int = 2) -> Training:
    """f(w) = a/2 · (w − b)² as the squared error of w · √a against b · √a, in double precision."""
    a, b = torch.tensor([1.0, 3.0, 2.0][:clients]).double(), torch.tensor([0.0, 4.0, -1.0][:clients]).double()
    data = Examples(a.sqrt()[:, None], (b * a.sqrt())[:, None])
    parts = [torch.tensor([i]) for i in range(clients)]
    task = Classification("parabolas", lambda _: point().double(), data, data, parts, loss=half_squares, classes=1)
    words = ['fleet.capacities=["1"]', f"fleet.clients={clients}", f"fleet.cohort={cohort}", "client.batch=1",
             "client.epochs=5", "client.lr=0.1", "client.momentum=0", *settings]  # fmt: skip
    return prepare(Recipe(device="cpu").with_settings(words), task)


def iterates(made: Training, rounds: int) -> list[float]:
    found = []
    for _ in range(rounds):
        made.run_round()
        found.append(float(made.state["weight"]))
    return found


def test_fedavg_goes_to_its_fixed_point_not_to_the_optimum() -> None:
    assert iterates(parabolas("method=fedavg"), 60)[-1] == pytest.approx(2.6805323, abs=1e-7)


def test_fedprox_goes_to_its_closed_form() -> None:
    """Local problems solved to the end: w = (a b + μ θ) / (a + μ), whose mean stands still at 2.4 for μ = 1."""
    made = parabolas("method=fedprox", "method.mu=1", "client.epochs=300")
    assert iterates(made, 60)[-1] == pytest.approx(2.4, abs=1e-7)


def test_the_stronger_the_pull_the_smaller_the_move() -> None:
    moves = [abs(iterates(parabolas("method=fedprox", f"method.mu={mu}"), 1)[0]) for mu in (0, 0.1, 1, 5)]
    assert moves == sorted(moves, reverse=True)
    assert moves[0] > moves[-1]
    frozen = parabolas("method=fedprox", "method.mu=1000", "client.lr=0.0005", "client.epochs=200")
    assert abs(iterates(frozen, 1)[0]) < 0.01


@pytest.mark.parametrize(
    ("option", "wanted"),
    [("II", [1.66386, 2.514891, 2.860100]), ("I", [1.66386, 2.691529, 2.971322])],
)
def test_scaffold_iterates(option: str, wanted: list[float]) -> None:
    made = parabolas("method=scaffold", f"method.option={option}")
    assert iterates(made, 3) == pytest.approx(wanted, abs=1e-6)
    assert iterates(made, 60)[-1] == pytest.approx(3.0, abs=1e-6)


def test_scaffolds_variates() -> None:
    made = parabolas("method=scaffold")
    assert made.states is not None
    for first, second in ((0.0, -6.65544), (1.964985, -5.36911), (2.723408, -4.104243)):
        made.run_round()
        own = [float((made.states.get(client) or {})["weight"]) for client in (0, 1)]
        assert own == pytest.approx([first, second], abs=1e-6)
        assert float(made.state["weight@control"]) == pytest.approx(sum(own) / 2, abs=1e-12)


def test_the_servers_variate_is_the_mean_of_all_clients_whoever_takes_part() -> None:
    made = parabolas("method=scaffold", clients=3, cohort=1)
    assert made.states is not None
    for _ in range(7):
        made.run_round()
        own = [made.states.get(client) for client in range(3)]
        mean = sum(0.0 if one is None else float(one["weight"]) for one in own) / 3
        assert float(made.state["weight@control"]) == pytest.approx(mean, abs=1e-12)


def test_one_step_makes_both_options_one() -> None:
    """With a single step the mean gradient of the path is the gradient at its start."""
    one, other = (parabolas("method=scaffold", f"method.option={o}", "client.epochs=1") for o in ("I", "II"))
    assert iterates(one, 5) == pytest.approx(iterates(other, 5), abs=1e-12)


def test_scaffold_with_one_client_is_plain_descent() -> None:
    plain, corrected = (parabolas(f"method={name}", clients=1, cohort=1) for name in ("fedavg", "scaffold"))
    assert iterates(corrected, 4) == pytest.approx(iterates(plain, 4), abs=1e-12)


@pytest.mark.parametrize(("steps", "wanted"), [(5, 13.1441), (50, 410.464)])
def test_how_far_momentum_carries(steps: int, wanted: float) -> None:
    work = LocalTraining(lr=1.0, momentum=0.9)
    assert Controls(denominator="momentum").distance(work, 0, steps) == pytest.approx(wanted, rel=1e-5)
    assert Controls().distance(work, 0, steps) == steps


def test_with_momentum_and_its_denominator_variates_are_mean_gradients() -> None:
    """A straight line has the same gradient everywhere: that is what a client keeps, whatever carries it."""
    data = Examples(torch.ones(1, 1).double(), torch.zeros(1, 1).double())
    task = Classification(
        "line", lambda _: point().double(), data, data, [torch.tensor([0])], loss=lambda s, _: 3 * s.mean(), classes=1
    )
    words = ['fleet.capacities=["1"]', "fleet.clients=1", "fleet.cohort=1", "client.batch=1", "client.epochs=7",
             "method=scaffold", "method.denominator=momentum"]  # fmt: skip
    made = prepare(Recipe(device="cpu").with_settings(words), task)
    made.run_round()
    assert made.states is not None
    assert float((made.states.get(0) or {})["weight"]) == pytest.approx(3.0)


# --- reductions on a real model ---


def small(*settings: str) -> Training:
    return prepare(Recipe(device="cpu").with_settings([*SMALL, *settings]))


def states(made: Training, rounds: int = 2) -> dict[str, Tensor]:
    for _ in range(rounds):
        made.run_round()
    return {name: tensor for name, tensor in made.state.items() if "@" not in name}


def test_fedprox_without_a_pull_is_fedavg() -> None:
    one, other = states(small("method=fedavg")), states(small("method=fedprox", "method.mu=0"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_scaffold_with_variates_frozen_at_zero_is_fedavg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlBook, "settle", lambda self, round, state: {})
    scaffold = small("method=scaffold", "method.denominator=momentum")
    one, other = states(small("method=fedavg")), states(scaffold)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_server_that_takes_whole_steps_is_plain_averaging() -> None:
    one = states(small("method=fedrolex"))
    other = states(small("method=fedrolex", "method.server={name: sgd, lr: 1.0}"))
    for name in one:
        torch.testing.assert_close(other[name], one[name])


@pytest.mark.parametrize("name", ["adam", "yogi"])
def test_an_adaptive_server_by_hand(name: Any) -> None:
    optimizer = ServerOptimizer(name=name, lr=0.1, momentum=0.9, second=0.99, floor=1e-3)
    before = {"w": torch.tensor([1.0]), "w@first": torch.tensor([0.2]), "w@second": torch.tensor([0.5]),
              "b": torch.tensor([4.0])}  # fmt: skip
    new = optimizer.step(before, {**before, "w": torch.tensor([3.0]), "b": torch.tensor([5.0])}, ["w"])
    first = 0.9 * 0.2 + 0.1 * 2.0
    second = 0.99 * 0.5 + 0.01 * 4.0 if name == "adam" else 0.5 + 0.01 * 4.0
    assert float(new["w@first"]) == pytest.approx(first)
    assert float(new["w@second"]) == pytest.approx(second)
    assert float(new["w"]) == pytest.approx(1.0 + 0.1 * first / (second**0.5 + 1e-3))
    assert float(new["b"]) == 5.0, "buffers keep their average"


def test_a_server_with_momentum_goes_on_where_clients_stand_still() -> None:
    optimizer = ServerOptimizer(momentum=0.5)
    state = {"w": torch.tensor([0.0]), "w@first": torch.tensor([0.0])}
    state = optimizer.step(state, {**state, "w": torch.tensor([1.0])}, ["w"])
    state = optimizer.step(state, state, ["w"])
    assert float(state["w"]) == 1.5


def test_fedavg_takes_the_width_everyone_can_hold() -> None:
    assert small("method=fedavg").method.width == Fraction(1, 2)
    assert small("method=fedavg", "method.width=1").method.width == ONE


# --- stragglers ---


def test_fedprox_keeps_stragglers_and_fedavg_drops_them() -> None:
    late = ["fleet.stragglers=0.6", "client.epochs=3"]
    kept, dropped = small("method=fedprox", *late), small("method=fedavg", *late)
    rows = [(kept.run_round(), dropped.run_round()) for _ in range(4)]
    assert all(one["clients"] == 4 and not one["dropped"] for one, _ in rows)
    assert sum(len(other["dropped"]) for _, other in rows) == sum(
        member.part < 1 for round in range(4) for member in kept.fleet.members(round)
    )
    assert all(why == "did not finish in time" for _, other in rows for why in other["dropped"].values())
    assert all(one["bytes_down"] == other["bytes_down"] for one, other in rows)


def test_a_straggler_does_a_part_of_its_steps() -> None:
    made = small("method=fedprox", "fleet.stragglers=1", "client.epochs=3")
    plan = made._plan()
    for answer in made.engine.run(plan):
        whole = 3 * -(-len(made.task.client(answer.job.client)) // 16)
        assert 1 <= answer.steps <= whole  # type: ignore[union-attr]
        assert answer.steps == max(1, -(-answer.job.part * whole // 1))  # type: ignore[union-attr]


# --- FedBE ---


def group(*models: Tensor, weights: list[float] | None = None, sent: float = 0.0) -> Group:
    module = nn.Linear(models[0].shape[-1], models[0].shape[0], bias=False)
    weights = weights or [1.0] * len(models)
    mean = sum(w * m for w, m in zip(weights, models, strict=True)) / sum(weights)
    uploads = [{"weight": model} for model in models]
    assert isinstance(mean, Tensor)
    return Group(module, {"weight": torch.full_like(mean, sent)}, {"weight": mean}, uploads, weights)


def test_models_drawn_from_one_client_are_that_client() -> None:
    own = torch.randn(3, 4)
    for sample in BayesianEnsemble(samples=3).drawn(group(own), 0, 0):
        assert torch.equal(sample["weight"], own)


def test_mean_and_variance_of_what_is_drawn() -> None:
    """100,000 weights that are 0 in one client (weight 1) and 1 in the other (weight 3): 3/4 and 3/16."""
    models = group(torch.zeros(100, 1000), torch.ones(100, 1000), weights=[1.0, 3.0])
    (sample,) = BayesianEnsemble(samples=1).drawn(models, 0, 0)
    assert float(sample["weight"].mean()) == pytest.approx(0.75, abs=5e-3)
    assert float(sample["weight"].var()) == pytest.approx(0.1875, rel=2e-2)


def test_dirichlet_samples_lie_between_the_clients() -> None:
    corners = group(*torch.eye(3)[:, None])
    for sample in BayesianEnsemble(posterior="dirichlet", samples=20).drawn(corners, 0, 0):
        assert float(sample["weight"].min()) >= 0
        assert float(sample["weight"].sum()) == pytest.approx(1.0)
    for sample in BayesianEnsemble(posterior="dirichlet", concentration=1e8, samples=2).drawn(corners, 0, 0):
        torch.testing.assert_close(sample["weight"], torch.full((1, 3), 1 / 3), atol=1e-3, rtol=0)


def test_the_released_form_survives_a_client_that_did_not_move() -> None:
    for sample in BayesianEnsemble(posterior="released", samples=3).drawn(group(torch.zeros(2, 2)), 0, 0):
        assert bool(sample["weight"].isfinite().all())


def test_probabilities_are_averaged_and_sharpened() -> None:
    one, other = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])
    found = BayesianEnsemble(sharpen=2.0).together(iter([one, other]))
    torch.testing.assert_close(found, torch.tensor([[0.49, 0.09]]) / 0.58)


def test_nothing_is_learned_from_oneself() -> None:
    own = torch.randn(3, 4)
    server = ServerRound(0, 0, {ONE: group(own)}, torch.randn(20, 4))
    (found,) = BayesianEnsemble(sharpen=1.0, lr=0.1, epochs=3, weight_decay=0.0)(server).values()
    torch.testing.assert_close(found["weight"], own, atol=1e-6, rtol=0)


def test_averaged_weights_of_a_model_that_stands_still_are_its_own() -> None:
    own, other = torch.randn(3, 4), torch.randn(3, 4)
    server = ServerRound(0, 0, {ONE: group(own, other)}, torch.randn(20, 4))
    (found,) = BayesianEnsemble(lr=0.0, epochs=9, average_from=2, average_every=1)(server).values()
    torch.testing.assert_close(found["weight"], (own + other) / 2)


def test_without_teaching_fedbe_is_fedavg() -> None:
    aside = ["task.public=0.2", "method.weighting=samples", "task.partition={name: dirichlet, alpha: 0.5}"]
    one = states(small("method=fedavg", *aside))
    other = states(small("method=fedbe", "method.ensemble={epochs: 0}", *aside))
    assert all(torch.equal(one[name], other[name]) for name in one)


# --- FedDF ---


def test_opposite_teachers_leave_nothing_to_say() -> None:
    own = torch.randn(3, 4)
    target = EnsembleDistillation().target(ServerRound(0, 0, {ONE: group(own, -own)}, torch.randn(5, 4)))
    torch.testing.assert_close(target, torch.full((5, 3), 1 / 3))


def test_logits_are_averaged_not_probabilities() -> None:
    one, other, x = torch.randn(3, 4), 5 * torch.randn(3, 4), torch.randn(5, 4)
    target = EnsembleDistillation(temperature=2.0).target(ServerRound(0, 0, {ONE: group(one, other)}, x))
    torch.testing.assert_close(target, (x @ ((one + other) / 4).T).softmax(1))


def test_one_client_teaches_itself_nothing() -> None:
    own, x = torch.randn(3, 4), torch.randn(30, 4)
    server = ServerRound(0, 0, {ONE: group(own)}, x, (x, torch.zeros(30, dtype=torch.int64)))
    (found,) = EnsembleDistillation(steps=4, judge_every=1)(server).values()
    torch.testing.assert_close(found["weight"], own)


def test_the_best_look_is_kept() -> None:
    """Teachers that are wrong about everything: the average, which was right, stays."""
    right, x = torch.eye(3), torch.eye(3).repeat(10, 1)
    wrong = Group(nn.Linear(3, 3, bias=False), {}, {"weight": 5 * right}, [{"weight": -right}], [1.0])
    server = ServerRound(0, 0, {ONE: wrong}, x, (x, torch.arange(3).repeat(10)))
    (found,) = EnsembleDistillation(steps=20, judge_every=5, lr=0.5)(server).values()
    torch.testing.assert_close(found["weight"], 5 * right)


def test_without_steps_every_size_is_averaged_by_itself() -> None:
    made = small("method=feddf", "method.distillation={steps: 0}", "fleet.cohort=6")
    answers: dict[Fraction, list[dict[str, Tensor]]] = {}
    plan = made._plan()
    for answer in made.engine.run(plan):
        answers.setdefault(answer.job.capacity, []).append({n: t.clone() for n, t in answer.tensors.items()})  # type: ignore[union-attr]
    made.run_round()
    for capacity, models in answers.items():
        window = made.method.scheme.window(made.axes, round=0, capacity=capacity)
        own = made.axes.take(made.apart.own(made.state, capacity), window)
        for name, tensor in own.items():
            torch.testing.assert_close(tensor, torch.stack([model[name] for model in models]).mean(0))


def test_sizes_of_feddf_share_no_weights() -> None:
    made = small("method=feddf", "method.distillation={steps: 0}")
    made.fleet = replace(made.fleet, availability=[[0, 2, 4]])  # all of them of capacity 1
    before = {name: tensor.clone() for name, tensor in made.state.items()}
    made.run_round()
    for name, tensor in made.state.items():
        assert torch.equal(tensor, before[name]) == name.endswith("@1/2"), name


# --- every method: trains, resumes bit for bit, is refused early ---

METHODS = {
    "fedprox": ["method=fedprox", "fleet.stragglers=0.3"],
    "scaffold": ["method=scaffold", "method.denominator=momentum"],
    "scaffold I": ["method=scaffold", "method.option=I"],
    "fedbe": ["method=fedbe", "method.ensemble={epochs: 4, average_from: 3, average_every: 1}"],
    "feddf": ["method=feddf", "method.distillation={steps: 10, judge_every: 5}"],
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
        (["method=fedprox", "method.mu=-1"], "give 0 or more"),
        (["method=fedrolex", "method.server={name: sgd, momentum: 1}"], "give 0 or more, below 1"),
        (["method=fedavg", "fleet.stragglers=2"], "give a chance between 0 and 1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings: list[str], said: str) -> None:
    with pytest.raises(FedrolexError, match=said) as error:
        small(*settings)
    assert "\n" not in str(error.value)
