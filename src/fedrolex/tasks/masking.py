"""Scores of classes that a client does not hold."""

from typing import Literal

import torch
from torch import Tensor

Mask = Literal["none", "zero", "neg_inf"]


def masked(scores: Tensor, held: Tensor, mask: Mask) -> Tensor:
    """Scores ``(…, classes)`` with those of classes outside ``held``, bool ``(classes,)``, taken out.

    ``zero`` puts 0 in their place, as HeteroFL and FedRolex do (an absent class still has weight e⁰ in the softmax, and
    wins where all present ones are negative); ``neg_inf`` removes them.
    """
    if mask == "none":
        return scores
    return torch.where(held, scores, 0.0 if mask == "zero" else -torch.inf)
