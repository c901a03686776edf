"""Networks of different families side by side: clients of some capacities train no part of the server's model."""

from dataclasses import dataclass
from fractions import Fraction

from fedrolex.clients import MODEL, Network
from fedrolex.core import FedrolexError
from fedrolex.methods.settings import FirstNodes
from fedrolex.methods.setup import Setup
from fedrolex.rounds import Server
from fedrolex.slicing import exact
from fedrolex.tasks import Classification


@dataclass(frozen=True, kw_only=True)
class Families(FirstNodes):
    """Clients train the first nodes of the server's model or, where ``task.models`` has one, a network of their own.

    A network of a capacity has the capacity's name, and so has the section of its tensors.
    """

    def check(self, setup: Setup) -> None:
        """Every network of its own must be somebody's."""
        super().check(setup)
        for capacity in setup.task.models if isinstance(setup.task, Classification) else ():
            if exact(capacity) / setup.scale not in setup.fleet.levels:
                raise FedrolexError(f"task.models has a model for capacity {capacity}, which nobody in the fleet has")

    def networks(self, setup: Setup) -> dict[str, Network]:
        """The server's model, and the networks of capacities that have their own."""
        found = super().networks(setup)
        for capacity, build in setup.task.models.items() if isinstance(setup.task, Classification) else ():
            level = str(exact(capacity) / setup.scale)
            found[level] = setup.network(build, "weights", level, whole=True)
        return found

    def network(self, server: Server, capacity: Fraction) -> str:
        """The capacity's own network, or the server's model."""
        return str(capacity) if str(capacity) in server.networks else MODEL
