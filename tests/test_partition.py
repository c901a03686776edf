"""Partitions: what methods promise about them, from the code; and capacities that depend on the data."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedrolex import FedrolexError, Recipe
from fedrolex.core.streams import deck
from fedrolex.runs.prepare import prepare
from fedrolex.tasks import Classification
from fedrolex.tasks.partition import (
    Partition,
    by_label,
    dirichlet,
    even,
    heterofl,
    hold_out,
    rare_classes,
    shards,
)


def labels(classes: int, each: int) -> Tensor:
    """Labels in a fixed, mixed order."""
    return torch.arange(classes * each) * 7919 % classes if (classes * each) % 7919 else torch.arange(classes * each)


def disjoint(parts: Partition, rows: int) -> int:
    """Checks the invariants; returns how many rows are used."""
    assert len(parts.rows) == len(parts.rows.unique()) == int(parts.sizes().sum())
    assert len(parts.rows) == 0 or 0 <= int(parts.rows.min()) <= int(parts.rows.max()) < rows
    assert [len(part) for part in parts] == parts.sizes().tolist()
    return len(parts.rows)


@pytest.mark.parametrize(
    ("classes", "wanted", "distinct", "unused", "sizes"),
    [(10, 2, 1.905, 0.048, (250, 50)), (10, 5, 4.108, 0.178, (100, 20)), (100, 20, 18.29, 0.086, (25, 5)),
     (100, 50, 39.65, 0.207, (10, 2))],
)  # fmt: skip
def test_what_the_published_split_leaves_out(
    classes: int, wanted: int, distinct: float, unused: float, sizes: tuple[int, int]
) -> None:
    """The table of consequences, as a mean over seeds: clients with fewer labels, and data nobody holds."""
    y, test_y = labels(classes, 50_000 // classes), labels(classes, 10_000 // classes)
    held, used = [], []
    for seed in range(12):
        train, test = heterofl(y, test_y, classes, 100, wanted, seed)
        used.append(disjoint(train, len(y)) / len(y))
        disjoint(test, len(test_y))
        sets = train.label_sets(y, classes)
        assert torch.equal(sets, test.label_sets(test_y, classes))
        assert torch.equal(train.sizes(), sets.sum(1) * sizes[0])
        assert torch.equal(test.sizes(), sets.sum(1) * sizes[1])
        held.append(float(sets.sum(1).double().mean()))
    spread = float(np.std(held)) / 12**0.5
    assert np.mean(held) == pytest.approx(distinct, abs=max(4 * spread, 0.01))
    assert 1 - np.mean(used) == pytest.approx(unused, abs=max(4 * spread / wanted, 0.002))


def test_shards_of_the_published_split_are_contiguous_and_take_the_remainder() -> None:
    y = torch.tensor([0, 1] * 13)
    train, _ = heterofl(y, y, 2, 3, 2, seed=0)
    rows = [sorted(part[y[part] == 0].tolist()) for part in train if (y[part] == 0).any()]
    cuts = [[0, 2, 4, 6, 24], [8, 10, 12, 14], [16, 18, 20, 22]]
    assert all(row in cuts for row in rows)


def test_exactly_so_many_labels_and_all_data() -> None:
    y = labels(10, 100)
    parts = by_label(y, 10, 20, 3, seed=1)
    assert disjoint(parts, 1000) == 1000
    assert set(parts.label_sets(y, 10).sum(1).tolist()) == {3}


def test_a_split_is_the_same_everywhere() -> None:
    """Hashes of splits; they change only if the algorithm does."""
    y = labels(10, 50)

    def digest(parts: Partition) -> str:
        return hashlib.sha256(parts.rows.numpy().astype("<i8").tobytes() + parts.starts.numpy().tobytes()).hexdigest()[
            :12
        ]

    found = {
        "iid": digest(even(y, 20, 1)),
        "heterofl": digest(heterofl(y, y, 10, 20, 2, 1)[0]),
        "labels": digest(by_label(y, 10, 20, 2, 1)),
        "dirichlet": digest(dirichlet(y, 20, 0.3, 1, smallest=2)),
        "shards": digest(shards(y, 20, 2, 1)),
    }
    assert found == HASHES


HASHES = {
    "iid": "c8b018490716",
    "heterofl": "3e742f61686c",
    "labels": "699a91918feb",
    "dirichlet": "d836f102692d",
    "shards": "3ffc7292f96a",
}


@given(
    classes=st.integers(2, 8), each=st.integers(20, 60), clients=st.integers(1, 12), alpha=st.floats(0.01, 100),
    seed=st.integers(0, 9), balanced=st.booleans(),
)  # fmt: skip
def test_dirichlet_always_ends_and_uses_everything(
    classes: int, each: int, clients: int, alpha: float, seed: int, balanced: bool
) -> None:
    y = labels(classes, each)
    parts = dirichlet(y, clients, alpha, seed, smallest=3, balanced=balanced)
    assert disjoint(parts, len(y)) == len(y)
    assert int(parts.sizes().min()) >= 3


def test_a_small_alpha_makes_clients_differ() -> None:
    y = labels(10, 500)
    few = dirichlet(y, 20, 0.05, 0).label_sets(y, 10).sum(1).double().mean()
    many = dirichlet(y, 20, 100.0, 0).label_sets(y, 10).sum(1).double().mean()
    assert few < 5
    assert many > 9.5


def test_shards_are_sorted_by_label() -> None:
    y = labels(10, 60)
    parts = shards(y, 30, 2, 0)
    assert disjoint(parts, 600) == 600
    assert set(parts.sizes().tolist()) == {20}
    assert int(parts.label_sets(y, 10).sum(1).max()) <= 4


def test_what_is_held_out_is_held_out_first() -> None:
    held = hold_out(100, {"validation": 0.2, "public": 0.1}, seed=0)
    assert {k: len(v) for k, v in held.items()} == {"validation": 20, "public": 10, "rest": 70}
    assert len(torch.cat(list(held.values())).unique()) == 100


def test_rare_classes_are_on_small_devices_alone_or_mostly() -> None:
    y = labels(10, 200)
    small = [client % 5 >= 3 for client in range(50)]
    alone = by_label(y, 10, 50, 3, 0, rare_classes(50, 10, small, [7, 8, 9], 0.0)).label_sets(y, 10)
    assert not alone[[not s for s in small]][:, 7:].any()
    assert alone[small][:, 7:].any(1).float().mean() > 0.9
    assert alone.sum(1).eq(3).all()
    mostly = even(y, 50, 0, rare_classes(50, 10, small, [7], 0.25))
    count = torch.tensor([int((y[part] == 7).sum()) for part in mostly]).double()
    ratio = count[[not s for s in small]].mean() / count[small].mean()
    assert ratio == pytest.approx(0.25, abs=0.08)


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("smallest", [1, 10, 30])
def test_rare_classes_stay_on_small_devices_in_a_dirichlet_draw(alpha: float, smallest: int) -> None:
    """Rows moved to poor clients, and classes that fall to one client, follow the affinity too."""
    y, small = labels(10, 200), [client % 5 >= 3 for client in range(40)]
    parts = dirichlet(y, 40, alpha, 0, smallest=smallest, affinity=rare_classes(40, 10, small, [7, 8, 9], 0.0))
    assert disjoint(parts, len(y)) == len(y)
    assert int(parts.sizes().min()) >= smallest
    assert not parts.label_sets(y, 10)[[not s for s in small]][:, 7:].any()


def test_a_small_device_is_small_compared_with_the_tasks_model() -> None:
    partition = "task.partition={name: labels, labels: 3, rare: [7, 8, 9], rare_capacity: 1/8}"
    for scale in (1, 2):
        settings = ["task.width=16", partition, 'fleet.capacities=["1/2", "1/8"]', f"fleet.server_scale={scale}"]
        made = prepare(Recipe(device="cpu").with_settings(settings))
        held = [bool((made.server.task.client(client).y >= 7).any()) for client in range(20)]
        assert held == [client % 2 == 1 for client in range(20)]


def test_capacities_correlated_with_the_data_from_a_recipe() -> None:
    recipe = Recipe(device="cpu").with_settings(
        ["task.width=8", "fleet.clients=20", "task.partition={name: labels, labels: 3, rare: [7, 8, 9]}"]
    )
    made = prepare(recipe)
    assert isinstance(made.server.task, Classification)
    for client in range(20):
        rare = bool((made.server.task.client(client).y >= 7).any())
        assert not rare or made.server.fleet.capacity(client) <= 1 / 8
    assert "rare_accuracy" in made.evaluate()
    with pytest.raises(FedrolexError, match=r"needs fleet\.redrawn=false"):
        prepare(recipe.with_settings(["fleet.redrawn=true"]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda y: heterofl(y, y, 10, 20, 11, 0), "11 labels a client of 10 classes: give 1 to 10"),
        (lambda y: heterofl(y, y, 10, 7, 3, 0), "a multiple of the 10 classes"),
        (lambda y: by_label(y, 10, 20, 0, 0), "0 labels a client of 10 classes: give 1 to 10"),
        (lambda y: dirichlet(y, 20, 0.0, 0), "alpha is 0.0: give a number above 0"),
        (lambda y: dirichlet(y, 20, -1.0, 0), "alpha is -1.0"),
        (lambda y: dirichlet(y, 20, float("inf"), 0), "alpha is inf: give a number above 0, at most 1e9"),
        (lambda y: dirichlet(y, 20, 1.0, 0, smallest=100), "there are too few"),
        (lambda y: shards(y, 600, 2, 0), "1200 shards of 1000 examples"),
        (lambda y: even(y, 2000, 0), "every client needs at least one"),
        (lambda y: hold_out(10, {"validation": 1.0}, 0), "give parts of the data"),
        (lambda y: rare_classes(5, 10, [True] * 5, [10], 0), "rare class 10: there are 0 to 9"),
        (lambda y: rare_classes(5, 10, [False] * 5, [1], 0), "no device is small enough"),
        (lambda y: even(None, 4, 0), "labels are a NoneType: give a tensor, one for every example"),  # type: ignore[arg-type]
        (lambda y: by_label(y, 9, 20, 2, 0), "labels are 0 to 9, of 9 classes: give more"),
        (lambda y: heterofl(y, y, 9, 9, 2, 0), "labels are 0 to 9, of 9 classes: give more"),
        (lambda y: Partition([1, 2], [0, 1, 2]), "make it of lists with Partition.of(parts)"),  # type: ignore[arg-type]
        (lambda y: by_label(y, 10, 5, 9, 0, rare_classes(5, 10, [True] + [False] * 4, [1, 2], 0)), "may only hold 8"),
    ],
)  # fmt: skip
def test_mistakes(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(FedrolexError) as error:
        call(labels(10, 100))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# --- a deck that is drawn from one by one ---


@given(size=st.integers(0, 3000), seed=st.integers(0, 5))
def test_a_deck_holds_every_card_once(size: int, seed: int) -> None:
    assert sorted(deck(size, seed, "test")) == list(range(size))


def test_the_first_card_of_a_deck_is_uniform() -> None:
    counts = np.bincount([next(deck(10, 0, "first", i)) for i in range(5000)], minlength=10)
    assert ((counts - 500) ** 2 / 500).sum() < 33  # χ² with 9 degrees, one in 10,000
    second = np.bincount([list(deck(10, 0, "second", i))[1] for i in range(5000)], minlength=10)
    assert ((second - 500) ** 2 / 500).sum() < 33
