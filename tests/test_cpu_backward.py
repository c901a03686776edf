"""A worker's way back: pooled gradients lie as the values do, large linear layers take their own step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedrolex.clients.optimizer import Memory
from fedrolex.clients.slot import Slot
from fedrolex.clients.work import LocalTraining, Loss
from fedrolex.engines.cpu.backward import LARGE, CpuSlot, plain_rate


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
    found, reached = step(CpuSlot(model(layout)), layout)
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    assert reached.is_contiguous(memory_format=layout)
    assert not reached.is_contiguous()


@pytest.mark.parametrize("kind", [Slot, CpuSlot])
def test_values_with_channels_first_are_left_as_they_are(kind: type[Slot]) -> None:
    _, reached = step(kind(model(torch.contiguous_format)), torch.contiguous_format)
    assert reached.is_contiguous()


def test_scores_without_a_way_back() -> None:
    with torch.no_grad():
        assert CpuSlot(model(torch.channels_last)).scores(torch.zeros(1, 3, 16, 16)).shape == (1, 5)


# --- linear layers that take their own step ---

WIDE = LARGE // 8


class Used(nn.Module):
    """One large linear layer, and what a model may do with its weight beside."""

    def __init__(self, how: str = "once") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large, self.small, self.how = nn.Linear(WIDE, 8), nn.Linear(8, 3), how
        if how == "watched":
            self.large.weight.register_hook(lambda gradient: 2 * gradient)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        y = self.large(x)
        if self.how == "twice":
            y = y + self.large(x.flip(1))
        elif self.how == "scaled":
            y = torch.addmm(self.large.bias, x, self.large.weight.t(), alpha=2)
        found: Tensor = self.small(torch.relu(y))
        return found + self.large.weight.square().sum() if self.how == "decayed" else found


def moved(slot: Slot, work: LocalTraining, steps: int = 3) -> dict[str, Tensor]:
    """The parameters after some steps."""
    data = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(4, WIDE, generator=data), torch.randint(3, (4,), generator=data)
        work.step(slot, x, y, nn.functional.cross_entropy, work.rate(0))
    return {name: parameter.detach() for name, parameter in slot.module.named_parameters()}


@pytest.mark.parametrize("how", ["once", "twice", "scaled", "watched", "decayed"])
def test_a_large_linear_layer_steps_as_plain_sgd_does(how: str) -> None:
    work = LocalTraining(lr=0.05)
    slot = CpuSlot(Used(how), rate=plain_rate(work, 0))
    wanted, found = moved(Slot(Used(how)), work), moved(slot, work)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    assert len(slot.parameters) == (3 if how == "once" else 4), "what only a layer of its own uses takes its own step"


def test_small_and_frozen_layers_are_left_to_the_optimiser() -> None:
    model = Used()
    model.large.weight.requires_grad_(False)
    before, slot = model.large.weight.clone(), CpuSlot(model, rate=0.1)
    assert torch.equal(moved(slot, LocalTraining())["large.weight"], before)
    assert len(slot.parameters) == 3


def test_a_large_layer_whose_bias_is_frozen_is_trained() -> None:
    """Nothing but the weight leads the way back to the layer."""
    work = LocalTraining(lr=0.05)
    models = [Used(), Used()]
    for model in models:
        model.large.bias.requires_grad_(False)
    before = models[0].large.weight.detach().clone()
    wanted, found = moved(Slot(models[0]), work), moved(CpuSlot(models[1], rate=plain_rate(work, 0)), work)
    assert not torch.equal(wanted["large.weight"], before)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@dataclass(frozen=True, kw_only=True)
class Pulled(LocalTraining):
    """Gradients are not what the loss says."""

    def pull(self, parameters: list[Tensor], gradients: list[Tensor], memory: Memory) -> None:
        """Twice as long."""
        torch._foreach_mul_(gradients, 2)


@dataclass(frozen=True, kw_only=True)
class Shifted(LocalTraining):
    """Another objective, and a step like any."""

    def objective(self, scores: Tensor, y: Tensor, loss: Loss, held: Tensor | None) -> Tensor:
        """Twice the loss."""
        return 2 * loss(scores, y)


def test_only_plain_sgd_is_plain() -> None:
    assert plain_rate(LocalTraining(lr=0.5, milestones=[3]), 2) == 0.5
    assert plain_rate(LocalTraining(lr=0.5, milestones=[3]), 3) == 0.05
    assert plain_rate(Shifted(lr=0.5), 0) == 0.5
    others = [{"momentum": 0.9}, {"weight_decay": 1e-4}, {"clip": 1.0}, {"optimizer": "adam"}]
    assert [plain_rate(LocalTraining(**each), 0) for each in others] == [None] * 4  # type: ignore[arg-type]
    assert plain_rate(Pulled(), 0) is None


def test_a_slot_takes_the_steps_it_is_told_of_next() -> None:
    """Methods may alternate what clients do; a slot is used again."""
    slot, plain = CpuSlot(Used(), rate=0.05), Slot(Used())
    for work in (LocalTraining(lr=0.05), LocalTraining(lr=0.05, momentum=0.9), LocalTraining(lr=0.05)):
        slot.rate = plain_rate(work, 0)
        for each in (slot, plain):
            work.begin(each.memory, each.parameters)
        wanted, found = moved(plain, work), moved(slot, work)
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
