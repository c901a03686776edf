"""HeteroFL: nested static sub-models.

Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients", ICLR 2021. FedRolex with a window that stands still: always the first ⌊βK⌋ nodes.
"""

from dataclasses import dataclass

from fedrolex.methods.averaging import Averaging
from fedrolex.methods.settings import FirstNodes


@dataclass(frozen=True, kw_only=True)
class HeteroFL(FirstNodes, Averaging):
    """Windows that stand still."""
