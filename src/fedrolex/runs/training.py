"""A training run: round after round, from the first or from a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fedrolex.engines import Engine, Failure, Job, RoundPlan, Upload
from fedrolex.errors import FedrolexError
from fedrolex.fleet import Fleet
from fedrolex.methods import Method
from fedrolex.runs.drift import Drift
from fedrolex.slicing.axes import Axes
from fedrolex.slicing.fold import Fold
from fedrolex.tasks import Task


@dataclass
class Training:
    """Everything a run is made of, and where it stands.

    Attributes:
        task, fleet, method, engine: what is learned, by whom, how, and on what.
        model: the server's model; its tensors are ``state`` after every round.
        axes: of the model.
        seed: of all streams.
        quorum: fewest good updates that make a round count.
        deadline: seconds a client may take.
        round: the next round.
        state: the server's tensors.
    """

    task: Task
    fleet: Fleet
    method: Method
    engine: Engine
    model: nn.Module
    axes: Axes
    seed: int = 0
    quorum: int = 1
    deadline: float | None = None
    round: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.state:
            self.state = {name: tensor.clone() for name, tensor in self.axes.state(self.model).items()}

    def run_round(self) -> dict[str, Any]:
        """One round; returns its metrics. A round below the quorum is void, and the window still advances."""
        began = time.perf_counter()
        plan = self._plan()
        fold = Fold(self.axes, self.state, normaliser=self.method.normaliser, order=[job.client for job in plan.jobs])
        drift = Drift(self.axes, self.state)
        losses: list[float] = []
        failures: dict[str, str] = {}
        for answer in self.engine.run(plan):
            why = self._take(answer, fold, drift, losses)
            if why is not None:
                fold.skip(answer.job.client)
                failures[str(answer.job.client)] = why
        void = len(fold.clients) < self.quorum
        metrics: dict[str, Any] = {
            "round": self.round,
            "clients": len(fold.clients),
            "dropped": failures,
            "void": void,
            "train_loss": sum(losses) / len(losses) if losses else None,
            "bytes_down": sum(self._bytes(job) for job in plan.jobs),
            "bytes_up": sum(self._bytes(job) for job in plan.jobs if str(job.client) not in failures),
        }
        if not void:
            new = fold.average()
            broken = next((n for n, t in new.items() if t.is_floating_point() and not bool(t.isfinite().all())), None)
            if broken is not None:
                raise FedrolexError(f"round {self.round}: {broken} is no longer finite; lower the learning rate")
            metrics["drift"] = drift.by_capacity(new)
        else:
            new = self.state
        metrics["seconds"] = time.perf_counter() - began
        self.state, self.round = new, self.round + 1
        return metrics

    def _plan(self) -> RoundPlan:
        members = self.fleet.members(self.round, self.method.width if self.method.able_only else None)
        jobs = []
        for member in members:
            capacity = self.method.width or member.capacity
            window = self.method.scheme.window(self.axes, round=self.round, capacity=capacity, client=member.client)
            jobs.append(Job(member.client, capacity, window))
        return RoundPlan(
            self.round, self.seed, self.axes, self.state, self.task, self.method.client, jobs, self.deadline
        )

    def _take(self, answer: Upload | Failure, fold: Fold, drift: Drift, losses: list[float]) -> str | None:
        """Fold one answer in, or say why it is dropped."""
        if isinstance(answer, Failure):
            return answer.why
        job = answer.job
        for name, tensor in answer.tensors.items():
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                return f"sent a value that is not finite ({name}){self._batch_of_one(answer)}"
        try:
            fold.add(job.client, answer.tensors, job.window, self._weight(answer))
        except FedrolexError as error:
            return str(error)
        drift.add(job.client, job.capacity, answer.tensors, job.window)
        losses.append(answer.loss)
        return None

    def _batch_of_one(self, upload: Upload) -> str:
        lonely = upload.examples % self.method.client.batch == 1 and any("running_var" in n for n in self.state)
        return "; its last batch is one example, which batch norm cannot train on" if lonely else ""

    def _weight(self, upload: Upload) -> float:
        return float(upload.examples) if self.method.weighting == "samples" else 1.0

    def _bytes(self, job: Job) -> int:
        """What a client receives, and sends back: parameters and buffers in their own precision."""
        sizes = (prod(self.axes.region(n, job.window).shape) * t.element_size() for n, t in self.state.items())
        return sum(sizes)

    def evaluate(self) -> dict[str, float]:
        """How good the model is now: the whole one, or the width everyone trains."""
        self.axes.load(self.model, self.state)
        if self.method.width is None:
            return self.task.evaluate(self.model)
        window = self.method.scheme.window(self.axes, round=0, capacity=self.method.width)
        return self.task.evaluate(self.axes.cut(self.model, window))

    def restore(self, tensors: Mapping[str, Tensor], round: int) -> None:
        """Go on from a checkpoint."""
        self.axes.check_whole(tensors)
        missing = sorted(set(self.state) ^ set(tensors))
        if missing:
            raise FedrolexError(f"the checkpoint does not fit this run: tensor {missing[0]!r}")
        device = next(iter(self.state.values())).device
        self.state = {name: tensors[name].to(device) for name in self.state}
        self.round = round


def full_bytes(training: Training) -> int:
    """Bytes full-model training sends to one client in a round."""
    return sum(tensor.numel() * tensor.element_size() for tensor in training.state.values())


def pick_device(name: str) -> torch.device:
    """``auto`` is a GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise FedrolexError("device is cuda, but there is no CUDA device here: use cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
