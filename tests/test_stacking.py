"""Clients of the same widths as one step: what a step does, who may be stacked, and the captured form of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_conformance import CUDA, alike, changes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from word_tasks import WORDS, corpus

from fedrolex import Examples, LocalTraining, Recipe, Task, Training, prepare, trace
from fedrolex.clients.messages import MODEL, Network, RoundPlan
from fedrolex.clients.optimizer import Memory
from fedrolex.clients.slot import Slot
from fedrolex.engines.cpu.loop import Loop
from fedrolex.engines.gpu import stacked
from fedrolex.engines.gpu.stacked import Stacked
from fedrolex.engines.stacking import Stack, clip_each, filling, ignored_by
from fedrolex.methods.fedprox import ProximalTraining
from fedrolex.methods.scaffold import ControlledTraining

# --- one step ---


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).double()


STEPS: dict[str, LocalTraining] = {
    "sgd": LocalTraining(lr=0.1, momentum=0.9, clip=0.5, weight_decay=0.01),
    "adam": LocalTraining(optimizer="adam", lr=0.01, clip=0.5),
    "masked": LocalTraining(lr=0.1, mask="neg_inf"),
    "pulled": ProximalTraining(lr=0.1, mu=0.7, clip=0.5),
    "corrected": ControlledTraining(lr=0.1, clip=0.5, weight_decay=0.01),
}


def clients(work: LocalTraining, count: int) -> tuple[list[Slot], Stack]:
    """Clients that start from different weights, each in a slot of its own and together in a stack."""
    torch.manual_seed(0)
    slots = [Slot(net()) for _ in range(count)]
    held = torch.ones(count, 5, dtype=torch.bool) if work.mask != "none" else None
    names = [name for name, _ in slots[0].module.named_parameters()]
    together = {
        name: torch.stack([dict(slot.module.named_parameters())[name].detach() for slot in slots]) for name in names
    }
    stack = Stack(net(), together, held)
    given = {what: [[torch.randn_like(p) for p in slot.parameters] for slot in slots] for what in work.constants}
    for place, slot in enumerate(slots):
        work.begin(slot.memory, slot.parameters, {what: own[place] for what, own in given.items()})
    work.begin(
        stack.memory,
        stack.parameters,
        {what: [torch.stack(each) for each in zip(*own, strict=True)] for what, own in given.items()},
    )
    if held is not None:
        held[0, 3:], held[1, :1] = False, False
    return slots, stack


def same(slots: Sequence[Slot], stack: Stack) -> None:
    for place, slot in enumerate(slots):
        for own, together in zip(slot.parameters, stack.parameters, strict=True):
            torch.testing.assert_close(together[place], own.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_a_stack_is_a_step_of_every_client(name: str) -> None:
    work = STEPS[name]
    slots, stack = clients(work, 3)
    for _ in range(3):
        x, y = torch.randn(3, 6, 1, 8, 8, dtype=torch.float64), torch.randint(1, 3, (3, 6))
        losses = stack.step(work, cross_entropy, x, y, 0.1)
        for place, slot in enumerate(slots):
            held = None if stack.held is None else stack.held[place]
            alone = work.step(slot, x[place], y[place], cross_entropy, 0.1, held)
            assert float(losses[place]) == pytest.approx(float(alone), rel=1e-9)
    same(slots, stack)


@pytest.mark.parametrize("name", ["sgd", "adam", "corrected"])
def test_the_first_places_go_on_without_the_others(name: str) -> None:
    work = STEPS[name]
    slots, stack = clients(work, 3)
    for busy in (3, 2, 2, 1):
        x, y = torch.randn(busy, 6, 1, 8, 8, dtype=torch.float64), torch.randint(0, 5, (busy, 6))
        stack.first(busy).step(work, cross_entropy, x, y, 0.1)
        for place, slot in enumerate(slots[:busy]):
            work.step(slot, x[place], y[place], cross_entropy, 0.1)
    same(slots, stack)


def test_a_client_that_stands_still_keeps_its_place_and_its_velocity() -> None:
    work = replace(STEPS["sgd"], epochs=2)
    slots, stack = clients(work, 2)
    for busy in ([True, True], [False, True], [True, True]):
        x, y = torch.randn(2, 6, 1, 8, 8, dtype=torch.float64), torch.randint(0, 5, (2, 6))
        losses = stack.step(work, cross_entropy, x, y, torch.tensor(0.1, dtype=torch.float64), torch.tensor(busy))
        for place, slot in enumerate(slots):
            if busy[place]:
                work.step(slot, x[place], y[place], cross_entropy, 0.1)
            else:
                assert float(losses[place]) == 0
    same(slots, stack)


def test_every_clients_gradient_is_clipped_by_its_own_norm() -> None:
    gradients = [torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.zeros(2, 1)]
    clip_each(gradients, 1.0)
    torch.testing.assert_close(gradients[0], torch.tensor([[0.6, 0.8], [0.3, 0.4]]), rtol=1e-5, atol=0)
    clip_each(gradients, None)
    torch.testing.assert_close(gradients[0], torch.tensor([[0.6, 0.8], [0.3, 0.4]]), rtol=1e-5, atol=0)


# --- whose batches may be filled up ---


class Functional(nn.Module):
    """A batch norm that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.outer(nn.functional.batch_norm(self.inner(x), None, None, training=True))
        return scores


@dataclass(frozen=True, kw_only=True)
class Smooth(LocalTraining):
    """An objective that every example counts for, ignored or not."""

    def objective(self, scores: Tensor, y: Tensor, loss: Any, held: Tensor | None) -> Tensor:
        return super().objective(scores, y, loss, held) + scores.square().mean()


def plan_for(build: Callable[[], nn.Module], work: LocalTraining) -> RoundPlan:
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    task = Task.split(lambda scale: build(), Examples(x, y), Examples(x, y), clients=3)
    return RoundPlan(0, 1, {MODEL: Network(build(), trace(build(), x[:2]))}, {}, task, work, [])


@pytest.mark.parametrize(
    ("build", "work", "target"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), LocalTraining(), -100),
        (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)), LocalTraining(), -100),
        (
            lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3)),
            LocalTraining(),
            None,
        ),
        (Functional, LocalTraining(), None),
        (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), Smooth(), None),
    ],
)
def test_batches_are_filled_up_where_nothing_notices(
    build: Callable[[], nn.Module], work: LocalTraining, target: int | None
) -> None:
    assert filling(plan_for(build, work), MODEL) == target


def test_a_loss_of_ones_own_ignores_what_it_says() -> None:
    x, y = torch.randn(4, 2), torch.arange(4) % 2
    task: Any = Task.split(lambda scale: nn.Linear(2, 2), Examples(x, y), Examples(x, y), clients=2)
    assert ignored_by(task) == -100
    assert ignored_by(replace(task, loss=nn.functional.mse_loss)) is None


# --- as a captured step; on a CPU the same without graphs ---

SETTINGS = {
    "sgd with momentum": ["client.momentum=0.9", "client.clip=0.5"],
    "adam": ["client.optimizer=adam", "client.lr=0.01"],
    "windows that differ": ["method=fed_dropout"],
    "two epochs and a mask": ["client.epochs=2", "client.mask=neg_inf", "client.lr=0.1"],
    "stragglers": ["method=fedprox", "method.mu=0.5", "fleet.stragglers=0.6", "client.epochs=2"],
}


@pytest.fixture(autouse=True)
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "PLACES", 3)


def ready(device: Any, engine: type[Stacked] | type[Loop], settings: Sequence[str], **options: Any) -> Training:
    """A run in which nothing is left to another engine."""
    made = prepare(Recipe(device=device).with_settings(["callbacks=[drift]", *settings, "engine=loop"]))
    made.say = lambda line: pytest.fail(line)
    made.engine = engine(device=made.server.device, **options, **({"rehearsed": True} if engine is Stacked else {}))
    return made


@pytest.fixture
def uneven(tmp_path: Path) -> list[str]:
    """Settings of a run of words whose users have 8 to 18 sentences."""
    file = tmp_path / "users.jsonl"
    users = [json.loads(line) for line in corpus(file).read_text().splitlines()]
    for number, user in enumerate(users):
        user["sentences"] = user["sentences"][: 8 + number % 11]
    file.write_text("".join(json.dumps(user) + "\n" for user in users))
    return [*WORDS, f"task.data={file}", "task.dropout=0.0", "task.fewest=5", "client.batch=7"]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", SETTINGS)
def test_rounds_of_words_are_those_of_loop(uneven: list[str], name: str, device: str) -> None:
    settings = [*uneven, *SETTINGS[name]]
    if name == "stragglers":
        settings.remove("method.rounding=ceil")
    made = ready(device, Stacked, settings)
    held = {len(made.server.task.client(member.client)) for member in made.server.fleet.members(0)}
    assert len(held) > 1
    found, wanted = changes(made, 2), changes(ready(device, Loop, settings), 2)
    for tensor, size in wanted.items():
        if name == "adam" and tensor.endswith("key.bias"):
            continue  # its gradient is zero but for rounding, which Adam makes as large as any
        assert float((found[tensor] - size).norm()) <= 2e-3 * float(size.norm()) + 1e-6, tensor


IMAGES = [
    "task.width=8", "task.limit=400", "task.partition={name: dirichlet, alpha: 0.5}", "task.augment=true",
    "fleet.clients=8", "fleet.cohort=8", 'fleet.capacities=["1", "1/2", "1/4"]',
    "client.epochs=3", "client.momentum=0.9", "client.lr=0.02", "client.batch=10",
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("method", [["fedavg"], ["fedprox", "method.mu=0.5"], ["scaffold"]])
def test_small_networks_that_convolve(method: list[str], device: str) -> None:
    """Clients of one width as one step: uneven holdings, shifted images, pulled and corrected gradients."""
    settings = [*IMAGES, f"method={method[0]}", *method[1:]]
    alike(changes(ready(device, Loop, settings), 2), changes(ready(device, Stacked, settings), 2), 1e-3)


def test_in_waves_too() -> None:
    settings = [*IMAGES, "method=fedavg"]
    made = ready("cpu", Stacked, settings, most=5)
    alike(changes(ready("cpu", Loop, settings)), changes(made), 1e-3)
    assert not made.engine.together


def test_the_next_clients_are_read_ahead_once(uneven: list[str]) -> None:
    made = ready("cpu", Stacked, uneven)
    read: list[int] = []

    def counted(task: Any) -> Any:
        class Counted(type(task)):  # type: ignore[misc]
            def client(self, number: int) -> Any:
                read.append(number)
                return super().client(number)

        return Counted(**{field.name: getattr(task, field.name) for field in fields(task)})

    cohorts = [{member.client for member in made.server.fleet.members(round)} for round in range(4)]
    made.server.view = counted(made.server.task)
    for round in range(2):
        read.clear()
        made.run_round()
        assert set(read) == cohorts[round + 1] | (cohorts[0] if round == 0 else set())
    made.server.view = counted(made.server.task)  # what was read belongs to the other task
    read.clear()
    made.run_round()
    assert set(read) == cohorts[2] | cohorts[3]


def test_dropout_follows_the_seed_and_nothing_else(uneven: list[str]) -> None:
    found = []
    for before in (1, 2):
        made = ready("cpu", Stacked, [*uneven, "task.dropout=0.3"])
        torch.manual_seed(before)
        made.run_round()
        found.append(made.server.state[MODEL])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["method=fedavg", "client.optimizer=adam", "client.lr=0.002"], "an Adam of their own"),
        (["method=fedrolex"], "fewer than 4 clients of the same widths"),
        (["method=fedavg", "method.width=1", "task.width=128"], "more than 262,144 parameters"),
        (["method=fedavg", "task.model=resnet8", "task.width=4"], "batches cannot be filled up"),
        (["method=fedavg", "deadline=100"], "only loop can interrupt a client at its deadline"),
    ],
)
def test_what_is_not_for_stacks_is_refused(settings: list[str], why: str) -> None:
    made = prepare(Recipe(device="cpu").with_settings([*IMAGES, *settings]))
    plan = made.plan(made.method.jobs(made.server, 0))
    assert why in str(Stacked(rehearsed=True).supports(plan))


def test_a_stack_remembers_nothing_at_first() -> None:
    module = net()
    stack = Stack(module, {name: torch.stack([p.detach()] * 2) for name, p in module.named_parameters()})
    assert isinstance(stack.memory, Memory)
    assert not any(bool(tensor.any()) for tensor in (*stack.memory.first, *stack.memory.second))
