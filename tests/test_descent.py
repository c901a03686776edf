"""Linear layers that move on the way back: the same steps as with gradients that are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedrolex import Classification, ClientRecipe, Examples, FleetRecipe, MethodRecipe, Recipe
from fedrolex.client import LocalTraining, Slot
from fedrolex.engines import Crew, Loop
from fedrolex.engines.crew import Member
from fedrolex.engines.descent import Descent, pays
from fedrolex.runs import Training, prepare

WIDE = 300


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(12, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.inside(torch.relu(self.first(x))))
        return scores

    def inside(self, x: Tensor) -> Tensor:
        return torch.relu(self.middle(x))


class Twice(Plain):
    """Calls a layer twice."""

    def inside(self, x: Tensor) -> Tensor:
        return torch.relu(self.middle(torch.relu(self.middle(x))))


class After(Plain):
    """Uses a layer's weight once more after the layer has."""

    def inside(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(torch.relu(self.middle(x)), self.middle.weight))


class Before(Plain):
    """Uses a layer's weight before the layer does, by another operation."""

    def inside(self, x: Tensor) -> Tensor:
        return torch.relu(self.middle(torch.relu(x @ self.middle.weight)))


class Summed(Plain):
    """Uses a layer's weight in a way that does not ask for its value on the way back."""

    def inside(self, x: Tensor) -> Tensor:
        return super().inside(x) + self.middle.weight.sum()


def training(model: Callable[[], nn.Module], **client: Any) -> Training:
    generator = torch.Generator().manual_seed(0)
    data = Examples(torch.randn(60, 12, generator=generator), torch.randint(0, 3, (60,), generator=generator))
    task = Classification("rows", lambda scale: model(), data, data, list(torch.arange(60).view(3, 20)))
    recipe = Recipe(
        method=MethodRecipe(name="fedavg"),
        fleet=FleetRecipe(clients=3, cohort=3, capacities=["1"]),
        client=ClientRecipe(**{"epochs": 2, "batch": 8, "lr": 0.05, "momentum": 0.0, **client}),
        device="cpu",
    )
    return prepare(recipe, task)


def updates(made: Training) -> dict[str, Tensor]:
    before = {name: tensor.clone() for name, tensor in made.state.items()}
    assert made.run_round()["dropped"] == {}
    return {name: made.state[name] - before[name] for name in before}


def same_updates(model: type[nn.Module], tolerance: float, **client: Any) -> list[Member]:
    """Those of ``loop``; the workers that found them."""
    one, other = training(model, **client), training(model, **client)
    crew = Crew(other.model, workers=2, stacked=())
    one.engine, other.engine = Loop(one.model), crew
    wanted, found = updates(one), updates(other)
    for name, tensor in wanted.items():
        assert float(tensor.norm()) > 0
        assert float((found[name] - tensor).norm() / tensor.norm()) < tolerance, name
    workers = [stack.loop for stack in crew._members]
    return [worker for worker in workers if isinstance(worker, Member) and worker._slots]


@pytest.mark.parametrize("model", [Plain, Twice, After, Before, Summed])
def test_a_round_is_that_of_loop(model: type[nn.Module]) -> None:
    workers = same_updates(model, 1e-5)
    assert {worker.descends for worker in workers} == {model in (Plain, Summed)}
    assert {slot.descending for worker in workers for slot in worker._slots.values()} == {model in (Plain, Summed)}


@pytest.mark.parametrize(
    "client",
    [{"momentum": 0.9}, {"weight_decay": 0.01}, {"clip": 1.0}, {"optimizer": "adam"}],
    ids=["momentum", "decay", "clip", "adam"],
)
def test_other_optimisers_see_all_gradients(client: dict[str, Any]) -> None:
    workers = same_updates(Plain, 1e-3, **client)
    assert not any(slot.descending for worker in workers for slot in worker._slots.values())


def test_the_weight_has_moved_before_gradients_are_told() -> None:
    module = Plain().double()
    slot, work = Slot(module, descending=True), LocalTraining(lr=0.5)
    x, y = torch.randn(2, 5, 12, dtype=torch.double), torch.randint(0, 3, (2, 5))
    parameters = list(module.parameters())
    found = torch.autograd.grad(loss(module(x), y), parameters)
    wanted = {name: p - 0.5 * g for (name, p), g in zip(module.named_parameters(), found, strict=True)}
    work.start(slot)
    with Descent(0.5):
        told = torch.autograd.grad(loss(module(x), y), parameters, allow_unused=True)
    assert [gradient is None for gradient in told] == [False, False, True, False, False, False]
    torch.testing.assert_close(module.middle.weight, wanted["middle.weight"])
    module.middle.weight.data.add_(found[2], alpha=0.5)
    with Descent(0.5):
        work.step(slot, x, y, loss, 0.5)
    for name, p in module.named_parameters():
        torch.testing.assert_close(p, wanted[name])


def test_nothing_moves_where_no_gradient_is_asked_for() -> None:
    module, frozen = Plain(), Plain().requires_grad_(False)
    before = [module.middle.weight.clone(), frozen.middle.weight.clone()]
    x = torch.randn(4, 12, requires_grad=True)
    with Descent(0.5):
        with torch.no_grad():
            module(x)
        frozen(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(module.middle.weight, before[0])
    assert torch.equal(frozen.middle.weight, before[1])


def test_small_layers_do_not_pay() -> None:
    assert pays(Plain())
    assert not pays(nn.Sequential(nn.Linear(4, 4), nn.Conv2d(300, 300, 3)))


def loss(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), y.flatten())
