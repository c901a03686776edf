"""A cohort on the cores of a CPU: a worker for every core, each with clients, or stacks of clients, of its own.

A step of a small model does not keep several cores busy; several clients do. Workers are threads of this process and
take the next unit of work as they come free, the longest first. What a unit computes does not depend on who takes the
unit or when, so a round gives the same bits every time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedrolex.clients.messages import Failure, Job, Kind, RoundPlan, Upload
from fedrolex.clients.slot import Precision
from fedrolex.core.errors import FedrolexError
from fedrolex.core.threads import threads_for
from fedrolex.engines.cpu.loop import Loop
from fedrolex.engines.cpu.units import Unit, first_together, units_of
from fedrolex.engines.cpu.worker import CrewWorker, Results
from fedrolex.engines.visits import close_visit, open_visits
from fedrolex.rounds.engine import Engine, interrupted, unknown_hooks

ROOM = 2**30  # bytes of updates kept at once
DRAWS = "the model draws random numbers while it trains, and threads share one generator"


class Crew(Engine):
    """Trains a cohort on all cores of a CPU.

    Args:
        precision, device: of an :class:`~fedrolex.rounds.Engine`; the device is a CPU.
        workers: how many; None is one for each of torch's threads, which the workers share out evenly.
        room: bytes of updates kept at once; a cohort that has more is trained in waves.
    """

    def __init__(
        self,
        *,
        precision: Precision = "fp32",
        device: torch.device | None = None,
        workers: int | None = None,
        room: int = ROOM,
    ) -> None:
        super().__init__(precision=precision, device=device)
        if self.device.type != "cpu":
            raise FedrolexError("engine crew trains on the cores of a CPU: use auto or graph on a GPU")
        self.workers = torch.get_num_threads() if workers is None else workers
        self.room = room
        self.draws = False
        self._stop = threading.Event()
        self._alone: set[Kind] = set()
        self._crew = [CrewWorker(precision, self._stop, self._alone) for _ in range(self.workers)]

    def supports(self, plan: RoundPlan) -> str | None:
        """Work without steps of its own; no deadlines, and no models that draw, other than for dropout."""
        if plan.deadline is not None:
            return interrupted(plan)
        return DRAWS if self.draws else unknown_hooks(plan.work)

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """Train the clients, wave by wave; answers come in the order of the jobs."""
        waves = self._waves(plan)
        self.together = len(waves) == 1
        for wave in waves:
            asked = replace(plan, jobs=wave)
            before = torch.get_rng_state()
            trained = self._trained(asked)
            if torch.equal(before, torch.get_rng_state()):
                for job in wave:
                    found = trained[job.key]
                    yield found if isinstance(found, Failure) else close_visit(*found)
            else:  # who drew what depends on who came first: once more, one after the other
                torch.set_rng_state(before)
                self.together, self.draws = False, True
                yield from Loop(precision=self.precision).run(asked)

    def _waves(self, plan: RoundPlan) -> list[list[Job]]:
        """The jobs in waves whose updates there is room for."""
        copies = 1 if plan.work.changed.isdisjoint({"before", "after"}) else 3  # what hooks keep of each client
        waves: list[list[Job]] = [[]]
        used = 0
        for job in plan.jobs:
            size = next(iter(plan.tensors[job.sections[0]].values())).element_size()
            bytes_ = plan.axes(job).parameters(job.window) * size * copies
            if waves[-1] and used + bytes_ > self.room:
                waves.append([])
                used = 0
            waves[-1].append(job)
            used += bytes_
        return waves

    def _trained(self, plan: RoundPlan) -> Results:
        """What comes of the clients of one wave; answers of the wave before are no longer good."""
        for worker in self._crew:
            worker.copies.free()
        visits, failures = open_visits(plan, plan.jobs, lambda job: self._crew[0].slot(plan, job).module)
        units = units_of(plan, visits, self.workers, self._alone)
        large = next((place for place, unit in enumerate(units) if threads_for(unit.parameters) == 1), len(units))
        shared = first_together([unit.cost for unit in units], self.workers, large)
        stacks = any(len(unit.visits) > 1 for unit in units)
        results: Results = {**failures}
        with sdpa_kernel(SDPBackend.MATH) if stacks else nullcontext():  # others do not take stacked clients
            for unit in units[:shared]:
                results |= self._crew[0].do(unit)
            self._side_by_side(units[shared:], results)
        return results

    def _side_by_side(self, units: Sequence[Unit], results: Results) -> None:
        """A thread a worker; each takes the next unit until there is none left."""
        if not units:
            return
        threads, queue, lock = torch.get_num_threads(), iter(units), threading.Lock()

        def work(worker: CrewWorker) -> None:
            torch.set_num_threads(max(1, threads // self.workers))
            torch.get_num_threads()  # makes it stick: a thread takes the process's number when it first asks
            while not self._stop.is_set():
                with lock:
                    unit = next(queue, None)
                if unit is None:
                    return
                found = worker.do(unit)
                with lock:
                    results.update(found)

        self._stop.clear()
        try:
            with ThreadPoolExecutor(self.workers) as pool:  # a thread's own join, interrupted, takes it for ended
                try:
                    done, _ = wait([pool.submit(work, worker) for worker in self._crew[: len(units)]])
                finally:
                    self._stop.set()
        finally:
            self._stop.clear()
            torch.set_num_threads(threads)
        for each in done:
            each.result()  # raises what broke a worker
