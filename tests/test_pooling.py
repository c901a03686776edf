"""Max pooling of a worker: the same gradients, laid out as the values are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedrolex.clients.slot import Slot
from fedrolex.engines.cpu.pooling import PooledSlot


def model(layout: torch.memory_format) -> nn.Sequential:
    torch.manual_seed(0)
    found = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 7 * 7, 5))
    return found.to(memory_format=layout)


def step(slot: Slot, layout: torch.memory_format) -> tuple[list[Tensor], Tensor]:
    """Gradients of the parameters, and the one that reached the ReLU."""
    reached: list[Tensor] = []

    def watch(_: nn.Module, __: Any, values: Tensor) -> None:
        values.register_hook(reached.append)

    hook = slot.module[1].register_forward_hook(watch)  # type: ignore[index]
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1)).to(memory_format=layout)
    found = torch.autograd.grad(slot.scores(x).square().sum(), slot.parameters)
    hook.remove()
    return list(found), reached[0]


def test_the_gradient_is_the_same_and_lies_as_the_values_do() -> None:
    layout = torch.channels_last
    wanted, _ = step(Slot(model(layout)), layout)
    found, reached = step(PooledSlot(model(layout)), layout)
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    assert reached.is_contiguous(memory_format=layout)
    assert not reached.is_contiguous()


@pytest.mark.parametrize("kind", [Slot, PooledSlot])
def test_values_with_channels_first_are_left_as_they_are(kind: type[Slot]) -> None:
    _, reached = step(kind(model(torch.contiguous_format)), torch.contiguous_format)
    assert reached.is_contiguous()


def test_scores_without_a_way_back() -> None:
    with torch.no_grad():
        assert PooledSlot(model(torch.channels_last)).scores(torch.zeros(1, 3, 16, 16)).shape == (1, 5)
