"""Federated Dropout: random sub-models.

Caldas, Konečný, McMahan, Talwalkar, "Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements", 2018. FedRolex with windows drawn anew every round, aligned along residual streams.
"""

from dataclasses import dataclass

from fedrolex.methods.averaging import Averaging
from fedrolex.methods.needs import Needs
from fedrolex.rounds import Server
from fedrolex.slicing import Random, Rounding, Scheme, Scope


@dataclass(frozen=True, kw_only=True)
class FedDropout(Averaging):
    """Windows that are drawn.

    Attributes:
        scope: who shares a draw: every ``client`` has its own, or those of a ``capacity``, or of a ``round``.
        rounding: of β · K: ``floor`` or ``ceil``; at least one node is kept.
    """

    scope: Scope = "client"
    rounding: Rounding = "floor"
    needs = Needs(larger_server=True)

    def windows(self, server: Server) -> Scheme:
        """Random nodes."""
        return Random(seed=server.seed, scope=self.scope, rounding=self.rounding)
