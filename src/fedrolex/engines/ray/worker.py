"""A worker: a process that keeps runs, their data and their device between rounds, and trains shards of cohorts."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedrolex.clients import MODEL, Failure, Origin, Precision, RoundPlan, Upload, why_failed
from fedrolex.core import FedrolexError
from fedrolex.core.allocator import keep_memory
from fedrolex.core.importing import resolve
from fedrolex.engines.auto import choose
from fedrolex.engines.cpu.loop import Loop
from fedrolex.engines.ray.wire import Box, Done, JobAnswer, PartialSum, RunSent, Shard, pack, unpack
from fedrolex.rounds import Average, Engine
from fedrolex.rounds.drift import Drift, DriftSums
from fedrolex.rounds.refusal import refusal
from fedrolex.slicing import one_line

KEPT = 2  # runs that a worker keeps


@dataclass
class Known:
    """A run that a worker keeps.

    Attributes:
        plan: its networks, task and work.
        engine: the fastest of the worker's device.
        loop: for rounds that the engine cannot run.
        sections: the server's tensors by section, with the number of their version.
        drift: of the answers of a round, with the number of the attempt at it.
    """

    plan: RoundPlan
    engine: Engine
    loop: Loop
    sections: dict[str, tuple[int, dict[str, Tensor]]]
    drift: tuple[int, Drift] | None = None


class Worker:
    """Trains shards; told what to do by an engine, in a process of its own.

    Args:
        device: where clients train.
        threads: that PyTorch may use.
    """

    def __init__(self, device: str, threads: int) -> None:
        self.device, self.threads = torch.device(device), threads
        if self.device.type == "cpu":
            keep_memory()
        self._runs: OrderedDict[str, Known] = OrderedDict()
        self._thread = ThreadPoolExecutor(1)  # all work is done in it, so that others can ask for a sign of life

    def ping(self) -> str:
        """A sign of life: where the worker is."""
        return f"{socket.gethostname()}, process {os.getpid()}"

    def train(self, run: RunSent, shard: Shard, *sections: bytes) -> Done:
        """Train a shard's clients; ``sections`` are the server's tensors, as the shard names them."""
        return self._thread.submit(self._train, run, shard, sections).result()

    def drift(self, run: str, serial: int, new: bytes) -> DriftSums:
        """How far the clients that this worker trained in an attempt at a round drifted from the new average."""
        return self._thread.submit(self._drift, run, serial, new).result()

    def _train(self, run: RunSent, shard: Shard, sections: Sequence[bytes]) -> Done:
        torch.set_num_threads(self.threads)
        made = False
        try:
            known = self._known(run)
            made = True
            return self._trained(known, self._plan(known, shard, sections), shard)
        except (Exception, SystemExit) as error:
            why = str(error) if isinstance(error, FedrolexError) else f"{type(error).__name__}: {one_line(error)}"
            return Done(failed=f"a worker on {self.ping()}: {why}", made=made)

    def _known(self, run: RunSent) -> Known:
        """A run, made now if it is new."""
        if run.key not in self._runs:
            if run.origin is None:
                raise FedrolexError("the run is not known here any more")
            sys.path += [folder for folder in run.path if folder not in sys.path and Path(folder).is_dir()]
            origin = unpickled(run.origin)
            plan: RoundPlan = resolve(origin.maker)(origin, self.device)
            if run.fingerprint not in (None, plan.task.fingerprint()):
                raise FedrolexError("the data here are others than those of the driver: give both the same files")
            precision = cast(Precision, run.precision)
            engine = choose(precision=precision, device=self.device)
            loop = Loop(precision=precision, device=self.device)
            self._runs[run.key] = Known(plan, engine, loop, {})
            while len(self._runs) > KEPT:
                self._runs.popitem(last=False)
        self._runs.move_to_end(run.key)
        return self._runs[run.key]

    def _plan(self, known: Known, shard: Shard, sections: Sequence[bytes]) -> RoundPlan:
        """The shard as client work of this process."""
        for (section, version), data in zip(shard.sections, sections, strict=True):
            if known.sections.get(section, (-1, None))[0] != version:
                known.sections[section] = version, unpack(data, self.device)
        tensors = {section: known.sections[section][1] for section, _ in shard.sections}
        jobs = shard.jobs(self.device)
        for job in jobs:
            _match(known.plan.networks[job.network].module, tensors[job.sections[0]])
        return replace(known.plan, round=shard.round, tensors=tensors, jobs=jobs)

    def _trained(self, known: Known, plan: RoundPlan, shard: Shard) -> Done:
        engine = known.loop if known.engine.supports(plan) is not None else known.engine
        box, answers, seconds = Box(), [], []
        adding = self._adding(known, plan, engine, shard) if shard.summing else None
        for answer, took in _timed(engine, plan):
            seconds.append(took)
            answers.append(_answered(plan, answer, box, adding, shard.apart))
        if engine.together:  # all came at once: the time is shared out by size
            seconds = _shared_out(plan, seconds)
        sums = [] if adding is None else _partial_sums(adding)
        return Done(answers, box.packed(), sums, seconds)

    def _adding(self, known: Known, plan: RoundPlan, engine: Engine, shard: Shard) -> Average:
        """The sums of a shard, and the drift of the round's clients so far."""
        assert plan.summing is not None
        adding = Average(plan, engine, label_axis=plan.summing.label_axis, exact=True)
        if shard.drift and MODEL in plan.tensors:
            if known.drift is None or known.drift[0] != shard.serial:
                known.drift = shard.serial, Drift(plan.networks[MODEL].axes, plan.tensors[MODEL])
            drift = known.drift[1]

            def seen(uploads: Sequence[Upload]) -> None:
                for upload in uploads:
                    if upload.job.sections[0] == MODEL:
                        drift.add(upload.job.client, upload.job.capacity, upload.tensors, upload.job.window)

            adding.seen = seen
        return adding

    def _drift(self, run: str, serial: int, new: bytes) -> DriftSums:
        torch.set_num_threads(self.threads)
        known = self._runs[run]
        if known.drift is None or known.drift[0] != serial:
            return {}
        drift, known.drift = known.drift[1], None
        return drift.sums(unpack(new, self.device))


def _match(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give a network the precision of the server's tensors."""
    dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), None)
    if dtype is not None and next(module.parameters()).dtype != dtype:
        module.to(dtype)


def _timed(engine: Engine, plan: RoundPlan) -> Iterator[tuple[Upload | Failure, float]]:
    """Answers, with the seconds that each took."""
    began = time.perf_counter()
    for answer in engine.run(plan):
        yield answer, time.perf_counter() - began
        del answer  # before the next client is trained, which may need its memory
        began = time.perf_counter()


def _answered(plan: RoundPlan, answer: Upload | Failure, box: Box, adding: Average | None, apart: bool) -> JobAnswer:
    """An answer as it travels: added up or, where it travels apart, with its tensors in the box."""
    why = answer.why if isinstance(answer, Failure) else refusal(plan, answer)
    if why is not None:
        return JobAnswer(answer.job.key, why)
    assert isinstance(answer, Upload)
    weight = None
    if adding is not None:
        assert plan.summing is not None
        try:
            weight = float(plan.summing.weight(answer))
            if not apart:
                adding.add(answer, weight)
            elif adding.seen is not None:
                adding.seen([answer])
        except Exception as failure:
            return JobAnswer(answer.job.key, why_failed(failure))
    who = f"of {answer.job.key}"
    return JobAnswer(
        answer.job.key,
        None,
        answer.examples,
        float(answer.loss),
        answer.steps,
        None if answer.labels is None else list(answer.labels),
        weight,
        box.put(answer.tensors, f"trained {who}") if apart else None,
        box.put(answer.sent, f"sent {who}"),
        None if answer.kept is None else box.put(answer.kept, f"kept {who}"),
    )


def _partial_sums(adding: Average) -> list[PartialSum]:
    found = []
    for section, fold in adding.sums().items():
        window = fold.hull()
        parts = {f"{grade}:{n}": t for n, grades in fold.grades(window).items() for grade, t in grades.items()}
        found.append(PartialSum(section, window, pack(parts)))
    return found


def _shared_out(plan: RoundPlan, seconds: Sequence[float]) -> list[float]:
    """The time of all jobs together, by the size of each."""
    sizes = [plan.axes(job).parameters(job.window) for job in plan.jobs]
    return [sum(seconds) * size / sum(sizes) for size in sizes]


def unpickled(data: bytes) -> Origin:
    """What the driver of the run has pickled: whoever may use the cluster may run any code on it anyway."""
    from ray import cloudpickle

    found: Origin = cloudpickle.loads(data)
    return found


def remote(ray: Any) -> Any:
    """The worker as a class of Ray's; nothing of it is done again by Ray itself."""
    return ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=2)(Worker)
