"""Lanes: every client's step captured on its own. On a CPU the same steps run without graphs and streams."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedrolex import Examples, FedrolexError, Recipe, Rolling, Task, Training, prepare
from fedrolex.clients.messages import MODEL, Failure, Job, Network, RoundPlan, Upload
from fedrolex.clients.slot import Slot
from fedrolex.clients.work import LocalTraining
from fedrolex.engines.cpu.loop import Loop
from fedrolex.engines.gpu.graph import Graph
from fedrolex.engines.gpu.lanes import Lanes
from fedrolex.slicing import trace

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
BASE = [
    "task.width=8", "fleet.clients=6", "fleet.cohort=4", "task.limit=200", 'fleet.capacities=["1", "1/2", "1/4"]',
    "callbacks=[drift]",
]  # fmt: skip
METHODS = {
    "rolling": ["method=fedrolex", "client.epochs=2", "client.momentum=0.9"],
    "norms apart": ["method=heterofl", "method.norms=per_capacity", "task.model=resnet8", "task.width=4"],
    "batch norms": ["method=heterofl", "task.model=resnet8", "task.width=4", "task.norm=batch"],
    "stragglers": ["method=fedprox", "method.mu=0.5", "fleet.stragglers=0.6", "client.epochs=2"],
    "constants": ["method=scaffold", "method.denominator=steps"],
    "hooks": ["method=fedselect", "client.lr=0.02"],
    "classes": ["method=fedrolex", "client.mask=zero", "method.rows=true", "task.partition=labels"],
}


def training(device: Any, settings: list[str], engine: type[Lanes] | type[Loop], **options: Any) -> Training:
    made = prepare(Recipe(device=device, engine="loop").with_settings([*BASE, *settings]))
    made.say = lambda line: pytest.fail(line)  # nothing is left to another engine
    if engine is Lanes:
        options |= {"rehearsed": True}
    made.engine = engine(device=made.server.device, **options)
    return made


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("method", METHODS)
def test_rounds_are_those_of_loop(method: str, device: Any) -> None:
    one = training(device, METHODS[method], Loop)
    other = training(device, METHODS[method], Lanes, most=3)  # in two waves
    for _ in range(2):
        wanted, found = one.run_round(), other.run_round()
        assert found["dropped"] == wanted["dropped"] == {}
        assert found["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-3)
        assert found["drift"] == pytest.approx(wanted["drift"], rel=1e-2, abs=1e-3)
    for section, tensors in one.server.state.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(other.server.state[section][name], tensor, rtol=2e-3, atol=2e-5)


@pytest.fixture(params=["cpu", CUDA])
def plan(request: pytest.FixtureRequest) -> RoundPlan:
    """One client with two jobs, one with none of its examples left, one with a short last batch."""
    torch.manual_seed(0)
    device = torch.device(request.param)
    x, y = torch.randn(30, 1, 8, 8), torch.arange(30) % 3
    task: Any = Task.split(build, Examples(x, y), Examples(x[:6], y[:6]), clients=3).to(device)
    task = replace(task, parts=[task.parts[0], task.parts[1][:0], task.parts[2][:7]])
    network = Network(build(1).to(device), trace(build(1), x[:2]))
    tensors = {name: tensor.clone() for name, tensor in network.axes.state(network.module).items()}

    def job(client: int, capacity: Fraction, name: str = "") -> Job:
        return Job(client, capacity, Rolling().window(network.axes, round=2, capacity=capacity), name=name)

    half = Fraction(1, 2)
    jobs = [job(0, half, "small"), job(0, Fraction(1), "large"), job(1, half), job(2, half)]
    return RoundPlan(2, 1, {MODEL: network}, {MODEL: tensors}, task, LocalTraining(batch=4, lr=0.1), jobs)


def build(scale: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8 * scale), nn.ReLU(), nn.Linear(8 * scale, 3))


def lanes(plan: RoundPlan, **options: Any) -> Lanes:
    return Lanes(device=next(iter(plan.tensors[MODEL].values())).device, rehearsed=True, **options)


def test_jobs_of_one_client_and_clients_without_examples(plan: RoundPlan) -> None:
    engine = lanes(plan)
    assert engine.supports(plan) is None
    for wanted, found, job in zip(Loop().run(plan), list(engine.run(plan)), plan.jobs, strict=True):
        assert found.job is job
        if isinstance(wanted, Failure):
            assert isinstance(found, Failure)
            assert found.why == wanted.why
            continue
        assert isinstance(found, Upload)
        assert (found.steps, found.examples) == (wanted.steps, wanted.examples)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-4)
        for name, tensor in wanted.tensors.items():
            torch.testing.assert_close(found.tensors[name], tensor, rtol=1e-4, atol=1e-6)


def test_another_runs_work_is_captured_anew(plan: RoundPlan) -> None:
    engine = lanes(plan)
    list(engine.run(plan))
    slower = replace(plan, work=replace(plan.work, momentum=0.5))
    for wanted, found in zip(Loop().run(slower), list(engine.run(slower)), strict=True):
        if isinstance(wanted, Upload) and isinstance(found, Upload):
            for name, tensor in wanted.tensors.items():
                torch.testing.assert_close(found.tensors[name], tensor, rtol=1e-4, atol=1e-6)


@dataclass(frozen=True, kw_only=True)
class Still(LocalTraining):
    """A step that does nothing."""

    def step(self, slot: Slot, x: Tensor, y: Tensor, *rest: Any) -> Tensor:
        return x.new_zeros(())


def test_a_step_of_ones_own_is_refused(plan: RoundPlan) -> None:
    assert lanes(plan).supports(replace(plan, work=Still())) == "Still has its own step"
    assert "deadline" in (lanes(plan).supports(replace(plan, deadline=1.0)) or "")


READING = """
import torch
from fedrolex.core.errors import FedrolexError
from fedrolex.engines.gpu.captured import captured
from fedrolex.engines.gpu.sharing import STREAMS

device = torch.device("cuda")
x = torch.ones(3, device=device)
try:
    captured(lambda: float(x.sum()), lambda: None, STREAMS.take(device))
except FedrolexError as error:
    print(error)
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_that_cannot_be_captured_says_so() -> None:
    """In a process of its own: a capture that fails may leave a device in a bad state."""
    done = subprocess.run([sys.executable, "-c", READING], capture_output=True, text=True)
    assert done.stdout.startswith("a step cannot be captured (")
    assert done.stdout.endswith("): use engine loop\n")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_dropout_draws_what_it_draws_in_loop() -> None:
    """Every client's graph has a generator of its own: what a client draws does not depend on who else trains."""

    def dropping(scale: int) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32 * scale), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32 * scale, 3)
        )

    x, y = torch.randn(90, 1, 8, 8), torch.arange(90) % 3
    states = []
    for engine in (Loop, Lanes, Lanes):
        task = Task.split(dropping, Examples(x, y), Examples(x[:6], y[:6]), clients=3)
        recipe = Recipe(device="cuda", engine="loop").with_settings(
            ["fleet.clients=3", "fleet.cohort=3", 'fleet.capacities=["1", "1/2"]', "client.batch=7", "callbacks=[]"]
        )
        made = prepare(recipe, task)
        made.engine = engine(device=made.server.device)
        for _ in range(3):
            assert made.run_round()["dropped"] == {}
        states.append(made.server.state[MODEL])
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-3, atol=1e-5)
        assert torch.equal(states[1][name], states[2][name])


@pytest.mark.parametrize("engine", [Lanes, Graph])
def test_without_a_gpu_it_is_refused(engine: Any) -> None:
    said = f"engine {engine.__name__.lower()} needs a CUDA device: use auto, loop or crew on a CPU"
    with pytest.raises(FedrolexError, match=said):
        engine(device=torch.device("cpu"))
