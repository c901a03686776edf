"""Methods that learn from what others say: FedBE, FedDF, DS-FL, Fed-ET, FedGKT."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from methods_shared import ONE, group, small, states, wordy
from safetensors.torch import save_file
from torch import Tensor, nn

from fedrolex import FedrolexError, Recipe
from fedrolex.methods.dsfl import SoftLabels
from fedrolex.methods.fedbe import BayesianEnsemble
from fedrolex.methods.feddf import EnsembleDistillation
from fedrolex.methods.fedet import Consensus, EnsembleTransfer
from fedrolex.methods.fedgkt import KnowledgeTransfer
from fedrolex.methods.server_round import Group, ServerRound
from fedrolex.models.represented import TOP
from fedrolex.rounds.intake import LATE
from fedrolex.runs import prepare
from fedrolex.runs.knowledge import GroupTraining

# --- FedBE ---


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


def test_learning_labels_draws_from_a_stream_of_its_own() -> None:
    """Dropout included: what a model learns depends neither on what was drawn before, nor do later draws on it."""
    inputs, labels = torch.randn(8, 5), torch.eye(3)[torch.arange(8) % 3]
    last = nn.Linear(6, 3, bias=False)
    before = last.weight.detach().clone()
    found = []
    for drawn in range(2):
        with torch.no_grad():
            last.weight.copy_(before)
        torch.manual_seed(drawn)
        state = torch.random.get_rng_state()
        SoftLabels(epochs=2).learn(nn.Sequential(nn.ZeroPad1d((0, 1)), nn.Dropout(0.5), last), inputs, labels, 1, 2)
        assert torch.equal(torch.random.get_rng_state(), state)
        found.append(last.weight.detach().clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], before)


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
    assert row["dropped"] == dict.fromkeys(late, LATE)
    assert row["clients"] == 4 - len(late)


def test_fedgkt_needs_images(tmp_path: Path) -> None:
    words = wordy(tmp_path)
    for method in ("fedgkt", "fedbe", "dsfl"):
        with pytest.raises(FedrolexError, match=f"{method} .*needs a task of images"):
            prepare(Recipe(device="cpu").with_settings([*words, f"method={method}"]))
