"""What a fold refuses: rows, updates, weights and calls that are wrong, each in one line, and nothing changes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from small import MATRIX, base_of, vector
from torch import Tensor

from fedrolex import FedrolexError, Fold, Static, Window
from fedrolex.slicing import WHOLE, Arc


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([0.5], r"rows of classes are \[0.5\]: give whole numbers from 0 to 3, or a mask of 4 booleans"),
        ([1.0, 2.0], "give whole numbers"),
        (torch.tensor([1.0]), "give whole numbers"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "give whole numbers"),
        (np.array([1.5]), "give whole numbers"),
        ([True, 2], "give whole numbers"),
        (["a"], "give whole numbers"),
        ("ab", "give whole numbers"),
        ([None], "give whole numbers"),
        ([[0], [1, 2]], "give whole numbers"),
        (torch.tensor([[0, 1]]), "give whole numbers"),
        (torch.tensor(1), "give whole numbers"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "give whole numbers"),
        (3, "give whole numbers"),
        ({0: 1}, "give whole numbers"),
        ((i for i in [0, 1]), "give whole numbers"),
        ([10**30], "give whole numbers"),
        ([-1], "outside 0..3"),
        (torch.tensor([4]), "outside 0..3"),
        ([True, False], "a mask of 2 booleans: give 4"),
        (torch.ones(5, dtype=torch.bool), "a mask of 5 booleans: give 4"),
    ],
)
def test_rows_of_anything_else_are_refused(rows: Any, says: str) -> None:
    base = base_of(MATRIX)
    fold = Fold(MATRIX, base)
    with pytest.raises(FedrolexError, match=f"client 0: .*{says}"):
        fold.add(0, base, WHOLE, rows={"classes": rows})
    with pytest.raises(FedrolexError, match="rows is a list: give indices by axis"):
        fold.add(0, base, WHOLE, rows=[1])  # type: ignore[arg-type]
    fold.add(0, base, WHOLE)


def ordered() -> Fold:
    """Of a, b, c and d: b has sent its update, c was skipped; a and d are awaited."""
    fold = Fold(vector(1), {"v": torch.zeros(1)}, order=["a", "b", "c", "d"])
    fold.add("b", {"v": torch.tensor([6.0])}, WHOLE)
    fold.skip("c")
    return fold


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda fold: fold.add("c", {"v": torch.ones(1)}, WHOLE), "client 'c': was skipped already"),
        (lambda fold: fold.skip("b"), "client 'b': has sent an update already"),
        (lambda fold: fold.skip("c"), "client 'c': was skipped already"),
        (lambda fold: fold.add("b", {"v": torch.ones(1)}, WHOLE), "client 'b': has sent an update already"),
        (lambda fold: fold.skip("z"), "client 'z': is not in the order"),
    ],
)
@pytest.mark.parametrize("after", [False, True])
def test_a_client_is_added_or_skipped_once_and_a_mistake_costs_no_round(after: bool, mistake: Any, says: str) -> None:
    """Before it is a client's turn, and after it."""
    fold = ordered()
    if after:
        fold.add("a", {"v": torch.tensor([2.0])}, WHOLE)
    with pytest.raises(FedrolexError, match=says):
        mistake(fold)
    if not after:
        fold.add("a", {"v": torch.tensor([2.0])}, WHOLE)
    fold.skip("d")
    assert fold.average()["v"].item() == 4.0
    with pytest.raises(FedrolexError, match="has ended"):
        fold.skip("d")


def good() -> tuple[dict[str, Tensor], Window]:
    window = Static().window(MATRIX, round=0, capacity="1/2")
    return MATRIX.take(base_of(MATRIX), window), window


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda p: p.pop("w"), "'w' is missing"),
        (lambda p: p.update(z=torch.zeros(1)), "'z' is unknown"),
        (lambda p: p.update(w=p["w"].T.contiguous()), r"w has shape \(2, 3\); this window's part has \(3, 2\)"),
        (lambda p: p.update(b=p["b"][:1]), r"b has shape \(1,\)"),
        (lambda p: p.update(b=p["b"].long()), "not real numbers"),
    ],
)
def test_a_bad_update_is_refused_in_one_line_and_changes_nothing(spoil: object, says: str) -> None:
    base = base_of(MATRIX)
    fold = Fold(MATRIX, base)
    part, window = good()
    spoil(part)  # type: ignore[operator]
    with pytest.raises(FedrolexError, match=says) as caught:
        fold.add(7, part, window)
    assert "client 7" in str(caught.value)
    assert all(torch.equal(t, base[n]) for n, t in fold.average().items())


BAD = [0.0, -1.0, float("nan"), float("inf"), -(10**400), 10**400, 10**5000, Fraction(1, 10**5000), 1e39, 1e-60, "1"]


@pytest.mark.parametrize("weight", [*BAD, None], ids=range(len(BAD) + 1))
def test_bad_weights_are_refused(weight: Any) -> None:
    part, window = good()
    fold = Fold(MATRIX, base_of(MATRIX))
    with pytest.raises(FedrolexError, match=r"client 0: weight \S+ is not a positive number"):
        fold.add(0, part, window, weight)
    with pytest.raises(FedrolexError, match=r"client 0: weight \S+ is not a positive number"):
        fold.add(0, part, window, dict.fromkeys(part, 1.0) | {"w": weight})


@pytest.mark.parametrize("divisor", BAD, ids=range(len(BAD)))
def test_a_bad_divisor_is_refused_before_the_round(divisor: Any) -> None:
    with pytest.raises(FedrolexError, match="not a positive number"):
        Fold(MATRIX, base_of(MATRIX), normaliser="expected", expected=divisor)
    with pytest.raises(FedrolexError, match="not a positive number"):
        Fold(MATRIX, base_of(MATRIX), normaliser="expected", expected={"w": 1.0})


def test_a_client_counts_once() -> None:
    part, window = good()
    fold = Fold(MATRIX, base_of(MATRIX))
    fold.add(0, part, window)
    with pytest.raises(FedrolexError, match="client 0: has sent an update already"):
        fold.add(0, part, window)


def test_counting_a_client_in_is_refused_as_adding_is() -> None:
    """A client whose part is among sums: named, once, and not where updates have an order."""
    fold = Fold(MATRIX, base_of(MATRIX))
    fold.count_in(0, WHOLE)
    with pytest.raises(FedrolexError, match="client 0: has sent an update already"):
        fold.count_in(0, WHOLE)
    with pytest.raises(FedrolexError, match="client 1: rows of classes"):
        fold.count_in(1, WHOLE, rows={"classes": [9]})
    assert fold.clients == [0]
    with pytest.raises(FedrolexError, match=r"updates one by one: use add\(\)"):
        Fold(MATRIX, base_of(MATRIX), order=[0, 1]).count_in(0, WHOLE)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Fold(MATRIX, base_of(MATRIX), normaliser="mean"), "normaliser"),  # type: ignore[arg-type]
        (lambda: Fold(MATRIX, base_of(MATRIX), normaliser="expected"), "expected="),
        (lambda: Fold(MATRIX, base_of(MATRIX), order=[1]).skip(2), "not in the order"),
        (lambda: Fold(MATRIX, base_of(MATRIX), order=[1, 2, 1]), "names client 1 twice"),
        (lambda: Fold(MATRIX, base_of(MATRIX)).skip(2), "a fold without an order"),
        (lambda: Fold(MATRIX, base_of(MATRIX)).add(0, good()[0], good()[1], rows={"z": [1]}), "no axis 'z'"),
        (
            lambda: Fold(MATRIX, base_of(MATRIX)).add(0, good()[0], good()[1], rows={"classes": [9]}),
            "client 0: rows of classes",
        ),
        (lambda: MATRIX.take(base_of(MATRIX), Window({"z": Arc(0, 1, 2)})), "does not have"),
        (lambda: MATRIX.take(base_of(MATRIX), Window({"out": Arc(0, 1, 2)})), "it has 6"),
        (lambda: MATRIX.put(base_of(MATRIX), {"w": torch.zeros(1, 1)}, WHOLE), "w has shape"),
    ],
)
def test_bad_use_gets_one_clear_line(make: object, says: str) -> None:
    with pytest.raises(FedrolexError, match=says):
        make()  # type: ignore[operator]
