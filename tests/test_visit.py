"""A client's round as its work sees it: hooks may use a visit's tensors whatever the engine does with its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedrolex import Examples, Rolling, Task
from fedrolex.clients import MODEL, Job, LocalTraining, Network, RoundPlan, Upload, Visit, copied
from fedrolex.engines.cpu.crew import Crew
from fedrolex.engines.cpu.loop import Loop
from fedrolex.engines.gpu.lanes import Lanes
from fedrolex.rounds import Engine
from fedrolex.slicing import trace

ENGINES: dict[str, Callable[[], Engine]] = {
    "loop": Loop,
    "crew": lambda: Crew(workers=2),
    "lanes": lambda: Lanes(rehearsed=True),
    "lanes in waves": lambda: Lanes(rehearsed=True, most=1),
}


def build(scale: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8 * scale), nn.ReLU(), nn.Linear(8 * scale, 3))


@pytest.fixture
def plan() -> RoundPlan:
    """Three clients of the same widths."""
    x, y = torch.randn(24, 1, 4, 4), torch.arange(24) % 3
    task: Any = Task.split(build, Examples(x, y), Examples(x[:6], y[:6]), clients=3)
    network = Network(build(1), trace(build(1), x[:2]))
    half = Fraction(1, 2)
    jobs = [Job(c, half, Rolling().window(network.axes, round=2, capacity=half)) for c in range(3)]
    tensors = copied(network.axes.state(network.module))
    return RoundPlan(2, 1, {MODEL: network}, {MODEL: tensors}, task, LocalTraining(batch=4, lr=0.1), jobs)


def answers(engine: Engine, asked: RoundPlan) -> list[tuple[dict[str, Tensor], Any]]:
    """What every client has trained, as it was when the engine gave it, and what the client keeps, as it is now."""
    found = []
    for answer in engine.run(asked):
        assert isinstance(answer, Upload)
        found.append((copied(answer.tensors), answer.kept))
    return found


@dataclass(frozen=True, kw_only=True)
class Keeping(LocalTraining):
    """Clients keep their model, and a part of it under another name."""

    def after(self, visit: Visit) -> None:
        """Keep what was trained as it is: nobody here copies it."""
        visit.kept = {**visit.trained, "row": visit.trained["1.weight"][1]}


@pytest.mark.parametrize("engine", ENGINES)
def test_what_clients_keep_stays_as_it_is_when_others_train(engine: str, plan: RoundPlan) -> None:
    for trained, kept in answers(ENGINES[engine](), replace(plan, work=Keeping(batch=4, lr=0.1))):
        assert all(torch.equal(kept[name], tensor) for name, tensor in trained.items())
        assert torch.equal(kept["row"], trained["1.weight"][1])


@dataclass(frozen=True, kw_only=True)
class LookingBack(LocalTraining):
    """Clients try once more what they have received."""

    def after(self, visit: Visit) -> None:
        """Keep the scores of both models."""
        x = visit.examples.x
        before = visit.module(visit.received)(x).detach()
        visit.kept = {"before": before, "after": visit.module(visit.trained)(x).detach()}


@pytest.mark.parametrize("engine", ENGINES)
def test_trying_what_was_received_leaves_what_was_trained(engine: str, plan: RoundPlan) -> None:
    wanted = [trained for trained, _ in answers(Loop(), plan)]
    found = answers(ENGINES[engine](), replace(plan, work=LookingBack(batch=4, lr=0.1)))
    for one, (other, kept) in zip(wanted, found, strict=True):
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor)
        assert not torch.allclose(kept["before"], kept["after"])
