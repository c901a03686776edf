"""A training run: round after round, from the first or from a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fedrolex.engines import Engine, Job, RoundPlan
from fedrolex.errors import FedrolexError
from fedrolex.fleet import Fleet
from fedrolex.methods import Method
from fedrolex.runs.apart import Apart
from fedrolex.runs.intake import Intake
from fedrolex.runs.measure import Measure
from fedrolex.slicing.axes import Axes
from fedrolex.slicing.capture import one_line
from fedrolex.slicing.windows import WHOLE, Window
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
        measure: how the model is evaluated.
        round: the next round.
        state: the server's tensors; those a capacity keeps apart are named ``tensor@capacity``.
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
    measure: Measure = field(default_factory=Measure)
    round: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.state:
            self.state = {name: tensor.clone() for name, tensor in self.axes.state(self.model).items()}
        levels = self.fleet.levels if self.method.width is None else [self.method.width]
        self.apart = Apart.of(self.model, levels if self.method.norms == "per_capacity" else ())
        self.state = self.apart.added(self.state)
        self._bytes_at: dict[tuple[int, ...], int] = {}
        self._coming: dict[int, list[Job]] = {}
        self.label_axis = self._find_label_axis() if self.method.rows else None

    def _find_label_axis(self) -> str:
        """The axis of the classes."""
        size = self.task.classes
        found = [a.name for a in self.axes.axes.values() if a.kind in ("outputs", "rows") and a.size == size]
        if len(found) != 1:
            raise FedrolexError(f"method.rows needs one axis for the {size} classes; the model has {len(found)}")
        return found[0]

    def run_round(self) -> dict[str, Any]:
        """One round; returns its metrics. A round below the quorum is void, and the window still advances."""
        began = time.perf_counter()
        plan = self._plan()
        answers = self.engine.run(plan)
        first = next(answers, None)
        intake = Intake(self, plan, together=self.engine.together)  # known once the engine has begun
        intake.take(answers if first is None else chain([first], answers))
        losses, failures = intake.losses, intake.failures
        void = len(losses) < self.quorum
        sizes = {window: self._bytes(window) for window in {job.window for job in plan.jobs}}
        metrics: dict[str, Any] = {
            "round": self.round,
            "clients": len(losses),
            "dropped": failures,
            "void": void,
            "train_loss": sum(losses) / len(losses) if losses else None,
            "bytes_down": sum(sizes[job.window] for job in plan.jobs),
            "bytes_up": sum(sizes[job.window] for job in plan.jobs if str(job.client) not in failures),
        }
        if not void:
            new, metrics["drift"] = intake.average()
        else:
            new = self.state
        metrics["seconds"] = time.perf_counter() - began
        self.state, self.round = new, self.round + 1
        return metrics

    def _plan(self) -> RoundPlan:
        jobs = self._coming.pop(self.round, None) or self._jobs(self.round)
        self._coming.clear()
        if self.apart.names:
            jobs = [replace(job, own=self.apart.own(self.state, job.capacity)) for job in jobs]
        return RoundPlan(
            self.round,
            self.seed,
            self.axes,
            self.apart.shared(self.state),
            self.task,
            self.method.client,
            jobs,
            self.deadline,
            self.method.rows,
            self._upcoming,
        )

    def _jobs(self, round: int) -> list[Job]:
        """Who takes part in a round, and with which window."""
        members = self.fleet.members(round, self.method.width if self.method.able_only else None)
        known: dict[Window, Window] = {}  # equal windows are one object: looking them up is then quick
        jobs = []
        for member in members:
            capacity = self.method.width or member.capacity
            window = self.method.scheme.window(self.axes, round=round, capacity=capacity, client=member.client)
            jobs.append(Job(member.client, capacity, known.setdefault(window, window)))
        return jobs

    def _upcoming(self) -> list[Job]:
        """The jobs of the next round, kept until then."""
        return self._coming.setdefault(self.round + 1, self._jobs(self.round + 1))

    def _bytes(self, window: Window) -> int:
        """What a client receives, and sends back: parameters and buffers in their own precision."""
        widths = self.axes.widths(window)
        key = tuple(widths.values())
        if key not in self._bytes_at:
            shared = self.apart.shared(self.state)
            self._bytes_at[key] = sum(prod(self.axes.shape(n, widths)) * t.element_size() for n, t in shared.items())
        return self._bytes_at[key]

    def whole_bytes(self) -> int:
        """What a client of the full model would receive."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.apart.shared(self.state).values())

    def evaluate(self) -> dict[str, Any]:
        """How good the model is now: the whole one, or the width everyone trains."""
        try:
            return self._evaluate()
        except ValueError as error:  # a batch norm that was given a single value a channel
            raise FedrolexError(f"the model could not be evaluated: {one_line(error)}") from error

    def _evaluate(self) -> dict[str, Any]:
        found = self.measure(self.task, self._model(self.method.width), self.model)
        if self.measure.submodels and self.method.width is None:
            found["submodels"] = {
                str(level): self.measure(self.task, self._model(level), self.model)["global_accuracy"]
                for level in self.fleet.levels
            }
        return found

    def _model(self, capacity: Fraction | None) -> nn.Module:
        """The server's model, or its sub-model of a capacity, as it stands."""
        largest = capacity or max(self.fleet.levels)
        state = {**self.apart.shared(self.state), **self.apart.own(self.state, largest)}
        self.axes.load(self.model, state)
        if capacity is None:
            return self.model
        window = self.method.scheme.window(self.axes, round=max(0, self.round - 1), capacity=capacity)
        return self.axes.cut(self.model, window)

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin with given weights; where they have none for a capacity's own copy, with those of the model."""
        for name, tensor in self.state.items():
            found = tensors.get(name, tensors.get(name.partition("@")[0]))
            if found is None:
                raise FedrolexError(f"there is no tensor {name!r}: the weights do not fit this model")
            self.axes.fits(name.partition("@")[0], found, WHOLE)
            tensor.copy_(found)

    def restore(self, tensors: Mapping[str, Tensor], round: int) -> None:
        """Go on from a checkpoint."""
        missing = sorted(set(self.state) ^ set(tensors))
        if missing:
            raise FedrolexError(f"the checkpoint does not fit this run: tensor {missing[0]!r}")
        self.axes.check_whole({name.partition("@")[0]: tensor for name, tensor in tensors.items()})
        device = next(iter(self.state.values())).device
        self.state = {name: tensors[name].to(device) for name in self.state}
        self.round = round


def pick_device(name: str) -> torch.device:
    """``auto`` is a GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise FedrolexError("device is cuda, but there is no CUDA device here: use cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
