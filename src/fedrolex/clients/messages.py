"""What an engine is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fedrolex.clients.work import LocalTraining
from fedrolex.slicing.axes import Axes
from fedrolex.slicing.windows import Window
from fedrolex.tasks.task import Task


@dataclass(frozen=True)
class Job:
    """One client's work in one round.

    Attributes:
        client: its number.
        capacity: what it trains, as a part of the server's model.
        window: which nodes.
        own: whole tensors that stand in for the server's of the same name: what its capacity keeps apart.
        correction: added to its gradients, by parameter, in the shapes of the window; none where it is empty.
        part: of its work that it does; a straggler does less than all.
        narrower: windows inside its own that it also trains, and the whole tensors these keep apart, by width.
    """

    client: int
    capacity: Fraction
    window: Window
    own: Mapping[str, Tensor] = field(default_factory=dict)
    correction: Mapping[str, Tensor] = field(default_factory=dict)
    part: float = 1.0
    narrower: Mapping[Fraction, tuple[Window, Mapping[str, Tensor]]] = field(default_factory=dict)

    @property
    def source(self) -> tuple[Window, int]:
        """What its part is cut from: jobs of one source receive the same tensors."""
        return self.window, id(self.own) if self.own else 0


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
        tell_labels: whether clients say which classes they hold.
        upcoming: gives the jobs of the next round, without what is ``own``: an engine that waits for its device may
            use the time to get ready for them.
    """

    round: int
    seed: int
    axes: Axes
    state: Mapping[str, Tensor]
    task: Task
    client: LocalTraining
    jobs: Sequence[Job]
    deadline: float | None = None
    tell_labels: bool = False
    upcoming: Callable[[], Sequence[Job]] = list

    @property
    def plain(self) -> bool:
        """Whether everyone does all of the same plain steps: no deadline, no stragglers, one width, weights told."""
        one = not self.client.gradient and not self.client.widths
        return one and self.deadline is None and all(job.part == 1 for job in self.jobs)


@dataclass(frozen=True)
class Upload:
    """What a client sends back; the tensors are only good until the next answer is asked for.

    Attributes:
        job: what it was asked.
        tensors: the window's part of every tensor, trained.
        examples: how many it trained on.
        loss: mean over its steps.
        steps: how many.
        labels: the classes it holds, where it was asked.
        finite: whether all its values are, where the engine has looked.
        gradient: of the received model, mean over its examples, by parameter, where it was asked.
        narrower: what the windows inside keep apart, in their shapes, by width.
    """

    job: Job
    tensors: Mapping[str, Tensor]
    examples: int
    loss: float
    steps: int
    labels: Sequence[int] | None = None
    finite: bool | None = None
    gradient: Mapping[str, Tensor] | None = None
    narrower: Mapping[Fraction, Mapping[str, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Averaged:
    """The server's new tensors.

    Attributes:
        state: by name.
        drift: how far the clients of each capacity drifted, see :mod:`fedrolex.rounds.drift`.
        finite: whether all values are, where the engine has looked.
    """

    state: Mapping[str, Tensor]
    drift: Mapping[str, float]
    finite: bool | None = None


@dataclass(frozen=True)
class Failure:
    """A client that did not make it, and why, in one line."""

    job: Job
    why: str


class Engine(Protocol):
    """Runs the client work of one cohort.

    Attributes:
        together: uploads stay good until the next round, so that those of one window can be folded at once.
    """

    @property
    def together(self) -> bool: ...

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """One answer a job, in the order of the jobs."""
        ...


@runtime_checkable
class Averaging(Engine, Protocol):
    """An engine that can average a round's uploads where they lie."""

    def average(self, uploads: Sequence[Upload], weights: Sequence[float], label_axis: str | None) -> Averaged | None:
        """The selective average by position; classes count for clients that hold them where ``label_axis`` is given.

        None where this round's uploads do not allow it.
        """
        ...


@runtime_checkable
class Holding(Engine, Protocol):
    """An engine that holds memory of the device from round to round."""

    def release(self) -> bool:
        """Give it back, and say whether there was any; the next round takes what it needs anew.

        Uploads that are still held keep their memory.
        """
        ...


FULL = ("out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED", "can't allocate memory")


def out_of_memory(failure: BaseException | None) -> bool:
    """Whether memory ran out, in PyTorch, in a library below it or in the driver: that is the failure or led to it."""
    while failure is not None:
        if isinstance(failure, torch.OutOfMemoryError):
            return True
        if isinstance(failure, RuntimeError) and any(words in str(failure) for words in FULL):
            return True
        failure = failure.__cause__ or failure.__context__
    return False
