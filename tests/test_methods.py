"""The methods beside FedRolex: closed forms, reductions, oracles, resuming, mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedrolex import Classification, Examples, FedrolexError, Recipe
from fedrolex.client import LocalTraining, Slot
from fedrolex.engines.narrow import Narrow
from fedrolex.methods import ServerOptimizer
from fedrolex.methods.dsfl import SoftLabels
from fedrolex.methods.fedbe import BayesianEnsemble
from fedrolex.methods.feddf import EnsembleDistillation
from fedrolex.methods.fedet import Consensus, EnsembleTransfer
from fedrolex.methods.fedgkt import KnowledgeTransfer
from fedrolex.methods.fjord import OrderedDropout
from fedrolex.methods.scaffold import Controls
from fedrolex.methods.server_round import Group, ServerRound
from fedrolex.models.represented import TOP
from fedrolex.runs import Run, Training, prepare
from fedrolex.runs.controls import ControlBook
from fedrolex.runs.knowledge import GroupTraining
from fedrolex.slicing import WHOLE

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


def test_clients_that_never_take_part_do_not_count_in_scaffolds_mean() -> None:
    """With a single client that can hold the model, its variate is the server's: plain descent."""
    fleet = ['fleet.capacities=["1", "1/2"]', "fleet.clients=2", "fleet.cohort=2", "method.width=1",
             "method.able_only=true", "client.momentum=0"]  # fmt: skip
    one, other = (states(small(f"method={name}", *fleet), 3) for name in ("fedavg", "scaffold"))
    for name in one:
        torch.testing.assert_close(other[name], one[name], atol=1e-5, rtol=1e-4)


def test_variates_that_are_not_finite_end_the_run() -> None:
    made = small("method=scaffold", "client.momentum=0", "client.milestones=[1]", "client.decay=1.0e-300")
    made.run_round()
    with pytest.raises(FedrolexError, match="@control is no longer finite"):
        made.run_round()


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
    monkeypatch.setattr(ControlBook, "settle", lambda self, state: {})
    monkeypatch.setattr(ControlBook, "keep", lambda self, round: None)
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


# --- FjORD ---


def test_fjord_at_one_width_is_fedavg_by_samples() -> None:
    alone = ['fleet.capacities=["1"]', "task.partition={name: dirichlet, alpha: 0.5}"]
    one = states(small("method=fedavg", "method.weighting=samples", *alone))
    other = states(small("method=fjord", *alone))
    assert all(torch.equal(one[name], other[name]) for name in one)


def drawn_slot(made: Training, width: Fraction) -> tuple[Slot, Narrow]:
    slot = Slot(made.axes.cut(made.model, WHOLE))
    window = made.method.scheme.window(made.axes, round=0, capacity=width)
    slot.drawn = Narrow.inside(made.axes, made.axes.cut(made.model, window), slot.names, WHOLE, window)
    return slot, slot.drawn


@pytest.mark.parametrize("distil", [False, True])
def test_a_batch_at_a_width_is_that_widths_batch(distil: bool) -> None:
    """Without distillation only the first nodes move; with it, the others move as if there were no narrow model."""
    made = small("method=fjord", f"method.distil={distil}", "client.momentum=0")
    slot, _ = drawn_slot(made, Fraction(1, 2))
    alone = Slot(made.axes.cut(made.model, WHOLE))
    x, y = made.task.inputs(made.task.client(0).x[:8]), made.task.client(0).y[:8]
    work = made.method.client
    for one in (slot, alone):
        work.start(one)
        work.step(one, x, y, made.task.loss, 0.1)
    window = made.method.scheme.window(made.axes, round=0, capacity="1/2")
    before = made.axes.state(made.model)
    for name, now, plain in zip(slot.names, slot.parameters, alone.parameters, strict=True):
        outside = torch.ones_like(now, dtype=torch.bool)
        made.axes.region(name, window).put(outside, torch.zeros(made.axes.shape(name, made.axes.widths(window))).bool())
        reference = plain.detach() if distil else before[name]
        torch.testing.assert_close(now.detach()[outside], reference[outside], atol=1e-7, rtol=1e-5)
        assert not torch.equal(now.detach()[~outside], before[name][~outside]), name


def test_a_width_never_reads_beyond_its_nodes() -> None:
    made = small("method=fjord", "method.distil=false")
    slot, narrow = drawn_slot(made, Fraction(1, 2))
    window = made.method.scheme.window(made.axes, round=0, capacity="1/2")
    for name, parameter in zip(slot.names, slot.parameters, strict=True):
        kept = made.axes.region(name, window).take(parameter.detach())
        parameter.detach().fill_(torch.nan)
        made.axes.region(name, window).put(parameter.detach(), kept)
    x, y = made.task.inputs(made.task.client(0).x[:8]), made.task.client(0).y[:8]
    made.method.client.start(slot)
    assert bool(made.method.client.step(slot, x, y, made.task.loss, 0.1).isfinite())
    assert all(bool(p.isfinite().all()) for p in narrow.parameters)


def test_what_is_learned_from_oneself_is_nothing() -> None:
    work = small("method=fjord").method.client
    assert isinstance(work, OrderedDropout)
    scores = torch.randn(5, 7, requires_grad=True)
    (gradient,) = torch.autograd.grad(work.learned(scores, scores.detach(), None), scores)
    assert float(gradient.abs().max()) < 1e-7


def test_a_batch_at_the_whole_width_counts_as_the_others_do() -> None:
    """CE + (1 − α) CE + α · 0: with α = 0 a step twice as long."""
    made = small("method=fjord", "method.alpha=0", "client.momentum=0")
    plain = small("method=fjord", "client.momentum=0")
    x, y = made.task.inputs(made.task.client(0).x[:8]), made.task.client(0).y[:8]
    slots = [Slot(one.axes.cut(one.model, WHOLE)) for one in (made, plain)]
    for one, slot, rate in zip((made, plain), slots, (0.1, 0.2), strict=True):
        one.method.client.start(slot)
        one.method.client.step(slot, x, y, one.task.loss, rate)
    for twice, longer in zip(slots[0].parameters, slots[1].parameters, strict=True):
        torch.testing.assert_close(twice, longer)


def test_ordered_dropout_finds_the_singular_vectors_in_order() -> None:
    """Two linear layers and all ranks alike: every truncation becomes the best approximation of its rank."""
    wanted = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]))
    data = Examples(torch.eye(4), wanted)

    def build(_: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))

    def squares(said: Tensor, y: Tensor) -> Tensor:
        return (said - y).square().sum()

    task = Classification("matrix", build, data, data, [torch.arange(4)], loss=squares, classes=4)
    words = ['fleet.capacities=["1"]', "fleet.clients=1", "fleet.cohort=1", "client.batch=4", "client.epochs=4000",
             "client.lr=0.02", "client.momentum=0", "method=fjord", 'method.widths=["1/4", "1/2", "3/4", "1"]',
             "method.distil=false"]  # fmt: skip
    made = prepare(Recipe(device="cpu").with_settings(words), task)
    made.run_round()
    first, second = made.state["0.weight"], made.state["1.weight"]
    for rank in range(1, 5):
        best = wanted.clone()
        best[rank:] = 0
        torch.testing.assert_close((second[:, :rank] @ first[:rank]).T, best, atol=0.02, rtol=0)


def test_every_width_has_statistics_of_its_own() -> None:
    def build(scale: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8 * scale), nn.BatchNorm1d(8 * scale), nn.ReLU(), nn.Linear(8 * scale, 3))

    generator = torch.Generator().manual_seed(0)
    data = Examples(torch.randn(60, 6, generator=generator), torch.arange(60) % 3)
    parts = [torch.arange(15 * i, 15 * i + 15) for i in range(4)]
    task = Classification("bn", build, data, data, parts, classes=3)
    words = ['fleet.capacities=["1", "1/2"]', "fleet.clients=4", "fleet.cohort=2", "client.batch=5", "method=fjord",
             "client.epochs=4"]  # fmt: skip

    def moved(clients: list[int]) -> set[str]:
        made = prepare(Recipe(device="cpu").with_settings(words), task)
        made.fleet = replace(made.fleet, availability=[clients])
        before = dict(made.state)
        assert made.run_round()["dropped"] == {}
        assert made.evaluate()["global_accuracy"] > 0
        return {name for name in before if "running_mean@" in name and not torch.equal(made.state[name], before[name])}

    assert moved([0, 2]) == {"1.running_mean@1", "1.running_mean@1/2"}, "wide clients train both"
    assert moved([1, 3]) == {"1.running_mean@1/2"}


# --- DS-FL ---


@pytest.mark.parametrize(
    ("mean", "wanted"),
    [
        ([0.6, 0.4], [0.88080, 0.11920]),
        ([0.5, 0.3, 0.2], [0.84379, 0.11420, 0.04201]),
        ([0.55, *[0.05] * 9], [0.94283, *[0.00635] * 9]),
        ([0.25] * 4, [0.25] * 4),
    ],
)
def test_entropy_is_reduced_as_published(mean: list[float], wanted: list[float]) -> None:
    found = SoftLabels().together([torch.tensor([mean])])
    torch.testing.assert_close(found, torch.tensor([wanted]), atol=1e-5, rtol=0)


def test_era_flattens_a_hundred_classes_and_a_power_does_not() -> None:
    mean = torch.full((1, 100), 0.7 / 99)
    mean[0, 3] = 0.3
    assert float(SoftLabels().together([mean])[0, 3]) < 0.3
    assert float(SoftLabels(reduce="power").together([mean])[0, 3]) > 0.3


def test_labels_keep_their_order_and_melt_with_heat() -> None:
    said = [torch.rand(5, 7).softmax(1) for _ in range(3)]
    mean = torch.stack(said).mean(0)
    assert torch.equal(SoftLabels().together(said).argsort(1), mean.argsort(1))
    hot = SoftLabels(temperature=1e6).together(said)
    torch.testing.assert_close(hot, torch.full((5, 7), 1 / 7), atol=1e-5, rtol=0)
    assert torch.equal(SoftLabels(reduce="none").together(said), mean)


def test_one_client_learns_nothing_from_its_own_labels() -> None:
    module, x = nn.Linear(4, 3), torch.randn(20, 4)
    before = module.weight.detach().clone()
    SoftLabels(batch=7).learn(module, x, module(x).softmax(1).detach(), 0)
    torch.testing.assert_close(module.weight.detach(), before, atol=1e-6, rtol=0)


def test_labels_belong_to_examples_whatever_the_order_of_batches() -> None:
    x, wanted = torch.eye(6), torch.eye(6)
    for key in range(3):
        module = nn.Linear(6, 6)
        SoftLabels(epochs=400, lr=1.0, batch=4).learn(module, x, wanted, key)
        assert torch.equal(module(x).argmax(1), torch.arange(6))


def test_dsfl_sends_labels_and_no_models() -> None:
    made = small("method=dsfl", "task.public=0.2")
    count = len(made.task.public)  # type: ignore[attr-defined]
    one = made.run_round()
    assert one["bytes_up"] == one["bytes_down"] == 4 * count * (10 * 4 + 16)
    wide = small("method=dsfl", "task.public=0.2", "task.width=16").run_round()
    assert wide["bytes_up"] == one["bytes_up"]


def test_clients_of_dsfl_begin_with_given_weights(tmp_path: Path) -> None:
    given = {name: torch.full_like(tensor, 0.5) for name, tensor in small("method=heterofl").state.items()}
    save_file(given, tmp_path / "w.safetensors")
    made = small("method=dsfl", f"weights={tmp_path / 'w.safetensors'}")
    assert all(float(tensor.max()) == 0.5 for job in made._plan().jobs for tensor in job.own.values())


def test_a_power_of_almost_nothing_is_finite() -> None:
    sharp = SoftLabels(reduce="power", temperature=1e-3).together([torch.tensor([[0.6, 0.4, 0.0]])])
    torch.testing.assert_close(sharp, torch.tensor([[1.0, 0.0, 0.0]]))


def test_clients_of_dsfl_go_on_with_their_own_models() -> None:
    made = small("method=dsfl", "method.labels={epochs: 0}", "fleet.cohort=6", 'fleet.capacities=["1"]')
    made.run_round()
    assert made.states is not None
    plan = made._plan()
    for job in plan.jobs:
        own = made.states.get(job.client)
        assert own is not None
        assert all(torch.equal(job.own[name], own[name]) for name in own)
    assert len({float(job.own["conv1.weight"].sum()) for job in plan.jobs}) == 6


# --- Fed-ET ---


def test_the_worked_case() -> None:
    said = [torch.tensor([row]) for row in ([4.0, 0, 0], [0, 1, 0.2], [0.5, 0.4, 0.6])]
    found = EnsembleTransfer().consensus(said)
    assert found.label.tolist() == [0]
    assert found.torn.tolist() == [True]
    torch.testing.assert_close(found.apart, torch.tensor([[0.01724, 0.97931, 0.21379]]), atol=1e-5, rtol=0)
    alike = EnsembleTransfer(confident=False).consensus(said)
    assert alike.label.tolist() == [0]
    torch.testing.assert_close(alike.apart, torch.tensor([[0.25, 0.7, 0.4]]))


def test_clients_that_agree_leave_nobody_apart() -> None:
    one = torch.randn(6, 4)
    found = EnsembleTransfer().consensus([one, one, one])
    assert not bool(found.torn.any())
    assert torch.equal(found.label, one.argmax(1))
    flat = EnsembleTransfer().consensus([torch.ones(2, 3), torch.ones(2, 3)])
    assert bool(flat.apart.isfinite().all())


def test_the_louder_client_counts_for_its_square() -> None:
    """Logits twice as large have four times the variance: 4 · 2 against 1 · 1.5 for class 1, not 2 against 1.5."""
    quiet, loud = torch.tensor([[0.0, 3.0, 0.0]]), torch.tensor([[2.0, 0.0, 0.0]])
    assert EnsembleTransfer().consensus([quiet, loud]).label.tolist() == [1]
    assert EnsembleTransfer().consensus([quiet, 2 * loud]).label.tolist() == [0]


def test_nobody_apart_is_not_a_wish_for_doubt() -> None:
    """An empty set of dissenters adds nothing to the loss; zero logits would pull towards all classes alike."""
    agreed = Consensus(torch.zeros(40, dtype=torch.int64), torch.zeros(40, 3), torch.zeros(40, dtype=torch.bool))
    x, weights = torch.randn(40, 4), torch.randn(3, 4)
    found = []
    for diversity in (0.0, 5.0):
        own = group(weights.clone())
        server = ServerRound(0, 0, {}, x)
        EnsembleTransfer(diversity=diversity, lr=0.1).teach(own.load(own.average), server, agreed)
        found.append(own.tensors()["weight"])
    assert torch.equal(*found)


def test_without_steps_fedet_averages_and_copies_the_representation() -> None:
    made = small("method=fedet", "method.transfer={steps: 0}", "fleet.cohort=6")
    answers: dict[Fraction, list[dict[str, Tensor]]] = {}
    for answer in made.engine.run(made._plan()):
        answers.setdefault(answer.job.capacity, []).append({n: t.clone() for n, t in answer.tensors.items()})  # type: ignore[union-attr]
    before = {name: tensor.clone() for name, tensor in made.state.items()}
    made.run_round()
    top = {n: torch.stack([m[n] for models in answers.values() for m in models]).mean(0) for n in TOP}
    for name in made.apart.names:
        wanted = top.get(name, before[name])
        torch.testing.assert_close(made.state[name], wanted, msg=name)
    for capacity, models in answers.items():
        window = made.method.scheme.window(made.axes, round=0, capacity=capacity)
        for name, tensor in made.axes.take(made.apart.own(made.state, capacity), window).items():
            wanted = top.get(name, torch.stack([model[name] for model in models]).mean(0))
            torch.testing.assert_close(tensor, wanted, msg=name)


def test_the_servers_model_is_its_own() -> None:
    """It learns, and is larger than what any client holds."""
    made = small("method=fedet", "fleet.server=2")
    before = made.state["trunk.conv1.weight"].clone()
    made.run_round()
    assert not torch.equal(made.state["trunk.conv1.weight"], before)
    assert made.state["trunk.conv1.weight"].shape[0] == 16
    assert made.evaluate()["global_accuracy"] > 0


# --- FedGKT ---


def test_both_learn_nothing_from_equal_logits_and_heat_does_not_cool_it() -> None:
    student, teacher = torch.randn(8, 5, requires_grad=True), torch.randn(8, 5)
    (none,) = torch.autograd.grad(KnowledgeTransfer().distance(student, student.detach()), student)
    assert float(none.abs().max()) < 1e-6
    sizes = []
    for temperature in (50.0, 100.0):
        (found,) = torch.autograd.grad(KnowledgeTransfer(temperature=temperature).distance(student, teacher), student)
        sizes.append(float(found.norm()))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)


def test_logits_belong_to_examples() -> None:
    """What a client keeps for its i-th example is what the server says about that example's map."""
    made = small("method=fedgkt", "fleet.cohort=2")
    made.run_round()
    assert isinstance(made, GroupTraining)
    assert made.states is not None
    made.axes.load(made.model, made.apart.shared(made.state))
    for member in made.fleet.members(0):
        own = made.states.get(member.client)
        assert own is not None
        made._load_edge(own)
        with torch.no_grad():
            maps = made._edge.eval().features(made.task.inputs(made.task.client(member.client).x))
            wanted = made.model.eval()(maps)
        torch.testing.assert_close(own["server's logits"], wanted, atol=1e-4, rtol=1e-4)


def test_without_distillation_clients_train_by_themselves() -> None:
    """Whatever the server does, and whoever else takes part."""
    alone = "method.knowledge={alpha: 0, server_alpha: 0, server_epochs: %d}"
    found = []
    for epochs, cohort in ((1, 6), (3, 6)):
        made = small("method=fedgkt", alone % epochs, f"fleet.cohort={cohort}")
        made.run_round()
        made.run_round()
        assert made.states is not None
        found.append(made.states.get(2) or {})
    edges = [name for name in found[0] if name != "server's logits"]
    assert all(torch.equal(found[0][name], found[1][name]) for name in edges)
    assert not torch.equal(*(each["server's logits"] for each in found))


def test_fedgkt_takes_a_wider_server_small_batches_and_drops_stragglers() -> None:
    sizes = [sum(p.numel() for p in small("method=fedgkt", f"fleet.server={n}").model.parameters()) for n in (1, 2)]
    assert sizes[1] > 2 * sizes[0]
    made = small("method=fedgkt", "client.batch=1", "fleet.stragglers=0.5", "method.knowledge={server_epochs: 1}")
    row = made.run_round()
    late = [str(member.client) for member in made.fleet.members(0) if member.part < 1]
    assert row["dropped"] == dict.fromkeys(late, "did not finish in time")
    assert row["clients"] == 4 - len(late)


def wordy(tmp_path: Path) -> list[str]:
    file = tmp_path / "users.jsonl"
    users = [{"user": f"u{i}", "sentences": [f"a b c w{i}", f"b c d v{i} w{i}"] * 4} for i in range(8)]
    file.write_text("".join(json.dumps(user) + "\n" for user in users))
    return ["task=words", f"task.data={file}", "task.fewest=1", "fleet.clients=null", "fleet.cohort=2"]


def test_fedgkt_needs_images(tmp_path: Path) -> None:
    words = wordy(tmp_path)
    for method in ("fedgkt", "fedbe", "dsfl"):
        with pytest.raises(FedrolexError, match=f"{method} .*needs a task of images"):
            prepare(Recipe(device="cpu").with_settings([*words, f"method={method}"]))


# --- Federated Select ---

TWO = ["task.partition={name: labels, labels: 2}", "client.momentum=0"]


def test_asking_for_everything_is_fedrolex() -> None:
    one = states(small("method=fedrolex", *TWO))
    other = states(small("method=fedselect", "method.keys=10", *TWO))
    for name in one:
        torch.testing.assert_close(other[name], one[name])


def test_asking_for_ones_own_classes_is_masking_the_others() -> None:
    """A softmax over the rows a client has is one in which the others are masked."""
    one = states(small("method=fedrolex", "method.rows=true", "client.mask=neg_inf", *TWO))
    other = states(small("method=fedselect", *TWO))
    for name in one:
        torch.testing.assert_close(other[name], one[name], atol=1e-6, rtol=1e-4)


def test_who_asks_for_less_receives_less() -> None:
    whole, part = (small(f"method={name}", *TWO).run_round() for name in ("fedrolex", "fedselect"))
    assert part["bytes_down"] < whole["bytes_down"]


def test_clients_ask_for_their_words(tmp_path: Path) -> None:
    made = prepare(Recipe(device="cpu").with_settings([*wordy(tmp_path), "method=fedselect", "task.dropout=0.0"]))
    data = made.task.client(3)
    keys = made.view.keys(3)
    assert torch.equal(keys, torch.cat([torch.zeros(1, dtype=torch.int64), made.task.labels(data)]))
    seen = made.view.client(3)
    assert torch.equal(keys[seen.x], data.x)
    assert torch.equal(keys[seen.y], data.y)
    before = {name: tensor.clone() for name, tensor in made.state.items()}
    made.run_round()
    (rows,) = (name for name, tensor in made.state.items() if "embed" in name and tensor.shape[0] == made.task.classes)
    moved = (made.state[rows] != before[rows]).flatten(1).any(1).nonzero().flatten()
    asked = torch.cat([made.view.keys(member.client) for member in made.fleet.members(0)]).unique()
    assert set(moved.tolist()) <= set(asked.tolist())
    assert len(moved) > 3


def test_so_many_keys_and_no_more(tmp_path: Path) -> None:
    """The most frequent of its own; what is not among them is not predicted. Few own words are filled up."""
    words = [*wordy(tmp_path), "method=fedselect", "task.dropout=0.0"]
    few = prepare(Recipe(device="cpu").with_settings([*words, "method.keys=4"]))
    assert len(few.view.keys(0)) == 4
    data, seen = few.task.client(0), few.view.client(0)
    held = torch.isin(data.y, few.view.keys(0))
    assert torch.equal(seen.y == 0, (data.y == 0) | ~held)
    assert few.run_round()["dropped"] == {}
    many = prepare(Recipe(device="cpu").with_settings([*words, "method.keys=20"]))
    assert {len(many.view.keys(client)) for client in range(4)} == {20}


# --- every method: trains, resumes bit for bit, is refused early ---

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
