"""FedRolex: rolling sub-models.

Alam, Liu, Yan, Zhang, "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction",
NeurIPS 2022. In round j a client of capacity β trains the ⌊βK⌋ nodes of every layer from j mod K on; the
server averages each position over the clients that held it and keeps the rest.
"""

from __future__ import annotations

from fedrolex.clients.work import LocalTraining
from fedrolex.methods.method import Method
from fedrolex.slicing.schemes import Offset, Rolling
from fedrolex.slicing.windows import Rounding


def fedrolex(
    client: LocalTraining, *, overlap: str | float = 1, offset: Offset | None = None, rounding: Rounding = "floor"
) -> Method:
    """The paper's method; ``overlap`` and ``offset`` are its (and our) variants of the roll."""
    return Method(name="fedrolex", scheme=Rolling(overlap=overlap, offset=offset, rounding=rounding), client=client)
