"""What servers have at hand that learn from clients' answers to public examples."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedrolex.clients import MODEL, Precision, Tensors, products_in
from fedrolex.core import FedrolexError, random_words, sample, shuffle
from fedrolex.models import collect, evaluating, static_norms, with_statistics
from fedrolex.rounds import Round, Server, State
from fedrolex.slicing import Window

AT_ONCE = 500


def pieces(rows: Tensor, size: int) -> list[Tensor]:
    """Rows in pieces of a size; a lonely last one joins the piece before it: batch norms cannot be trained on one."""
    found = list(rows.split(size))
    return [*found[:-2], torch.cat(found[-2:])] if len(found) > 1 and len(found[-1]) == 1 else found


@dataclass(frozen=True)
class Public:
    """Public examples in one round.

    Attributes:
        inputs: as models take them, ``(n, …)``.
        seed, round: of the run; with them, the order of batches is drawn.
        precision: of the products of what is taught with them, and of teachers.
    """

    inputs: Tensor
    seed: int = 0
    round: int = 0
    precision: Precision = "fp32"

    def batches(self, size: int, steps: int, purpose: str) -> Iterator[Tensor]:
        """Rows of ``steps`` random batches, epoch after epoch, int64."""
        count, epoch = len(self.inputs), 0
        while steps > 0:
            order = torch.from_numpy(shuffle(count, self.seed, purpose, self.round, epoch)).to(self.inputs.device)
            for rows in pieces(order, size)[:steps]:
                yield rows
                steps -= 1
            epoch += 1


@dataclass(frozen=True)
class Group:
    """The clients that train models of one size.

    Attributes:
        module: a model of that size, to load tensors into; its own tensors are of no meaning.
        received: the tensors that the clients received.
        average: of the clients' answers; ``received`` where nobody answered.
        uploads: the clients' answers.
        weights: of the clients in the average.
    """

    module: nn.Module
    received: Tensors
    average: Tensors
    uploads: Sequence[Tensors] = ()
    weights: Sequence[float] = ()

    @classmethod
    def of(cls, round: Round, new: State, section: str, window: Window, network: str = MODEL) -> Self:
        """The clients that trained a window of a section of the server's state, now averaged in ``new``."""
        found = round.server.networks[network]
        with torch.random.fork_rng(devices=[]):
            module = found.axes.cut(found.module, window)
        received = found.axes.take(round.state[section], window)
        mine = [(upload.tensors, weight) for upload, weight in round.uploads if upload.job.sections[0] == section]
        average = found.axes.take(new[section], window) if section in new else received
        return cls(module, received, average, [tensors for tensors, _ in mine], [weight for _, weight in mine])

    def load(self, tensors: Tensors) -> nn.Module:
        """The module with these tensors."""
        with torch.no_grad():
            for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
                if name in tensors:
                    tensor.copy_(tensors[name])
        return self.module

    def tensors(self) -> dict[str, Tensor]:
        """A copy of the module's tensors, of the names that travel."""
        held = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {name: held[name].detach().clone() for name in self.average}

    def scores(self, tensors: Tensors, public: Public) -> Tensor:
        """Scores of public examples of a model of this size with these tensors, ``(n, classes)``."""
        return scores(self.load(tensors), public.inputs, precision=public.precision)


def check_examples_a_round(examples: int | None) -> None:
    """Raise, in one line, unless a setting ``examples`` is null or a whole number that norms can be trained on."""
    if examples is not None and (type(examples) is not int or examples < 2):
        raise FedrolexError(f"method.examples is {examples!r}: give a whole number of at least 2, or null for all")


def public_rows(server: Server, round: int, examples: int | None) -> Tensor:
    """Which public examples a round is about, int64, ascending: so many, drawn anew, or all that there are."""
    public = server.classification.public
    count = 0 if public is None else len(public)
    found = sample(count, count if examples is None else min(examples, count), server.seed, "public", round)
    return torch.from_numpy(found).to(server.device)


@contextmanager
def teaching(round: Round, examples: int | None = None) -> Iterator[Public]:
    """The round's public examples, so many or all; inside, models draw from the server's stream of the round."""
    server, task = round.server, round.server.classification
    assert task.public is not None
    rows = public_rows(server, round.number, examples)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(random_words(1, server.seed, "server", round.number)[0] >> 1))
        yield Public(task.inputs(task.public.x[rows]), server.seed, round.number, round.plan.precision)


def scores(
    module: nn.Module, inputs: Tensor, statistics_of: Tensor | None = None, precision: Precision = "fp32"
) -> Tensor:
    """Scores of a model in evaluation mode, ``(n, classes)``, whose products are taken in ``precision``.

    Static batch norms take their statistics from the inputs, or from the inputs ``statistics_of``; those of a traced
    graph from every batch, as in version 0.1.0: what teachers say decides what is trained, which stays the same.
    """
    with products_in(precision, inputs.device):
        if any(isinstance(norm, _BatchNorm) for norm in static_norms(module).values()):
            source = inputs if statistics_of is None else statistics_of
            module = with_statistics(module, collect(module, pieces(source, AT_ONCE)))
        with evaluating(module):
            return torch.cat([module(part).float() for part in pieces(inputs, AT_ONCE)])
