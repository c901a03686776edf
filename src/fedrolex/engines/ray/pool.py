"""Workers on a cluster: started, given work, watched; a lost one's work is done again by another."""

from __future__ import annotations

import atexit
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fedrolex.clients import Job
from fedrolex.core import FedrolexError
from fedrolex.engines.ray.cluster import connected, session
from fedrolex.engines.ray.wire import Done
from fedrolex.engines.ray.worker import KEPT, remote
from fedrolex.slicing import one_line

SIGN_OF_LIFE = 5.0  # seconds between the questions whether a busy worker is still there
PATIENCE = 30.0  # seconds without an answer after which it is lost
GATHERED = 20.0  # seconds that a run's first round waits for workers on their way, once one is there
NOBODY = 600.0  # seconds without any worker after which a run stops
ONE_HEAP = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}
"""Environment of a worker: see :func:`~fedrolex.core.allocator.keep_memory`, which comes after Ray's own threads."""

Answer = TypeVar("Answer")
Start = Callable[[Sequence[Job], "PooledWorker"], Any]
"""Has a worker do jobs; gives Ray's reference to what comes of it, a :class:`Done`."""


@dataclass(frozen=True)
class Errand:
    """Jobs for a worker: a piece of a cohort or, once a worker was lost with that, a single one of its jobs."""

    place: int
    jobs: Sequence[Job]
    again: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a worker has done with jobs; None where it was lost."""

    jobs: Sequence[Job]
    member: PooledWorker
    done: Done | None


@dataclass(eq=False)
class PooledWorker:
    """A worker of the pool.

    Attributes:
        handle: Ray's actor.
        known: keys of the runs that it keeps.
        work: the reference to what it is busy with, and what that is; None where it is idle.
        sign: the reference to a sign of life that it was asked for, if any.
        heard: when it was last heard of.
    """

    handle: Any
    known: list[str] = field(default_factory=list)
    work: tuple[Any, Errand] | None = None
    sign: Any = None
    heard: float = 0.0

    def knows(self, run: str) -> bool:
        """Whether the worker has a run by now; if not, it is told of it next."""
        found = run in self.known
        self.known = [*(other for other in self.known if other != run), run][-KEPT:]
        return found


Take = Callable[[Outcome], list[Answer]]
"""Makes answers of what a worker has done, one a job, as soon as it is there."""


class Pool:
    """Workers on a Ray cluster; the engines of a process share them, run after run.

    Args:
        device: ``cpu`` or ``cuda``.
        cores: of each worker.

    Attributes:
        workers: how many there should be; None is one for every GPU, or ``cores`` of a CPU, that the cluster has.
    """

    def __init__(self, device: str, cores: int) -> None:
        self.ray = connected()
        self.device, self.cores = device, cores
        self.workers: int | None = None
        self.members: list[PooledWorker] = []
        self._starting: dict[Any, PooledWorker] = {}
        self._session = session(self.ray)
        self._class = remote(self.ray).options(
            num_cpus=cores,
            num_gpus=1 if device == "cuda" else 0,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": ONE_HEAP},
        )
        atexit.register(self.close)

    @property
    def usable(self) -> bool:
        """Whether the cluster is still the one that the workers were started on."""
        return session(self.ray) == self._session

    def close(self) -> None:
        """End all workers."""
        atexit.unregister(self.close)
        for member in [*self.members, *self._starting.values()] if self.usable else ():
            self._lose(member)
        self.members.clear()
        self._starting.clear()

    def wanted(self) -> int:
        """How many workers there should be."""
        if self.workers is not None:
            return self.workers
        found = self.ray.cluster_resources()
        return max(1, int(found.get("GPU", 0)) if self.device == "cuda" else int(found.get("CPU", 0)) // self.cores)

    def gather(self, everyone: bool = False) -> None:
        """Wait until somebody can work; with ``everyone``, a while for all that are on their way."""
        self._fill()
        began = since = time.monotonic()
        while not self.members or (self._starting and everyone):
            self._news()
            now = time.monotonic()
            since = since if self.members else now
            if now - since > GATHERED:
                break
            if now - began > NOBODY and not self.members:
                what = f"no worker was there for {NOBODY:.0f} s: the cluster has {self.ray.cluster_resources()}"
                raise FedrolexError(f"{what}; add nodes and resume, or ask for less with FEDROLEX_WORKER_CPUS")

    def each(
        self, pieces: Sequence[Sequence[Job]], start: Start, take: Take[Answer], ahead: int | None = None
    ) -> Iterator[list[Answer]]:
        """What comes of the pieces, in their order: an answer a job.

        A piece whose worker is lost is done again, job by job; a job whose worker is lost once more comes to nothing.
        At most ``ahead`` pieces are under way, or done and not asked for yet.
        """
        ahead = len(pieces) if ahead is None else ahead
        todo = deque(Errand(place, piece) for place, piece in enumerate(pieces))
        done: dict[int, list[Answer]] = {place: [] for place in range(len(pieces))}
        try:
            for due, piece in enumerate(pieces):
                while len(done[due]) < len(piece):
                    self.gather()
                    self._hand_out(todo, start, due + ahead)
                    for outcome, errand in self._news():
                        if outcome.done is None and not errand.again:
                            todo.extendleft(Errand(errand.place, [job], again=True) for job in reversed(errand.jobs))
                        else:
                            done[errand.place] += take(outcome)
                yield done.pop(due)
        finally:
            for member in [each for each in self.members if each.work is not None]:  # what they do is of no use now
                self._lose(member)

    def _hand_out(self, todo: deque[Errand], start: Start, before: int) -> None:
        """Give errands to idle workers, as far as they belong to the first pieces."""
        for member in self.members:
            if todo and member.work is None and todo[0].place < before:
                errand = todo.popleft()
                member.heard, member.sign = time.monotonic(), None
                member.work = start(errand.jobs, member), errand

    def _news(self) -> list[tuple[Outcome, Errand]]:
        """What workers have done, or were lost with, since. Waits a second at most."""
        busy = {member.work[0]: member for member in self.members if member.work is not None}
        signs = {member.sign: member for member in busy.values() if member.sign is not None}
        everything = [*busy, *signs, *self._starting]
        if not everything:
            time.sleep(0.1)
            return []
        ready, _ = self.ray.wait(everything, timeout=1.0)
        news = []
        for ref in ready:
            if ref in self._starting:
                self._join(ref)
            elif ref in signs:
                signs[ref].sign = None
                with suppress(self.ray.exceptions.RayError):
                    self.ray.get(ref)
                    signs[ref].heard = time.monotonic()
            else:
                news.append(self._ended(busy[ref], self._result(ref)))
        return news + self._silent()

    def _ended(self, member: PooledWorker, found: Done | None) -> tuple[Outcome, Errand]:
        """A worker is done, or lost."""
        assert member.work is not None
        errand, member.work = member.work[1], None
        if found is None:
            self._lose(member)
        return Outcome(errand.jobs, member, found), errand

    def _silent(self) -> list[tuple[Outcome, Errand]]:
        """The busy workers that give no sign of life; others that were not heard of for a while are asked for one."""
        news, now = [], time.monotonic()
        for member in list(self.members):
            if member.work is not None and now - member.heard > PATIENCE:
                news.append(self._ended(member, None))
            elif member.work is not None and member.sign is None and now - member.heard > SIGN_OF_LIFE:
                member.sign = member.handle.ping.remote()
        return news

    def _result(self, ref: Any) -> Done | None:
        """What came of a call; None where its worker is no longer there."""
        try:
            found: Done = self.ray.get(ref)
            return found
        except self.ray.exceptions.RayTaskError as error:
            raise FedrolexError(f"a worker failed: {one_line(error.cause)}") from error
        except self.ray.exceptions.RayError:
            return None

    def _fill(self) -> None:
        """Start as many workers as are missing; end those that are too many and idle."""
        wanted = self.wanted()
        for member in [each for each in self.members if each.work is None][: max(0, len(self.members) - wanted)]:
            self._lose(member)
        for _ in range(wanted - len(self.members) - len(self._starting)):
            member = PooledWorker(self._class.remote(self.device, self.cores))
            self._starting[member.handle.ping.remote()] = member

    def _join(self, ref: Any) -> None:
        """A worker has started, or could not."""
        member = self._starting.pop(ref)
        try:
            self.ray.get(ref)
            self.members.append(member)
        except self.ray.exceptions.RayActorError as error:
            if getattr(error, "actor_init_failed", False):
                raise FedrolexError(f"a worker cannot start: {one_line(error)}: is fedrolex on every node?") from error

    def _lose(self, member: PooledWorker) -> None:
        """See to it that a worker is gone: what it might still say would come too late."""
        if member in self.members:
            self.members.remove(member)
        with suppress(Exception):
            self.ray.kill(member.handle, no_restart=True)


_POOLS: dict[tuple[str, int], Pool] = {}


def pool_of(workers: int | None, device: str, cores: int) -> Pool:
    """The workers of a kind in this process, now so many; those of other kinds are ended, to make room for them."""
    for other in [other for other, pool in _POOLS.items() if other != (device, cores) or not pool.usable]:
        _POOLS.pop(other).close()
    if (device, cores) not in _POOLS:
        _POOLS[device, cores] = Pool(device, cores)
    pool = _POOLS[device, cores]
    pool.workers = workers
    return pool
