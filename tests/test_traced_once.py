"""That runs share traces changes nothing: a trace does not depend on weights, and leaves the network as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from small import Residual
from torch import Tensor, nn

from fedrolex import Axes, Recipe, prepare, trace
from fedrolex.models import VGG, ConvNet, LeNet, PreResNet, Represented, ResNet, WordTransformer
from fedrolex.models.preresnet import Plan
from fedrolex.slicing.submodel import SubModel
from fedrolex.slicing.traced_once import KEPT, kind, known, traced_once

IMAGES = (2, 1, 16, 16)
PLAN = Plan(blocks=(1, 1), classes=4, channels=1, size=16, width=4, norm="static", scaler=True)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "convnet": lambda: ConvNet(size=(16, 16), width=4),
    "lenet": lambda: LeNet(10, 1, 16, 4),
    "resnet": lambda: ResNet(8, 10, 1, 16, 4, "batch"),
    "vgg": lambda: VGG(10, 1, 16, 4, "group"),
    "preresnet": lambda: PreResNet(PLAN),
    "represented": lambda: Represented(ConvNet(6, size=(16, 16), width=4), 6, 10),
    "words": lambda: WordTransformer(30, 8, layers=1, heads=2, head_dim=4, stream=16, inner=8),
}


def example(name: str) -> Tensor:
    return torch.randint(0, 30, (2, 8)) if name == "words" else torch.randn(IMAGES)


def programs(axes: Axes) -> list[str]:
    """What a half-wide sub-model computes, in training and in evaluation."""
    assert axes.build is not None
    made = axes.build(axes.widths(Fraction(1, 2)), axes.build.constants)
    if not isinstance(made, SubModel):  # of the model's own factory
        return [repr(made)]
    return [str(made.slicing_code[mode].graph) for mode in (True, False)]


@pytest.mark.parametrize("name", NETWORKS)
def test_traces_of_networks_with_other_weights_are_equal_and_leave_no_traces(name: str) -> None:
    one, other = NETWORKS[name](), NETWORKS[name]()
    inputs = example(name)
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    before = {key: tensor.clone() for key, tensor in one.state_dict().items()}
    chance = torch.get_rng_state()
    first = trace(one, inputs)
    assert name == "words" or torch.equal(torch.get_rng_state(), chance), "only dropout draws"
    assert all(torch.equal(tensor, before[key]) for key, tensor in one.state_dict().items())
    second = trace(other, inputs)
    assert first.to_json() == second.to_json()
    assert programs(first) == programs(second)
    assert kind(one, inputs) == kind(other, inputs) is not None


def test_a_network_is_traced_once_and_another_one_too() -> None:
    inputs = torch.randn(2, 1, 8, 8)
    first = traced_once(ConvNet(width=4), inputs)
    assert traced_once(ConvNet(width=4), inputs) is first
    assert traced_once(ConvNet(width=6), inputs).full != first.full
    assert traced_once(ConvNet(width=4), inputs, whole=True) is not first
    before = len(known)
    odd, hooked, own = ConvNet(width=4), ConvNet(width=4), Residual()
    odd.double()
    hooked.conv1.register_forward_hook(lambda module, given, made: 2 * made)
    assert kind(odd, inputs.double()) not in (None, kind(ConvNet(width=4), inputs))
    assert kind(hooked, inputs) is None
    assert kind(own, torch.randn(2, 3, 8, 8)) is None
    assert traced_once(own, torch.randn(2, 3, 8, 8)) is not traced_once(own, torch.randn(2, 3, 8, 8))
    assert len(known) == before
    assert kind(ConvNet(width=4).eval(), inputs) != kind(ConvNet(width=4), inputs)


class Tied(nn.Module):
    """Six linear layers, some of which are one."""

    def __init__(self, *pairs: tuple[int, int], modules: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        for one, other in pairs:
            if modules:
                self.layers[other] = self.layers[one]
            else:
                self.layers[other].weight = self.layers[one].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.mark.parametrize("modules", [True, False])
def test_networks_that_are_tied_otherwise_are_others(modules: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tied, "__module__", "fedrolex.models.tied")
    x = torch.randn(2, 4)
    ties: list[list[tuple[int, int]]] = [[], [(0, 2), (1, 3)], [(0, 3), (1, 2)], [(0, 2), (0, 3)], [(0, 2)]]
    assert len({kind(Tied(*pairs, modules=modules), x) for pairs in ties}) == len(ties)
    assert kind(Tied(*ties[1], modules=modules), x) == kind(Tied(*ties[1], modules=modules), x) is not None


@pytest.mark.parametrize(
    "odd",
    [torch.ones(3), [torch.ones(3)], {"a": object()}, (Residual(),), {1: [lambda x: x]}],
    ids=lambda o: type(o).__name__,
)
def test_what_a_representation_does_not_say_is_traced_anew(odd: object) -> None:
    model = ConvNet(width=4)
    vars(model)["extra"] = odd
    assert kind(model, torch.randn(2, 1, 8, 8)) is None
    assert kind(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)) is None, "not one of this package's"


def test_axes_keep_no_weights_of_the_network_they_are_of() -> None:
    model = ResNet(8, 10, 1, 16, 4, "batch")
    axes = trace(model, torch.randn(IMAGES))
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert not any(weight() is not None for weight in weights)
    assert axes.parameters("1/2") > 0


def test_few_traces_are_kept() -> None:
    known.clear()
    inputs = torch.randn(2, 1, 8, 8)
    first = traced_once(ConvNet(width=2), inputs)
    for width in range(3, 3 + KEPT):
        traced_once(ConvNet(width=width), inputs)
    assert len(known) == KEPT
    assert traced_once(ConvNet(width=2), inputs) is not first


def test_seeds_of_a_run_share_a_trace_but_not_what_their_axes_remember() -> None:
    """What axes remember of windows may lie on a device: runs side by side must not find each other's there."""
    one, other = (prepare(replace(Recipe(device="cpu", engine="loop"), seed=seed)).server.main.axes for seed in (1, 2))
    assert one.build is other.build
    assert one._regions is not other._regions
