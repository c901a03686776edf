"""Methods that give clients parts of a model: FjORD, Federated Select."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from methods_shared import small, states, wordy
from torch import Tensor, nn

from fedrolex import Classification, Examples, Recipe
from fedrolex.clients.work import Slot
from fedrolex.engines.narrow import Narrow
from fedrolex.methods.fjord import OrderedDropout
from fedrolex.runs import Training, prepare
from fedrolex.slicing import WHOLE

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
