"""HeteroFL: nested static sub-models.

Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients", ICLR 2021. FedRolex with a window that stands still: always the first ⌊βK⌋ nodes.
"""

from __future__ import annotations

from dataclasses import replace

from fedrolex.clients.work import LocalTraining
from fedrolex.methods.fedrolex import fedrolex
from fedrolex.methods.method import Method
from fedrolex.slicing.schemes import Static
from fedrolex.slicing.windows import Rounding


def heterofl(client: LocalTraining, *, rounding: Rounding = "floor") -> Method:
    """Static windows, averaged over the clients that hold a position."""
    return replace(fedrolex(client), name="heterofl", scheme=Static(rounding=rounding))
