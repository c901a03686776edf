"""A cohort on the cores of a CPU: a worker for every core, each with clients, or stacks of clients, of its own.

A step of a small model does not keep several cores busy; several clients do. Workers are threads of this
process and take the next unit of work as they come free, the longest first. What a unit computes does not
depend on who takes it or when, so a round gives the same bits every time.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor, nn

from fedrolex.clients.dropout import OwnDropout
from fedrolex.clients.messages import Failure, Job, RoundPlan, Upload
from fedrolex.clients.work import Precision, Slot
from fedrolex.engines.cpu.loop import Loop, stream_seed
from fedrolex.engines.cpu.stack import Stack, Unit
from fedrolex.engines.rewriting import rewrite

ROOM = 2**30  # bytes of updates kept at once
BASE = 200_000  # what a step costs beside its parameters, in parameters
SHARED = 0.8  # how much of every core a step that all share makes use of
CUTTING = threading.Lock()

Key = tuple[tuple[torch.Size, torch.dtype], ...]


class Stopped(BaseException):
    """The run was interrupted while a worker was busy."""


class Member(Loop):
    """One worker's own sub-models, channels last; it leaves when it is told to."""

    def __init__(self, model: nn.Module, precision: Precision, stop: threading.Event) -> None:
        super().__init__(model, precision=precision)
        self.stop = stop

    def new_slot(self, plan: RoundPlan, job: Job) -> Slot:
        """Its code rewritten for eager steps, which this slot alone takes."""
        module = self.cut(plan, job)
        return Slot(module, self.precision, rewrite(module) if self.precision == "fp32" else None)

    def cut(self, plan: RoundPlan, job: Job) -> nn.Module:
        """Channels last; a new module draws weights, which is not what counts as drawing."""
        with CUTTING, torch.random.fork_rng(devices=[]):
            return super().cut(plan, job).to(memory_format=torch.channels_last)

    def go_on(self, plan: RoundPlan, began: float, steps: int) -> None:
        """Unless the run was interrupted."""
        if self.stop.is_set():
            raise Stopped

    @contextmanager
    def drawing(self, plan: RoundPlan, *jobs: Job) -> Iterator[OwnDropout | None]:
        """Threads share one random generator; dropout is given another, what else was drawn is noticed afterwards."""
        seeds = [stream_seed(plan, job) for job in jobs]
        with OwnDropout(*seeds) if self.dropout else nullcontext() as dropout:
            yield dropout


class Shelf:
    """Where a worker keeps updates until the round is over, in tensors that every round uses again."""

    def __init__(self) -> None:
        self._free: dict[Key, list[list[Tensor]]] = {}
        self._used: dict[Key, list[list[Tensor]]] = {}

    def clear(self) -> None:
        """What is kept is no longer needed."""
        for shapes, used in self._used.items():
            self._free.setdefault(shapes, []).extend(used)
        self._used.clear()

    def kept(self, answers: Iterator[Upload | Failure]) -> dict[int, Upload | Failure]:
        """Answers by client, the tensors of a client that was alone copied out of its slot, which is used again."""
        found = list(answers)
        alone = len(found) == 1
        return {
            answer.job.client: replace(answer, tensors=self._copied(answer.tensors))
            if alone and isinstance(answer, Upload)
            else answer
            for answer in found
        }

    def _copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = list(tensors.values())
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in values)
        free = self._free.get(shapes)
        place = free.pop() if free else [torch.empty_like(tensor) for tensor in values]
        for own, tensor in zip(place, values, strict=True):
            own.copy_(tensor)
        self._used.setdefault(shapes, []).append(place)
        return dict(zip(tensors, place, strict=True))


class Crew:
    """Trains a cohort on all cores of a CPU.

    A recipe with a deadline, a GPU, and a model that draws random numbers while it trains other than for dropout are
    left to ``loop``: threads share one random generator.

    Args:
        model: the server's model, to cut sub-models from; its weights are not used.
        precision: of the forward and backward pass.
        workers: how many; None is one for each of torch's threads, which they share out evenly.
        stacked: capacities whose clients are stacked (see :class:`~fedrolex.engines.cpu.stack.Stack`); None is all.
        fewest, most: clients in one stack.
        room: bytes of updates kept at once; a cohort that has more is trained in waves.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        precision: Precision = "fp32",
        workers: int | None = None,
        stacked: Collection[Fraction] | None = None,
        fewest: int = 3,
        most: int = 10,
        room: int = ROOM,
    ) -> None:
        self.model = model
        self.precision = precision
        self.workers = torch.get_num_threads() if workers is None else workers
        self.stacked, self.fewest, self.most, self.room = stacked, fewest, most, room
        self.loop = Loop(model, precision=precision)
        self.together = False
        self.draws = False
        self._stop = threading.Event()
        self._members: list[Stack] = []
        self._shelves: list[Shelf] = []

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """Train the clients, wave by wave; answers come in the order of the jobs."""
        device = next(iter(plan.state.values())).device
        if not plan.plain or self.draws or device.type != "cpu":
            self.together = False
            yield from self.loop.run(plan)
            return
        waves = self._waves(plan)
        self.together = len(waves) == 1
        for wave in waves:
            part = replace(plan, jobs=wave)
            before = torch.get_rng_state()
            answers = self._train(part)
            if torch.equal(before, torch.get_rng_state()):
                yield from (answers[job.client] for job in wave)
            else:  # who drew what depends on who came first: once more, one after the other
                torch.set_rng_state(before)
                self.together, self.draws = False, True
                yield from self.loop.run(part)

    def _waves(self, plan: RoundPlan) -> list[Sequence[Job]]:
        """The jobs in parts whose updates there is room for."""
        waves: list[list[Job]] = [[]]
        size = next(iter(plan.state.values())).element_size()
        used = 0
        for job in plan.jobs:
            bytes_ = plan.axes.parameters(job.window) * size
            if waves[-1] and used + bytes_ > self.room:
                waves.append([])
                used = 0
            waves[-1].append(job)
            used += bytes_
        return list(waves)

    def _train(self, plan: RoundPlan) -> dict[int, Upload | Failure]:
        """The answers of one wave, by client; those of the wave before are no longer good."""
        for shelf in self._shelves:
            shelf.clear()
        while len(self._members) < self.workers:
            self._shelves.append(Shelf())
            loop = Member(self.model, self.precision, self._stop)
            self._members.append(
                Stack(
                    self.model,
                    precision=self.precision,
                    fewest=self.fewest,
                    most=self.most,
                    stacked=self.stacked,
                    loop=loop,
                )
            )
        units, failures = self._members[0].units(plan, self.workers)
        answers: dict[int, Upload | Failure] = {failure.job.client: failure for failure in failures}
        costs = [cost(plan, unit) for unit in units]
        order = sorted(range(len(units)), key=lambda place: -costs[place])
        shared = first_together([costs[place] for place in order], self.workers)
        for place in order[:shared]:
            answers |= self._shelves[0].kept(self._members[0].train(plan, units[place]))
        self._side_by_side(plan, [units[place] for place in order[shared:]], answers)
        return answers

    def _side_by_side(self, plan: RoundPlan, units: Sequence[Unit], answers: dict[int, Upload | Failure]) -> None:
        """A thread a worker; each takes the next unit until there is none left."""
        threads, queue, lock = torch.get_num_threads(), iter(units), threading.Lock()
        broken: list[BaseException] = []

        def work(member: Stack, shelf: Shelf) -> None:
            torch.set_num_threads(max(1, threads // self.workers))
            torch.get_num_threads()  # makes it stick: a thread takes the process's number when it first asks
            try:
                while not self._stop.is_set():
                    with lock:
                        unit = next(queue, None)
                    if unit is None:
                        return
                    found = shelf.kept(member.train(plan, unit))
                    with lock:
                        answers.update(found)
            except BaseException as error:
                broken.append(error)

        both = list(zip(self._members, self._shelves, strict=True))[: len(units)]
        self._stop.clear()
        try:
            with ThreadPoolExecutor(self.workers) as pool:  # a thread's own join, interrupted, takes it for ended
                try:
                    wait([pool.submit(work, *pair) for pair in both])
                finally:
                    self._stop.set()
        finally:
            self._stop.clear()
            torch.set_num_threads(threads)
        if broken:
            raise broken[0]


def cost(plan: RoundPlan, unit: Unit) -> float:
    """How long a unit takes, up to a factor."""
    return (plan.axes.parameters(unit.jobs[0][0].window) + BASE) * sum(len(data) for _, data in unit.jobs)


def first_together(costs: Sequence[float], workers: int) -> int:
    """How many of the longest units all workers should do together first, so that all are done soonest.

    Args:
        costs: of the units, the longest first.
        workers: how many there are.
    """

    def finish(shared: int) -> float:
        ends = [sum(costs[:shared]) / (workers * SHARED)] * workers
        for one in costs[shared:]:
            heapq.heappushpop(ends, ends[0] + one)
        return max(ends)

    return min(range(min(workers, len(costs)) + 1), key=finish)
