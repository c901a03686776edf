"""Clients of one network and the same widths as one: their tensors stacked, their steps taken together.

Narrow sub-models are too small to keep a processor busy; ten of them at once are not. A step of a stack is one ``vmap``
of the work's objective. Gradients are those of the sum of losses: a client's loss depends on its own parameters alone.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from fedrolex.clients import LocalTraining, Loss, Memory, Network, OwnDropout, RoundPlan, Tensors, Visit
from fedrolex.clients.slot import Precision, in_precision
from fedrolex.tasks import Task


@dataclass
class Stack:
    """Places for clients of the same widths, one client a place, places along dimension 0 of everything.

    Attributes:
        module: a sub-model of these widths, for its code.
        tensors: parameters and buffers, by name.
        held: the classes of each client for the loss's mask, bool ``(places, classes)``; None where nothing is masked.
        precision: of the products of the forward and backward pass.
        dropout: draws from a stream of each client's own; None where dropout draws from PyTorch's generator.
        trained, fixed: names of parameters that are trained, and of all other tensors.
        memory: what the optimiser remembers.
    """

    module: nn.Module
    tensors: dict[str, Tensor]
    held: Tensor | None = None
    precision: Precision = "fp32"
    dropout: OwnDropout | None = None

    def __post_init__(self) -> None:
        trained = {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        self.trained = [name for name in self.tensors if name in trained]
        self.fixed = [name for name in self.tensors if name not in trained]
        self.memory = Memory.of(self.parameters)

    @property
    def parameters(self) -> list[Tensor]:
        """What is trained."""
        return [self.tensors[name] for name in self.trained]

    def first(self, places: int) -> Self:
        """The first places alone; the tensors share memory with these."""
        found, memory = copy(self), self.memory
        found.tensors = {name: tensor[:places] for name, tensor in self.tensors.items()}
        found.memory = Memory(
            found.parameters,
            memory.count,
            [tensor[:places] for tensor in memory.first],
            [tensor[:places] for tensor in memory.second],
            {name: [tensor[:places] for tensor in values] for name, values in memory.constants.items()},
        )
        found.held = None if self.held is None else self.held[:places]
        return found

    @torch.no_grad()
    def load(self, parts: Sequence[Tensors]) -> None:
        """Copy what clients begin with into the first places; what all begin with, into every place."""
        alike = all(part is parts[0] for part in parts)
        for name, tensor in self.tensors.items():
            if alike:
                tensor.copy_(parts[0][name])
            else:
                tensor[: len(parts)] = torch.stack([part[name] for part in parts])

    def begin(self, work: LocalTraining, visits: Sequence[Visit]) -> None:
        """A new round of clients in the first places: the optimiser remembers nothing but the round's constants."""
        rows = [*visits, *[visits[0]] * (len(self.parameters[0]) - len(visits))]
        constants = {
            what: [torch.stack([visit.constants[what][name] for visit in rows]) for name in self.trained]
            for what in visits[0].constants
        }
        work.begin(self.memory, self.parameters, constants)
        self.module.train()

    def step(
        self, work: LocalTraining, loss: Loss, x: Tensor, y: Tensor, rate: float | Tensor, busy: Tensor | None = None
    ) -> Tensor:
        """One batch of every client, ``(places, batch, …)``; returns the losses ``(places,)``, still on the device.

        ``loss`` is the mean over a batch. Clients that are not ``busy``, bool ``(places,)``, do not move; None is all.
        """
        leaves = [parameter.detach().requires_grad_() for parameter in self.parameters]
        losses = self._losses(work, loss, leaves, x, y)
        gradients = list(torch.autograd.grad(losses.sum(), leaves, allow_unused=True, materialize_grads=True))
        losses = losses.detach()
        with torch.no_grad():
            work.pull(self.parameters, gradients, self.memory)
            clip_each(gradients, work.clip)
            if busy is None:
                work.descend(self.parameters, gradients, self.memory, rate)
                return losses
            goes_on = work.momentum > 0 and work.epochs > 1  # a client that stands still now may move again
            velocity = [tensor.clone() for tensor in self.memory.first] if goes_on else []
            rates = [_along(rate * busy, parameter) for parameter in self.parameters]
            work.descend(self.parameters, gradients, self.memory, rates)
            for own, before in zip(self.memory.first, velocity, strict=False):
                own.copy_(torch.where(_along(busy, own), own, before))
            return torch.where(busy, losses, 0.0)

    def sums(self) -> Tensor:
        """The sum of all of a client's values, float64 ``(places,)``: finite if all values are, up to overflow."""
        return torch.stack([tensor.flatten(1).sum(1).double() for tensor in self.tensors.values()]).sum(0)

    def _losses(self, work: LocalTraining, loss: Loss, leaves: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        """The loss of every client, given the trained parameters."""
        names, others = [*self.trained, *self.fixed], [self.tensors[name] for name in self.fixed]
        dropout, places = self.dropout, None
        if dropout is not None:
            dropout.places, places = len(x), torch.arange(len(x))

        def objective(
            values: list[Tensor], others: list[Tensor], x: Tensor, y: Tensor, held: Tensor | None, place: Tensor | None
        ) -> Tensor:
            if dropout is not None:
                dropout.place = place
            known = dict(zip(names, (*values, *others), strict=True))
            scores = in_precision(lambda x: functional_call(self.module, known, (x,)), x, self.precision)
            return work.objective(scores, y, loss, held)

        dims = (0, 0, 0, 0, None if self.held is None else 0, None if places is None else 0)
        return vmap(objective, dims, randomness="different")(leaves, others, x, y, self.held, places)


def clip_each(gradients: Sequence[Tensor], most: float | None) -> None:
    """Shorten every client's gradient, places first, to a norm of ``most``, in place."""
    if most is None:
        return
    norms = torch.stack([torch.linalg.vector_norm(g, dim=list(range(1, g.dim()))) for g in gradients])
    scale = torch.clamp(most / (torch.linalg.vector_norm(norms, dim=0) + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(_along(scale, gradient))


def _along(values: Tensor, tensor: Tensor) -> Tensor:
    """One value a place, in a shape that broadcasts against a tensor of all places."""
    return values.view(-1, *[1] * (tensor.dim() - 1))


def ignored_by(task: Task) -> int | None:
    """A target that a task's loss leaves out, and does not count; None where there is none."""
    return -100 if task.ignored is None and task.loss is nn.functional.cross_entropy else task.ignored


def filling(plan: RoundPlan, network: str) -> int | None:
    """The target of examples that may fill up a network's batches; None where examples would be noticed.

    Batch norms notice them, and so may an objective of one's own.
    """
    if "objective" in plan.work.changed or mixes_examples(plan.networks[network]):
        return None
    return ignored_by(plan.task)


def mixes_examples(network: Network) -> bool:
    """Whether a network has batch norms, so that scores of an example depend on its batch."""
    if any(isinstance(module, _BatchNorm) for module in network.module.modules()):
        return True
    programs = getattr(network.axes.build, "programs", {})
    graphs = [program.captured.graph for program in programs.values()]
    return any("batch_norm" in str(node.target) for graph in graphs for node in graph.nodes)
