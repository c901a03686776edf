"""Hints of a model's user, and axes as plain data that travel without the model."""

from __future__ import annotations

import pytest
import torch
from small import Residual, residual_axes
from torch import nn
from traced_models import Attention

from fedrolex import Axes, FedrolexError, Hints, Rolling, Window, pick, trace
from fedrolex.slicing import WHOLE


def test_hints_name_freeze_and_tie() -> None:
    model = Residual()
    x = torch.randn(2, 3, 8, 8)
    named = trace(model, x, Hints(name={"stem.weight:0": "stream", "a": "inner"}))
    assert [axis.name for axis in named.cut_axes] == ["stream", "inner"]
    frozen = trace(model, x, Hints(freeze=["a.weight:0"]))
    assert [axis.name for axis in frozen.cut_axes] == ["stem"]
    assert [note.what for note in frozen.frozen if note.about == "a.weight:0"] == ["frozen on request"]
    tied = trace(Residual(8, 8), x, Hints(tie=[["stem.weight:0", "a.weight:0"]]))
    assert len(tied.cut_axes) == 1
    assert tied.freeze("stem").cut_axes == ()


def test_a_kind_can_be_overridden_to_cut_heads() -> None:
    model = Attention()
    axes = trace(model, torch.randn(2, 7, 5), Hints(kind={"q.heads": "width", "q.qk": "factor", "v.v": "factor"}))
    cut = axes.cut(model, Rolling().window(axes, round=1, capacity="1/3"))
    assert cut.get_parameter("q.weight").shape == (6, 4)


@pytest.mark.parametrize(
    ("hints", "says"),
    [
        (Hints(freeze=["nothing*"]), "nothing matches"),
        (Hints(name={"nothing:0": "x"}), "no axis matches"),
        (Hints(tie=[["stem.weight:0", "z:1"]]), "'z:1'"),
        (Hints(kind={"z": "width"}), "no axis 'z'"),
    ],
)
def test_hints_that_match_nothing_are_refused(hints: Hints, says: str) -> None:
    with pytest.raises(FedrolexError, match=says):
        trace(Residual(), torch.randn(2, 3, 8, 8), hints)


def test_layouts_survive_json_and_cut_without_the_graph() -> None:
    model, axes = residual_axes()
    copied = Axes.from_json(axes.to_json())
    assert copied.encode() == axes.encode()
    window = Rolling().window(copied, round=5, capacity="1/2")
    assert window == Rolling().window(axes, round=5, capacity="1/2")
    state = axes.state(model)
    assert all(
        torch.equal(a, b)
        for a, b in zip(copied.take(state, window).values(), axes.take(state, window).values(), strict=True)
    )
    with pytest.raises(FedrolexError, match="loaded without a model"):
        copied.cut(model, window)


def nested(depth: int) -> str:
    """Axes with a layout of so many parts inside parts."""
    dims = '{"prod": [' * depth + "1" + "]}" * depth
    tensor = f'{{"dims": [{dims}], "role": "parameter", "reads": [], "floating": true}}'
    return f'{{"format": 1, "axes": {{}}, "tensors": {{"t": {tensor}}}, "aliases": {{}}, "frozen": [], "notes": []}}'


def test_a_layout_of_a_hundred_parts_inside_parts_can_be_used() -> None:
    axes = Axes.from_json(nested(100))
    assert axes.shape("t") == (1,)
    assert axes.take({"t": torch.ones(1)}, WHOLE)["t"].tolist() == [1.0]
    assert Axes.from_json(axes.to_json()).encode() == axes.encode()


def test_a_part_without_indices_is_nothing_to_any_window() -> None:
    dims = [{"cat": [{"cat": []}, "k"]}]
    tensor = {"dims": dims, "role": "parameter", "reads": [], "floating": True}
    data = {"format": 1, "axes": {"k": {"size": 4, "kind": "width"}}, "tensors": {"v": tensor}}
    axes = Axes.decode({**data, "aliases": {}, "frozen": [], "notes": []})
    for span in (pick([2, 0], 4), pick([1, 2], 4)):
        assert axes.take({"v": torch.arange(4.0)}, Window({"k": span}))["v"].tolist() == span.indices().tolist()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ('{"format": 2}', "format 2, this version reads 1"),
        ('{"format": 1}', "damaged"),
        ("[" * 100_000 + "]" * 100_000, "not JSON: maximum recursion depth"),
        ('{"format": ' + "1" * 5000 + "}", "not JSON: Exceeds the limit"),
        ('{"layouts": [1]}', "format None, this version reads 1"),
        (nested(100_000), "not JSON: maximum recursion depth"),
        (nested(101), "parts are nested more than 100 deep"),
    ],
    ids=range(9),
)
def test_damaged_layouts_are_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(FedrolexError, match=says):
        Axes.from_json(text)


def test_a_different_model_is_refused() -> None:
    _, axes = residual_axes()
    with pytest.raises(FedrolexError, match="not the one that was traced"):
        axes.cut(nn.Linear(2, 2), WHOLE)
    with pytest.raises(FedrolexError, match=r"stem.weight has shape \(4, 3, 3, 3\)"):
        axes.cut(Residual(4), WHOLE)
