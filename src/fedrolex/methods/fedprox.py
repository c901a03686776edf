"""FedProx: clients are held back from drifting, and partial work counts.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020. A client
minimises its loss + μ/2 · ‖w − θ‖², θ being the model it received; whoever manages only a part of its steps
sends what it has.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import isfinite

from fedrolex.clients.work import LocalTraining
from fedrolex.core.errors import FedrolexError
from fedrolex.methods.fedavg import fedavg
from fedrolex.methods.method import Method
from fedrolex.slicing.windows import Rounding


def fedprox(
    client: LocalTraining,
    *,
    mu: float = 0.01,
    width: Fraction | str = "1",
    able_only: bool = False,
    rounding: Rounding = "floor",
) -> Method:
    """FedAvg with a proximal term of strength μ that keeps stragglers; with 0 and none of those it is FedAvg."""
    if not (mu >= 0 and isfinite(mu)):
        raise FedrolexError(f"method.mu is {mu}: give 0 or more")
    held_back = replace(client, proximal=mu)
    average = fedavg(held_back, width=width, able_only=able_only, rounding=rounding)
    return replace(average, name="fedprox", keeps_stragglers=True)
