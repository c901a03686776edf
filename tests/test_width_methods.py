"""Methods that give clients parts of a model: FjORD, Federated Select."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import cast

import pytest
import torch
from methods_shared import copied, only, small, states, wordy
from torch import Tensor, nn

from fedrolex import Classification, Examples, Regression
from fedrolex.clients.messages import MODEL
from fedrolex.clients.slot import Slot
from fedrolex.clients.visit import Visit
from fedrolex.methods.fedselect import Selected
from fedrolex.methods.fjord import Narrow, OrderedDropout
from fedrolex.recipes.recipe import Recipe
from fedrolex.runs.prepare import prepare
from fedrolex.runs.training import Training
from fedrolex.slicing.windows import WHOLE

# --- FjORD ---


def test_fjord_at_one_width_is_fedavg_by_samples() -> None:
    alone = ['fleet.capacities=["1"]', "task.partition={name: dirichlet, alpha: 0.5}"]
    one = states(small("method=fedavg", "method.weighting=samples", *alone))
    other = states(small("method=fjord", *alone))
    assert all(torch.equal(one[name], other[name]) for name in one)


HALF = Fraction(1, 2)


def begun(made: Training) -> tuple[OrderedDropout, Slot, Narrow]:
    """The work, and a slot of the whole model that is ready for its first step, with the half inside it."""
    server, work = made.server, made.work
    assert isinstance(work, OrderedDropout)
    (job,) = [job for job in made.method.jobs(server, 0) if job.capacity == 1][:1]
    slot = Slot(server.main.axes.cut(server.main.module, WHOLE))
    work.start(slot, Visit(made.plan([job]), job, server.task.client(job.client), lambda: slot.module))
    return work, slot, slot.scratch["inside"][HALF]


def eight(made: Training) -> tuple[Tensor, Tensor]:
    """Eight examples."""
    data = made.server.task.client(0)
    return made.server.task.inputs(data.x[:8]), data.y[:8]


@pytest.mark.parametrize("distil", [False, True])
def test_a_batch_at_a_width_is_that_widths_batch(distil: bool) -> None:
    """Without distillation only the first nodes move; with it, the others move as if there were no narrow model."""
    made = small("method=fjord", f"method.distil={distil}", "client.momentum=0")
    server, loss = made.server, made.server.task.loss
    work, slot, half = begun(made)
    _, alone, _ = begun(made)
    work.narrow_step(half, slot, *eight(made), loss, 0.1, None)
    super(OrderedDropout, work).step(alone, *eight(made), loss, 0.1)
    axes, window = server.main.axes, server.window(0, HALF)
    before = server.state[MODEL]
    for name, now, plain in zip(slot.names, slot.parameters, alone.parameters, strict=True):
        outside = torch.ones_like(now, dtype=torch.bool)
        axes.region(name, window).put(outside, torch.zeros(axes.shape(name, axes.widths(window))).bool())
        reference = plain.detach() if distil else before[name]
        torch.testing.assert_close(now.detach()[outside], reference[outside], atol=1e-7, rtol=1e-5)
        assert not torch.equal(now.detach()[~outside], before[name][~outside]), name


def test_a_width_never_reads_beyond_its_nodes() -> None:
    made = small("method=fjord", "method.distil=false")
    work, slot, half = begun(made)
    axes, window = made.server.main.axes, made.server.window(0, HALF)
    for name, parameter in zip(slot.names, slot.parameters, strict=True):
        kept = axes.region(name, window).take(parameter.detach())
        parameter.detach().fill_(torch.nan)
        axes.region(name, window).put(parameter.detach(), kept)
    assert bool(work.narrow_step(half, slot, *eight(made), made.server.task.loss, 0.1, None).isfinite())
    assert all(bool(p.isfinite().all()) for p in half.parameters)


def test_widths_are_drawn_evenly_and_anew_for_every_step() -> None:
    made = small("method=fjord", 'method.widths=["1", "1/2", "1/4", "1/8"]')
    _, slot, _ = begun(made)
    drawn = [next(slot.scratch["drawn"]) for _ in range(400)]
    known = [*slot.scratch["inside"].values(), None]
    counts = [sum(each is one for each in drawn) for one in known]
    assert sum(counts) == 400
    assert all(60 < count < 140 for count in counts)


def test_what_is_learned_from_oneself_is_nothing() -> None:
    scores = torch.randn(5, 7, requires_grad=True)
    (gradient,) = torch.autograd.grad(OrderedDropout().learned(scores, scores.detach(), None), scores)
    assert float(gradient.abs().max()) < 1e-7


def test_a_batch_at_the_whole_width_counts_as_the_others_do() -> None:
    """CE + (1 − α) CE + α · 0: with α = 0 a step twice as long."""
    found = []
    for alpha, rate in ((0, 0.1), (1, 0.2)):
        made = small("method=fjord", f"method.alpha={alpha}", "client.momentum=0")
        work, slot, _ = begun(made)
        slot.scratch["drawn"] = iter([None])
        work.step(slot, *eight(made), made.server.task.loss, rate)
        found.append(slot.parameters)
    for twice, longer in zip(*found, strict=True):
        torch.testing.assert_close(twice, longer)


def test_ordered_dropout_finds_the_singular_vectors_in_order() -> None:
    """Two linear layers and all ranks alike: every truncation becomes the best approximation of its rank."""
    wanted = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]))
    data = Examples(torch.eye(4), wanted)

    def build(_: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))

    def squares(said: Tensor, y: Tensor) -> Tensor:
        return (said - y).square().sum()

    task = Regression("matrix", build, data, data, [torch.arange(4)], loss=squares)
    words = ['fleet.capacities=["1"]', "fleet.clients=1", "fleet.cohort=1", "client.batch=4", "client.epochs=2000",
             "client.lr=0.02", "client.momentum=0", "method=fjord", 'method.widths=["1/4", "1/2", "3/4", "1"]',
             "method.distil=false"]  # fmt: skip
    made = small(*words, task=task)
    made.run_round()
    first, second = (made.server.state[MODEL][f"{layer}.weight"] for layer in (0, 1))
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
        made = only(small(*words, task=task), clients)
        before = copied(made)
        assert made.run_round()["dropped"] == {}
        assert made.evaluate()["global_accuracy"] > 0
        model, wide = (made.server.state[section] for section in (MODEL, "statistics@1"))
        assert all(torch.equal(model[name], wide[name]) for name in wide), "the server's model is the widest"
        name = "1.running_mean"
        return {s for s in before if "@" in s and not torch.equal(made.server.state[s][name], before[s][name])}

    assert moved([0, 2]) == {"statistics@1", "statistics@1/2"}, "wide clients train both"
    assert moved([1, 3]) == {"statistics@1/2"}


def test_statistics_of_narrower_widths_are_counted_in_bytes() -> None:
    """Two floats a channel and a counter for the half of every batch norm, both ways."""
    words = ["task.model=resnet8", "task.width=4", "task.norm=batch", "fleet.cohort=6"]
    plain, ordered = (small(f"method={name}", *words) for name in ("heterofl", "fjord"))
    channels = [n for n, _ in plain.server.main.module.named_buffers() if n.endswith("running_mean")]
    half = plain.server.main.axes.widths(plain.server.window(0, HALF))
    bytes = sum(2 * 4 * plain.server.main.axes.shape(name, half)[0] + 8 for name in channels)
    wide = sum(job.capacity == 1 for job in plain.method.jobs(plain.server, 0))
    one, other = plain.run_round(), ordered.run_round()
    assert [other[key] - one[key] for key in ("bytes_down", "bytes_up")] == [wide * bytes] * 2


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


def test_no_part_of_a_client_is_measured_on_classes_it_does_not_have() -> None:
    made = small("method=fedselect", "evaluation.submodels=true", *TWO)
    made.run_round()
    found = made.evaluate()
    assert "submodels" not in found
    assert found["global_accuracy"] >= 0


def selected(*settings: str) -> tuple[Training, Selected]:
    made = prepare(Recipe(device="cpu").with_settings([*settings, "method=fedselect", "task.dropout=0.0"]))
    return made, cast(Selected, made.server.view)


def test_clients_ask_for_their_words(tmp_path: Path) -> None:
    made, view = selected(*wordy(tmp_path))
    data, keys = made.server.task.client(3), view.keys(3)
    assert torch.equal(keys, torch.cat([torch.zeros(1, dtype=torch.int64), made.server.task.labels(data)]))
    seen = view.client(3)
    assert torch.equal(keys[seen.x], data.x)
    assert torch.equal(keys[seen.y], data.y)
    before = copied(made)[MODEL]
    made.run_round()
    after, size = made.server.state[MODEL], made.server.task.classes
    (rows,) = (name for name, tensor in after.items() if "embed" in name and tensor.shape[0] == size)
    moved = (after[rows] != before[rows]).flatten(1).any(1).nonzero().flatten()
    asked = torch.cat([view.keys(member.client) for member in made.server.fleet.members(0)]).unique()
    assert set(moved.tolist()) <= set(asked.tolist())
    assert len(moved) > 3


def test_so_many_keys_and_no_more(tmp_path: Path) -> None:
    """The most frequent of its own; a word that is not among them is not predicted. Few own words are filled up."""
    few, view = selected(*wordy(tmp_path), "method.keys=4")
    assert len(view.keys(0)) == 4
    data, seen = few.server.task.client(0), view.client(0)
    held = torch.isin(data.y, view.keys(0))
    assert torch.equal(seen.y == 0, (data.y == 0) | ~held)
    assert few.run_round()["dropped"] == {}
    _, many = selected(*wordy(tmp_path), "method.keys=20")
    assert {len(many.keys(client)) for client in range(4)} == {20}
