"""One client's round, as its work sees it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedrolex.clients.messages import Job, Network, RoundPlan, Tensors, Upload
from fedrolex.core import FedrolexError, random_words, shuffle
from fedrolex.slicing import one_line
from fedrolex.tasks import Examples, Mask


@dataclass
class Visit:
    """One client's round: what the client was asked, what it holds, what comes of it.

    Attributes:
        plan, job: what is asked.
        examples: what the client holds.
        spare: gives a module of the job's widths to try things with; the engine may train in it later.
        go_on: called before every step with the number of steps done; raises where the client must stop. May be None.
        constants: what all steps read beside their batch: by name, one tensor for each trained parameter.
        trained: the window's tensors after training.
        steps, loss: how many steps, and the mean loss over them.
        sent, kept: see :class:`~fedrolex.clients.messages.Upload`.
    """

    plan: RoundPlan
    job: Job
    examples: Examples
    spare: Callable[[], nn.Module]
    go_on: Callable[[int], None] | None = None
    constants: dict[str, Tensors] = field(default_factory=dict)
    trained: Tensors = field(default_factory=dict)
    steps: int = 0
    loss: float = float("nan")
    sent: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, Tensor] | None = None

    @property
    def network(self) -> Network:
        """The network that the client trains a part of."""
        return self.plan.networks[self.job.network]

    @cached_property
    def received(self) -> dict[str, Tensor]:
        """The tensors that training starts from, in the shapes of the window; may be replaced before training."""
        return self.plan.received(self.job)

    def check_constants(self, declared: Sequence[str], parameters: Iterable[str]) -> None:
        """Raise unless ``before`` filled the constants that the work declares, one tensor for each parameter."""
        if set(self.constants) != set(declared):
            raise FedrolexError(
                f"before() filled constants {sorted(self.constants)}; the work declares constants = {tuple(declared)}"
            )
        for what, values in self.constants.items():
            missing = next((name for name in parameters if name not in values), None)
            if missing is not None:
                raise FedrolexError(f"constants[{what!r}] has nothing for the trained parameter {missing!r}")

    def load(self, module: nn.Module) -> None:
        """Copy what training starts from into a module of the job's widths."""
        if "received" in self.__dict__:
            self._copy(module, self.received)
        else:  # straight from the server's tensors
            self.plan.load(module, self.job)

    def module(self, tensors: Tensors) -> nn.Module:
        """A module of the job's widths with these tensors; the next call uses the same module again.

        What was trained stays as it is, where the engine has trained it in that very module, too.
        """
        module = self.spare()
        if tensors is not self.trained:
            self.trained = _apart(self.trained, self.plan.axes(self.job).state(module, self.job.window))
        self._copy(module, tensors)
        return module

    def _copy(self, module: nn.Module, tensors: Tensors) -> None:
        own = self.plan.axes(self.job).state(module, self.job.window)
        torch._foreach_copy_(list(own.values()), [tensors[name] for name in own])

    @cached_property
    def labels(self) -> Tensor:
        """The classes the client holds."""
        return self.plan.task.labels(self.examples)

    def held(self, mask: Mask) -> Tensor | None:
        """The client's classes, bool ``(classes,)``; None where nothing is masked."""
        if mask == "none":
            return None
        held = torch.zeros(self.plan.task.classes, dtype=torch.bool, device=self.examples.y.device)
        return held.index_fill_(0, self.labels, True)

    def batches(self, epochs: int, size: int, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of every step, shuffled and augmented epoch by epoch; ``most`` steps at most."""
        task, data, device, done = self.plan.task, self.examples, self.examples.y.device, 0
        for epoch in range(epochs):
            key = (self.plan.round, self.job.client, epoch)
            order = torch.from_numpy(shuffle(len(data), self.plan.seed, "batches", *key)).to(device)
            draws = random_draws(len(data), self.plan.seed, *key).to(device) if task.random_inputs else None
            for rows in order.split(size)[: most - done]:
                if self.go_on is not None:
                    self.go_on(done)
                yield task.inputs(data.x[rows], None if draws is None else draws[rows]), data.y[rows]
                done += 1

    def upload(self, finite: bool | None = None) -> Upload:
        """The client's answer; what the client keeps lies in memory of its own, since the engine uses its own again."""
        labels, count = self.labels.tolist() if self.plan.tell_labels else None, len(self.examples)
        kept = None if self.kept is None else _apart(self.kept, self.trained)
        return Upload(self.job, self.trained, count, self.loss, self.steps, labels, finite, self.sent, kept)


def _apart(tensors: Tensors, others: Tensors) -> Tensors:
    """The tensors, copies where they lie in memory of the others; what is no tensors by name comes back as it is."""
    if not (isinstance(tensors, Mapping) and isinstance(others, Mapping)):
        return tensors
    taken = {_memory(other) for other in others.values()} - {None}
    return {name: tensor.clone() if _memory(tensor) in taken else tensor for name, tensor in tensors.items()}


def _memory(tensor: Tensor) -> int | None:
    """The address of the memory that a tensor lies in, whole or a part of it; None where there is none."""
    strided = isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_meta
    return tensor.untyped_storage().data_ptr() if strided else None


def random_draws(count: int, seed: int, round: int, client: int, epoch: int) -> Tensor:
    """One random int64 ≥ 0 for every example of a client, for :meth:`~fedrolex.tasks.task.Task.inputs`."""
    drawn = random_words(count, seed, "augment", round, client, epoch)
    return torch.from_numpy((drawn >> np.uint64(1)).astype(np.int64))


def stream_seed(plan: RoundPlan, job: Job) -> int:
    """The seed of what a model draws while a client trains it."""
    return int(random_words(1, plan.seed, "client", plan.round, job.client, *([job.name] if job.name else []))[0] >> 1)


def examples_of(plan: RoundPlan, job: Job, known: Mapping[int, Examples] | None = None) -> Examples:
    """What a client holds; a client without examples raises."""
    found = known[job.client] if known and job.client in known else plan.task.client(job.client)
    if not len(found):
        raise ValueError("has no examples")
    return found


def why_failed(failure: BaseException) -> str:
    """Why a client is dropped, in one line."""
    return str(failure) if isinstance(failure, FedrolexError) else f"{type(failure).__name__}: {one_line(failure)}"
