"""Columns: which there are, who trains which, and what they say together."""

from __future__ import annotations

from fractions import Fraction
from math import sqrt
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods_shared import SMALL, copied, small, states
from safetensors.torch import load_file
from told import told
from torch import Tensor, nn

from fedrolex import load, prepare, train
from fedrolex.clients.messages import MODEL
from fedrolex.methods import Columns
from fedrolex.methods.own_width import at_own_width
from fedrolex.models import ColumnModel
from fedrolex.models.preresnet import Plan, PreResNet
from fedrolex.recipes.recipe import Recipe
from fedrolex.rounds.fleet import Fleet, Member
from fedrolex.runs.training import Training
from fedrolex.slicing import Static, trace

WHOLE, HALF, QUARTER = LEVELS = Fraction(1), Fraction(1, 2), Fraction(1, 4)
OPTIMIZER = "method.server_optimizer={name: sgd, lr: 1.0}"


def made(*words: str) -> Training:
    return small("method=columns", *words)


def method_of(training: Training) -> Columns:
    assert isinstance(training.method, Columns)
    return training.method


# --- which columns there are ---


@pytest.mark.parametrize(
    ("levels", "scale", "given", "wanted"),
    [
        (["1", "1/2", "1/4"], 1, (), ["1/2", "1/4"]),
        (["1/8", "1", "1/2"], 1, (), ["1/2", "1/8"]),
        (["1", "1/2"], 1, (), ["1/2", "1/2"]),
        (["1"], 1, (), ["1"]),
        (["1/2"], 1, (), ["1/2", "1/2"]),
        (["1/4"], 4, (), ["1", "1"]),
        (["1/2", "1/4"], 2, (), ["1/2", "1/2"]),
        (["1", "1/2", "1/4"], 1, ("1/4", "1/2", "1/4"), ["1/2", "1/4", "1/4"]),
    ],
)
def test_the_rule_and_what_is_asked_for(
    levels: list[str], scale: int, given: tuple[str, ...], wanted: list[str]
) -> None:
    fleet = Fleet(clients=10, cohort=5, capacities=levels)
    assert Columns(columns=given).widths(fleet, scale) == [Fraction(each) for each in wanted]


def test_a_column_that_nobody_can_hold_is_refused() -> None:
    recipe = Recipe().with_settings(SMALL)
    said = told(lambda: recipe.with_settings(["method=columns", 'fleet.capacities=["1/2"]', "method.columns=[1]"]))
    assert "method.columns has a width of 1: the largest device holds 1/2" in said
    assert "method.columns: " in told(lambda: recipe.with_settings(["method=columns", 'method.columns=["2/0"]']))
    assert "method.columns: capacity 2 is" in told(
        lambda: recipe.with_settings(["method=columns", "method.columns=[2]"])
    )


# --- who trains which ---


@settings(max_examples=60, deadline=None)
@given(
    widths=st.lists(st.sampled_from(["1", "1/2", "1/3", "1/4", "1/8"]), min_size=1, max_size=5),
    capacity=st.sampled_from(["1", "1/2", "1/3", "1/4", "1/8"]),
    client=st.integers(0, 9),
    round=st.integers(0, 50),
)
def test_nobody_trains_more_than_its_capacity(widths: list[str], capacity: str, client: int, round: int) -> None:
    training, method = TRAINING, Columns(columns=widths)
    axes, scheme = training.server.main.axes, Static()
    found = method.trained_by(training.server, Member(client, Fraction(capacity)), round)

    def size(width: Fraction) -> int:
        return axes.parameters(scheme.window(axes, round=0, capacity=width, client=0))

    sizes = [size(each) for each in method.widths(training.server.fleet, 1)]
    left = size(Fraction(capacity)) - sum(sizes[column] for column in found)
    assert left >= 0
    assert all(sizes[column] > left for column in range(len(sizes)) if column not in found), "what fits is trained"


TRAINING = made('fleet.capacities=["1", "1/2", "1/4"]')


def test_the_largest_train_all_and_the_others_their_own() -> None:
    method, server = method_of(TRAINING), TRAINING.server
    by_capacity = {c: method.trained_by(server, Member(0, c), 0) for c in (Fraction(1), HALF, QUARTER)}
    assert by_capacity == {Fraction(1): [0, 1], HALF: [0], QUARTER: [1]}
    assert method.trained_by(server, Member(0, Fraction(1, 8)), 0) == []


def test_columns_of_one_width_take_turns() -> None:
    training = made('fleet.capacities=["1/2"]', 'method.columns=["1/2", "1/2", "1/2"]')
    chosen = [method_of(training).trained_by(training.server, Member(3, HALF), round) for round in range(60)]
    assert all(len(each) == 1 for each in chosen)
    assert all(10 <= chosen.count([column]) <= 30 for column in range(3))


def test_devices_without_room_for_all_columns_train_narrower_ones_in_half_of_the_rounds() -> None:
    words = ('fleet.capacities=["1", "1/2", "1/4"]', 'method.columns=["1/2", "1/4", "1/4"]', "method.turns=true")
    training = made(*words)
    method, server = method_of(training), training.server
    chosen = {c: [method.trained_by(server, Member(3, c), round) for round in range(80)] for c in LEVELS}
    assert all(each == [0, 1, 2] for each in chosen[WHOLE])
    assert {tuple(each) for each in chosen[HALF]} == {(0,), (1, 2)}
    assert 25 <= chosen[HALF].count([0]) <= 55
    assert {tuple(each) for each in chosen[QUARTER]} == {(1,), (2,)}, "there are no narrower ones"
    part = method.submodel(server, HALF)
    assert isinstance(part, ColumnModel)
    assert len(part.columns) == 1, "a device is given its largest column, whatever the round"


def test_one_by_one_a_device_trains_every_column_that_it_can_hold() -> None:
    words = ('fleet.capacities=["1", "1/2", "1/4"]', 'method.columns=["1/2", "1/4", "1/4"]', "method.one_by_one=true")
    training = made(*words)
    method, server = method_of(training), training.server
    chosen = {c: {tuple(method.trained_by(server, Member(3, c), round)) for round in range(9)} for c in LEVELS}
    assert chosen == {WHOLE: {(0, 1, 2)}, HALF: {(0, 1, 2)}, QUARTER: {(1, 2)}}
    part = method.submodel(server, HALF)
    assert isinstance(part, ColumnModel)
    assert len(part.columns) == 1, "what a device runs in the end must fit together"
    row = training.run_round()
    assert row["dropped"] == {}
    largest = max(sum(server.bytes(job) for job in training.method.jobs(server, 1) if job.client == client)
                  for client in range(server.fleet.clients))  # fmt: skip
    assert row["bytes_up"] > 0
    assert largest <= 4 * sum(server.main.axes.parameters(width) for width in (HALF, QUARTER, QUARTER))
    refused = told(lambda: made(*words, "method.turns=true"))
    assert "method.turns is for columns that must fit together" in refused


def test_a_client_is_asked_for_its_columns_and_sends_no_more_than_those() -> None:
    training = made('fleet.capacities=["1", "1/2", "1/4"]')
    server = training.server
    jobs = training.method.jobs(server, 0)
    members = {member.client: member.capacity for member in server.fleet.members(0)}
    assert {job.client for job in jobs} == set(members)
    for client, capacity in members.items():
        mine = [job for job in jobs if job.client == client]
        assert sum(server.bytes(job) for job in mine) <= 4 * server.main.axes.parameters(capacity)
        assert len({job.sections for job in mine}) == len({job.name for job in mine}) == len(mine)
    row = training.run_round()
    assert row["clients"] == len(members)
    assert row["bytes_up"] == sum(server.bytes(job) for job in jobs)


# --- reductions ---


def test_one_column_of_the_whole_model_is_fedavg() -> None:
    words = ('fleet.capacities=["1"]', "method.rows=true")
    one, other = states(made(*words)), states(small("method=fedavg", *words))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_column_that_all_train_one_by_one_is_a_model_that_all_train() -> None:
    fleet = 'fleet.capacities=["1/2", "1/4"]'
    row = made(fleet, "method.one_by_one=true", 'method.columns=["1/2", "1/4"]')
    alone = made(fleet, 'method.columns=["1/4"]')
    alone.server.state[MODEL] = {name: tensor.clone() for name, tensor in row.server.state["column1"].items()}
    for _ in range(3):
        row.run_round()
        alone.run_round()
    found = alone.server.state[MODEL]
    assert all(torch.equal(tensor, found[name]) for name, tensor in row.server.state["column1"].items())


def test_a_round_changes_the_columns_that_were_trained_and_no_others() -> None:
    training = made('fleet.capacities=["1/2", "1/4"]', "fleet.cohort=1", 'method.columns=["1/2", "1/4"]')
    server, seen = training.server, set()
    assert not torch.equal(server.state[MODEL]["head.weight"], server.state["column1"]["head.weight"])
    for round in range(6):
        before, asked = copied(training), {job.sections[0] for job in training.method.jobs(server, round)}
        training.run_round()
        changed = {
            section
            for section in before
            if any(not torch.equal(t, server.state[section][n]) for n, t in before[section].items())
        }
        assert changed == asked
        seen |= asked
    assert seen == {MODEL, "column1"}


# --- what comes of it ---


def test_the_row_gives_the_mean_of_its_columns_and_each_device_its_own() -> None:
    training = made('fleet.capacities=["1", "1/2", "1/4"]')
    states(training)
    method, server = method_of(training), training.server
    x = server.task.example()
    row = method.judged(server).eval()
    columns = [method.submodel(server, capacity) for capacity in (HALF, QUARTER)]
    assert all(column is not None for column in columns)
    scores = [column.eval()(x) for column in columns if column is not None]
    torch.testing.assert_close(row(x), (scores[0] + scores[1]) / 2)
    assert method.submodel(server, Fraction(1, 8)) is None


def test_a_server_larger_than_every_client_holds_no_larger_network() -> None:
    training = made('fleet.capacities=["1"]', "fleet.server_scale=4")
    assert method_of(training).widths(training.server.fleet, 4) == [1, 1]
    whole = sum(p.numel() for p in training.server.task.build(1).parameters())
    assert training.server.parameters == whole
    states(training)
    assert sum(p.numel() for p in training.method.judged(training.server).parameters()) == 2 * whole


def test_weights_are_as_if_drawn_at_the_width_they_are_used_at() -> None:
    model = PreResNet(Plan(width=16, size=8))
    axes = trace(model, model.slicing_example())
    window = Static().window(axes, round=0, capacity=QUARTER, client=0)
    state = axes.state(model)
    found, before = axes.take(at_own_width(axes, state, window), window), axes.take(state, window)
    inner = "stages.0.0.conv1.weight"
    torch.testing.assert_close(found[inner], before[inner] * 2)
    assert 1 / sqrt(16 * 9) < float(found[inner].abs().max()) <= 1 / sqrt(4 * 9)
    for same in ("stem.weight", "norm.weight", "head.bias"):
        assert torch.equal(found[same], before[same]), "of these, all inputs are left"
    torch.testing.assert_close(found["head.weight"], before["head.weight"] * 2)


# --- classes that some columns have never seen ---


class Says(nn.Module):
    """Always the same scores."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.register_buffer("scores", torch.tensor(scores))

    def forward(self, x: Tensor) -> Tensor:
        """One row for every example."""
        found: Tensor = self.scores  # type: ignore[assignment]
        return found.expand(len(x), -1)


def answer(columns: list[Says], seen: list[list[int]] | None) -> Tensor:
    known = None if seen is None else torch.tensor(seen).bool()
    found: Tensor = ColumnModel(columns, known)(torch.zeros(1, 2))[0]
    return found


def test_columns_that_have_seen_every_class_decide_how_likely_a_rare_one_is() -> None:
    wise, other = Says(1.0, 0.0, 2.0), Says(0.0, 3.0, 50.0)
    scores = answer([wise, other], [[1, 1, 1], [1, 1, 0]])
    assert scores[2] == 2.0, "an absent class is masked by a score of 0: scores are no logarithms of probabilities"
    found = scores.softmax(0)
    rare = torch.tensor([1.0, 0.0, 2.0]).softmax(0)[2]
    common = torch.tensor([0.5, 1.5]).softmax(0) * (1 - rare)
    torch.testing.assert_close(found, torch.cat([common, rare[None]]))


def test_where_all_have_seen_all_scores_are_averaged() -> None:
    columns = [Says(1.0, 0.0, 2.0), Says(0.0, 3.0, 4.0)]
    mean = torch.tensor([0.5, 1.5, 3.0])
    assert torch.equal(answer(columns, [[1, 1, 1], [1, 1, 1]]), mean)
    assert torch.equal(answer(columns, None), mean)
    assert torch.equal(answer(columns, [[1, 1, 0], [1, 1, 0]]), mean), "nobody has seen the last one"


def test_where_nobody_has_seen_all_a_class_is_for_those_who_have_seen_it() -> None:
    found = answer([Says(1.0, 0.0, 9.0), Says(9.0, 3.0, 4.0)], [[1, 1, 0], [0, 1, 1]])
    assert torch.equal(found, torch.tensor([1.0, 1.5, 4.0]))
    found = answer([Says(-1.0, -3.0, -9.0), Says(-9.0, -3.0, -7.0)], [[1, 0, 0], [0, 1, 0]])
    assert torch.equal(found, torch.tensor([-1.0, -3.0, -8.0])), "nobody has seen the last one: all are heard"


def test_what_columns_have_seen_is_kept_with_the_run(tmp_path: Path) -> None:
    words = [*SMALL, "method=columns", "method.rows=true", "rounds=2", "task.partition={name: labels, labels: 2}"]
    recipe = Recipe(device="cpu").with_settings([*words, 'fleet.capacities=["1", "1/2", "1/4"]'])
    done = train(recipe, out=tmp_path / "run")
    labels: list[set[int]] = [set(), set()]
    other = prepare(recipe)
    for round in range(2):
        for job in other.method.jobs(other.server, round):
            labels[int(job.name)] |= set(other.server.task.labels(other.server.task.client(job.client)).tolist())
    seen = load_file(tmp_path / "run" / "checkpoint.safetensors")["seen:classes"]
    assert [set(row.nonzero().flatten().tolist()) for row in seen] == labels
    x = other.server.task.inputs(other.server.task.client(0).x[:5])
    torch.testing.assert_close(load(tmp_path / "run")(x), done.model(x))


def test_a_model_of_one_size_may_begin_at_its_own_width() -> None:
    cut, own = (small("method=fedavg", "method.width=1/2", f"method.own_width={own}") for own in ("false", "true"))
    before, after = (made.server.state[MODEL] for made in (cut, own))
    factor = {name: float(after[name].norm() / before[name].norm()) for name in before if before[name].norm() > 0}
    assert factor["conv1.weight"] == pytest.approx(1)
    assert factor["conv2.weight"] == pytest.approx(sqrt(2))


# --- the server's optimiser ---


def test_an_optimiser_of_rate_one_without_momentum_is_the_average() -> None:
    plain, moved = (made('method.columns=["1/2", "1/4"]', *words) for words in ([], [OPTIMIZER]))
    for training in (plain, moved):
        states(training)
    for section in (MODEL, "column1"):
        for name, tensor in plain.server.state[section].items():
            torch.testing.assert_close(moved.server.state[section][name], tensor)


def test_every_column_has_a_momentum_of_its_own() -> None:
    training = made('method.columns=["1/2", "1/4"]', OPTIMIZER, "method.server_optimizer.momentum=0.5")
    begun = copied(training)
    training.run_round()
    once = copied(training)
    training.run_round()
    twice = copied(training)
    for section, memory in ((MODEL, "server_optimizer.first"), ("column1", "server_optimizer.first.column1")):
        for name, velocity in once[memory].items():
            torch.testing.assert_close(velocity, once[section][name] - begun[section][name])
            torch.testing.assert_close(twice[memory][name], twice[section][name] - once[section][name])
        assert any(tensor.any() for tensor in twice[memory].values())


def test_the_full_model_that_bytes_are_compared_with_is_as_wide_as_the_server() -> None:
    words = [*SMALL, "fleet.server_scale=2", 'fleet.capacities=["1", "1/2"]']
    full = []
    for method in ("columns", "fedrolex", "fedavg"):
        made = prepare(Recipe(device="cpu").with_settings([*words, f"method={method}"]))
        full.append(made.method.full_size(made.server))
    assert full[0] == full[1] == full[2]


@pytest.mark.parametrize(
    ("settings", "harm"),
    [
        (["method.rows=true"], True),
        (["method.rows=true", "client.mask=zero"], False),
        ([], False),
    ],
)
def test_rows_without_a_mask_are_said_to_do_harm_where_clients_lack_classes(
    settings: list[str], harm: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*SMALL, "method=columns", "rounds=1", "task.partition={name: labels, labels: 2}", *settings]
    train(Recipe(device="cpu").with_settings(words), out=tmp_path / "run")
    assert ("clients lack some of the 10 classes, where method.rows wants a mask" in capsys.readouterr().err) == harm
