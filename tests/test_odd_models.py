"""Odd models and damaged data: cut to one index, other dtypes, names that helpers have, inputs that are missing."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import residual_axes
from torch import Tensor, nn
from two_layers import Two, X

from fedrolex import Axes, FedrolexError, Hints, Rolling, Static, Window, trace
from fedrolex.slicing import WHOLE, Arc


class Squeezed(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.o = nn.Conv2d(3, width, 1), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.o(F.adaptive_avg_pool2d(self.a(x), 1).squeeze())
        return y


def test_a_dimension_cut_to_one_is_not_squeezed_away() -> None:
    axes = trace(Squeezed(), torch.randn(3, 3, 4, 4))
    window = Static().window(axes, round=0, capacity="1/8")
    assert axes.cut(Squeezed(), window)(torch.randn(3, 3, 4, 4)).shape == (3, 2)


class HandWritten(nn.Module):
    """A recurrent net whose first state has the default dtype."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(5, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], self.b.in_features)
        for t in range(3):
            h = torch.tanh(self.a(x[:, t]) + self.b(h))
        y: Tensor = self.o(h)
        return y


@pytest.mark.parametrize("build", [HandWritten, lambda: _Lstm()])
def test_tensors_a_sub_model_makes_follow_its_dtype(build: Any) -> None:
    model = build()
    axes = trace(model, torch.randn(2, 3, 5))
    cut = axes.cut(model, Static().window(axes, round=0, capacity="1/2")).double()
    assert cut(torch.randn(4, 3, 5).double()).dtype is torch.float64


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.o = nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.o(self.rnn(x)[0][:, -1])
        return y


def test_a_cut_has_the_dtype_and_the_frozen_parameters_the_model_has_now() -> None:
    model, axes = residual_axes()
    model.double()
    model.a.weight.requires_grad_(False)
    cut = axes.cut(model, Rolling().window(axes, round=1, capacity="1/2"))
    assert cut.get_parameter("stem.weight").dtype is torch.float64
    assert not cut.get_parameter("a.weight").requires_grad
    assert cut(torch.randn(2, 3, 8, 8).double()).dtype is torch.float64


def test_pickling_is_plain_data_or_a_clear_refusal() -> None:
    model, axes = residual_axes()
    copied = pickle.loads(pickle.dumps(axes))
    assert copied.encode() == axes.encode()
    with pytest.raises(FedrolexError, match="state_dict"):
        pickle.dumps(axes.cut(model, WHOLE))
    assert copy.deepcopy(axes.cut(model, WHOLE))(torch.randn(2, 3, 8, 8)).shape == (2, 5)


class Noisy(Two):
    def between(self, h: Tensor) -> Tensor:
        return F.gumbel_softmax(F.rrelu(h + 0.1 * torch.randn_like(h), training=self.training)) if self.training else h


class Borrowed(Two):
    """``view_as`` and ``expand_as`` take their sizes from another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.c = nn.Linear(10, 8), nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return self.o(h) + self.o(self.b(x).view_as(h)) + self.o(self.c(x).expand_as(h))


class Ellipsis(Two):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(10, 8)

    def forward(self, x: Tensor) -> Any:
        scores = torch.einsum("...qd,...kd->...qk", self.a(x), self.b(x))
        return self.o(torch.einsum("...qk,...kd->...qd", scores.softmax(-1), self.b(x)))


class Interleaved(Two):
    """Rotary positions in the interleaved spelling."""

    def between(self, h: Tensor) -> Tensor:
        even, odd = h[..., ::2], h[..., 1::2]
        return torch.stack([even * 0.8 - odd * 0.6, even * 0.6 + odd * 0.8], -1).flatten(-2)


class Complex(Two):
    def between(self, h: Tensor) -> Tensor:
        turned = torch.view_as_complex(h.view(*h.shape[:-1], -1, 2)) * complex(0.8, 0.6)
        return torch.view_as_real(turned).flatten(-2)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.o = nn.LSTMCell(10, 8), nn.GRUCell(8, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.o(self.gru(self.lstm(x)[0]))
        return y


@pytest.mark.parametrize(
    ("model", "widths"),
    [
        (Noisy(), {8}),
        (Borrowed(), {8}),
        (Ellipsis(), {8}),
        (Interleaved(), {4}),
        (Complex(), {4}),
        (Cells(), {8, 6}),
        (nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(10, 8)), nn.ReLU(), nn.Linear(8, 4)), {8}),
        (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(10, 8)), nn.ReLU(), nn.Linear(8, 4)), {8}),
    ],
)
def test_more_that_can_be_cut(model: nn.Module, widths: set[int]) -> None:
    x = torch.randn(3, 5, 10) if isinstance(model, Ellipsis) else X
    axes = trace(model, x)
    assert {axis.size for axis in axes.cut_axes} == widths
    cut = axes.cut(model, Window({a.name: Arc(1, 1, a.size) for a in axes.cut_axes}))
    assert cut.eval()(x).shape == model.eval()(x).shape


def test_an_input_of_one_row_beside_a_batch_is_left_alone() -> None:
    class Masked(Two):
        def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
            return self.o(self.a(x * mask))

    axes = trace(Masked(), (X, torch.ones(1, 10)))
    assert len(axes.cut_axes) == 1


@pytest.mark.parametrize(
    "names", [("flat", "inputs"), ("code", "graph"), ("meta", "model"), ("delete_submodule", "recompile")]
)
def test_a_module_called_like_a_helper(names: tuple[str, str]) -> None:
    model = nn.Sequential()
    for name, layer in zip(names, (nn.Linear(10, 8), nn.Linear(8, 4)), strict=True):
        model.add_module(name, layer)
    axes = trace(model, X)
    window = Static().window(axes, round=0, capacity="1/2")
    small = axes.cut(model, window)
    assert list(small.state_dict()) == list(model.state_dict())
    assert copy.deepcopy(small)(X).shape == (3, 4)
    torch.testing.assert_close(axes.cut(model, WHOLE)(X), model(X))


class TakesTwo(Two):
    def forward(self, x: Tensor, more: Tensor) -> Any:  # type: ignore[override]
        return self.o(self.a(x) + self.a(more))


def test_a_missing_input_and_one_too_many_get_different_advice() -> None:
    with pytest.raises(FedrolexError, match="give all arguments of forward, as a tuple or by name"):
        trace(TakesTwo(), X)
    with pytest.raises(FedrolexError, match="Give the inputs only"):
        trace(Two(), (X, X))


@pytest.mark.parametrize(
    "text",
    [
        '{"format":1,"axes":{"a":{"size":"x","kind":"width"}},"tensors":{},"aliases":{},"frozen":[],"notes":[]}',
        '{"format":1,"axes":{"a":{"size":-3,"kind":"width"}},"tensors":{},"aliases":{},"frozen":[],"notes":[]}',
        '{"format":1,"axes":{"a":{"size":3,"kind":"wrong"}},"tensors":{},"aliases":{},"frozen":[],"notes":[]}',
    ],
)
def test_damaged_axes(text: str) -> None:
    with pytest.raises(FedrolexError, match="damaged"):
        Axes.from_json(text)


@pytest.mark.parametrize("data", [[], None, "x", {"a": [True, 1, 2]}, {"a": {"pick": [True], "size": 2}}])
def test_damaged_windows(data: Any) -> None:
    with pytest.raises(FedrolexError, match="not a window"):
        Window.decode(data)


def test_damaged_hints() -> None:
    with pytest.raises(FedrolexError, match="'wrong'}: give a mapping to one of width"):
        Hints(kind={"a": "wrong"})  # type: ignore[dict-item]
    with pytest.raises(FedrolexError, match="scaling"):
        Hints(scaling="mine")  # type: ignore[arg-type]


class Inner(Two):
    """A product that sums over the last dimensions of both."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.o = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 4)

    def between(self, h: Tensor) -> Tensor:
        return torch.inner(h, self.w)


def test_inner_sums_over_the_last_dimensions_of_both() -> None:
    model = Inner()
    axes = trace(model, X)
    assert {name: axis.size for name, axis in axes.axes.items() if axis.kind == "width"} == {"a": 8, "w": 8}
    window = Window({"a": Arc(0, 4, 8), "w": Arc(2, 4, 8)})
    part = axes.cut(model, window)
    hidden = torch.inner(model.a(X)[:, :4], model.w[2:6, :4])
    torch.testing.assert_close(part(X), hidden @ model.o.weight[:, 2:6].T + model.o.bias)


def test_an_axis_has_a_name() -> None:
    with pytest.raises(FedrolexError, match="the name for 'a' is empty: give the axis a name"):
        trace(Two(), X, hints=Hints(name={"a": ""}))
