"""A cohort on the cores of a CPU: who is stacked, hooks, draws, interruptions; the same updates as ``loop``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from methods_shared import asked
from test_conformance import alike, changes
from torch import Tensor, nn

from fedrolex import (
    Classification,
    Examples,
    FedrolexError,
    LocalTraining,
    Recipe,
    Training,
    elementwise,
    prepare,
    trace,
)
from fedrolex.clients.messages import MODEL, Failure, Job, Network, RoundPlan, Upload
from fedrolex.clients.slot import Slot
from fedrolex.clients.visit import Visit
from fedrolex.engines.cpu import crew as crews
from fedrolex.engines.cpu import units
from fedrolex.engines.cpu.crew import DRAWS, Crew
from fedrolex.engines.cpu.loop import Loop
from fedrolex.engines.cpu.units import first_together, stacks_of, units_of
from fedrolex.engines.visits import open_visits
from fedrolex.rounds.engine import Engine
from fedrolex.slicing import Rolling
from fedrolex.tasks.partition import Partition

SETTINGS = [
    "task.width=8", "fleet.clients=10", "fleet.cohort=8", "task.limit=400", 'fleet.capacities=["1", "1/4"]',
    "callbacks=[drift]",
]  # fmt: skip


def run(engine: Engine, *settings: str) -> Training:
    made = prepare(Recipe(device="cpu", engine="loop").with_settings([*SETTINGS, *settings]))
    made.engine = engine
    return made


# --- a small plan of one's own ---


def build(scale: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 6 * scale, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216 * scale, 3))


def plan(sizes: list[int], work: LocalTraining | None = None, make: Callable[[], nn.Module] = build) -> RoundPlan:
    """Clients that hold so many examples each, all of capacity 1/2."""
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(sum(sizes), 1, 8, 8, generator=draw), torch.arange(sum(sizes)) % 3
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    parts = Partition.of(range(a, a + count) for a, count in zip(starts, sizes, strict=True))
    data = Examples(x, y)
    task = Classification("tiny", lambda scale: make(), data, data, parts, classes=3)
    network = Network(make(), trace(make(), x[:2]))
    tensors = {name: tensor.clone() for name, tensor in network.axes.state(network.module).items()}
    window = Rolling().window(network.axes, round=2, capacity="1/2")
    jobs = [Job(client, Fraction(1, 2), window) for client in range(len(sizes))]
    return RoundPlan(
        2, 1, {MODEL: network}, {MODEL: tensors}, task, work or LocalTraining(batch=4, lr=0.1, momentum=0.9), jobs
    )


def answers(engine: Engine, asked: RoundPlan) -> dict[tuple[int, str], Upload | Failure]:
    found: dict[tuple[int, str], Upload | Failure] = {}
    for answer in engine.run(asked):
        if isinstance(answer, Upload):
            answer = replace(answer, tensors={name: tensor.clone() for name, tensor in answer.tensors.items()})
        found[answer.job.key] = answer
    assert list(found) == [job.key for job in asked.jobs]
    return found


def never(*arguments: Any) -> Tensor:
    pytest.fail("a client was trained alone")


def agree(
    asked: RoundPlan, engine: Engine | None = None, *, stacked: bool = False
) -> dict[tuple[int, str], Upload | Failure]:
    """The crew's answers, which are those of ``loop``; with ``stacked``, all clients are in stacks."""
    wanted = answers(Loop(), asked)
    with pytest.MonkeyPatch.context() as patch:
        if stacked:
            patch.setattr(LocalTraining, "step", never)
        found = answers(engine or Crew(workers=2), asked)
    for key, one in wanted.items():
        other = found[key]
        if isinstance(one, Failure):
            assert isinstance(other, Failure)
            assert other.why == one.why
            continue
        assert isinstance(other, Upload)
        assert (other.steps, other.examples) == (one.steps, one.examples)
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        for what in ("tensors", "sent", "kept"):
            mine, theirs = getattr(one, what) or {}, getattr(other, what) or {}
            assert mine.keys() == theirs.keys()
            for name in mine:
                torch.testing.assert_close(theirs[name], mine[name], rtol=1e-4, atol=1e-5)
    return found


def stacks(asked: RoundPlan, workers: int = 2) -> list[list[int]]:
    """The clients that are trained together."""
    visits, _ = open_visits(asked, asked.jobs, lambda job: pytest.fail("no module is needed"))
    return [[visit.job.client for visit in unit.visits] for unit in units_of(asked, visits, workers)]


# --- who is stacked ---


@pytest.mark.parametrize(
    ("clients", "workers", "stacks"), [(3, 2, 3), (4, 2, 1), (7, 2, 1), (8, 2, 2), (10, 1, 1), (11, 1, 2), (28, 2, 4)]
)
def test_stacks_are_of_four_to_ten_clients_and_as_many_as_workers(clients: int, workers: int, stacks: int) -> None:
    assert stacks_of(clients, workers) == stacks


def test_clients_with_other_numbers_of_examples_are_stacked_where_batches_can_be_filled_up() -> None:
    assert stacks(plan([9, 4, 13, 8, 8])) == [[2, 0, 3, 4, 1]]
    assert stacks(plan([9, 4, 13, 8, 8], make=normed)) == [[2], [0], [3], [4], [1]]
    assert stacks(plan([8, 4, 8, 8, 8], make=normed)) == [[0, 2, 3, 4], [1]]


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6, track_running_stats=False), nn.Flatten(), nn.Linear(216, 3)
    )


def buffered() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(216, 3))


def test_large_networks_and_those_with_buffers_are_trained_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(stacks(plan([8] * 6, make=buffered))) == 6
    monkeypatch.setattr(units, "STACKED_VALUES", 50)
    assert len(stacks(plan([8] * 6))) == 6


@pytest.mark.parametrize(("costs", "workers", "together"), [
    ([1.0, 1.0], 2, 0), ([1.0, 1.0, 1.0], 2, 1), ([9.0, 1.0, 1.0], 2, 1), ([9.0], 2, 1), ([], 2, 0),
    ([4.0, 2.0, 1.0, 1.0], 2, 0), ([1.0] * 7, 4, 3), ([1.0] * 8, 4, 0), ([3.0, 2.0], 1, 0),
])  # fmt: skip
def test_what_does_not_come_out_even_is_done_by_all_workers_first(
    costs: list[float], workers: int, together: int
) -> None:
    assert first_together(costs, workers) == together
    assert first_together(costs, workers, 0) == 0


# --- the same updates as loop ---


@dataclass(frozen=True, kw_only=True)
class Hooked(LocalTraining):
    """Every client starts from weights of its own, is corrected, and tells how far it came; client 2 fails."""

    constants = ("push",)

    def before(self, visit: Visit) -> None:
        if visit.job.client == 2:
            raise FedrolexError("is not in the mood")
        visit.received = {name: tensor + 0.01 * visit.job.client for name, tensor in visit.received.items()}
        visit.constants["push"] = {name: torch.full_like(t, 0.1) for name, t in visit.received.items()}

    @elementwise
    def correct(self, parameters: list[Tensor], gradients: list[Tensor], memory: Any) -> None:
        torch._foreach_add_(gradients, memory.constants["push"])

    def after(self, visit: Visit) -> None:
        if visit.job.client == 3:
            raise FedrolexError("forgot")
        visit.sent = {name: visit.trained[name] - tensor for name, tensor in visit.received.items()}
        visit.kept = {"scores": visit.module(visit.trained)(visit.examples.x[:1]).detach()}


@pytest.mark.parametrize("sizes", [[8] * 6, [8, 5, 8, 13, 4, 6], [8, 5]])
@pytest.mark.parametrize("work", [
    LocalTraining(batch=4, lr=0.1, momentum=0.9, epochs=2, clip=0.5, weight_decay=0.01),
    LocalTraining(batch=4, lr=0.01, optimizer="adam", epochs=2, mask="zero"),
    Hooked(batch=4, lr=0.1),
])  # fmt: skip
def test_answers_are_those_of_loop(work: LocalTraining, sizes: list[int]) -> None:
    found = agree(plan(sizes, work), stacked=len(sizes) > 2)
    failed = {key[0]: answer.why for key, answer in found.items() if isinstance(answer, Failure)}
    wanted = {2: "is not in the mood", 3: "forgot"} if isinstance(work, Hooked) else {}
    assert failed == {client: why for client, why in wanted.items() if client < len(sizes)}


class UnitGradients(LocalTraining):
    """A hook that looks at a client's gradients as a whole: of many clients at once it would see one large norm."""

    def pull(self, parameters: list[Tensor], gradients: list[Tensor], memory: Any) -> None:
        torch._foreach_div_(gradients, torch.stack([gradient.norm() for gradient in gradients]).norm() + 1e-6)


class CentredGradients(LocalTraining):
    """A hook that asks for a gradient's shape."""

    def correct(self, parameters: list[Tensor], gradients: list[Tensor], memory: Any) -> None:
        for gradient in gradients:
            if gradient.dim() > 1:
                gradient.sub_(gradient.mean(dim=tuple(range(1, gradient.dim())), keepdim=True))


@pytest.mark.parametrize("work", [UnitGradients(batch=4, lr=0.1), CentredGradients(batch=4, lr=0.1)])
def test_hooks_that_may_look_at_a_client_as_a_whole_are_given_one(work: LocalTraining) -> None:
    agree(plan([8] * 6, work), stacked=False)
    assert work.looks_at_wholes is not None
    assert work.looks_at_wholes.endswith(f"() of {type(work).__name__} is not marked @elementwise")


def test_several_jobs_of_a_client_stragglers_and_clients_without_examples() -> None:
    asked = plan([8, 8, 0, 8, 8, 8])
    jobs = [replace(asked.jobs[0], name="first"), replace(asked.jobs[0], name="again", part=0.4), *asked.jobs[1:]]
    found = agree(replace(asked, jobs=jobs), stacked=True)
    again, empty = found[0, "again"], found[2, ""]
    assert isinstance(again, Upload)
    assert again.steps == 1
    assert isinstance(empty, Failure)
    assert "has no examples" in empty.why


def test_several_networks() -> None:
    asked, other = plan([8, 6, 8, 7, 8]), plan([8, 6, 8, 7, 8], make=normed)
    jobs = [replace(job, network="other", sections=("other",), name="other") for job in other.jobs]
    agree(
        replace(
            asked,
            networks={**asked.networks, "other": other.networks[MODEL]},
            tensors={**asked.tensors, "other": other.tensors[MODEL]},
            jobs=[*asked.jobs, *jobs],
        )
    )


def test_rounds_in_waves_are_the_same() -> None:
    whole, waves = run(Crew(workers=2)), run(Crew(workers=3, room=20_000))
    alike(changes(run(Loop())), changes(whole), 1e-3)
    alike(changes(run(Loop())), changes(waves), 1e-3)
    assert whole.engine.together
    assert not waves.engine.together


def test_a_client_with_broken_data_is_dropped_alone() -> None:
    asked = plan([8] * 5)
    task: Any = asked.task

    class Odd(type(task)):  # type: ignore[misc]
        def client(self, number: int) -> Examples:
            found: Examples = super().client(number)
            return Examples(found.x[:, :, :5], found.y) if number == 1 else found

    broken = Odd(task.name, task.build, task.train, task.test, task.parts, classes=3)
    found = answers(Crew(workers=2), replace(asked, task=broken))
    assert [key[0] for key, answer in found.items() if isinstance(answer, Failure)] == [1]


class Doubled(torch.autograd.Function):
    """Twice its input; ``vmap`` does not know how."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


@dataclass(frozen=True, kw_only=True)
class Unstackable(LocalTraining):
    def objective(self, scores: Tensor, y: Tensor, loss: Any, held: Tensor | None) -> Tensor:
        found: Tensor = Doubled.apply(super().objective(scores, y, loss, held))
        return found


def test_what_cannot_be_stacked_is_trained_alone() -> None:
    agree(plan([8] * 6, Unstackable(batch=4, lr=0.1)))


# --- what a crew cannot run ---


@dataclass(frozen=True, kw_only=True)
class Idle(LocalTraining):
    """A step that moves nothing."""

    def step(self, slot: Slot, x: Tensor, y: Tensor, loss: Any, rate: Any, held: Tensor | None = None) -> Tensor:
        return torch.zeros(())


def test_a_step_that_does_nothing_moves_nothing() -> None:
    made, heard = run(Crew(workers=2)), list[str]()
    made.work, made.say = Idle(), heard.append
    before = {name: tensor.clone() for name, tensor in made.server.state[MODEL].items()}
    assert made.engine.supports(asked(made)) == "Idle has its own step"
    for _ in range(2):
        made.run_round()
    assert heard == ["engine: loop (Idle has its own step)"]
    torch.testing.assert_close(made.server.state[MODEL], before, rtol=1e-6, atol=0)  # averages of equal values round


def test_deadlines_and_gpus_are_refused() -> None:
    assert "deadline" in str(Crew().supports(replace(plan([4]), deadline=9.0)))
    with pytest.raises(FedrolexError, match="crew trains on the cores of a CPU"):
        Crew(device=torch.device("cuda"))


# --- random numbers ---


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(216, 3))


class Noisy(nn.Module):
    """A layer that draws, and not for dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) if self.training else x


def with_noise() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), Noisy(), nn.Flatten(), nn.Linear(216, 3))


@pytest.mark.parametrize(("sizes", "stacked"), [([8] * 6, True), ([8, 5, 7, 6, 9], False)])
def test_dropout_draws_what_it_would_for_a_client_alone(sizes: list[int], stacked: bool) -> None:
    asked = plan(sizes, make=with_dropout)
    assert (len(stacks(asked)) < len(sizes)) == stacked
    engine = Crew(workers=2)
    agree(asked, engine, stacked=stacked)
    assert engine.supports(asked) is None


def test_a_model_that_draws_otherwise_is_left_to_loop_and_that_is_said() -> None:
    """Draws of threads that share a generator would differ from run to run; loop's bits come out instead."""
    asked, engine = plan([8, 5, 7, 6], make=with_noise), Crew(workers=2)
    state = torch.get_rng_state()
    wanted, found = answers(Loop(), asked), answers(engine, asked)
    assert torch.equal(torch.get_rng_state(), state)
    for key, one in wanted.items():
        other = found[key]
        assert isinstance(one, Upload)
        assert isinstance(other, Upload)
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    assert engine.supports(asked) == DRAWS


# --- threads ---


def test_workers_leave_torch_as_it_was_and_stop_when_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the wait for workers that are busy: when the interrupt gets through, none is."""
    torch.set_num_threads(2)
    asked, engine = plan([8, 5, 7, 6], make=buffered), Crew(workers=2)
    answers(Loop(), asked)  # PyTorch may start a thread of its own
    running = threading.active_count()
    answers(engine, asked)
    assert threading.active_count() == running
    assert torch.get_num_threads() == 2
    step, busy = LocalTraining.step, []

    def slow(*arguments: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        busy.append(1)
        time.sleep(0.3)
        busy.pop()
        return step(*arguments)

    def interrupted(_: Any) -> None:
        while not busy:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalTraining, "step", slow)
    monkeypatch.setattr(crews, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answers(engine, asked)
    assert busy == []
    assert threading.active_count() == running
    assert torch.get_num_threads() == 2
    monkeypatch.undo()
    answers(engine, asked)
