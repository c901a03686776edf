"""What makes a method: which nodes, what the client does, how updates are averaged."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from fedrolex.client import LocalTraining
from fedrolex.slicing.fold import Normaliser
from fedrolex.slicing.schemes import Scheme

Weighting = Literal["uniform", "samples"]
Norms = Literal["shared", "per_capacity"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A federated method; one file builds each.

    Attributes:
        name: as in recipes.
        scheme: which nodes a client holds in a round.
        client: what it does with them.
        weighting: a client's weight in the average.
        normaliser: what the average divides by.
        width: everyone trains this width instead of what it can hold.
        able_only: only clients that can hold ``width`` take part.
        norms: whether all capacities share scales and shifts of norms, or each keeps its own.
        rows: a class's part of the output layer is averaged over the clients that hold the class only.
    """

    name: str
    scheme: Scheme
    client: LocalTraining
    weighting: Weighting = "uniform"
    normaliser: Normaliser = "per_position"
    width: Fraction | None = None
    able_only: bool = False
    norms: Norms = "shared"
    rows: bool = False
