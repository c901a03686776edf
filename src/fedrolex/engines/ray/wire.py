"""What travels between the driver of a run and its workers: plain data, and tensors as safetensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedrolex.clients import Failure, Job, RoundPlan, Tensors, Upload
from fedrolex.slicing import Window

Keys = Mapping[str, str]
"""Names of tensors to their keys in a box."""


class Box:
    """Tensors that are sent together; those that are there already are not packed again."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._latest: dict[tuple[str, str], tuple[str, Tensor]] = {}

    def put(self, tensors: Tensors, purpose: str = "") -> dict[str, str]:
        """Put tensors in; of one purpose and name, the same values as the last are put in once."""
        return {name: self._key(tensor.detach(), (purpose, name)) for name, tensor in tensors.items()}

    def _key(self, tensor: Tensor, about: tuple[str, str]) -> str:
        key, last = self._latest.get(about, ("", None))
        if last is None or last.dtype != tensor.dtype or not torch.equal(last, tensor):
            key = str(len(self._tensors))
            self._tensors[key] = tensor.cpu().clone(memory_format=torch.contiguous_format)
            self._latest[about] = key, tensor
        return key

    def packed(self) -> bytes:
        """All tensors, as they travel."""
        return save(self._tensors)


def pack(tensors: Tensors) -> bytes:
    """Tensors by name, as they travel."""
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def unpack(data: bytes, device: torch.device | None = None) -> dict[str, Tensor]:
    """Inverse of :func:`pack`, in memory of its own."""
    return {name: tensor if device is None else tensor.to(device) for name, tensor in load(data).items()}


def named(box: Tensors, keys: Keys) -> dict[str, Tensor]:
    """Tensors of a box by their names."""
    return {name: box[key] for name, key in keys.items()}


@dataclass(frozen=True)
class RunSent:
    """A run as a worker is told of it.

    Attributes:
        key: tells runs apart.
        origin: how the worker makes it, pickled by Ray's pickler, so that it can be read once ``path`` is known; None
            where the worker has the run.
        precision: of client work.
        fingerprint: of the data that the driver sees; None where data travel with the origin.
        path: folders in which the driver finds modules.
    """

    key: str
    origin: bytes | None
    precision: str
    fingerprint: str | None
    path: Sequence[str]


@dataclass(frozen=True)
class AskedJob:
    """A job, with the keys of the tensors that are sent with it."""

    job: Job
    sent: Mapping[str, Keys]
    kept: Keys | None


@dataclass(frozen=True)
class Shard:
    """Jobs of one round for one worker.

    Attributes:
        round: its number.
        serial: the number of the attempt at a round, which is another one where a round is run again.
        asked: the jobs.
        tensors: the box of what is sent with them.
        sections: names of the sections of the server's state that come with the shard, each with the number of its
            version.
        summing: whether answers are added up, here or there.
        apart: whether what clients trained comes back as it is.
        drift: whether it is measured how far clients drift apart.
    """

    round: int
    serial: int
    asked: Sequence[AskedJob]
    tensors: bytes
    sections: Sequence[tuple[str, int]]
    summing: bool
    apart: bool
    drift: bool

    @staticmethod
    def of(
        plan: RoundPlan, serial: int, jobs: Sequence[Job], sections: Sequence[tuple[str, int]], apart: bool
    ) -> Shard:
        """A shard of these jobs of a plan."""
        box, asked = Box(), []
        for job in jobs:
            sent = {purpose: box.put(tensors, purpose) for purpose, tensors in job.sent.items()}
            kept = None if job.kept is None else box.put(job.kept, f"kept by {job.client}")
            asked.append(AskedJob(replace(job, sent={}, kept=None), sent, kept))
        drift = plan.summing is not None and plan.summing.drift
        return Shard(plan.round, serial, asked, box.packed(), sections, plan.summing is not None, apart, drift)

    def jobs(self, device: torch.device) -> list[Job]:
        """The jobs with what is sent, on a device."""
        box, found = unpack(self.tensors, device), []
        for asked in self.asked:
            sent = {purpose: named(box, keys) for purpose, keys in asked.sent.items()}
            kept = None if asked.kept is None else named(box, asked.kept)
            found.append(replace(asked.job, sent=sent, kept=kept))
        return found


@dataclass(frozen=True)
class JobAnswer:
    """An answer to a job without its tensors, or why there is none; the attributes are those of an upload."""

    key: tuple[int, str]
    why: str | None = None
    examples: int = 0
    loss: float = 0.0
    steps: int = 0
    labels: Sequence[int] | None = None
    summed: float | None = None
    tensors: Keys | None = None
    sent: Keys | None = None
    kept: Keys | None = None

    def upload(self, job: Job, box: Tensors) -> Upload | Failure:
        """The answer as the server takes it."""
        if self.why is not None:
            return Failure(job, self.why)
        kept = None if self.kept is None else named(box, self.kept)
        tensors, sent = named(box, self.tensors or {}), named(box, self.sent or {})
        return Upload(job, tensors, self.examples, self.loss, self.steps, self.labels, True, sent, kept, self.summed)


@dataclass(frozen=True)
class PartialSum:
    """What a worker has added up for one section: ``grade:name`` to tensors, cut to a window."""

    section: str
    window: Window
    tensors: bytes


@dataclass(frozen=True)
class Done:
    """What comes of a shard.

    Attributes:
        answers: one a job.
        tensors: the box of what is sent with them.
        sums: of the answers that are summed.
        seconds: that each job took.
        failed: why nothing came of it, in one line; None where something did.
        made: whether the worker could make the run.
    """

    answers: Sequence[JobAnswer] = ()
    tensors: bytes = b""
    sums: Sequence[PartialSum] = ()
    seconds: Sequence[float] = ()
    failed: str | None = None
    made: bool = True
