"""Federated Dropout: random sub-models.

Caldas, Konečný, McMahan, Talwalkar, "Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements", 2018. FedRolex with windows drawn anew every round, aligned along residual streams.
"""

from __future__ import annotations

from dataclasses import replace

from fedrolex.clients.work import LocalTraining
from fedrolex.methods.fedrolex import fedrolex
from fedrolex.methods.method import Method
from fedrolex.slicing.schemes import Random, Scope
from fedrolex.slicing.windows import Rounding


def fed_dropout(
    client: LocalTraining, *, seed: int = 0, scope: Scope = "client", rounding: Rounding = "floor"
) -> Method:
    """Random windows, drawn for each client (or shared by a capacity, or by the round)."""
    return replace(fedrolex(client), name="fed_dropout", scheme=Random(seed=seed, scope=scope, rounding=rounding))
