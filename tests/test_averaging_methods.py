"""Methods that average models of one size: closed forms, reductions, stragglers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from methods_shared import answered, copied, small, states
from torch import Tensor, nn

from fedrolex import Examples, Regression
from fedrolex.clients.messages import MODEL
from fedrolex.methods import Scaffold, ServerOptimizer
from fedrolex.methods.scaffold import CONTROL, ControlledTraining
from fedrolex.methods.server_optimizer import FIRST, SECOND
from fedrolex.rounds.round import Round
from fedrolex.rounds.server import State
from fedrolex.runs.training import LATE, Training

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
    task = Regression("parabolas", lambda _: point().double(), data, data, parts, loss=half_squares)
    words = ['fleet.capacities=["1"]', f"fleet.clients={clients}", f"fleet.cohort={cohort}", "client.batch=1",
             "client.epochs=5", "client.lr=0.1", "client.momentum=0", *settings]  # fmt: skip
    return small(*words, task=task)


def iterates(made: Training, rounds: int) -> list[float]:
    found = []
    for _ in range(rounds):
        made.run_round()
        found.append(float(made.server.state[MODEL]["weight"]))
    return found


def variates(made: Training) -> list[float]:
    """What every client keeps; 0 for newcomers."""
    states = made.server.clients
    assert states is not None
    own = [states.get(client) for client in range(made.server.fleet.clients)]
    return [0.0 if one is None else float(one["weight"]) for one in own]


def test_fedavg_goes_to_its_fixed_point_not_to_the_optimum() -> None:
    assert iterates(parabolas("method=fedavg"), 60)[-1] == pytest.approx(2.6805323, abs=1e-7)


def test_fedprox_goes_to_its_closed_form() -> None:
    """Local problems solved to the end: w = (a b + μ θ) / (a + μ), whose mean stands still at 2.4 for μ = 1."""
    made = parabolas("method=fedprox", "method.mu=1", "client.epochs=80")
    assert iterates(made, 20)[-1] == pytest.approx(2.4, abs=1e-7)


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
    for wanted in ([0.0, -6.65544], [1.964985, -5.36911], [2.723408, -4.104243]):
        made.run_round()
        assert variates(made) == pytest.approx(wanted, abs=1e-6)
        assert float(made.server.state[CONTROL]["weight"]) == pytest.approx(sum(variates(made)) / 2, abs=1e-12)


def test_the_servers_variate_is_the_mean_of_all_clients_whoever_takes_part() -> None:
    made = parabolas("method=scaffold", clients=3, cohort=1)
    for _ in range(7):
        made.run_round()
        assert float(made.server.state[CONTROL]["weight"]) == pytest.approx(sum(variates(made)) / 3, abs=1e-12)


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


def test_clients_whose_variates_are_not_finite_are_dropped() -> None:
    """A rate of almost 0 divides by almost 0: nobody's answer counts, and nothing changes."""
    made = small("method=scaffold", "client.momentum=0", "client.milestones=[1]", "client.decay=1.0e-300")
    made.run_round()
    before = copied(made)
    row = made.run_round()
    assert row["void"]
    assert all("sent a value that is not finite" in why for why in row["dropped"].values())
    assert len(row["dropped"]) == 4
    assert all(torch.equal(made.server.state[s][n], t) for s, tensors in before.items() for n, t in tensors.items())


def test_scaffold_with_one_client_is_plain_descent() -> None:
    plain, corrected = (parabolas(f"method={name}", clients=1, cohort=1) for name in ("fedavg", "scaffold"))
    assert iterates(corrected, 4) == pytest.approx(iterates(plain, 4), abs=1e-12)


@pytest.mark.parametrize(("steps", "wanted"), [(5, 13.1441), (50, 410.464)])
def test_how_far_momentum_carries(steps: int, wanted: float) -> None:
    work = ControlledTraining(lr=1.0, momentum=0.9)
    assert work.distance(0, steps) == pytest.approx(wanted, rel=1e-5)
    assert replace(work, denominator="steps").distance(0, steps) == steps


def test_with_momentum_and_its_denominator_variates_are_mean_gradients() -> None:
    """A straight line has the same gradient everywhere: that is what a client keeps, whatever carries it."""
    data = Examples(torch.ones(1, 1).double(), torch.zeros(1, 1).double())
    task = Regression(
        "line", lambda _: point().double(), data, data, [torch.tensor([0])], loss=lambda s, _: 3 * s.mean()
    )
    words = ['fleet.capacities=["1"]', "fleet.clients=1", "fleet.cohort=1", "client.batch=1", "client.epochs=7",
             "method=scaffold"]  # fmt: skip
    made = small(*words, task=task)
    made.run_round()
    assert variates(made) == pytest.approx([3.0])


# --- reductions on a real model ---


def test_fedprox_without_a_pull_is_fedavg() -> None:
    one, other = states(small("method=fedavg")), states(small("method=fedprox", "method.mu=0"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@dataclass(frozen=True, kw_only=True)
class Frozen(Scaffold):
    """SCAFFOLD whose variates stay 0, on both sides."""

    def finish(self, round: Round) -> State:
        round.kept.clear()
        return {**super().finish(round), CONTROL: round.state[CONTROL]}


def test_scaffold_with_variates_frozen_at_zero_is_fedavg() -> None:
    made = small("method=scaffold")
    frozen = Training(made.server, Frozen(), made.work, made.engine)
    one, other = states(small("method=fedavg")), states(frozen)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_server_that_takes_whole_steps_is_plain_averaging() -> None:
    one = states(small("method=fedrolex"))
    other = states(small("method=fedrolex", "method.server_optimizer={name: sgd, lr: 1.0}"))
    for name in one:
        torch.testing.assert_close(other[name], one[name])


@pytest.mark.parametrize("name", ["adam", "yogi"])
def test_an_adaptive_server_by_hand(name: Any) -> None:
    optimizer = ServerOptimizer(name=name, lr=0.1, momentum=0.9, second=0.99, floor=1e-3)
    before = {MODEL: {"w": torch.tensor([1.0]), "b": torch.tensor([4.0])}, FIRST: {"w": torch.tensor([0.2])},
              SECOND: {"w": torch.tensor([0.5])}}  # fmt: skip
    new = optimizer.moved(before, {MODEL: {"w": torch.tensor([3.0]), "b": torch.tensor([5.0])}}, ["w"])
    first = 0.9 * 0.2 + 0.1 * 2.0
    second = 0.99 * 0.5 + 0.01 * 4.0 if name == "adam" else 0.5 + 0.01 * 4.0
    assert float(new[FIRST]["w"]) == pytest.approx(first)
    assert float(new[SECOND]["w"]) == pytest.approx(second)
    assert float(new[MODEL]["w"]) == pytest.approx(1.0 + 0.1 * first / (second**0.5 + 1e-3))
    assert float(new[MODEL]["b"]) == 5.0, "buffers keep their average"


def test_a_server_with_momentum_goes_on_where_clients_stand_still() -> None:
    optimizer = ServerOptimizer(name="sgd", momentum=0.5)
    state = {MODEL: {"w": torch.tensor([0.0])}, FIRST: {"w": torch.tensor([0.0])}}
    state = optimizer.moved(state, {MODEL: {"w": torch.tensor([1.0])}}, ["w"])
    state = optimizer.moved(state, {MODEL: state[MODEL]}, ["w"])
    assert float(state[MODEL]["w"]) == 1.5


# --- stragglers ---


def test_fedprox_keeps_stragglers_and_fedavg_drops_them() -> None:
    late = ["fleet.stragglers=0.6", "client.epochs=3"]
    kept, dropped = small("method=fedprox", *late), small("method=fedavg", *late)
    rows = [(kept.run_round(), dropped.run_round()) for _ in range(4)]
    assert all(one["clients"] == 4 and not one["dropped"] for one, _ in rows)
    assert sum(len(other["dropped"]) for _, other in rows) == sum(
        member.part < 1 for round in range(4) for member in kept.server.fleet.members(round)
    )
    assert all(why == LATE for _, other in rows for why in other["dropped"].values())
    assert all(one["bytes_down"] == other["bytes_down"] for one, other in rows)


def test_a_straggler_does_a_part_of_its_steps() -> None:
    made = small("method=fedprox", "fleet.stragglers=1", "client.epochs=3")
    for answer in answered(made):
        whole = 3 * -(-len(made.server.task.client(answer.job.client)) // 16)
        assert 1 <= answer.steps <= whole
        assert answer.steps == max(1, -(-answer.job.part * whole // 1))
