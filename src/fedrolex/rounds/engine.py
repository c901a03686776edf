"""An engine: runs the client work of one cohort."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from fedrolex.clients import Failure, LocalTraining, Precision, RoundPlan, Tensors, Upload


@dataclass(frozen=True)
class Averaged:
    """The server's new tensors of a network.

    Attributes:
        state: by name.
        drift: how far the clients of each capacity drifted, see :mod:`fedrolex.rounds.drift`.
        finite: whether all values are finite, where the engine has looked.
    """

    state: Tensors
    drift: Mapping[str, float]
    finite: bool | None = None


class Engine(ABC):
    """Runs the client work of one cohort; knows nothing of methods.

    Args:
        precision: of the products of the forward and backward pass.
        device: where clients train; an engine that cannot run there raises FedrolexError.

    Attributes:
        together: whether uploads stay good until the next round; known once a round has given its first answer.
        shares_process: whether several such engines may work at once in threads of one process, each for a run of its
            own, and still give the same results as one after the other.
        foreign: whether answers come from machines of others: one that a method cannot take costs its client the round.
        carried: bytes that the jobs of the last round brought to their clients and back, where the engine counts them.
        remarks: what else a round's metrics should tell, by name.
    """

    together: bool = False
    shares_process: ClassVar[bool] = False
    foreign: ClassVar[bool] = False
    carried: Mapping[tuple[int, str], tuple[int, int]] = MappingProxyType({})
    remarks: Mapping[str, object] = MappingProxyType({})

    def __init__(self, *, precision: Precision = "fp32", device: torch.device | None = None) -> None:
        self.precision = precision
        self.device = torch.device("cpu") if device is None else device

    def supports(self, plan: RoundPlan) -> str | None:
        """Why this engine cannot run a round's client work, in a few words; None where it can."""
        return None

    @abstractmethod
    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """One answer a job, in the order of the jobs."""

    def average(self, uploads: Sequence[Upload], weights: Sequence[float], label_axis: str | None) -> Averaged | None:
        """The selective average by position of a round's uploads where they lie; None where the engine cannot.

        With ``label_axis``, the axis of the classes, a class counts for the clients that hold it only.
        """
        return None

    def sums(self) -> Mapping[str, Tensors]:
        """What the round's answers that are already ``summed`` add up to: by section, whole weighted tensors."""
        return {}

    def drift(self, new: Tensors) -> dict[str, float] | None:
        """How far the clients of answers that are ``summed`` drifted; None where it was not measured.

        ``new`` is the average of the main network, see :mod:`fedrolex.rounds.drift`.
        """
        return None

    def release(self) -> bool:
        """Give back memory of the device that is held from round to round; whether there was any."""
        return False


HOOKS = frozenset({"before", "after", "objective", "pull", "correct", "rate", "steps"})
"""What an engine that has its own loop over steps still calls of a client's work."""


def unknown_hooks(work: LocalTraining, known: Collection[str] = HOOKS) -> str | None:
    """Why an engine that calls only the ``known`` hooks cannot run a client's work; None where it can."""
    own = sorted(work.changed - set(known))
    return f"{type(work).__name__} has its own {', '.join(own)}" if own else None


def interrupted(plan: RoundPlan) -> str | None:
    """Why an engine that trains clients together cannot run a round in which some stop earlier; None where none do."""
    if plan.deadline is not None:
        return "only loop can interrupt a client at its deadline"
    return "stragglers do a part of their work" if any(job.part != 1 for job in plan.jobs) else None


FULL = ("out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED", "can't allocate memory")


def out_of_memory(failure: BaseException | None) -> bool:
    """Whether memory ran out, in PyTorch, in a library below it or in the driver: that is the failure or led to it."""
    while failure is not None:
        told = isinstance(failure, RuntimeError) and any(words in str(failure) for words in FULL)
        if told or isinstance(failure, torch.OutOfMemoryError):
            return True
        failure = failure.__cause__ or failure.__context__
    return False
