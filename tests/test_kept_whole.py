"""What tracing keeps whole, refuses or only remarks on, and why: small models with known answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import residual_axes
from torch import Tensor, nn

from fedrolex import FedrolexError, trace
from fedrolex.slicing import WHOLE


class Order(nn.Module):
    """Channels whose order matters to ``name``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        match self.name:
            case "cumsum":
                x = x.cumsum(-1)
            case "flip":
                x = x.flip(-1)
            case "arange":
                x = x + torch.arange(8)
            case "argmax":
                x = x * x.argmax(-1, keepdim=True)
            case "sort":
                x = x.sort(-1).values
            case "unknown":
                x = torch.special.bessel_j0(x) + torch.trapezoid(x, dim=-1)[..., None]
            case "strided":
                x = x + torch.cat([x[..., ::3], x[..., 1::3], x[..., 2::3]], -1)
        y: Tensor = self.c(torch.relu(self.b(x)))
        return y


@pytest.mark.parametrize("name", ["cumsum", "flip", "arange", "argmax", "sort", "unknown", "strided"])
def test_channels_whose_order_matters_stay_whole(name: str) -> None:
    model = Order(name)
    axes = trace(model, torch.randn(3, 4))
    assert [axis.name for axis in axes.cut_axes] == ["b"]
    assert any(note.about == "a.weight:0" for note in axes.frozen), axes.frozen
    x = torch.randn(3, 4)
    torch.testing.assert_close(axes.cut(model, WHOLE)(x), model(x))


class Hidden(nn.Module):
    """A permutation nobody can see in the graph's shapes: an index buffer reorders the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("order", torch.randperm(8))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.order, Tensor)
        y: Tensor = self.b(self.a(x)[:, self.order])
        return y


def test_a_model_of_which_nothing_can_be_cut_is_refused_with_the_reason() -> None:
    with pytest.raises(FedrolexError, match=r"no axis of this model can be cut: .*picked from it"):
        trace(Hidden(), torch.randn(2, 4))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x) if x.sum() > 0 else x
        return y


@pytest.mark.parametrize(
    ("model", "example", "says"),
    [
        (Branching(), torch.randn(2, 4), "cannot be traced by torch.export"),
        (nn.Linear(4, 4), torch.randn(2, 5), "does not accept the example"),
        (nn.Linear(4, 4), "x", "example is a str"),
        (nn.Linear(4, 4), (), "holds no tensor"),
        (nn.Linear(4, 4), torch.randn(2, 4), "no axis of this model can be cut"),
        (nn.ReLU(), torch.randn(2, 4), "no parameters"),
    ],
)
def test_what_cannot_be_traced_is_refused_in_one_line(model: nn.Module, example: Any, says: str) -> None:
    with pytest.raises(FedrolexError, match=says) as caught:
        trace(model, example)
    assert "\n" not in str(caught.value)


def test_a_wrong_rule_would_be_caught_by_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a residual add did not tie its operands, permuting them apart must fail and the axes be frozen."""
    from fedrolex.slicing.rules import RULES
    from fedrolex.slicing.rules.call import Call

    def untied(call: Call) -> Any:
        return list(call.tensors()[0].dims)

    monkeypatch.setitem(RULES, "add", untied)
    _, axes = residual_axes()
    assert [axis.name for axis in axes.cut_axes] == ["a"]
    assert any("failed its proof" in note.what for note in axes.frozen)


class Hardly(nn.Module):
    """A wide part whose order matters, and a narrow one that can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(4, 8), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x).cumsum(-1)) + self.d(self.c(x))
        return y


def test_where_little_can_be_cut_the_notes_say_so() -> None:
    axes = trace(Hardly(), torch.randn(2, 4))
    assert [axis.size for axis in axes.cut_axes] == [8]
    what = "sub-models of capacity 1/4 keep 86% of them: little can be cut, see what is frozen and why"
    assert [(n.about, n.what) for n in axes.notes] == [("parameters", what)]
