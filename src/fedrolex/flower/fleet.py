"""The fleet of a run on real devices: who is there is asked of Flower, what each can hold of the device itself."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedrolex.core import FedrolexError
from fedrolex.flower.exchange import exchanged
from fedrolex.flower.messages import Profile, failure_of, one_clear_line
from fedrolex.rounds import Fleet, Member


@dataclass(frozen=True, kw_only=True)
class OneRoundFleet(Fleet):
    """A fleet of which only one round's cohort is known: a device's view, told by the server."""

    told: Sequence[Member] = ()

    def members(self, round: int, able: Fraction | None = None) -> list[Member]:
        """Those the server named."""
        return list(self.told)

    def sampled(self, round: int, chance: float, key: int) -> list[Member]:
        """Those the server named."""
        return list(self.told)


@dataclass(frozen=True, kw_only=True)
class Present(Fleet):
    """The devices that are there.

    Attributes:
        nodes: Flower's id and the capacity of every client that is there.
        look: brings ``nodes`` up to date; called before a round's cohort is drawn.
        looked: the rounds for which it was called.
    """

    nodes: dict[int, tuple[int, Fraction]] = field(default_factory=dict, compare=False)
    look: Callable[[], None] = field(default=lambda: None, compare=False)
    looked: set[int] = field(default_factory=set, compare=False)

    def capacity(self, client: int, round: int = 0) -> Fraction:
        """What a client said it can hold; the least there is, for one that is not there."""
        return self.nodes[client][1] if client in self.nodes else min(self.levels)

    def _called(self, round: int) -> Iterator[int]:
        if round > max(self.looked, default=-1):  # whoever is there when a round's cohort is first asked for
            self.looked.add(round)
            self.look()
        return (client for client in super()._called(round) if client in self.nodes)


class Roster:
    """Finds out who is there.

    Args:
        grid: Flower's way to the nodes.
        fleet: the recipe's.
        recipe: a hash of it; nodes with another one are not taken.
        timeout: seconds that a new node may take to say what it can hold.
        patience: seconds to wait, before the first round, until as many nodes are there as the recipe has clients.
        enough: how many must be there to begin.
        say: tells the user something.
    """

    def __init__(
        self, grid: Grid, fleet: Fleet, recipe: str, *, timeout: float, patience: float, enough: int,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.grid, self.recipe, self.timeout, self.patience, self.enough = grid, recipe, timeout, patience, enough
        self.say, self.refused = say, dict[int, str]()
        own = {each.name: getattr(fleet, each.name) for each in fields(fleet)}
        self.present = Present(**own, look=self.look)
        self._known: dict[int, int] = {}  # client by node
        self._claims: dict[int, int] = {}  # the same, of nodes that were refused, too
        self._begun = False

    def look(self) -> None:
        """Ask nodes that are new; forget nodes that are gone."""
        ends = time.monotonic() + self.patience
        self._look()
        while not self._begun and len(self.present.nodes) < self.present.clients and time.monotonic() < ends:
            time.sleep(min(1.0, self.patience))
            self._look()
        if not self._begun and len(self.present.nodes) < self.enough:
            there = f"{len(self.present.nodes)} of at least {self.enough} devices are there"
            why = f" ({next(iter(self.refused.values()))})" if self.refused else ""
            raise FedrolexError(f"{there} after {self.patience:g} s{why}: start more SuperNodes")
        self._begun = True

    def _look(self) -> None:
        there = set(self.grid.get_node_ids())
        for node in set(self._known) - there:
            client = self._known.pop(node)
            self.say(f"device {client} has gone")
            del self.present.nodes[client]
            for twin in [other for other, claimed in self._claims.items() if claimed == client]:
                self.refused.pop(twin, None)
        self.refused = {node: why for node, why in self.refused.items() if node in there}
        new = sorted(there - set(self._known) - set(self.refused))
        asked = {node: Message(RecordDict(), node, "query.profile") for node in new}
        replies = exchanged(self.grid, asked, self.timeout)
        for node in new:
            reply = replies.get(node)
            try:
                if reply is None:
                    raise FedrolexError(f"did not say within {self.timeout:g} s what it can hold")
                if reply.has_error():
                    raise failure_of(reply)
                self._take(node, Profile.read(reply.content))
            except Exception as error:  # whatever a node sends, the run goes on
                self.refused[node] = one_clear_line(str(error))
                self.say(f"node {node} is not taken: {self.refused[node]}")

    def _take(self, node: int, said: Profile) -> None:
        levels, fleet = self.present.levels, self.present
        if said.recipe != self.recipe:
            raise FedrolexError("it has another recipe: give all the same app and run-config")
        if not 0 <= said.client < fleet.clients:
            raise FedrolexError(f"it says it is client {said.client}: there are 0 to {fleet.clients - 1}")
        self._claims[node] = said.client
        if said.client in fleet.nodes:
            raise FedrolexError(
                f"there is a client {said.client} already: give every node its own --node-config client"
            )
        fitting = [level for level in levels if level <= said.capacity]
        if not fitting:
            raise FedrolexError(f"it holds {said.capacity}, less than every capacity of the recipe")
        fleet.nodes[said.client] = node, max(fitting)
        self._known[node] = said.client
