"""Training and evaluation: what a model keeps in one of them, and layers that are dropped by chance."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from two_layers import Two, X

from fedrolex import FedrolexError, trace
from fedrolex.slicing import WHOLE
from fedrolex.slicing.submodel import SubModel


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
