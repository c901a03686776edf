"""The way back through a model in a worker, as a CPU does it soonest: large layers step inside it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node

from fedrolex.clients.slot import Slot
from fedrolex.clients.work import LocalTraining

CHANNELS_LAST = torch.channels_last
LARGE = 2**18  # values of a weight that is slow to read from memory
STEPS = frozenset({"train", "step", "pull", "correct", "start", "begin", "move", "descend"})


@dataclass
class CpuSlot(Slot):
    """A slot with two short cuts on the way back.

    Gradients of max-pooled values are laid out as the values are. A flattened value has a gradient with channels first;
    pooling, and the ReLU before it, go back through channels last several times faster. The numbers are the same.

    Weights of a large linear layer take their step of plain SGD as soon as their layer has been passed: ``w -= rate ·
    gradᵀ · input`` is one product, where the gradient would be written to memory and read again. They are not among
    :attr:`parameters` after :meth:`scores`. The numbers are the same up to rounding.

    Attributes:
        rate: the learning rate where the step is plain SGD; None where it is any other.
    """

    rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._all = self.parameters

    def scores(self, x: Tensor) -> Tensor:
        """The sub-model's scores, their way back prepared."""
        found = super().scores(x)
        uses = _uses(found.grad_fn)
        stepped = set()
        for node in uses:
            if node.name().startswith("MaxPool2D") and node._saved_self.is_contiguous(memory_format=CHANNELS_LAST):  # type: ignore[attr-defined]
                node.register_prehook(_channels_last)
            weight = _own_weight(node, uses)
            if weight is not None and self.rate is not None:
                node.register_hook(_step(weight, node._saved_mat1, self.rate))  # type: ignore[attr-defined]
                stepped.add(id(weight))
        self.parameters = [parameter for parameter in self._all if id(parameter) not in stepped]
        return found


def plain_rate(work: LocalTraining, round: int) -> float | None:
    """The learning rate of a round whose steps are plain SGD; None where they are anything else."""
    plain = work.optimizer == "sgd" and not work.momentum and not work.weight_decay and work.clip is None
    return work.rate(round) if plain and work.changed.isdisjoint(STEPS) else None


def _uses(last: Node | None) -> Counter[Node]:
    """All nodes on the way back, and how many others lead to each."""
    uses: Counter[Node] = Counter()
    todo = [last]
    while todo:
        node = todo.pop()
        if node is not None:
            uses[node] += 1
            if uses[node] == 1:
                todo += [before for before, _ in node.next_functions]
    return uses


def _own_weight(node: Node, uses: Counter[Node]) -> Tensor | None:
    """The large weight of a linear layer, where nothing else in the model uses or watches it.

    None where the layer's bias is not trained: no gradient of the weight is asked for, so nothing may lead the way back
    to the layer then, and the weight would never move.
    """
    if node.name() != "AddmmBackward0" or node._saved_alpha != 1:  # type: ignore[attr-defined]
        return None
    bias, turned = node.next_functions[0][0], node.next_functions[2][0]
    if bias is None:
        return None
    if turned is None or turned.name() != "TBackward0" or uses[turned] != 1:
        return None
    leaf = turned.next_functions[0][0]
    weight: Tensor | None = getattr(leaf, "variable", None)
    if weight is None or leaf is None or uses[leaf] != 1 or weight.numel() < LARGE or weight._backward_hooks:
        return None
    return weight


def _step(weight: Tensor, x: Tensor, rate: float) -> Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], None]:
    def step(_: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
        with torch.no_grad():
            weight.addmm_(gradients[0].t(), x, alpha=-rate)

    return step


def _channels_last(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(gradient.contiguous(memory_format=CHANNELS_LAST) for gradient in gradients)
