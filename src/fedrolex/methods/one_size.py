"""Settings of methods in which everyone trains a model of the same width."""

from dataclasses import dataclass, replace
from fractions import Fraction

from torch import nn

from fedrolex.clients import MODEL, LocalTraining, Network
from fedrolex.core import FedrolexError
from fedrolex.methods.own_width import begin_at_own_width
from fedrolex.methods.settings import FirstNodes
from fedrolex.methods.setup import Setup
from fedrolex.rounds import Fleet, Member, Server
from fedrolex.slicing import Static, Window, exact


@dataclass(frozen=True, kw_only=True)
class OneSize(FirstNodes):
    """Everyone trains the first nodes of every layer, as many as ``width`` says.

    Attributes:
        width: what everyone trains, as a part of the task's model; null is the smallest capacity of the fleet.
        able_only: only clients that can hold ``width`` take part.
        own_width: begin with weights as if drawn at ``width``, as whoever trains a model of that size would; otherwise
            with a part of the whole model's weights, which are too small for it.
    """

    width: str | None = None
    able_only: bool = False
    own_width: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width is not None:
            exact(self.width)

    def capacity(self, fleet: Fleet, scale: int) -> Fraction:
        """The width as a part of the server's model."""
        return min(fleet.levels) if self.width is None else exact(self.width) / scale

    def check_fleet(self, fleet: Fleet, client: LocalTraining, scale: int) -> None:
        """Somebody must be able to hold the width, where only those who can take part."""
        super().check_fleet(fleet, client, scale)
        if self.able_only and max(fleet.levels) < self.capacity(fleet, scale):
            largest = max(fleet.levels) * scale
            raise FedrolexError(f"nobody in the fleet can hold width {self.width}: the largest is {largest}")

    def networks(self, setup: Setup) -> dict[str, Network]:
        """The server's model; at full width it need not be one that can be cut."""
        width = self.capacity(setup.fleet, setup.scale)
        network = setup.network(lambda: setup.task.build(setup.scale), "weights", whole=width == 1)
        if self.own_width:
            scheme = Static(rounding=self.rounding)
            begin_at_own_width(network, scheme.window(network.axes, round=0, capacity=width, client=0))
        return {MODEL: network}

    def sizes(self, server: Server) -> list[Fraction]:
        """One."""
        return [self.capacity(server.fleet, server.scale)]

    def members(self, server: Server, round: int) -> list[Member]:
        """The cohort, or the first who can; all train the same width."""
        (width,) = self.sizes(server)
        found = server.fleet.members(round, width if self.able_only else None)
        return [replace(member, capacity=width) for member in found]

    def extent(self, server: Server, section: str) -> Window:
        """The width that everyone trains: nobody has the rest."""
        (width,) = self.sizes(server)
        return server.window(0, width)

    def judged(self, server: Server) -> nn.Module:
        """The width that everyone trains."""
        (width,) = self.sizes(server)
        module = server.loaded(*self.sections(server, width))
        return server.main.axes.cut(module, server.window(max(0, server.round - 1), width))

    def submodel(self, server: Server, capacity: Fraction) -> nn.Module | None:
        """There are none beside the model itself."""
        return None
