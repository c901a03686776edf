"""A sub-model with its optimiser's memory, used again for every client of the same widths."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedrolex.clients.optimizer import Memory

Precision = Literal["fp32", "tf32", "bf16"]


def products_in(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Inside, products are taken in ``precision``; TF32 is a switch of the whole process, which is set elsewhere.

    Weights are cast anew wherever they are used: inside another autocast PyTorch would keep what it cast them to, and
    so go on with the weights of the first step.
    """
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def in_precision(forward: Callable[[Tensor], Tensor], x: Tensor, precision: Precision) -> Tensor:
    """Scores of a model whose products are taken in ``precision``; the scores are float32 at least."""
    if precision != "bf16":
        return forward(x)
    with products_in(precision, x.device):
        low = forward(x)
    return low.float()


@dataclass
class Slot:
    """A sub-model and its optimiser's memory.

    Attributes:
        module: the sub-model.
        precision: of the module's products; its parameters keep theirs.
        names, parameters: of what is trained.
        memory: what the optimiser remembers from step to step.
        scratch: what a client's work keeps with the slot.
    """

    module: nn.Module
    precision: Precision = "fp32"
    names: list[str] = field(init=False)
    parameters: list[Tensor] = field(init=False)
    memory: Memory = field(init=False)
    scratch: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.names, self.parameters = list(trained), list(trained.values())
        self.memory = Memory.of(self.parameters)

    def scores(self, x: Tensor) -> Tensor:
        """The sub-model's scores, ``(batch, classes)`` or whatever the task's loss takes."""
        return in_precision(self.module, x, self.precision)
