"""Settings of methods whose server takes averages of weights, position by position."""

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from fedrolex.clients import MODEL, copied
from fedrolex.core import FedrolexError
from fedrolex.methods.server_optimizer import ServerOptimizer
from fedrolex.methods.settings import Weighted
from fedrolex.models import norm_parameters
from fedrolex.rounds import Round, Server, State

Norms = Literal["shared", "per_capacity"]


@dataclass(frozen=True, kw_only=True)
class Averaging(Weighted):
    """Every position is averaged over the clients that hold it.

    Attributes:
        norms: ``shared``, or ``per_capacity``: every capacity keeps scales and shifts of its own; the server's model
            has those of the largest.
        rows: average a class's part of the output layer over the clients that hold the class only. They must say
            which they hold, and where some lack classes, ``client.mask`` must not be ``none``.
        server_optimizer: takes the average change as a gradient; see
            :class:`~fedrolex.methods.server_optimizer.ServerOptimizer`.
    """

    norms: Norms = "shared"
    rows: bool = False
    server_optimizer: ServerOptimizer = field(default_factory=ServerOptimizer)

    def begin(self, server: Server) -> State:
        """Norms of every capacity, and what the server's optimiser remembers."""
        model, own = server.state[MODEL], {}
        if self.norms == "per_capacity":
            names = norm_parameters(server.main.module)
            if not names:
                raise FedrolexError("method.norms is per_capacity, but this model has no norms with scales and shifts")
            own = {_own(level): {name: model[name].clone() for name in names} for level in self.sizes(server)}
        return {**own, **self.server_optimizer.begin({name: model[name] for name in server.trainable()})}

    def sections(self, server: Server, capacity: Fraction) -> tuple[str, ...]:
        """The model and, where norms are kept apart, those of the capacity."""
        return (MODEL,) if self.norms == "shared" else (MODEL, _own(capacity))

    def label_axis(self, server: Server) -> str | None:
        """The axis of the classes, where ``rows`` asks for it."""
        return find_label_axis(server, "method.rows") if self.rows else None

    def finish(self, round: Round) -> State:
        """The average, moved on by the server's optimiser."""
        new = round.average.result()
        if self.norms == "per_capacity":
            largest = {**round.state, **new}[_own(max(self.sizes(round.server)))]
            new[MODEL] |= copied(largest)
        return self.server_optimizer.moved(round.state, new, round.server.trainable())


def find_label_axis(server: Server, what: str) -> str:
    """The axis of the classes; ``what`` asks for it."""
    size = server.task.classes
    found = [a.name for a in server.main.axes.axes.values() if a.kind in ("outputs", "rows") and a.size == size]
    if len(found) != 1:
        raise FedrolexError(f"{what} needs one axis for the {size} classes; the model has {len(found)}")
    return found[0]


def _own(capacity: Fraction) -> str:
    return f"norms@{capacity}"
