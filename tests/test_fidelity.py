"""What export does not see must not become a wrong cut: each case here once did, or nearly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from small import same_as_built
from torch import Tensor, nn
from two_layers import Two, X

from fedrolex import FedrolexError, Hints, Static, trace
from fedrolex.slicing import WHOLE


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
