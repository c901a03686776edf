"""The fastest engine on a CPU, found by trying them on the run's own first cohort.

For every capacity, a few batches of a few of its clients are trained one after the other (``loop``), side by side, and
stacked (``crew``), in turn. ``loop`` stays unless another is faster. What was measured is thrown away: neither the
server's tensors nor any random number is touched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from fedrolex.clients.messages import Engine, Failure, Job, RoundPlan, Upload
from fedrolex.clients.work import Precision
from fedrolex.engines.choice import Choice
from fedrolex.engines.cpu.crew import Crew
from fedrolex.engines.cpu.loop import Loop
from fedrolex.tasks.task import Examples

CLEARLY = 0.95  # of the time, for a stack to be taken for faster
SHORT = 60.0  # seconds of training that are not worth a measurement
TRIES = 7  # timed repetitions
BUDGET = (1.0, 5.0)  # seconds after which a capacity is not tried again, at least and at most
SHARE = 0.05  # of the run's length after which nothing more is tried
FEW = 3  # clients that ``loop`` is tried with: one is over too soon to be compared with ten
WIDE = 0.1  # seconds of a step above which clients are not worth stacking
STEPS = 3  # batches of a client that are tried: with one, what a client costs beside its steps counts too much


class Auto:
    """Chooses an engine at its first round, and is that engine from then on.

    Args:
        model: the server's model.
        precision: of the forward and backward pass.
        rounds: of the whole run; a run of less than a minute is not measured.
    """

    def __init__(self, model: nn.Module, *, precision: Precision = "fp32", rounds: int = 1) -> None:
        self.model = model
        self.precision = precision
        self.rounds = rounds
        self.choice: Choice | None = None
        self._engine: Engine = Loop(model, precision=precision)

    @property
    def together(self) -> bool:
        """As the chosen engine."""
        return self._engine.together

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """Train the clients on the chosen engine."""
        if self.choice is None:
            self.choose(plan)
        yield from self._engine.run(plan)

    def choose(self, plan: RoundPlan) -> Choice:
        """Measure, and be the fastest."""
        choice = choose(plan, self.model, self.precision, self.rounds)
        self.use(choice)
        return choice

    def use(self, choice: Choice) -> None:
        """Be this engine."""
        self.choice = choice
        self._engine = choice.build(self.model, self.precision)


@dataclass(frozen=True)
class Times:
    """Seconds a client of one capacity takes for a step: by ``loop``, side by side, stacked."""

    loop: float
    alone: float
    stacked: float


def choose(plan: RoundPlan, model: nn.Module, precision: Precision, rounds: int) -> Choice:
    """The fastest engine for runs of cohorts like this one."""
    if not plan.plain:
        what = "a deadline needs" if plan.deadline is not None else "clients that do other than all plain steps need"
        return Choice("loop", why=f"{what} it")
    jobs = {capacity: [job for job in plan.jobs if job.capacity == capacity] for capacity in _capacities(plan)}
    if len(plan.jobs) < 2:
        return Choice("loop", why="one client at a time")
    with torch.random.fork_rng(devices=[]):
        loop = Loop(model, precision=precision)
        steps = plan.client.epochs * -(-_examples(plan) // plan.client.batch)
        for _ in range(2):  # once to make the sub-models
            first = {capacity: _seconds(loop, plan, group[:1]) for capacity, group in jobs.items()}
        length = rounds * steps * sum(len(jobs[capacity]) * one for capacity, one in first.items())
        if length < SHORT:
            return Choice("loop", why="the run is too short to measure others")
        workers = torch.get_num_threads()
        alone = Crew(model, precision=precision, workers=workers, stacked=())
        stacked = Crew(model, precision=precision, workers=workers)
        budget = min(max(SHARE * length / len(jobs), BUDGET[0]), BUDGET[1])
        times = {
            c: _times(plan, _some(plan, group, workers), loop, alone, stacked, budget) for c, group in jobs.items()
        }
    if alone.draws or stacked.draws:
        return Choice("loop", why="the model draws random numbers while it trains")
    return decide(times, {capacity: len(group) for capacity, group in jobs.items()}, workers)


def decide(times: Mapping[Fraction, Times], clients: Mapping[Fraction, int], workers: int) -> Choice:
    """The choice for so many clients of each capacity, given what a step of one takes."""
    stacks = [capacity for capacity, one in times.items() if one.stacked < CLEARLY * one.alone]
    plain = sum(clients[capacity] * one.loop for capacity, one in times.items())
    crew = sum(clients[c] * (one.stacked if c in stacks else one.alone) for c, one in times.items())
    said = f"measured: a step of the cohort takes {1000 * plain:.0f} ms with loop, {1000 * crew:.0f} ms with crew"
    if crew < plain:  # asking for more, one noisy moment was enough to lose a third of the speed
        return Choice("crew", workers, tuple(str(capacity) for capacity in stacks), said)
    return Choice("loop", why=said)


def _capacities(plan: RoundPlan) -> list[Fraction]:
    return sorted({job.capacity for job in plan.jobs}, reverse=True)


def _some(plan: RoundPlan, group: Sequence[Job], workers: int) -> list[Job]:
    """Clients of one capacity to measure: up to five a worker, and at least one each, borrowed from others."""
    few = list(group[: 5 * workers])
    others = [job.client for job in plan.jobs if all(job.client != one.client for one in group)]
    return few + [replace(group[0], client=client) for client in others[: max(0, workers - len(few))]]


def _times(plan: RoundPlan, jobs: Sequence[Job], loop: Loop, alone: Crew, stacked: Crew, budget: float) -> Times:
    """The best of a few tries, in turn; the first, which makes sub-models, does not count."""
    tries: list[tuple[Engine, Sequence[Job]]] = [(loop, jobs[:FEW]), (alone, jobs[: alone.workers])]
    if len(jobs) >= stacked.fewest and _seconds(loop, plan, jobs[:1]) < WIDE:
        tries[1:] = [(alone, jobs), (stacked, jobs)]
    began = time.perf_counter()
    for engine, some in tries[1:]:
        _seconds(engine, plan, some)
    best = [float("inf")] * len(tries)
    for _ in range(TRIES):
        best = [min(now, _seconds(engine, plan, some)) for now, (engine, some) in zip(best, tries, strict=True)]
        if time.perf_counter() - began > budget:
            break
    return Times(best[0], best[1], best[2] if len(best) > 2 else best[1])


def _seconds(engine: Engine, plan: RoundPlan, jobs: Sequence[Job]) -> float:
    """Seconds a client takes for a step; endless where one of them fails."""
    short: Any = _Beginning(plan.task, STEPS * plan.client.batch)
    began = time.perf_counter()
    work = replace(plan.client, epochs=1)
    answers = list(engine.run(replace(plan, task=short, client=work, jobs=jobs)))
    steps = sum(answer.steps for answer in answers if isinstance(answer, Upload))
    failed = any(isinstance(answer, Failure) for answer in answers)
    return float("inf") if failed else (time.perf_counter() - began) / steps


def _examples(plan: RoundPlan) -> int:
    """What the clients hold on average, of those that can be asked."""
    held = []
    for job in plan.jobs:
        with suppress(Exception):
            held.append(len(plan.task.client(job.client)))
    return -(-sum(held) // max(1, len(held)))


class _Beginning:
    """A task whose clients hold only the first few of their examples."""

    def __init__(self, task: Any, examples: int) -> None:
        self._task, self._examples = task, examples

    def client(self, number: int) -> Examples:
        data = self._task.client(number)
        return Examples(data.x[: self._examples], data.y[: self._examples])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)
