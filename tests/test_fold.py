"""The selective average: exact small cases, what peers get wrong, and properties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import MATRIX, base_of, hand_made, vector
from torch import Tensor

from fedrolex import Axes, FedrolexError, Fold, Random, Rolling, Window
from fedrolex.slicing import WHOLE, Arc, pick

# --- exact cases ---


def test_the_papers_averages() -> None:
    """Round 0 of the worked example: a, b from the large client, e from the small one, c, d the mean of both."""
    axes = vector(5)
    fold = Fold(axes, {"v": torch.zeros(5)})
    fold.add("large", {"v": torch.tensor([1.0, 2.0, 3.0, 4.0])}, Window({"k": Arc(0, 4, 5)}))
    fold.add("small", {"v": torch.tensor([30.0, 40.0, 50.0])}, Window({"k": Arc(2, 3, 5)}))
    assert fold.average()["v"].tolist() == [1.0, 2.0, 16.5, 22.0, 50.0]


def test_untouched_positions_are_not_zeroed() -> None:
    """A peer divides by one after subtracting the old value, which makes [2, 2, 0, 0] of [1, 1, 5, 5]."""
    fold = Fold(vector(4), {"v": torch.tensor([1.0, 1.0, 5.0, 5.0])})
    fold.add(0, {"v": torch.tensor([2.0, 2.0])}, Window({"k": Arc(0, 2, 4)}))
    assert fold.average()["v"].tolist() == [2.0, 2.0, 5.0, 5.0]


def test_a_smaller_shape_does_not_broadcast() -> None:
    """A peer averages (1, 3) with (4, 3) to (4, 3) without a word; here the client is refused and nothing changes."""
    axes = hand_made({"out": 4, "in": 3}, {"w": ["out", "in"]})
    base = {"w": torch.randn(4, 3)}
    fold = Fold(axes, base)
    with pytest.raises(FedrolexError, match=r"client 'liar': w has shape \(1, 3\); the whole model's has \(4, 3\)"):
        fold.add("liar", {"w": torch.ones(1, 3)}, WHOLE)
    assert torch.equal(fold.average()["w"], base["w"])


def test_order_of_arrival_carries_no_weight() -> None:
    """Three clients sending 0, 1, 2 average to 1 (the published code gives 1.333 for norms in the first round)."""
    fold = Fold(vector(2), {"v": torch.zeros(2)})
    for client, value in enumerate((0.0, 1.0, 2.0)):
        fold.add(client, {"v": torch.full((2,), value)}, WHOLE)
    assert fold.average()["v"].tolist() == [1.0, 1.0]


def test_weights_by_client_and_by_tensor() -> None:
    axes = hand_made({"k": 2}, {"u": ["k"], "v": ["k"]})
    fold = Fold(axes, base_of(axes, 0.0))
    fold.add(0, {"u": torch.ones(2), "v": torch.ones(2)}, WHOLE, weight=3.0)
    fold.add(1, {"u": torch.zeros(2), "v": torch.zeros(2)}, WHOLE, weight={"u": 1.0, "v": 9.0})
    new = fold.average()
    assert new["u"].tolist() == [0.75, 0.75]
    assert new["v"].tolist() == [0.25, 0.25]


def test_the_three_normalisers() -> None:
    """Two clients move [10, 10, 10] by +2 on positions (0, 1) and by +4 on (1, 2)."""
    axes, base = vector(3), {"v": torch.full((3,), 10.0)}

    def folded(**kwargs: object) -> list[float]:
        fold = Fold(axes, base, **kwargs)  # type: ignore[arg-type]
        fold.add(0, {"v": torch.tensor([12.0, 12.0])}, Window({"k": Arc(0, 2, 3)}))
        fold.add(1, {"v": torch.tensor([14.0, 14.0])}, Window({"k": Arc(1, 2, 3)}))
        return [float(x) for x in fold.average()["v"]]

    assert folded() == [12.0, 13.0, 14.0]
    assert folded(normaliser="cohort") == [11.0, 13.0, 12.0]
    assert folded(normaliser="expected", expected=4.0) == [10.5, 11.5, 11.0]
    assert folded(normaliser="expected", expected={"v": 8.0}) == [10.25, 10.75, 10.5]


def test_rows_nobody_trained_keep_their_bits_and_the_others_come_from_their_holders() -> None:
    """Two clients with disjoint classes: each row of the head is that of its only holder."""
    axes, base = MATRIX, base_of(MATRIX)
    window = Window({"out": Arc(4, 3, 6)})
    parts = [{n: torch.randn(axes.region(n, window).shape) for n in base} for _ in range(2)]
    fold = Fold(axes, base)
    fold.add(0, parts[0], window, rows={"classes": [0, 2]})
    fold.add(1, parts[1], window, rows={"classes": [3]})
    head = fold.average()["head"]
    columns = [4, 5, 0]
    assert torch.equal(head[0, columns], parts[0]["head"][0])
    assert torch.equal(head[2, columns], parts[0]["head"][2])
    assert torch.equal(head[3, columns], parts[1]["head"][3])
    assert torch.equal(head[1], base["head"][1])
    assert torch.equal(head[:, [1, 2, 3]], base["head"][:, [1, 2, 3]])


def test_rows_count_only_where_the_window_holds_them() -> None:
    axes = vector(5)
    fold = Fold(axes, {"v": torch.zeros(5)})
    fold.add(0, {"v": torch.tensor([7.0, 8.0, 9.0])}, Window({"k": Arc(3, 3, 5)}), rows={"k": [0, 1, 4]})
    assert fold.average()["v"].tolist() == [9.0, 0.0, 0.0, 0.0, 8.0]


MASK = [True, False, True, False]


@pytest.mark.parametrize(
    "rows",
    [
        [2, 0], (0, 2), {0, 2}, range(0, 4, 2), np.array([0, 2], dtype=np.uint8), [np.int32(0), np.int64(2)],
        torch.tensor([2, 0, 2]), torch.tensor([0, 2], dtype=torch.int32), MASK, np.array(MASK), torch.tensor(MASK),
    ],
)  # fmt: skip
def test_rows_are_indices_or_a_mask_of_any_kind(rows: Any) -> None:
    base = base_of(MATRIX)
    part = {n: torch.randn_like(t) for n, t in base.items()}
    for together in (False, True):
        fold = Fold(MATRIX, base)
        if together:
            fold.add_all([0], [part], WHOLE, [1.0], [{"classes": rows}])
        else:
            fold.add(0, part, WHOLE, rows={"classes": rows})
        head = fold.average()["head"]
        assert torch.equal(head[[0, 2]], part["head"][[0, 2]])
        assert torch.equal(head[[1, 3]], base["head"][[1, 3]])


@pytest.mark.parametrize("rows", [[], torch.tensor([], dtype=torch.int64), [False] * 4])
def test_no_rows_are_none(rows: Any) -> None:
    base = base_of(MATRIX)
    fold = Fold(MATRIX, base)
    fold.add(0, {n: t + 1 for n, t in base.items()}, WHOLE, rows={"classes": rows})
    new = fold.average()
    assert torch.equal(new["head"], base["head"])
    assert torch.equal(new["b"], base["b"] + 1)


def test_rows_of_every_client_count_when_added_together() -> None:
    """Only the second client names an axis."""
    base = base_of(MATRIX, 0.0)
    parts = [{n: torch.full_like(t, value) for n, t in base.items()} for value in (1.0, 3.0)]
    fold = Fold(MATRIX, base)
    fold.add_all([0, 1], parts, WHOLE, [1.0, 1.0], [{}, {"classes": [1]}])
    assert fold.average()["head"][:, 0].tolist() == [1.0, 2.0, 1.0, 1.0]


def test_integer_tensors_are_never_averaged() -> None:
    from dataclasses import replace

    layout = {**MATRIX.tensors, "steps": replace(MATRIX.tensors["b"], dims=(), floating=False)}
    axes = Axes(MATRIX.axes, layout)
    base = {**base_of(MATRIX), "steps": torch.tensor(5)}
    fold = Fold(axes, base)
    fold.add(0, {**{n: torch.zeros_like(t) for n, t in base.items() if n != "steps"}, "steps": torch.tensor(9)}, WHOLE)
    assert fold.average()["steps"].item() == 5


def test_half_precision_is_summed_in_single() -> None:
    axes = vector(1)
    fold = Fold(axes, {"v": torch.zeros(1, dtype=torch.float16)})
    for client in range(3000):
        fold.add(client, {"v": torch.ones(1, dtype=torch.float16)}, WHOLE)
    new = fold.average()["v"]
    assert new.dtype is torch.float16
    assert new.item() == 1.0


def test_change_is_what_a_server_optimiser_steps_along() -> None:
    axes, base = vector(4), {"v": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    fold = Fold(axes, base)
    fold.add(0, {"v": torch.tensor([5.0, 5.0])}, Window({"k": Arc(1, 2, 4)}))
    assert fold.change()["v"].tolist() == [0.0, 3.0, 2.0, 0.0]


def test_the_cut_memory_layout_does_not_matter() -> None:
    axes = hand_made({"out": 6, "in": 4}, {"k": ["out", "in", 3, 3]})
    base = {"k": torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last)}
    window = Window({"out": Arc(5, 4, 6), "in": Arc(2, 3, 4)})
    part = axes.take(base, window)["k"]
    assert torch.equal(part, base["k"][[5, 0, 1, 2]][:, [2, 3, 0]])
    fold = Fold(axes, base)
    fold.add(0, {"k": (part + 1).to(memory_format=torch.channels_last)}, window)
    new = fold.average()["k"]
    assert torch.equal(new[[5, 0, 1, 2]][:, [2, 3, 0]], part + 1)
    assert torch.equal(new[3:5], base["k"][3:5])


# --- the deterministic mode ---


@given(st.permutations(range(5)))
def test_the_order_of_arrival_does_not_matter_to_a_single_bit(arrival: list[int]) -> None:
    generator = torch.Generator().manual_seed(3)
    axes, base = MATRIX, {n: torch.zeros(MATRIX.shape(n)) for n in MATRIX.tensors}
    windows = [Rolling(offset=lambda a, p, r, c: c).window(axes, round=1, capacity="1/2", client=c) for c in range(5)]
    parts = [
        {n: torch.randn(axes.region(n, w).shape, generator=generator) * 10.0**c for n in base}
        for c, w in enumerate(windows)
    ]

    def folded(order: list[int]) -> dict[str, Tensor]:
        fold = Fold(axes, base, order=range(5))
        for client in order:
            fold.add(client, parts[client], windows[client])
        return fold.average()

    in_order, late = folded(list(range(5))), folded(arrival)
    assert all(torch.equal(in_order[n], late[n]) for n in base)


def test_updates_that_wait_are_kept_as_they_were_sent() -> None:
    fold = Fold(vector(1), {"v": torch.zeros(1)}, order=["a", "b", "c"])
    slot = {"v": torch.tensor([6.0])}
    fold.add("b", slot, WHOLE)
    slot["v"].fill_(100.0)
    fold.skip("c")
    with pytest.raises(FedrolexError, match="'a' has not reported"):
        fold.average()
    fold.add("a", {"v": torch.tensor([2.0])}, WHOLE)
    assert fold.average()["v"].item() == 4.0
    assert fold.clients == ["a", "b"]


def test_rows_that_wait_are_kept_as_they_were_sent() -> None:
    fold, rows = Fold(vector(2), {"v": torch.zeros(2)}, order=["a", "b"]), torch.tensor([0])
    fold.add("b", {"v": torch.ones(2)}, WHOLE, rows={"k": rows})
    rows.fill_(1)
    fold.skip("a")
    assert fold.average()["v"].tolist() == [1.0, 0.0]


# --- properties ---


@st.composite
def windows(draw: st.DrawFn) -> Window:
    spans = {}
    for name, size in MATRIX.full.items():
        chosen = draw(st.permutations(range(size)))[: draw(st.integers(1, size))]
        spans[name] = draw(st.sampled_from([pick(chosen, size), Arc(chosen[0], len(chosen), size)]))
    return Window(spans)


@given(windows())
def test_put_undoes_take(window: Window) -> None:
    base = base_of(MATRIX)
    before = {n: t.clone() for n, t in base.items()}
    MATRIX.put(base, MATRIX.take(base, window), window)
    assert all(torch.equal(base[n], before[n]) for n in base)


@given(st.lists(windows(), min_size=1, max_size=4))
def test_identical_clients_fold_to_themselves_and_the_rest_keeps_its_bits(cohort: list[Window]) -> None:
    base = base_of(MATRIX)
    target = {n: torch.randn_like(t) for n, t in base.items()}
    fold = Fold(MATRIX, base)
    for client, window in enumerate(cohort):
        fold.add(client, MATRIX.take(target, window), window)
    covered = {n: (fold.count(n) > 0).expand(base[n].shape) for n in base}
    new = fold.average()
    for n in base:
        assert torch.equal(new[n][~covered[n]], base[n][~covered[n]])
        torch.testing.assert_close(new[n][covered[n]], target[n][covered[n]])


@given(st.lists(windows(), min_size=2, max_size=4))
def test_the_order_of_clients_is_rounding_only(cohort: list[Window]) -> None:
    base = base_of(MATRIX)
    updates = [(w, {n: torch.randn(MATRIX.region(n, w).shape) for n in base}, 0.5 + c) for c, w in enumerate(cohort)]

    def folded(order: list[int]) -> dict[str, Tensor]:
        fold = Fold(MATRIX, base)
        for client in order:
            window, part, weight = updates[client]
            fold.add(client, part, window, weight)
        return fold.average()

    order = list(range(len(updates)))
    first, second = folded(order), folded(order[::-1])
    for n in base:
        torch.testing.assert_close(first[n], second[n], rtol=1e-5, atol=1e-6)


@given(windows())
def test_a_single_client_comes_back_bit_for_bit(window: Window) -> None:
    base = base_of(MATRIX)
    part = {n: torch.randn(MATRIX.region(n, window).shape) for n in base}
    fold = Fold(MATRIX, base)
    fold.add(0, part, window)
    assert all(torch.equal(t, part[n]) for n, t in MATRIX.take(fold.average(), window).items())


def test_counts_are_the_coverage() -> None:
    axes = MATRIX
    fold = Fold(axes, base_of(axes))
    for client in range(20):
        window = Random(seed=1).window(axes, round=0, capacity="1/2", client=client)
        fold.add(client, axes.take(fold.base, window), window)
    assert fold.count("k").shape == (6, 5, 1), "kernel positions share one count"
    assert float(fold.count("b").sum()) == 20 * 3
    assert float(fold.count("w").sum()) == 20 * 3 * 2
