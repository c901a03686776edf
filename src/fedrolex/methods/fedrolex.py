"""FedRolex: rolling sub-models.

Alam, Liu, Yan, Zhang, "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction",
NeurIPS 2022. In round j a client of capacity β trains the ⌊βK⌋ nodes of every layer from j mod K on; the
server averages each position over the clients that held it and keeps the rest.

The windows are here; averaging position by position is :class:`~fedrolex.methods.averaging.Averaging`'s, by
:class:`~fedrolex.slicing.Fold`.
"""

from dataclasses import dataclass

from fedrolex.methods.averaging import Averaging
from fedrolex.methods.needs import Needs
from fedrolex.rounds import Server
from fedrolex.slicing import Rolling, Rounding, Scheme, spread


@dataclass(frozen=True, kw_only=True)
class FedRolex(Averaging):
    """Windows that roll.

    Attributes:
        overlap: of consecutive windows, from 0 (none) to 1 (the window moves by one node a round).
        spread: give every axis and client an offset of its own, so that all weights are trained.
        rounding: of β · K: ``floor`` or ``ceil``; at least one node is kept.
    """

    overlap: str = "1"
    spread: bool = False
    rounding: Rounding = "floor"
    needs = Needs(larger_server=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        Rolling(overlap=self.overlap)

    def windows(self, server: Server) -> Scheme:
        """The roll of Equation (4), with the appendix's overlap and our spread."""
        offset = spread(server.fleet.cohort) if self.spread else None
        return Rolling(overlap=self.overlap, offset=offset, rounding=self.rounding)
