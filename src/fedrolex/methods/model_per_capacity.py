"""Every capacity has a model of its own: clients of different capacities share no weights."""

from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from fedrolex.clients import MODEL, Upload, copied
from fedrolex.methods.distillation import Group
from fedrolex.methods.families import Families
from fedrolex.methods.settings import Weighted
from fedrolex.rounds import Round, Server, State
from fedrolex.slicing import WHOLE, Window


@dataclass(frozen=True, kw_only=True)
class ModelPerCapacity(Families, Weighted):
    """Clients are averaged with those of their capacity; a subclass then lets the capacities' models learn.

    The model of a capacity is a network of its own, or lies in whole tensors of the server's model, in a section
    ``model@capacity``, of which only the capacity's first nodes are used.
    """

    def sections(self, server: Server, capacity: Fraction) -> tuple[str, ...]:
        """The capacity's model."""
        name = self.network(server, capacity)
        return (f"{MODEL}@{capacity}" if name == MODEL else name,)

    def extent(self, server: Server, section: str) -> Window:
        """The capacity's width."""
        found = {self.sections(server, level)[0]: level for level in self.parts(server)}
        return server.window(0, found[section]) if section in found else WHOLE

    def parts(self, server: Server) -> list[Fraction]:
        """The capacities whose clients train parts of the server's model."""
        return [level for level in self.sizes(server) if self.network(server, level) == MODEL]

    def begin(self, server: Server) -> State:
        """All capacities begin with the server's weights."""
        model = server.state[MODEL]
        return {self.sections(server, level)[0]: copied(model) for level in self.parts(server)}

    def take(self, round: Round, upload: Upload) -> None:
        """Average the answer, and keep it as a teacher."""
        super().take(round, upload)
        round.keep(upload, self.weight(upload))

    def groups(self, round: Round, new: State) -> dict[Fraction, Group]:
        """The clients of every capacity, averaged in ``new``."""
        server, found = round.server, {}
        for level in self.sizes(server):
            (section,) = self.sections(server, level)
            network = self.network(server, level)
            found[level] = Group.of(round, new, section, self._window(round, level), network)
        return found

    def replaced(self, round: Round, new: State, models: dict[Fraction, dict[str, Tensor]]) -> State:
        """The averages ``new`` with the capacities' models put in their place."""
        server, state = round.server, dict(new)
        for level, tensors in models.items():
            (section,) = self.sections(server, level)
            whole = copied({**round.state, **new}[section])
            server.networks[self.network(server, level)].axes.put(whole, tensors, self._window(round, level))
            state[section] = whole
        return state

    def _window(self, round: Round, capacity: Fraction) -> Window:
        main = self.network(round.server, capacity) == MODEL
        return round.server.window(round.number, capacity) if main else WHOLE
