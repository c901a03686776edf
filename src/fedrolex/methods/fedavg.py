"""FedAvg: everybody trains the same model.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017. At one width, it is also what a fleet can do without partial training: all
train the smallest model, or only those that can hold a larger one train that.
"""

from __future__ import annotations

from fractions import Fraction

from fedrolex.clients.work import LocalTraining
from fedrolex.methods.method import Method, Weighting
from fedrolex.slicing.schemes import Static
from fedrolex.slicing.windows import Rounding, exact


def fedavg(
    client: LocalTraining,
    *,
    width: Fraction | str = "1",
    able_only: bool = False,
    weighting: Weighting = "uniform",
    rounding: Rounding = "floor",
) -> Method:
    """One model of ``width`` for everyone, or for everyone who can hold it."""
    return Method(
        name="fedavg",
        scheme=Static(rounding=rounding),
        client=client,
        weighting=weighting,
        width=exact(width),
        able_only=able_only,
    )
