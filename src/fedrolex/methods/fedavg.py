"""FedAvg: everybody trains the same model.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017. At one width, it is also what a fleet can do without partial training: all
train the smallest model, or only those that can hold a larger one train that.
"""

from dataclasses import dataclass

from fedrolex.methods.averaging import Averaging
from fedrolex.methods.needs import Needs
from fedrolex.methods.one_size import OneSize


@dataclass(frozen=True, kw_only=True)
class FedAvg(OneSize, Averaging):
    """One model of ``width`` for everyone, or for everyone who can hold it; its weights are averaged."""

    needs = Needs(one_size=True)
