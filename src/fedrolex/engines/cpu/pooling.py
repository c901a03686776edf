"""Max pooling on a CPU, trained channels last."""

import torch
from torch import Tensor

from fedrolex.clients.slot import Slot

CHANNELS_LAST = torch.channels_last


class PooledSlot(Slot):
    """A slot whose gradients of max-pooled values are laid out as the values are.

    A flattened value has a gradient with channels first. Pooling, and the ReLU before it, go back through channels last
    several times faster; the numbers are the same.
    """

    def scores(self, x: Tensor) -> Tensor:
        """The sub-model's scores, their way back prepared."""
        found = super().scores(x)
        seen, todo = set(), [found.grad_fn]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node.name().startswith("MaxPool2D") and node._saved_self.is_contiguous(memory_format=CHANNELS_LAST):  # type: ignore[attr-defined]
                node.register_prehook(_channels_last)
            todo += [before for before, _ in node.next_functions]
        return found


def _channels_last(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(gradient.contiguous(memory_format=CHANNELS_LAST) for gradient in gradients)
