"""What engines on a GPU have in common: they train many clients at once, as many as the memory holds."""

from __future__ import annotations

import gc
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fedrolex.clients import Failure, Job, RoundPlan, Upload
from fedrolex.core import FedrolexError
from fedrolex.engines.gpu.sharing import GATE, POOL, STREAMS
from fedrolex.rounds import Engine, out_of_memory


class Waves(Engine):
    """Trains clients in waves; a wave is trained at once.

    What was captured for the clients of a wave is kept for later rounds. Where memory runs out, what is kept is
    given back; if nothing was kept, waves get smaller.

    Args:
        most: clients of a wave.
        rehearsed: take a CPU, too, where the same steps run without graphs and streams: for tests.
        options: precision and device of an :class:`~fedrolex.rounds.Engine`.

    Attributes:
        neighbours: engines of the same run that keep things on the device: they give back what they keep together with
            this one.
    """

    shares_process = True

    def __init__(self, *, most: int = 256, rehearsed: bool = False, **options: Any) -> None:
        super().__init__(**options)
        if not rehearsed:
            refuse_cpu(self)
        self.most = most
        self.neighbours: weakref.WeakSet[Waves] = weakref.WeakSet()
        self._allocated = 0
        self._made_for: tuple[object, ...] = ()
        self._streams: list[Any] = []
        weakref.finalize(self, lambda streams: STREAMS.give_back(*streams), self._streams)

    @abstractmethod
    def _wave(self, plan: RoundPlan, jobs: Sequence[Job]) -> list[Upload | Failure]:
        """The answers of jobs that are trained at once, in their order; a lack of memory is raised."""

    @abstractmethod
    def _holds(self) -> bool:
        """Whether anything is kept on the device from round to round."""

    @abstractmethod
    def _clear(self) -> None:
        """Drop what is kept on the device; the next round makes it anew."""

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """Train the clients, wave by wave; answers come in the order of the jobs."""
        self.together = False
        made_for = (plan.work, plan.task, plan.networks)
        if any(one is not other for one, other in zip(made_for, self._made_for, strict=False)):
            self._clear()  # captured steps have another run's work in them
        self._made_for = made_for
        waiting, fresh = plan.jobs, not self._anything_held()
        while waiting:
            wave, answers = waiting[: self.most], None
            try:
                with GATE.passing():
                    GATE.pause()
                    answers = self._wave(plan, wave)
                    if waiting is plan.jobs:  # nothing has been folded yet
                        self._check_room_to_fold(plan)
            except RuntimeError as failure:
                if not out_of_memory(failure):
                    raise
                if fresh and len(wave) == 1:
                    what = f"one client of capacity {wave[0].capacity} at a time and the average"
                    raise FedrolexError(f"memory is not enough for {what}: use a smaller batch or model") from failure
                answers = None
            if answers is None:
                self.release()  # places for cohorts of other rounds go first; if there were none, waves get smaller
                self.most = -(-len(wave) // 2) if fresh else self.most
                fresh = True
                continue
            self.together = len(wave) == len(plan.jobs)
            yield from answers
            waiting, fresh = waiting[len(wave) :], False

    def release(self) -> bool:
        """Give back what is kept on the device; whether there was anything. Streams stay, with their workspaces."""
        held = self._anything_held()
        for each in (self, *self.neighbours):
            each._clear()
            each._allocated = 0
        gc.collect()
        if self.device.type == "cuda":
            with GATE.alone():
                torch.cuda.empty_cache()
        return held

    def _anything_held(self) -> bool:
        return any(each._holds() for each in (self, *self.neighbours))

    def _check_room_to_fold(self, plan: RoundPlan) -> None:
        """Run out of memory now, where waves can get smaller, if averaging the answers later would.

        Asked again when more is allocated than at the last time there was room.
        """
        if self.device.type != "cuda" or (allocated := torch.cuda.memory_allocated(self.device)) <= self._allocated:
            return
        folds = 1 + len({job.capacity for job in plan.jobs})  # the average, and the drift of every capacity
        models = 2 * folds + 3  # sums and counts; one update, its change, and the new state
        sections = {section for job in plan.jobs for section in job.sections}
        whole = sum(tensor.nbytes for section in sections for tensor in plan.tensors[section].values())
        windows = {(job.network, job.window) for job in plan.jobs}
        apart = sum(plan.networks[network].axes.parameters(window) for network, window in windows)  # sums of changes
        torch.empty(models * whole + 4 * apart, dtype=torch.uint8, device=self.device)  # is there as much?
        self._allocated = allocated

    def _stream(self, number: int) -> Any:
        """The engine's stream of a number, the same every time: a stream's workspaces stay on the device."""
        if self.device.type != "cuda":
            return None
        while len(self._streams) <= number % POOL:
            self._streams.append(STREAMS.take(self.device))
        return self._streams[number % POOL]


def refuse_cpu(engine: Engine) -> None:
    """Raise where an engine that needs a GPU has none."""
    if engine.device.type != "cuda":
        name = getattr(type(engine), "name", type(engine).__name__.lower())
        raise FedrolexError(f"engine {name} needs a CUDA device: use auto, loop or crew on a CPU")
