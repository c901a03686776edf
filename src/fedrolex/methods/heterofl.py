"""HeteroFL: nested static sub-models.

Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients", ICLR 2021. FedRolex with a window that stands still: always the first ⌊βK⌋ nodes.
"""

from dataclasses import dataclass

from fedrolex.core import one_of
from fedrolex.methods.averaging import Averaging
from fedrolex.rounds import Server
from fedrolex.slicing import Rounding, Scheme, Static


@dataclass(frozen=True, kw_only=True)
class HeteroFL(Averaging):
    """Windows that stand still.

    Attributes:
        rounding: of β · K: ``floor`` or ``ceil``; at least one node is kept.
    """

    rounding: Rounding = "floor"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("method.rounding", self.rounding, ("floor", "ceil"))

    def windows(self, server: Server) -> Scheme:
        """The first nodes."""
        return Static(rounding=self.rounding)
