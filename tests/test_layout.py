"""Channels last on the way back: pooling before a flattening copies nothing, and computes the same."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.profiler import ProfilerActivity, profile

from fedrolex.engines.layout import channels_last

SIZE = [2, 4, 6, 6]  # of what is pooled


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2))
    return nn.Sequential(*layers)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters())))


def test_gradients_are_the_same() -> None:
    model, x = network(), torch.randn(2, 3, 8, 8)
    for own, wanted in zip(gradients(channels_last(copy.deepcopy(model)), x), gradients(model, x), strict=True):
        torch.testing.assert_close(own, wanted)


def test_what_is_pooled_is_not_copied() -> None:
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)

    def copies(model: nn.Module) -> int:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            gradients(model, x)
        found = seen.key_averages(group_by_input_shape=True)
        return sum(e.count for e in found if e.key == "aten::copy_" and e.input_shapes[0] == SIZE)

    assert copies(network().to(memory_format=torch.channels_last)) == 2  # else nothing is left to do here
    assert copies(channels_last(network())) == 0


def test_under_vmap_and_without_gradients_and_with_indices() -> None:
    model, x = channels_last(network()), torch.randn(3, 2, 3, 8, 8)
    names = [name for name, _ in model.named_parameters()]
    stacked = [torch.stack([p.detach()] * 3).requires_grad_() for p in model.parameters()]

    def loss(values: list[Tensor], x: Tensor) -> Tensor:
        found: Tensor = functional_call(model, dict(zip(names, values, strict=True)), (x,))
        return found.pow(2).sum()

    together = torch.autograd.grad(vmap(loss)(stacked, x).sum(), stacked)
    for place in range(3):
        for own, wanted in zip(together, gradients(model, x[place]), strict=True):
            torch.testing.assert_close(own[place], wanted)
    with torch.no_grad():
        model(x[0])
    assert len(channels_last(nn.MaxPool2d(2, return_indices=True))(x[0].requires_grad_())) == 2
