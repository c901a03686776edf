"""What an engine is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from torch import Tensor

from fedrolex.client import LocalSGD
from fedrolex.slicing.axes import Axes
from fedrolex.slicing.windows import Window
from fedrolex.tasks.task import Task


@dataclass(frozen=True)
class Job:
    """One client's work in one round."""

    client: int
    capacity: Fraction
    window: Window


@dataclass(frozen=True)
class RoundPlan:
    """The client work of one round.

    Attributes:
        round: counted from 0.
        seed: of the run; streams are keyed by it, their purpose, the round and the client.
        axes: of the server's model.
        state: the server's tensors.
        task: data and loss.
        client: what each client does.
        jobs: in the order of client numbers.
        deadline: seconds a client may take, checked between steps; None is no limit.
    """

    round: int
    seed: int
    axes: Axes
    state: Mapping[str, Tensor]
    task: Task
    client: LocalSGD
    jobs: Sequence[Job]
    deadline: float | None = None


@dataclass(frozen=True)
class Upload:
    """What a client sends back; the tensors are only good until the next answer is asked for."""

    job: Job
    tensors: Mapping[str, Tensor]
    examples: int
    loss: float
    steps: int


@dataclass(frozen=True)
class Failure:
    """A client that did not make it, and why, in one line."""

    job: Job
    why: str


class Engine(Protocol):
    """Runs the client work of one cohort."""

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """One answer a job, in the order of the jobs."""
        ...
