"""That runs share traces changes nothing: a trace does not depend on weights, and leaves the network as it was."""

from __future__ import annotations

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
