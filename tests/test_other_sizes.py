"""Inputs of other sizes than the example's: taken where the code does not ask for sizes, refused where it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from two_layers import Two

from fedrolex import trace
from fedrolex.slicing import WHOLE


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


class Kernel(nn.Module):
    """Words under a kernel of five."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv, self.out = nn.Embedding(11, 8), nn.Conv1d(8, 6, 5), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.conv(self.embed(x).transpose(1, 2)).mean(-1))


def test_a_length_with_a_lower_limit_alone_has_no_upper_one_in_words() -> None:
    model = Kernel()
    axes = trace(model, torch.randint(0, 11, (2, 9)))
    assert [(n.about, n.what) for n in axes.notes] == [("dimension 1 of x", "must be at least 5")]
    with pytest.raises(ValueError, match="dimension 1 of x is 3; this sub-model was traced for at least 5"):
        axes.cut(model, WHOLE)(torch.randint(0, 11, (2, 3)))


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
