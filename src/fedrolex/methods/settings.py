"""Settings that several methods share."""

from dataclasses import dataclass
from typing import Literal

from fedrolex.clients import Upload
from fedrolex.methods.method import Method
from fedrolex.rounds import Server
from fedrolex.slicing import Rounding, Scheme, Static

Weighting = Literal["uniform", "samples", "size", "updates", "hybrid"]


@dataclass(frozen=True, kw_only=True)
class Weighted(Method):
    """All clients count alike in an average, or by their data, size or work.

    Attributes:
        weighting: of a client in the average: ``uniform``; ``samples``, by its number of examples; the schemes of the
            paper's appendix, ``size``, by the number of filters it holds, which its capacity says, ``updates``, by its
            number of steps, and ``hybrid``, by both.
    """

    weighting: Weighting = "uniform"

    def weight(self, upload: Upload) -> float:
        """A client's weight in the average."""
        size, updates = float(upload.job.capacity), float(upload.steps)
        by = {"uniform": 1.0, "samples": float(upload.examples), "size": size, "updates": updates}
        return by.get(self.weighting, size * updates)


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
