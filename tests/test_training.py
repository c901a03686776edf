"""Training: reductions of one method to another, faults inside a round, drift."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from small import hand_made
from torch import Tensor, nn

from fedrolex import (
    Axes,
    Examples,
    Failure,
    FedAvg,
    FedDropout,
    FedRolex,
    Fleet,
    HeteroFL,
    Job,
    LocalTraining,
    Method,
    Recipe,
    Regression,
    Rolling,
    RoundPlan,
    Scheme,
    Server,
    Task,
    Training,
    Upload,
    prepare,
)
from fedrolex.clients.messages import MODEL, Network
from fedrolex.clients.slot import Slot
from fedrolex.core.streams import shuffle
from fedrolex.engines.cpu.loop import Loop
from fedrolex.slicing.trace import FactoryBuilder
from fedrolex.theory.costs import cost

SMALL = Recipe(rounds=3, device="cpu").with_settings(
    ["task.width=8", "fleet.clients=10", "fleet.cohort=5", "client.lr=0.05", "engine=loop"]
)


def training(method: Method | None = None, *settings: str) -> Training:
    recipe = SMALL.with_settings(settings)
    return prepare(recipe if method is None else replace(recipe, method=method))


def after(made: Training, rounds: int = 3) -> dict[str, Tensor]:
    for _ in range(rounds):
        made.run_round()
    return made.server.state[MODEL]


def doubled(made: Training) -> Training:
    """The same in float64: a rolled layer adds up in another order, and single precision would drift apart."""
    server, task = made.server, made.server.classification
    server.main.module.double()
    server.state = {MODEL: {name: tensor.double() for name, tensor in server.state[MODEL].items()}}
    train, test = (Examples(task.inputs(part.x).double(), part.y) for part in (task.train, task.test))
    server.task = server.view = replace(task, train=train, test=test, pixels=None)
    return made


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


# --- reductions ---


def test_with_every_client_full_size_all_methods_are_fedavg() -> None:
    full = 'fleet.capacities=["1"]'
    wanted = after(training(FedAvg(), full))
    assert same(after(training(HeteroFL(), full)), wanted)
    assert same(after(training(FedDropout(), full)), wanted)
    rolled, exact = after(doubled(training(FedRolex(), full))), after(doubled(training(FedAvg(), full)))
    for name, tensor in exact.items():
        torch.testing.assert_close(rolled[name], tensor, rtol=1e-9, atol=1e-11)


class Still(FedRolex):
    """Windows that roll back as far as they have rolled."""

    def windows(self, server: Server) -> Scheme:
        return Rolling(offset=lambda axis, place, round, client: -round)


def test_fedrolex_with_a_window_that_stands_still_is_heterofl() -> None:
    assert same(after(training(Still())), after(training(HeteroFL())))
    assert not same(after(training(FedRolex())), after(training(HeteroFL())))


class Point(nn.Module):
    """A model that is just a point; k copies of it."""

    def __init__(self, k: int = 2) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(k, dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        return self.x.expand(len(rows), -1)


def quadratic(output: Tensor, target: Tensor) -> Tensor:
    """½ a (x − b)², targets are (a, b)."""
    return (0.5 * target[:, :1] * (output - target[:, 1:]) ** 2).mean(0).sum()


def test_the_fixed_point_of_fedavg_on_two_quadratics() -> None:
    """a = (1, 3), b = (0, 4), η = 0.1, five full-gradient steps: 2.6805323, not the optimum 3."""
    axes = hand_made({"k": 2}, {"x": ["k"]})
    axes = Axes(axes.axes, axes.tensors, build=FactoryBuilder(lambda sizes: Point(sizes["k"])))
    data = Examples(torch.zeros(2, 1, dtype=torch.float64), torch.tensor([[1.0, 0.0], [3.0, 4.0]], dtype=torch.float64))
    parts = [torch.tensor([0]), torch.tensor([1])]
    task = Regression("quadratics", lambda scale: Point(), data, data, parts, loss=quadratic)
    fleet = Fleet(clients=2, cohort=2, capacities=["1"])
    server = Server(task, fleet, {MODEL: Network(Point(), axes)})
    made = Training(server, FedAvg(), LocalTraining(epochs=5, batch=1, lr=0.1), Loop())
    assert float(after(made, 200)["x"][0]) == pytest.approx(2.6805323, abs=1e-7)


class Backwards(Loop):
    """Clients run in the opposite order."""

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        answers = []
        for answer in super().run(replace(plan, jobs=plan.jobs[::-1])):
            assert isinstance(answer, Upload)
            answers.append(replace(answer, tensors={name: tensor.clone() for name, tensor in answer.tensors.items()}))
        yield from answers[::-1]


@pytest.mark.parametrize("method", [FedRolex(), FedDropout(), FedAvg(weighting="samples")])
def test_the_order_in_which_clients_ran_does_not_matter(method: Method) -> None:
    made = training(method)
    turned = training(method)
    turned.engine = Backwards()
    assert same(after(made), after(turned))


def test_one_client_with_all_data_is_ordinary_training() -> None:
    alone = ["fleet.clients=1", "fleet.cohort=1", 'fleet.capacities=["1"]']
    made, twin = training(FedAvg(), *alone), training(FedAvg(), *alone).server.main.module
    optimiser = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    task = made.server.classification
    rows = task.parts[0]
    order = torch.from_numpy(shuffle(len(rows), made.server.seed, "batches", 0, 0, 0))
    for batch in rows[order].split(16):
        optimiser.zero_grad()
        nn.functional.cross_entropy(twin(task.inputs(task.train.x[batch])), task.train.y[batch]).backward()
        optimiser.step()
    for name, tensor in after(made, 1).items():
        torch.testing.assert_close(tensor, twin.get_parameter(name).detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)])
def test_adam_is_adam(rate: Any) -> None:
    """Step by step what torch.optim.Adam does, with a rate that is a number or a tensor."""
    torch.manual_seed(0)
    model, twin = nn.Linear(6, 3), nn.Linear(6, 3)
    twin.load_state_dict(model.state_dict())
    slot, work = Slot(model), LocalTraining(optimizer="adam", weight_decay=5e-4)
    optimiser = torch.optim.Adam(twin.parameters(), lr=0.01, weight_decay=5e-4)
    work.begin(slot.memory, slot.parameters)
    for _ in range(7):
        x, y = torch.randn(5, 6), torch.randint(0, 3, (5,))
        work.step(slot, x, y, nn.functional.cross_entropy, rate)
        optimiser.zero_grad()
        nn.functional.cross_entropy(twin(x), y).backward()
        optimiser.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    work.begin(slot.memory, slot.parameters)
    assert float(slot.memory.count) == 0


@pytest.mark.parametrize(
    ("work", "tensors"),
    [
        (LocalTraining(), (0, 0)),
        (LocalTraining(momentum=0.9), (2, 0)),
        (LocalTraining(optimizer="adam"), (2, 2)),
    ],
)
def test_an_optimiser_takes_the_memory_that_its_steps_use(work: LocalTraining, tensors: tuple[int, int]) -> None:
    slot = Slot(nn.Linear(6, 3))
    for _ in range(2):
        work.begin(slot.memory, slot.parameters)
        work.step(slot, torch.randn(5, 6), torch.randint(0, 3, (5,)), nn.functional.cross_entropy, 0.1)
        assert (len(slot.memory.first), len(slot.memory.second)) == tensors


def test_positions_outside_every_window_keep_their_bits() -> None:
    made = training(Still(), 'fleet.capacities=["1/2"]')
    before = {name: tensor.clone() for name, tensor in made.server.state[MODEL].items()}
    new = after(made, 2)
    assert torch.equal(new["conv2.weight"][8:], before["conv2.weight"][8:])
    assert torch.equal(new["conv2.weight"][:, 4:], before["conv2.weight"][:, 4:])
    assert not torch.equal(new["conv2.weight"][:8, :4], before["conv2.weight"][:8, :4])


def test_a_server_twice_as_wide_as_the_largest_client() -> None:
    made = training(None, "fleet.server_scale=2")
    axes = made.server.main.axes
    assert axes["conv1"].size == 16
    sizes = {axes.parameters(job.window) for job in made.method.jobs(made.server, 0)}
    assert max(sizes) <= training().server.main.axes.parameters()
    first = made.evaluate()["loss"]
    after(made, 6)
    assert made.evaluate()["loss"] < first


# --- the client's step is the textbook's ---


@pytest.mark.parametrize(
    "work", [LocalTraining(lr=0.1), LocalTraining(lr=0.1, momentum=0.9, weight_decay=0.01, clip=0.5)]
)
def test_a_step_is_what_torch_does(work: LocalTraining) -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    slot = Slot(ours)
    work.begin(slot.memory, slot.parameters)
    optimiser = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=work.momentum, weight_decay=work.weight_decay)
    for _ in range(4):
        x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
        work.step(slot, x, y, nn.functional.cross_entropy, 0.1)
        optimiser.zero_grad()
        nn.functional.cross_entropy(theirs(x), y).backward()
        if work.clip is not None:
            nn.utils.clip_grad_norm_(theirs.parameters(), work.clip)
        optimiser.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_tf32_is_a_permission_that_a_cpu_makes_no_use_of() -> None:
    assert same(after(training(None, "precision=tf32"), 1), after(training(None, "precision=fp32"), 1))


def test_the_rate_falls_at_milestones() -> None:
    work = LocalTraining(lr=1.0, milestones=[3, 5], decay=0.5)
    assert [work.rate(j) for j in range(7)] == [1, 1, 1, 0.5, 0.5, 0.25, 0.25]


# --- faults inside a round ---


class Faulty(Loop):
    """Some clients go wrong, each in its own way."""

    def __init__(self, faults: Mapping[int, str]) -> None:
        super().__init__()
        self.faults = faults

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        for answer in super().run(plan):
            fault = self.faults.get(answer.job.client)
            if fault is None or isinstance(answer, Failure):
                yield answer
                continue
            tensors = dict(answer.tensors)
            if fault == "nan":
                tensors["head.bias"] = tensors["head.bias"] * float("nan")
            elif fault == "shape":
                tensors["head.weight"] = tensors["head.weight"][:1]
            elif fault == "missing":
                del tensors["conv1.bias"]
            yield replace(answer, tensors=tensors)

    def trained(self, plan: RoundPlan, job: Job) -> Upload:
        if self.faults.get(job.client) == "raise":
            raise RuntimeError("out of battery")
        return super().trained(plan, job)


def test_bad_clients_are_dropped_named_and_counted() -> None:
    made = training(None, "fleet.cohort=10")
    made.engine = Faulty({1: "raise", 3: "nan", 5: "shape", 7: "missing"})
    row = made.run_round()
    assert row["clients"] == 6
    assert set(row["dropped"]) == {"1", "3", "5", "7"}
    assert row["dropped"]["1"] == "RuntimeError: out of battery"
    assert row["dropped"]["3"] == "sent a value that is not finite (head.bias)"
    assert row["dropped"]["5"].startswith("client 5: head.weight has shape (1, 64)")
    assert row["dropped"]["7"] == "client 7: tensor 'conv1.bias' is missing"
    clean = training(None, "fleet.cohort=10")
    clean.engine = Faulty(dict.fromkeys((1, 3, 5, 7), "raise"))
    clean.run_round()
    assert same(made.server.state[MODEL], clean.server.state[MODEL]), "a bad client is as good as absent"


def test_a_round_below_its_quorum_is_void_and_the_window_advances() -> None:
    made = training(None, "quorum=4")
    before = dict(made.server.state[MODEL])
    made.engine = Faulty(dict.fromkeys(range(10), "raise"))
    row = made.run_round()
    assert row["void"]
    assert row["clients"] == 0
    assert same(made.server.state[MODEL], before)
    assert made.server.round == 1


def test_a_client_past_its_deadline_is_dropped() -> None:
    made = training(None, "deadline=1e-9")
    row = made.run_round()
    assert row["void"]
    assert all("past its deadline" in why for why in row["dropped"].values())


# --- drift ---


def test_drift_is_zero_for_clients_that_agree_and_larger_for_those_that_do_not() -> None:
    from fedrolex.rounds.drift import Drift
    from fedrolex.slicing import WHOLE

    axes = hand_made({"k": 2}, {"v": ["k"]})
    base = {"v": torch.zeros(2)}

    def drift(*changes: list[float]) -> float:
        measured = Drift(axes, base)
        for client, change in enumerate(changes):
            measured.add(client, Fraction(1), {"v": torch.tensor(change)}, WHOLE)
        mean = torch.tensor(changes).mean(0)
        return measured.by_capacity({"v": mean})["1"]

    assert drift([1.0, 2.0], [1.0, 2.0]) == pytest.approx(0.0, abs=1e-6)
    assert drift([1.0, 0.0], [0.0, 1.0]) == pytest.approx(1 - 2**-0.5, abs=1e-6)
    assert drift([1.0, 0.0], [-1.0, 0.0]) == 0.0, "no average to drift from"


def test_every_round_reports_drift_by_capacity() -> None:
    row = training(None, "fleet.cohort=10").run_round()
    assert set(row["drift"]) == {"1", "1/2", "1/4", "1/8", "1/16"}
    assert all(0 <= value <= 2 for value in row["drift"].values())


# --- the fleet ---


def test_cohorts_and_capacities_are_reproducible_and_cost_nothing_to_ask_for() -> None:
    fleet = Fleet(clients=1_000_000, cohort=5, seed=3)
    assert fleet.members(7) == fleet.members(7)
    assert fleet.members(7) != fleet.members(8)
    assert fleet.capacity(999_999, 0) == Fraction(1, 16)
    redrawn = Fleet(clients=1000, cohort=5, redrawn=True)
    assert len({redrawn.capacity(1, j) for j in range(50)}) == 5
    mixed = Fleet(clients=200, cohort=1, capacities=["1", "1/16"], shares=["0.06", "0.94"])
    assert sum(mixed.capacity(c, 0) == 1 for c in range(200)) == 12, "exactly its share"
    drawn = Fleet(clients=20_000, cohort=1, capacities=["1", "1/16"], shares=["0.06", "0.94"], redrawn=True)
    assert sum(drawn.capacity(c, 0) == 1 for c in range(20_000)) / 20_000 == pytest.approx(0.06, abs=0.006)


def test_availability_by_chance_and_by_trace() -> None:
    rare = Fleet(clients=1000, cohort=1000, availability=0.1)
    assert 60 < len(rare.members(0)) < 140
    traced = Fleet(clients=10, cohort=3, availability=[[1, 2], [], [4, 5, 6, 7]])
    assert [m.client for m in traced.members(0)] == [1, 2]
    assert traced.members(1) == []
    assert len(traced.members(2)) == 3
    assert [m.client for m in traced.members(3)] == [1, 2]
    able = Fleet(clients=10, cohort=10).members(0, able=Fraction(1, 4))
    assert {m.client % 5 for m in able} == {0, 1, 2}


def test_weights_by_samples_work_for_every_method() -> None:
    few = "task.partition={name: labels, labels: 2}"
    assert not same(after(training(None, few, "method.weighting=samples")), after(training(None, few)))


def test_a_client_without_examples_is_dropped() -> None:
    made = training(None, "fleet.cohort=10")
    task = made.server.classification
    parts = list(task.parts)
    parts[3] = torch.tensor([], dtype=torch.int64)
    made.server.view = replace(task, parts=parts)
    assert made.run_round()["dropped"] == {"3": "ValueError: has no examples"}


# --- what clients compute ---


def test_operations_are_those_of_the_sub_models_that_answered() -> None:
    made = training(FedRolex(), "fleet.cohort=10", "fleet.stragglers=0.5", "client.epochs=2")
    plan = made.plan(made.method.jobs(made.server, 0))
    example, axes, model = made.server.task.example(), made.server.main.axes, made.server.main.module
    one = {capacity: cost(model, axes, capacity, example).macs for capacity in {job.capacity for job in plan.jobs}}
    answers = [answer for answer in made.engine.run(plan) if isinstance(answer, Upload)]
    passes = {answer.job.key: min(answer.steps * made.work.batch, 2 * answer.examples) for answer in answers}
    row = made.run_round()
    kept = [answer for answer in answers if str(answer.job.client) not in row["dropped"]]
    assert row["macs"] == sum(3 * one[answer.job.capacity] * passes[answer.job.key] for answer in kept) > 0


def test_operations_that_cannot_be_counted_are_not_known() -> None:
    made = training()
    made.server.view = cast(Task, SimpleNamespace(example=lambda: torch.zeros(2, 99)))
    assert made.server.macs(made.method.jobs(made.server, 0)[0]) is None
