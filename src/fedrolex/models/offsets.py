"""Class offsets: a number added to every class's score, so that classes which no client has compared can be compared.

A client with two classes learns to tell these two apart; nobody learns how their scores compare with those of a class
that it does not hold. What is missing is mostly one number a class, and it is found after training, from a few labelled
examples of all classes.
"""

import torch
from torch import Tensor, nn

OFFSETS = "class_offsets"  # the tensor's name
STEPS = 100
SMALL = 1e-3  # weight of the squares that keep what the examples do not decide near where it was


class WithOffsets(nn.Module):
    """A model of classes whose scores have offsets added, float ``(classes,)``."""

    class_offsets: Tensor

    def __init__(self, model: nn.Module, offsets: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer(OFFSETS, offsets)
        self.train(model.training)

    def forward(self, x: Tensor) -> Tensor:
        """Scores ``(batch, classes)``."""
        scores: Tensor = self.model(x)
        return scores + self.class_offsets


def class_offsets(scores: Tensor, targets: Tensor) -> Tensor:
    """The offsets with which scores explain their targets best, by cross-entropy.

    They have the mean 0; a class of which there is no example has 0.

    Args:
        scores: ``(n, classes)``, finite.
        targets: ``(n,)``, int64.
    """
    known = targets.unique()
    x, y = scores[:, known].detach().double().cpu(), torch.searchsorted(known, targets).cpu()
    offsets = torch.zeros(len(known), dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([offsets], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        found = nn.functional.cross_entropy(x + offsets, y) + SMALL * offsets.square().mean()
        found.backward()
        return found

    with torch.enable_grad():
        search.step(loss)
    found = (offsets - offsets.mean()).detach().to(scores.device, torch.promote_types(scores.dtype, torch.float32))
    return found.new_zeros(scores.shape[1]).index_copy(0, known, found)
