"""Methods that learn from what others say: FedBE, FedDF, DS-FL, Fed-ET, FedGKT."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from methods_shared import answered, asked, copied, group, only, part, small, states, wordy
from safetensors.torch import save_file
from torch import Tensor, nn

from fedrolex import FedrolexError
from fedrolex.clients.messages import MODEL
from fedrolex.methods import DSFL, FedBE, FedDF, FedET, FedGKT
from fedrolex.methods.distillation import Group, Public
from fedrolex.methods.fedet import Consensus
from fedrolex.models.represented import TOP
from fedrolex.recipes.recipe import Recipe
from fedrolex.runs.prepare import prepare
from fedrolex.runs.training import LATE, Training

# --- FedBE ---


def test_models_drawn_from_one_client_are_that_client() -> None:
    own = torch.randn(3, 4)
    for sample in FedBE(samples=3).drawn(group(own), 0, 0):
        assert torch.equal(sample["weight"], own)


def test_mean_and_variance_of_what_is_drawn() -> None:
    """100,000 weights that are 0 in one client (weight 1) and 1 in the other (weight 3): 3/4 and 3/16."""
    models = group(torch.zeros(100, 1000), torch.ones(100, 1000), weights=[1.0, 3.0])
    (sample,) = FedBE(samples=1).drawn(models, 0, 0)
    assert float(sample["weight"].mean()) == pytest.approx(0.75, abs=5e-3)
    assert float(sample["weight"].var()) == pytest.approx(0.1875, rel=2e-2)


def test_dirichlet_samples_lie_between_the_clients() -> None:
    corners = group(*torch.eye(3)[:, None])
    for sample in FedBE(posterior="dirichlet", samples=20).drawn(corners, 0, 0):
        assert float(sample["weight"].min()) >= 0
        assert float(sample["weight"].sum()) == pytest.approx(1.0)
    for sample in FedBE(posterior="dirichlet", concentration=1e8, samples=2).drawn(corners, 0, 0):
        torch.testing.assert_close(sample["weight"], torch.full((1, 3), 1 / 3), atol=1e-3, rtol=0)


def test_the_released_form_survives_a_client_that_did_not_move() -> None:
    for sample in FedBE(posterior="released", samples=3).drawn(group(torch.zeros(2, 2)), 0, 0):
        assert bool(sample["weight"].isfinite().all())


def test_probabilities_are_averaged_and_sharpened() -> None:
    one, other = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])
    found = FedBE(sharpen=2.0).together(iter([one, other]))
    torch.testing.assert_close(found, torch.tensor([[0.49, 0.09]]) / 0.58)


def test_nothing_is_learned_from_oneself() -> None:
    own = torch.randn(3, 4)
    x, how = torch.randn(20, 4), FedBE(sharpen=1.0, lr=0.1, epochs=3, weight_decay=0.0)
    found = how.taught(group(own), (x @ own.T).softmax(1), Public(x))
    torch.testing.assert_close(found["weight"], own, atol=1e-6, rtol=0)


def test_averaged_weights_of_a_model_that_stands_still_are_its_own() -> None:
    own, other = torch.randn(3, 4), torch.randn(3, 4)
    x, how = torch.randn(20, 4), FedBE(lr=0.0, epochs=9, average_from=2, average_every=1)
    found = how.taught(group(own, other), (x @ own.T).softmax(1), Public(x))
    torch.testing.assert_close(found["weight"], (own + other) / 2)


def test_without_teaching_fedbe_is_fedavg() -> None:
    aside = ["task.public=0.2", "method.weighting=samples", "task.partition={name: dirichlet, alpha: 0.5}"]
    one = states(small("method=fedavg", *aside))
    other = states(small("method=fedbe", "method.epochs=0", *aside))
    assert all(torch.equal(one[name], other[name]) for name in one)


# --- FedDF ---


def test_opposite_teachers_leave_nothing_to_say() -> None:
    own = torch.randn(3, 4)
    target = FedDF().target([group(own, -own)], Public(torch.randn(5, 4)))
    torch.testing.assert_close(target, torch.full((5, 3), 1 / 3))


def test_logits_are_averaged_not_probabilities() -> None:
    one, other, x = torch.randn(3, 4), 5 * torch.randn(3, 4), torch.randn(5, 4)
    target = FedDF(temperature=2.0).target([group(one), group(other)], Public(x))
    torch.testing.assert_close(target, (x @ ((one + other) / 4).T).softmax(1))


def test_one_client_teaches_itself_nothing() -> None:
    own, x = torch.randn(3, 4), torch.randn(30, 4)
    how, alone = FedDF(steps=4, judge_every=1), group(own)
    y = 1 - (x @ own.T).argmax(1).clamp(max=1)  # any change of the answers would look better
    found = how.taught(alone, how.target([alone], Public(x)), Public(x), x, y)
    torch.testing.assert_close(found["weight"], own)


def test_the_best_look_is_kept() -> None:
    """Teachers that are wrong about everything: the average, which was right, stays."""
    right, x = torch.eye(3), torch.eye(3).repeat(10, 1)
    wrong = Group(nn.Linear(3, 3, bias=False), {}, {"weight": 5 * right}, [{"weight": -right}], [1.0])
    how = FedDF(steps=20, judge_every=5, lr=0.5)
    found = how.taught(wrong, how.target([wrong], Public(x)), Public(x), x, torch.arange(3).repeat(10))
    torch.testing.assert_close(found["weight"], 5 * right)


def by_capacity(made: Training) -> dict[Fraction, list[dict[str, Tensor]]]:
    """The clients' trained tensors in the next round, which is not counted."""
    found: dict[Fraction, list[dict[str, Tensor]]] = {}
    for upload in answered(made):
        found.setdefault(upload.job.capacity, []).append(dict(upload.tensors))
    return found


def test_without_steps_every_size_is_averaged_by_itself() -> None:
    made = small("method=feddf", "method.steps=0", "fleet.cohort=6")
    answers = by_capacity(made)
    made.run_round()
    for job in made.method.jobs(made.server, 0):
        for name, tensor in part(made, job).items():
            wanted = torch.stack([model[name] for model in answers[job.capacity]]).mean(0)
            torch.testing.assert_close(tensor, wanted)


def test_sizes_of_feddf_share_no_weights() -> None:
    made = only(small("method=feddf", "method.steps=0"), [0, 2, 4])  # all of them of capacity 1
    before = copied(made)
    made.run_round()
    for section, tensors in made.server.state.items():
        same = [torch.equal(tensor, before[section][name]) for name, tensor in tensors.items()]
        assert all(same) if section == "model@1/2" else not any(same), section


def test_the_servers_model_of_feddf_is_that_of_the_largest_capacity() -> None:
    made = small("method=feddf", "method.steps=2")
    made.run_round()
    model, largest = made.server.state[MODEL], made.server.state["model@1"]
    assert all(torch.equal(model[name], largest[name]) for name in largest)


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
    found = DSFL().together([torch.tensor([mean])])
    torch.testing.assert_close(found, torch.tensor([wanted]), atol=1e-5, rtol=0)


def test_era_flattens_a_hundred_classes_and_a_power_does_not() -> None:
    mean = torch.full((1, 100), 0.7 / 99)
    mean[0, 3] = 0.3
    assert float(DSFL().together([mean])[0, 3]) < 0.3
    assert float(DSFL(reduce="power").together([mean])[0, 3]) > 0.3


def test_labels_keep_their_order_and_melt_with_heat() -> None:
    said = [torch.rand(5, 7).softmax(1) for _ in range(3)]
    mean = torch.stack(said).mean(0)
    assert torch.equal(DSFL().together(said).argsort(1), mean.argsort(1))
    hot = DSFL(temperature=1e6).together(said)
    torch.testing.assert_close(hot, torch.full((5, 7), 1 / 7), atol=1e-5, rtol=0)
    assert torch.equal(DSFL(reduce="none").together(said), mean)


def test_one_client_learns_nothing_from_its_own_labels() -> None:
    module, x = nn.Linear(4, 3), torch.randn(20, 4)
    before = module.weight.detach().clone()
    DSFL(batch=7).learn(module, x, module(x).softmax(1).detach(), 0)
    torch.testing.assert_close(module.weight.detach(), before, atol=1e-6, rtol=0)


def test_labels_belong_to_examples_whatever_the_order_of_batches() -> None:
    x, wanted = torch.eye(6), torch.eye(6)
    for key in range(3):
        module = nn.Linear(6, 6)
        DSFL(epochs=400, lr=1.0, batch=4).learn(module, x, wanted, key)
        assert torch.equal(module(x).argmax(1), torch.arange(6))


def test_dsfl_sends_labels_and_no_models() -> None:
    """Down: labels, their ids and those of this round's examples; up: probabilities, whatever the model's size."""
    made = small("method=dsfl", "method.examples=20")
    one = made.run_round()
    assert [one["bytes_down"], one["bytes_up"]] == [4 * 20 * (10 * 4 + 16), 4 * 20 * 10 * 4]
    wide = small("method=dsfl", "method.examples=20", "task.width=16").run_round()
    assert [wide[key] for key in ("bytes_down", "bytes_up")] == [one["bytes_down"], one["bytes_up"]]


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
        DSFL(epochs=2).learn(nn.Sequential(nn.ZeroPad1d((0, 1)), nn.Dropout(0.5), last), inputs, labels, 1, 2)
        assert torch.equal(torch.random.get_rng_state(), state)
        found.append(last.weight.detach().clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], before)


def test_clients_of_dsfl_begin_with_given_weights(tmp_path: Path) -> None:
    model = small("method=heterofl").server.state[MODEL]
    save_file({name: torch.full_like(t, 0.5) for name, t in model.items()}, tmp_path / "w.safetensors")
    made = small("method=dsfl", f"weights={tmp_path / 'w.safetensors'}")
    plan = asked(made)
    assert all(float(tensor.max()) == 0.5 for job in plan.jobs for tensor in plan.received(job).values())


def test_a_power_of_almost_nothing_is_finite() -> None:
    sharp = DSFL(reduce="power", temperature=1e-3).together([torch.tensor([[0.6, 0.4, 0.0]])])
    torch.testing.assert_close(sharp, torch.tensor([[1.0, 0.0, 0.0]]))


def test_clients_of_dsfl_go_on_with_their_own_models() -> None:
    """Two rounds with a rate of almost 0 in the second: what a client sends back is what it kept."""
    frozen = ["client.milestones=[1]", "client.decay=1.0e-30"]
    made = small("method=dsfl", "method.epochs=0", "fleet.cohort=6", 'fleet.capacities=["1"]', *frozen)
    made.run_round()
    kept = [dict(job.kept or {}) for job in asked(made).jobs]
    assert len({float(own["conv1.weight"].sum()) for own in kept}) == 6
    for own, upload in zip(kept, answered(made), strict=True):
        for name, tensor in upload.tensors.items():
            torch.testing.assert_close(tensor, own[name])


def test_clients_of_dsfl_learn_the_labels_of_the_round_before() -> None:
    """Clients whose own training moves nothing are moved by labels, from the second round on."""
    alone = ["client.lr=1.0e-30", "client.momentum=0", 'fleet.capacities=["1"]', "fleet.cohort=6"]
    made = small("method=dsfl", "method.epochs=1", *alone)
    first = {name: tensor.clone() for name, tensor in made.server.state[MODEL].items()}
    for upload in answered(made):
        torch.testing.assert_close(dict(upload.tensors), first, atol=1e-20, rtol=0)
    made.run_round()
    moved = [upload.tensors["conv1.weight"] for upload in answered(made)]
    for tensor in (*moved, made.server.state[MODEL]["conv1.weight"]):  # the server learns, too
        assert float((tensor - first["conv1.weight"]).abs().max()) > 1e-4


# --- Fed-ET ---


def test_the_worked_case() -> None:
    said = [torch.tensor([row]) for row in ([4.0, 0, 0], [0, 1, 0.2], [0.5, 0.4, 0.6])]
    found = FedET().consensus(said)
    assert found.label.tolist() == [0]
    assert found.torn.tolist() == [True]
    torch.testing.assert_close(found.apart, torch.tensor([[0.01724, 0.97931, 0.21379]]), atol=1e-5, rtol=0)
    alike = FedET(confident=False).consensus(said)
    assert alike.label.tolist() == [0]
    torch.testing.assert_close(alike.apart, torch.tensor([[0.25, 0.7, 0.4]]))


def test_clients_that_agree_leave_nobody_apart() -> None:
    one = torch.randn(6, 4)
    found = FedET().consensus([one, one, one])
    assert not bool(found.torn.any())
    assert torch.equal(found.label, one.argmax(1))
    flat = FedET().consensus([torch.ones(2, 3), torch.ones(2, 3)])
    assert bool(flat.apart.isfinite().all())


def test_the_louder_client_counts_for_its_square() -> None:
    """Logits twice as large have four times the variance: 4 · 2 against 1 · 1.5 for class 1, not 2 against 1.5."""
    quiet, loud = torch.tensor([[0.0, 3.0, 0.0]]), torch.tensor([[2.0, 0.0, 0.0]])
    assert FedET().consensus([quiet, loud]).label.tolist() == [1]
    assert FedET().consensus([quiet, 2 * loud]).label.tolist() == [0]


def test_nobody_apart_is_not_a_wish_for_doubt() -> None:
    """An empty set of dissenters adds nothing to the loss; zero logits would pull towards all classes alike."""
    agreed = Consensus(torch.zeros(40, dtype=torch.int64), torch.zeros(40, 3), torch.zeros(40, dtype=torch.bool))
    x, weights = torch.randn(40, 4), torch.randn(3, 4)
    found = []
    for diversity in (0.0, 5.0):
        own = group(weights.clone())
        FedET(diversity=diversity, lr=0.1).teach(own.load(own.average), Public(x), agreed)
        found.append(own.tensors()["weight"])
    assert torch.equal(*found)


def test_without_steps_fedet_averages_and_copies_the_representation() -> None:
    made = small("method=fedet", "method.steps=0", "fleet.cohort=6")
    answers, before = by_capacity(made), copied(made)
    made.run_round()
    top = {n: torch.stack([m[n] for models in answers.values() for m in models]).mean(0) for n in TOP}
    for name, tensor in made.server.state[MODEL].items():
        torch.testing.assert_close(tensor, top.get(name, before[MODEL][name]), msg=name)
    for job in made.method.jobs(made.server, 0):
        for name, tensor in part(made, job).items():
            wanted = top.get(name, torch.stack([model[name] for model in answers[job.capacity]]).mean(0))
            torch.testing.assert_close(tensor, wanted, msg=name)


def test_without_diversity_and_trust_fedet_learns_the_class_of_the_mean_logits() -> None:
    """λ = 0 and clients alike: FedDF's ensemble, with hard labels."""
    one, other, x = torch.randn(3, 4), 5 * torch.randn(3, 4), torch.randn(50, 4)
    target = FedDF().target([group(one, other)], Public(x))
    found = FedET(confident=False).consensus([x @ one.T, x @ other.T])
    assert torch.equal(found.label, target.argmax(1))


def test_the_servers_model_is_its_own() -> None:
    """It learns, and is larger than the model of any client."""
    made = small("method=fedet", "fleet.server_scale=2", "method.steps=4")
    before = made.server.state[MODEL]["trunk.conv1.weight"].clone()
    made.run_round()
    after = made.server.state[MODEL]["trunk.conv1.weight"]
    assert not torch.equal(after, before)
    assert after.shape[0] == 16
    assert made.evaluate()["global_accuracy"] > 0


# --- FedGKT ---


def test_both_learn_nothing_from_equal_logits_and_heat_does_not_cool_it() -> None:
    student, teacher = torch.randn(8, 5, requires_grad=True), torch.randn(8, 5)
    (none,) = torch.autograd.grad(FedGKT().distance(student, student.detach()), student)
    assert float(none.abs().max()) < 1e-6
    sizes = []
    for temperature in (50.0, 100.0):
        (found,) = torch.autograd.grad(FedGKT(temperature=temperature).distance(student, teacher), student)
        sizes.append(float(found.norm()))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)


def test_logits_belong_to_examples() -> None:
    """What a client keeps for its i-th example is what the server says about that example's map."""
    made = small("method=fedgkt", "fleet.cohort=2", "method.server_epochs=1")
    made.run_round()
    server, how = made.server, made.method
    assert isinstance(how, FedGKT)
    assert server.clients is not None
    model = server.loaded().eval()
    for member in server.fleet.members(0):
        own = server.clients.get(member.client)
        assert own is not None
        with torch.no_grad():
            maps = how.edge(server, member.client).features(server.task.inputs(server.task.client(member.client).x))
            wanted = model(maps)
        torch.testing.assert_close(own["server's logits"], wanted, atol=1e-4, rtol=1e-4)


def test_without_distillation_clients_train_by_themselves() -> None:
    """Whatever the server does."""
    found = []
    for epochs in (1, 3):
        alone = ["method.alpha=0", "method.server_alpha=0", f"method.server_epochs={epochs}", "fleet.cohort=6"]
        made = small("method=fedgkt", *alone)
        states(made, 2)
        assert made.server.clients is not None
        found.append(made.server.clients.get(2) or {})
    edges = [name for name in found[0] if name != "server's logits"]
    assert len(edges) > 10
    assert all(torch.equal(found[0][name], found[1][name]) for name in edges)
    assert not torch.equal(*(each["server's logits"] for each in found))


def test_clients_of_fedgkt_learn_from_the_servers_logits() -> None:
    """With distillation, what the server does in the first round changes the clients in the second."""
    found = []
    for epochs in (1, 3):
        made = small("method=fedgkt", f"method.server_epochs={epochs}", "fleet.cohort=6")
        states(made, 2)
        assert made.server.clients is not None
        found.append((made.server.clients.get(2) or {})["stem.weight"])
    assert not torch.equal(*found)


def test_fedgkt_takes_a_wider_server_small_batches_and_drops_stragglers() -> None:
    sizes = [
        sum(tensor.numel() for tensor in small("method=fedgkt", f"fleet.server_scale={n}").server.state[MODEL].values())
        for n in (1, 2)
    ]
    assert sizes[1] > 2 * sizes[0]
    made = small("method=fedgkt", "client.batch=1", "fleet.stragglers=0.5", "method.server_epochs=1", "task.limit=60")
    row = made.run_round()
    late = [str(member.client) for member in made.server.fleet.members(0) if member.part < 1]
    assert row["dropped"] == dict.fromkeys(late, LATE)
    assert row["clients"] == 4 - len(late)


def test_fedgkt_stops_clients_at_their_deadline() -> None:
    made = small("method=fedgkt", "deadline=1.0e-9")
    row = made.run_round()
    assert row["void"]
    assert all("past its deadline" in why for why in row["dropped"].values())
    assert made.server.clients is not None
    assert not any(made.server.clients.has(client) for client in range(6))
    assert made.evaluate()["global_accuracy"] >= 0, "newcomers' extractors"


def test_some_methods_need_images(tmp_path: Path) -> None:
    words = wordy(tmp_path)
    for method in ("fedgkt", "fedbe", "dsfl"):
        with pytest.raises(FedrolexError, match=f"{method} .*needs a task of images"):
            prepare(Recipe(device="cpu").with_settings([*words, f"method={method}"]))
