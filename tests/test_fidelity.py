"""What export does not see must not become a wrong cut: each case here once did, or nearly."""

from __future__ import annotations

import copy
import pickle
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import residual_axes, same_as_built
from torch import Tensor, nn

from fedrolex import Axes, FedrolexError, Hints, Rolling, Static, Window, trace
from fedrolex.slicing import WHOLE, Arc
from fedrolex.slicing.submodel import SubModel

X = torch.randn(3, 10)


class Two(nn.Module):
    """Two linear layers and something in between."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(10, width), nn.Linear(width, 4)

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Any:
        y: Tensor = self.o(self.between(self.a(x)))
        return y


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class CustomBackward(Two):
    def between(self, h: Tensor) -> Tensor:
        y: Tensor = Straight.apply(h)
        return y


class Reassigned(Two):
    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(8))

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


def test_a_custom_backward_is_not_lost_silently() -> None:
    with pytest.raises(FedrolexError, match=r"not what the model computes in training: the gradient of a\.\w+ differs"):
        trace(CustomBackward(), X)


def test_a_reassigned_buffer_is_updated_or_the_model_refused() -> None:
    try:
        model = Reassigned()
        axes = trace(model, X)
    except FedrolexError as error:
        assert "the buffer mean" in str(error)
        return
    cut = axes.cut(model, WHOLE)
    cut(X)
    assert bool(cut.get_buffer("mean").any())


class DropPath(Two):
    def between(self, h: Tensor) -> Tensor:
        return h * (torch.rand(h.shape[0], 1) > 0.1) if self.training else h


def test_evaluation_is_not_derived_from_a_graph_that_draws_random_numbers() -> None:
    model = DropPath()
    axes = trace(model, X)
    cut = axes.cut(model, WHOLE)
    big = torch.randn(200, 10)
    assert not torch.equal(cut(big), cut(big))
    assert torch.equal(cut.eval()(big), model.eval()(big))


class Averaging(Two):
    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.steps: Tensor
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def between(self, h: Tensor) -> Tensor:
        self.steps += 1
        if self.training:
            self.mean.mul_(0.9).add_(h.mean(0).detach(), alpha=0.1)
        return h


def test_buffers_change_in_the_modes_in_which_the_model_changes_them() -> None:
    model = Averaging()
    cut = trace(model, X).cut(model, WHOLE)
    cut.eval()(X)
    assert not bool(cut.get_buffer("mean").any())
    assert int(cut.get_buffer("steps")) == 1
    cut.train()(X)
    assert bool(cut.get_buffer("mean").any())


def test_a_norm_kept_in_evaluation_stays_there() -> None:
    model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    model[1].eval()
    axes = trace(model, X)
    assert [note.what for note in axes.notes] == ["as the model is now: 1 stays in evaluation"]
    torch.testing.assert_close(axes.cut(model, WHOLE)(X), model(X))


def test_a_training_mode_that_cannot_be_traced_is_refused_with_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 4))
    with pytest.raises(FedrolexError, match=r"Hints\(evaluation_only=True\)"):
        trace(model, X)
    axes = trace(model, X, Hints(evaluation_only=True))
    assert "is evaluation" in axes.notes[0].what


class MeanOfWords(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.e, self.o = nn.Embedding(30, width), nn.Linear(width, 4)

    def forward(self, words: Tensor) -> Tensor:
        y: Tensor = self.o(self.e(words).sum(1) / words.shape[1])
        return y


def test_a_size_known_only_at_run_time_is_no_width() -> None:
    """As long as it is wide: 16 words of 16 dimensions."""
    model = MeanOfWords()
    axes = trace(model, torch.randint(0, 30, (3, 16)))
    assert not axes.notes
    shorter = torch.randint(0, 30, (5, 9))
    torch.testing.assert_close(axes.cut(model, WHOLE)(shorter), model(shorter))
    window = Static().window(axes, round=0, capacity="1/2")
    same_as_built(MeanOfWords, {}, {"width": 8}, window, axes, shorter)


class Crowd(Two):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return self.o(h * 2 if x.shape[0] > 100 else h)


def test_a_branch_on_the_batch_size_limits_it() -> None:
    axes = trace(Crowd(), X)
    assert [(note.about, note.what) for note in axes.notes] == [("dimension 0 of x", "must be at most 100")]
    with pytest.raises(ValueError, match="dimension 0 of x is 150"):
        axes.cut(Crowd(), WHOLE)(torch.randn(150, 10))


@dataclass
class Pair:
    scores: Tensor
    features: Tensor


class ReturnsPair(Two):
    def __init__(self, also: bool) -> None:
        super().__init__()
        self.also = also

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        pair = Pair(self.o(h), h)
        return (pair.scores, pair) if self.also else pair


def test_outputs_that_cannot_be_taken_apart() -> None:
    with pytest.raises(FedrolexError, match="returns no tensor that can be reached"):
        trace(ReturnsPair(also=False), X)
    axes = trace(ReturnsPair(also=True), X)
    assert [note.what for note in axes.notes] == ["a Pair cannot be taken apart and is left out"]
    assert axes.axes["o"].kind == "outputs"


class TakesDict(Two):
    def forward(self, x: Any) -> Any:
        return self.o(self.a(x["image"]))


@pytest.mark.parametrize(
    ("model", "example", "says"),
    [
        (TakesDict(), ({"image": X},), "argument x is a dict that holds tensors"),
        (nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 4)), X, "lazy layers"),
    ],
)
def test_more_refusals(model: nn.Module, example: Any, says: str) -> None:
    with pytest.raises(FedrolexError, match=says):
        trace(model, example)


class InPlace(Two):
    def forward(self, x: Tensor) -> Any:
        return self.o(self.a(x.mul_(2)))


def test_tracing_does_not_touch_the_example() -> None:
    example = X.clone()
    trace(InPlace(), example)
    assert torch.equal(example, X)


# --- cut to one index, other dtypes, what follows the model ---


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


# --- what a model remembers in evaluation ---


class Remembers(Two):
    """Computes something from its weights once in evaluation, and forgets it when it trains, as LeViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.kept = nn.Parameter(torch.randn(8)), dict[str, Tensor]()

    def train(self, mode: bool = True) -> Remembers:
        if mode:
            self.kept = {}
        return super().train(mode)

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            return h * (torch.rand(h.shape[0], 1) > 0.1) + self.bias.exp()
        if "bias" not in self.kept:
            self.kept["bias"] = self.bias.exp()
        return h + self.kept["bias"]


@pytest.mark.parametrize("used", [False, True])
def test_what_a_model_remembers_in_evaluation_is_no_constant(used: bool) -> None:
    model = Remembers()
    if used:
        with torch.no_grad():
            model.eval()(X)
    before = dict(model.kept)
    axes = trace(model, X)
    assert model.kept == before
    assert model.training != used
    cut = axes.cut(model, WHOLE).eval()
    with torch.no_grad():
        model.train().bias.add_(1)
        cut.get_parameter("bias").add_(1)
    torch.testing.assert_close(cut(X), model.eval()(X))


class Merges(Two):
    """Adds a part of its weights to the others in evaluation, and takes it away again, as low-rank adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.randn(8, 10))

    def train(self, mode: bool = True) -> Merges:
        if mode != self.training:
            with torch.no_grad():
                self.a.weight.add_(self.extra if not mode else -self.extra)
        return super().train(mode)

    def between(self, h: Tensor) -> Tensor:
        return h + torch.rand(h.shape[0], 1) if self.training else h

    def forward(self, x: Tensor) -> Any:
        return self.o(self.between(self.a(x) + (F.linear(x, self.extra) if self.training else 0)))


def test_weights_that_differ_in_evaluation_are_refused() -> None:
    model = Merges()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FedrolexError, match="not what the model computes in evaluation"):
        trace(model, X)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class KeepsItsNorm(nn.Sequential):
    """A norm that stays in evaluation whatever the model is told."""

    def train(self, mode: bool = True) -> KeepsItsNorm:
        super().train(mode)
        self[1].eval()
        return self


@pytest.mark.parametrize("training", [True, False])
def test_modes_are_those_that_train_and_eval_make(training: bool) -> None:
    model = KeepsItsNorm(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).train(training)
    axes = trace(model, X)
    torch.testing.assert_close(axes.cut(model, WHOLE).train()(X), model.train()(X))


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = Two()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(FedrolexError, match="the model cannot be copied"):
        trace(model, X)


# --- other sizes of inputs ---


class Upscaled(nn.Module):
    """Scores for every pixel, made at half the size, as in a segmentation network."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.o(torch.relu(self.a(x))), size=x.shape[-2:], mode="bilinear")


def test_another_size_of_image_is_refused_where_the_code_asks_for_it() -> None:
    model = Upscaled()
    axes = trace(model, torch.randn(2, 3, 16, 12))
    assert [(n.about, n.what) for n in axes.notes] == [
        ("dimension 2 of x", "must be 16"),
        ("dimension 3 of x", "must be 12"),
    ]
    cut = axes.cut(model, WHOLE)
    same = torch.randn(5, 3, 16, 12)
    torch.testing.assert_close(cut(same), model(same))
    with pytest.raises(ValueError, match="dimension 2 of x is 24; this sub-model was traced for 16"):
        cut(torch.randn(2, 3, 24, 12))
    with pytest.raises(ValueError, match="dimension 3 of x is 18; this sub-model was traced for 12"):
        cut(torch.randn(2, 3, 16, 18))


def test_another_size_of_image_is_taken_where_the_code_does_not_ask() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))
    axes = trace(model, torch.randn(2, 3, 16, 16))
    assert not axes.notes
    for size in ((16, 16), (24, 24), (9, 31)):
        x = torch.randn(2, 3, *size)
        torch.testing.assert_close(axes.cut(model, WHOLE)(x), model(x))


class MeanOfSteps(Two):
    """Mean over time of sequences of floats, the number of steps taken from the input."""

    def forward(self, x: Tensor) -> Any:
        return self.o(self.a(x).sum(1) / x.shape[1])


def test_another_length_of_floats_is_refused_where_the_code_asks_for_it() -> None:
    model = MeanOfSteps()
    axes = trace(model, torch.randn(2, 6, 10))
    assert [(n.about, n.what) for n in axes.notes] == [("dimension 1 of x", "must be 6")]
    with pytest.raises(ValueError, match="dimension 1 of x is 12; this sub-model was traced for 6"):
        axes.cut(model, WHOLE)(torch.randn(2, 12, 10))


class LastStep(Two):
    def forward(self, x: Tensor) -> Any:
        return self.o(self.a(x).cumsum(1)[:, -1])


def test_another_length_of_floats_is_taken_where_the_code_does_not_ask() -> None:
    model = LastStep()
    axes = trace(model, torch.randn(2, 6, 10))
    assert not axes.notes
    longer = torch.randn(3, 13, 10)
    torch.testing.assert_close(axes.cut(model, WHOLE)(longer), model(longer))


class OnlyEven(MeanOfSteps):
    def forward(self, x: Tensor) -> Any:
        if x.shape[1] % 4:
            raise ValueError("give a multiple of four steps")
        return super().forward(x)


def test_sizes_that_a_model_with_strides_takes_are_tried() -> None:
    axes = trace(OnlyEven(), torch.randn(2, 8, 10))
    assert ("dimension 1 of x", "must be 8") in [(n.about, n.what) for n in axes.notes]


class Weighted(nn.Module):
    """Two inputs that are equally long."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(10, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        y: Tensor = self.o((self.a(x) * weights.unsqueeze(-1)).sum(1) / weights.shape[1])
        return y


def test_inputs_that_are_equally_long_are_tried_together() -> None:
    axes = trace(Weighted(), (torch.randn(2, 6, 10), torch.rand(2, 6)))
    assert {(n.about, n.what) for n in axes.notes} == {
        ("dimension 1 of x", "must be 6"),
        ("dimension 1 of weights", "must be 6"),
    }


# --- layers that are dropped by chance ---


class DropsLayers(Two):
    """Leaves a layer out of a step with a probability, as speech and language models do in training."""

    def __init__(self, spelling: str = "tensor") -> None:
        super().__init__()
        self.m, self.spelling = nn.Linear(8, 8), spelling

    def between(self, h: Tensor) -> Tensor:
        draw: Any = torch.rand([]) if self.spelling == "tensor" else torch.rand(1).item()
        draw = draw if self.training else 1
        mixed: Tensor = h if draw < 0.5 else h + self.m(F.dropout(h, 0.2, self.training))
        return mixed


@pytest.mark.parametrize("spelling", ["tensor", "item"])
def test_layers_dropped_by_chance_are_never_dropped_and_that_is_said(spelling: str) -> None:
    model = DropsLayers(spelling)
    axes = trace(model, X)
    assert [(n.about, n.what) for n in axes.notes] == [
        ("chance", "a single random number decides what is run: taken as 1, no layer is dropped")
    ]
    cut = axes.cut(model, WHOLE)
    for _ in range(8):
        cut.zero_grad()
        cut(X).sum().backward()
        assert bool(cut.get_parameter("m.weight").grad.any())  # type: ignore[union-attr]
    torch.testing.assert_close(cut.eval()(X), model.eval()(X))


class Mixed(Two):
    def between(self, h: Tensor) -> Tensor:
        return h * torch.rand([]) if self.training else h


def test_a_single_random_number_that_decides_nothing_is_drawn() -> None:
    model = Mixed()
    axes = trace(model, X)
    assert not axes.notes
    cut = axes.cut(model, WHOLE)
    assert not torch.equal(cut(X), cut(X))


class DropsPaths(Two):
    """Stochastic depth as vision models have it; ``scaled`` as it should be."""

    def __init__(self, scaled: bool = True) -> None:
        super().__init__()
        self.m, self.scaled = nn.Linear(8, 8), scaled

    def between(self, h: Tensor) -> Tensor:
        path: Tensor = self.m(h)
        if not self.training:
            return h + (path if self.scaled else 0.5 * path)
        taken = torch.empty(h.shape[0], 1).bernoulli_(0.5)
        return h + path * (taken.div_(0.5) if self.scaled else taken)


@pytest.mark.parametrize("scaled", [True, False])
def test_evaluation_takes_every_path(scaled: bool) -> None:
    model = DropsPaths(scaled)
    axes = trace(model, X)
    cut = axes.cut(model, WHOLE)
    big = torch.randn(200, 10)
    assert not torch.equal(cut(big), cut(big))
    torch.testing.assert_close(cut.eval()(big), model.eval()(big))
    assert isinstance(cut, SubModel)
    drawn = {mode: [n for n in code.graph.nodes if "bernoulli" in str(n)] for mode, code in cut.slicing_code.items()}
    assert drawn[True]
    assert not drawn[False]
