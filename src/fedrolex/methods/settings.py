"""Settings that several methods share."""

from dataclasses import dataclass
from typing import Literal

from fedrolex.clients import Upload
from fedrolex.methods.method import Method
from fedrolex.rounds import Server
from fedrolex.slicing import Rounding, Scheme, Static

Weighting = Literal["uniform", "samples"]


@dataclass(frozen=True, kw_only=True)
class Weighted(Method):
    """All clients count alike in an average, or by their data.

    Attributes:
        weighting: of a client in the average: ``uniform``, or ``samples``, by its number of examples.
    """

    weighting: Weighting = "uniform"

    def weight(self, upload: Upload) -> float:
        """A client's weight in the average."""
        return float(upload.examples) if self.weighting == "samples" else 1.0


@dataclass(frozen=True, kw_only=True)
class FirstNodes(Method):
    """Clients train the first nodes of every layer.

    Attributes:
        rounding: of β · K: ``floor`` or ``ceil``; at least one node is kept.
    """

    rounding: Rounding = "floor"

    def windows(self, server: Server) -> Scheme:
        """The first nodes."""
        return Static(rounding=self.rounding)
