"""Workers on a cluster: started, given work, watched; a lost one's work is done again by another."""

from __future__ import annotations

import atexit
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fedrolex.core import FedrolexError
from fedrolex.engines.ray.cluster import connected, session
from fedrolex.engines.ray.wire import Done
from fedrolex.engines.ray.worker import KEPT, remote
from fedrolex.slicing import one_line

SIGN_OF_LIFE = 5.0  # seconds between the questions whether a busy worker is still there
PATIENCE = 30.0  # seconds without an answer after which it is lost
GATHERED = 20.0  # seconds that the first round waits for workers on their way, once one is there
NOBODY = 600.0  # seconds without any worker after which a run stops
TIMES = 2  # that work is given out before it is given up

Call = Callable[["Member"], Any]
"""Has a worker do something; gives Ray's reference to what comes of it, a :class:`Done`."""


@dataclass(eq=False)
class Member:
    """A worker of the pool.

    Attributes:
        handle: Ray's actor.
        known: keys of the runs that it keeps.
        work: the reference to what it is busy with, and which call that is; None where it is idle.
        sign: the reference to a sign of life that it was asked for, if any.
        heard: when it was last heard of.
    """

    handle: Any
    known: list[str] = field(default_factory=list)
    work: tuple[Any, int] | None = None
    sign: Any = None
    heard: float = 0.0

    def knows(self, run: str) -> bool:
        """Whether the worker has a run by now; if not, it is told of it next."""
        found = run in self.known
        self.known = [*(other for other in self.known if other != run), run][-KEPT:]
        return found


class Pool:
    """Workers on a Ray cluster; the engines of a process share them, run after run.

    Args:
        workers: how many; None is one for every GPU, or ``cores`` of a CPU, that the cluster has.
        device: ``cpu`` or ``cuda``.
        cores: of each worker.
    """

    def __init__(self, workers: int | None, device: str, cores: int) -> None:
        self.ray = connected()
        self.workers, self.device, self.cores = workers, device, cores
        self.members: list[Member] = []
        self._starting: dict[Any, Member] = {}
        self._gathered = False
        self._session = session(self.ray)
        self._class = remote(self.ray).options(
            num_cpus=cores, num_gpus=1 if device == "cuda" else 0, scheduling_strategy="SPREAD"
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

    def gather(self) -> None:
        """Wait until somebody can work; before the first round, for all that are on their way."""
        self._fill()
        began = since = time.monotonic()
        while not self.members or (self._starting and not self._gathered):
            self._news()
            now = time.monotonic()
            since = since if self.members else now
            if now - since > GATHERED:
                break
            if now - began > NOBODY and not self.members:
                what = f"no worker was there for {NOBODY:.0f} s: the cluster has {self.ray.cluster_resources()}"
                raise FedrolexError(f"{what}; add nodes and resume, or ask for less with FEDROLEX_WORKER_CPUS")
        self._gathered = True

    def each(self, calls: Sequence[Call], ahead: int | None = None) -> Iterator[tuple[Member, Done] | None]:
        """What comes of the calls, in their order, and from whom.

        A call that a worker is lost with is made once more, to another worker; where that one is lost, too, nothing
        comes of it. At most ``ahead`` calls are under way, or done and not asked for yet.
        """
        ahead = len(calls) if ahead is None else ahead
        todo, tries, done = deque(range(len(calls))), Counter[int](), dict[int, tuple[Member, Done] | None]()
        try:
            for due in range(len(calls)):
                while due not in done:
                    self.gather()
                    self._hand_out(calls, todo, ahead - len(done))
                    for member, place, found in self._news():
                        if found is not None:
                            done[place] = member, found
                            continue
                        tries[place] += 1
                        if tries[place] < TIMES:
                            todo.appendleft(place)
                        else:
                            done[place] = None
                yield done.pop(due)
        finally:
            for member in [each for each in self.members if each.work is not None]:  # what they do is of no use now
                self._lose(member)

    def _hand_out(self, calls: Sequence[Call], todo: deque[int], most: int) -> None:
        """Give calls to idle workers, until there are ``most`` under way."""
        under_way = sum(member.work is not None for member in self.members)
        for member in self.members:
            if todo and member.work is None and under_way < most:
                place = todo.popleft()
                member.heard, member.sign = time.monotonic(), None
                member.work = calls[place](member), place
                under_way += 1

    def _news(self) -> list[tuple[Member, int, Done | None]]:
        """The workers that are done, with what and with which call; None where one was lost. Waits a second at most."""
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
                signs[ref].sign, signs[ref].heard = None, time.monotonic()
            else:
                member, found = busy[ref], self._result(ref)
                assert member.work is not None
                news.append((member, member.work[1], found))
                member.work = None
                if found is None:
                    self._lose(member)
        return news + self._silent()

    def _silent(self) -> list[tuple[Member, int, None]]:
        """The busy workers that give no sign of life; others that were not heard of for a while are asked for one."""
        news, now = [], time.monotonic()
        for member in list(self.members):
            if member.work is not None and now - member.heard > PATIENCE:
                news.append((member, member.work[1], None))
                self._lose(member)
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
        """Start as many workers as are missing."""
        for _ in range(self.wanted() - len(self.members) - len(self._starting)):
            member = Member(self._class.remote(self.device, self.cores))
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

    def _lose(self, member: Member) -> None:
        """See to it that a worker is gone: what it might still say would come too late."""
        if member in self.members:
            self.members.remove(member)
        with suppress(Exception):
            self.ray.kill(member.handle, no_restart=True)


_POOLS: dict[tuple[int | None, str, int], Pool] = {}


def pool_of(workers: int | None, device: str, cores: int) -> Pool:
    """The pool of such workers in this process; workers of other kinds are ended, to make room for them."""
    key = (workers, device, cores)
    for other in [other for other, pool in _POOLS.items() if other != key or not pool.usable]:
        _POOLS.pop(other).close()
    if key not in _POOLS:
        _POOLS[key] = Pool(*key)
    return _POOLS[key]
