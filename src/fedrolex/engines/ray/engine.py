"""The engine ``ray``: every worker of a cluster trains a shard of the cohort and adds its answers up.

What a worker adds up does not depend on who trained what (:mod:`fedrolex.slicing.sums`): the sums of a round are the
same bits whatever the number of workers, their speed, and who was lost on the way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from fedrolex.clients import MODEL, Failure, Job, Origin, Precision, RoundPlan, Tensors, Upload
from fedrolex.core import FedrolexError
from fedrolex.core.errors import one_of
from fedrolex.engines.ray.cluster import ADDRESS, check_installed, connected
from fedrolex.engines.ray.pool import PATIENCE, Outcome, Pool, PooledWorker, pool_of
from fedrolex.engines.ray.shards import Costs, dealt, in_order, worth_adding
from fedrolex.engines.ray.wire import PartialSum, RunSent, Shard, pack, unpack
from fedrolex.rounds import Average, Engine
from fedrolex.rounds.drift import DriftSums, drift_of
from fedrolex.slicing.sums import MOST

PIECES = 4  # of a cohort for every worker, where answers come one by one
ROOM = 2**26  # bytes of answers in one piece
TWICE_LOST = "its worker was lost, and the next one, too"


@dataclass
class Traffic:
    """Bytes that went through Ray in a round.

    Attributes:
        state: of the server's tensors; they go to every node once.
        asked: sent to workers beside it.
        sums: of what workers have added up.
        answers: of all else that came back: what clients trained, where that is fewer bytes than its sum, sent and
            kept.
    """

    state: int = 0
    asked: int = 0
    sums: int = 0
    answers: int = 0


class NotMadeError(FedrolexError):
    """A worker cannot make the run."""


class RayEngine(Engine):
    """Trains a cohort on the workers of a Ray cluster, each with the fastest engine of its device.

    Args:
        precision, device: of an :class:`~fedrolex.rounds.Engine`; the server's tensors are on this device.
        workers: how many; None is FEDROLEX_WORKERS or, without it, one for every GPU or core of the cluster.
        cores: of each worker; None is FEDROLEX_WORKER_CPUS or 1.

    Attributes:
        traffic: of the last round.
        costs: how long clients take.
    """

    def __init__(
        self,
        *,
        precision: Precision = "fp32",
        device: torch.device | None = None,
        workers: int | None = None,
        cores: int | None = None,
    ) -> None:
        super().__init__(precision=precision, device=device)
        self.workers = _number("FEDROLEX_WORKERS") if workers is None else workers
        self.cores = (_number("FEDROLEX_WORKER_CPUS") or 1) if cores is None else cores
        self.trained_on = os.environ.get("FEDROLEX_WORKER_DEVICE") or self.device.type
        one_of("FEDROLEX_WORKER_DEVICE", self.trained_on, ("cpu", "cuda"))
        self.traffic = Traffic()
        self.costs = Costs()
        self._sections: dict[str, Stored] = {}
        self._run: tuple[Origin, RunSent] | None = None
        self._adding: Average | None = None
        self._plan: RoundPlan | None = None
        self._by_value = False  # the recipe travels as an object, with the user's own classes in it
        self._drifted: list[PooledWorker] = []
        self._serial = 0
        check_installed()
        if os.environ.get(ADDRESS):
            connected()  # a cluster that is not there is told before anything is written

    @property
    def pool(self) -> Pool:
        """The workers; the cluster is asked for when they are needed first."""
        return pool_of(self.workers, self.trained_on, self.cores)

    def supports(self, plan: RoundPlan) -> str | None:
        """What other processes can make, too."""
        if plan.origin is None:
            return "workers make a run from its recipe, and this one has none"
        return f"a cohort of more than {MOST:,}" if len(plan.jobs) > MOST else None

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """Deal the cohort out; answers come in the order of the jobs."""
        if not plan.jobs:
            return
        given = 0
        try:
            for answer in self._round(plan):
                given += 1
                yield answer
                del answer  # before the next one comes, which may need its memory
        except NotMadeError:
            if self._by_value:
                raise
            self._by_value, self._run = True, None
            yield from self._round(replace(plan, jobs=plan.jobs[given:]))

    def _round(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        self.traffic, self._plan, self._drifted = Traffic(), plan, []
        axis = None if plan.summing is None else plan.summing.label_axis
        self._adding = None if plan.summing is None else Average(plan, self, label_axis=axis, exact=True)
        self._serial += 1
        pool = self.pool
        pool.gather(everyone=self._run is None)
        if plan.summing is None:
            yield from self._one_by_one(plan, pool)
            return
        costs = [self.costs.of(plan, job) for job in plan.jobs]
        answers: dict[tuple[int, str], Upload | Failure] = {}
        for found in self._answers(plan, pool, dealt(plan.jobs, costs, len(pool.members))):
            answers |= {answer.job.key: answer for answer in found}
        for job in plan.jobs:
            yield answers[job.key]

    def _one_by_one(self, plan: RoundPlan, pool: Pool) -> Iterator[Upload | Failure]:
        sizes = [plan.axes(job).parameters(job.window) * 4 for job in plan.jobs]
        pieces = in_order(plan.jobs, sizes, PIECES * len(pool.members), ROOM)
        for piece, found in zip(pieces, self._answers(plan, pool, pieces, ahead=2 * len(pool.members)), strict=True):
            answers = {answer.job.key: answer for answer in found}
            yield from (answers[job.key] for job in piece)

    def _answers(
        self, plan: RoundPlan, pool: Pool, shards: Sequence[Sequence[Job]], ahead: int | None = None
    ) -> Iterator[list[Upload | Failure]]:
        """The answers of every shard, shard by shard."""
        sections = {section: self._stored(section, plan.tensors[section]) for section in _sections(plan)}
        run = self._told(plan)
        stamps = [(section, stored.version) for section, stored in sections.items()]

        def start(jobs: Sequence[Job], member: PooledWorker) -> Any:
            apart = plan.summing is None or not worth_adding(plan, jobs)
            shard = Shard.of(plan, self._serial, jobs, stamps, apart)
            self.traffic.asked += len(shard.tensors)
            told = replace(run, origin=None) if member.knows(run.key) else run
            return member.handle.train.remote(told, shard, *(stored.ref for stored in sections.values()))

        self.traffic.state = sum(stored.size for stored in sections.values())
        yield from pool.each(shards, start, partial(self._taken, plan), ahead)

    def _taken(self, plan: RoundPlan, outcome: Outcome) -> list[Upload | Failure]:
        """The answers of a shard."""
        done, jobs = outcome.done, outcome.jobs
        if done is None:
            return [Failure(job, TWICE_LOST) for job in jobs]
        if done.failed is not None:
            raise (FedrolexError if done.made else NotMadeError)(done.failed)
        self._merge(done.sums, jobs)
        self._drifted += [outcome.member] if outcome.member not in self._drifted else []
        self.traffic.sums += sum(len(each.tensors) for each in done.sums)
        self.traffic.answers += len(done.tensors)
        box = unpack(done.tensors, self.device)
        for job, seconds in zip(jobs, done.seconds, strict=True):
            self.costs.measured(plan, job, seconds)
        return [self._added(answer.upload(job, box)) for job, answer in zip(jobs, done.answers, strict=True)]

    def _merge(self, sums: Sequence[PartialSum], jobs: Sequence[Job]) -> None:
        """Add a worker's sums to those of the others; the server's memory does not grow with the number of workers."""
        home = {section: job for job in jobs for section in job.sections}
        for part in sums:
            found: dict[str, dict[int, Tensor]] = {}
            for key, tensor in unpack(part.tensors, self.device).items():
                grade, _, name = key.partition(":")
                found.setdefault(name, {})[int(grade)] = tensor
            assert self._adding is not None
            self._adding.add_sums(part.section, home[part.section], found, part.window)

    def _added(self, answer: Upload | Failure) -> Upload | Failure:
        """An answer, added to the sums where its worker did not do that."""
        if self._adding is None or isinstance(answer, Failure) or not answer.tensors:
            return answer
        assert answer.summed is not None
        try:
            self._adding.add(replace(answer, summed=None), answer.summed)
        except FedrolexError as error:
            return Failure(answer.job, str(error))
        return replace(answer, tensors={})

    def sums(self) -> dict[str, dict[str, Tensor]]:
        """What all workers have added up."""
        adding, self._adding = self._adding, None
        return {} if adding is None else {section: fold.totals() for section, fold in adding.sums().items()}

    def drift(self, new: Tensors) -> dict[str, float] | None:
        """As the workers measured it; nothing where one of them was lost since."""
        if self._plan is None or self._plan.summing is None or not self._plan.summing.drift or not new:
            return None
        ray, stored, total = self.pool.ray, self._stored(MODEL, new), DriftSums()
        run = self._told(self._plan).key
        refs = [member.handle.drift.remote(run, self._serial, stored.ref) for member in self._drifted]
        try:
            for sums in ray.get(refs, timeout=PATIENCE):
                for capacity, found in sums.items():
                    before = total.get(capacity, (0.0, 0.0, 0.0))
                    total[capacity] = before[0] + found[0], before[1] + found[1], before[2] + found[2]
        except ray.exceptions.RayError:
            return {}
        return drift_of(total)

    def _stored(self, section: str, tensors: Tensors) -> Stored:
        """A section in the object store, put there again only where a tensor is another one."""
        before = self._sections.get(section)
        if before is None or not before.holds(tensors, self.pool):
            data = pack(tensors)
            version = 0 if before is None else before.version + 1
            ref = self.pool.ray.put(data)
            self._sections[section] = Stored(ref, version, len(data), dict(tensors), _versions(tensors), self.pool)
        return self._sections[section]

    def _told(self, plan: RoundPlan) -> RunSent:
        """The run, as workers are told of it; the recipe as plain data, where workers know all that it names."""
        origin = plan.origin
        assert origin is not None
        known = self._run
        if known is None or known[0].view is not origin.view or known[0].recipe is not origin.recipe:
            travels = origin.task is not None or origin.view is not None
            fingerprint = None if travels else plan.task.fingerprint()
            path = [os.getcwd(), *(folder for folder in sys.path if folder)]
            sent = origin if self._by_value else replace(origin, recipe=origin.recipe.encode())
            pickled = self.pool.ray.cloudpickle.dumps(sent)
            known = origin, RunSent(uuid4().hex, pickled, self.precision, fingerprint, path)
            self._run = known
        return known[1]


@dataclass(frozen=True)
class Stored:
    """A section of the server's state in the object store."""

    ref: Any
    version: int
    size: int
    tensors: Mapping[str, Tensor]
    versions: Sequence[int]
    pool: Pool

    def holds(self, tensors: Tensors, pool: Pool) -> bool:
        """Whether these are the tensors that were stored, unchanged, on the same cluster."""
        same = self.pool is pool and self.tensors.keys() == tensors.keys() and self.versions == _versions(tensors)
        return same and all(tensor is self.tensors[name] for name, tensor in tensors.items())


def _versions(tensors: Tensors) -> list[int]:
    return [tensor._version for tensor in tensors.values()]


def _sections(plan: RoundPlan) -> list[str]:
    """The sections that a round's jobs are cut from."""
    return list(dict.fromkeys(section for job in plan.jobs for section in job.sections))


def _number(name: str) -> int | None:
    """A whole number above 0 of the environment; None where it is not given."""
    given = os.environ.get(name)
    if not given:
        return None
    if not (given.isascii() and given.isdigit() and int(given) > 0):
        raise FedrolexError(f"{name} is {given!r}: give a whole number above 0")
    return int(given)
