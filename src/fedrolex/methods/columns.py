"""Columns: the server's model is a row of independent models, and a device trains those that fit into it.

A scheme of our own. Nodes that are trained together stay together, nobody trains more than its own capacity, and the
row may be larger than every client. In a round

1. every client of the cohort is given columns: those that fit into it together, those that it can hold one at a time
   (``one_by_one``), or now and then its narrower ones only (``turns``);
2. each (client, column) is a job: the client trains that column as if it were the whole model;
3. every column is averaged over the clients that trained it, and over nobody else;
4. the server notes which classes a column has been trained on (``rows``).

Columns meet in their scores only, see :class:`~fedrolex.models.ColumnModel`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

import torch
from torch import nn

from fedrolex.clients import MODEL, Job, LocalTraining, Network, Upload
from fedrolex.core import FedrolexError, random_words
from fedrolex.methods.averaging import find_label_axis
from fedrolex.methods.method import adding, size
from fedrolex.methods.needs import Needs
from fedrolex.methods.own_width import at_own_width, begin_at_own_width
from fedrolex.methods.server_optimizer import ServerOptimizer
from fedrolex.methods.settings import Weighted
from fedrolex.methods.setup import Setup
from fedrolex.models import ColumnModel
from fedrolex.rounds import Fleet, Member, Round, Server, State
from fedrolex.slicing import Axes, Static, Window, exact

SEEN = "seen"  # the section that says which classes every column has seen


@dataclass(frozen=True, kw_only=True)
class Columns(Weighted):
    """A row of models; a device trains the largest column that it can hold, then the next that fit beside it.

    Columns of equal width take turns. With ``one_by_one`` a device trains every column that it can hold by itself.

    Attributes:
        columns: their widths, as parts of the task's model. None given: one for every capacity below the largest,
            which trains them all; two, where that would be a single one and the server's model is larger than that.
        one_by_one: a device trains every column that it can hold by itself, one after the other, so that narrow columns
            see all clients' examples. It needs memory for one column at a time, and computes and sends what its columns
            do together: with one for every capacity up to a third more than a model of its own size, where weights
            shrink with the square of the width; more where they hardly shrink, as vocabularies do.
        turns: in about half of the rounds a device that has no room for all columns leaves its largest one to others
            and trains narrower ones, so that columns see more clients' examples.
        rows: average a class's part of a column's output layer over the clients that hold the class only, and let
            columns answer for the classes they have seen. Clients must say which classes they hold, and where some lack
            classes, ``client.mask`` must not be ``none``.
        server_optimizer: takes a column's average change as a gradient; see
            :class:`~fedrolex.methods.server_optimizer.ServerOptimizer`.
    """

    columns: Sequence[str] = ()
    one_by_one: bool = False
    turns: bool = False
    rows: bool = False
    server_optimizer: ServerOptimizer = field(default_factory=ServerOptimizer)
    needs = Needs(larger_server=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for width in self.columns:
            try:
                exact(width)
            except FedrolexError as error:
                raise FedrolexError(f"method.columns: {error}") from None
        if self.one_by_one and self.turns:
            raise FedrolexError("method.turns is for columns that must fit together: leave it or one_by_one out")

    def check_fleet(self, fleet: Fleet, client: LocalTraining, scale: int) -> None:
        """Somebody must be able to hold every column."""
        widest, largest = max(self.widths(fleet, scale)), max(fleet.levels) * scale
        if widest > largest:
            raise FedrolexError(f"method.columns has a width of {widest}: the largest device holds {largest}")

    def widths(self, fleet: Fleet, scale: int) -> list[Fraction]:
        """Every column's, as parts of the task's model, the widest first."""
        if self.columns:
            return sorted(map(exact, self.columns), reverse=True)
        levels = sorted({level * scale for level in fleet.levels}, reverse=True)
        widths = levels[1:] or levels
        return widths * 2 if len(widths) == 1 and widths[0] < scale else widths

    # --- before the first round ---

    def networks(self, setup: Setup) -> dict[str, Network]:
        """The task's model, of which every column is a part; its own weights are the first column's."""
        network = setup.network(lambda: setup.task.build(1), "weights")
        width = self.widths(setup.fleet, setup.scale)[0]
        begin_at_own_width(network, Static().window(network.axes, round=0, capacity=width, client=0))
        return {MODEL: network}

    def begin(self, server: Server) -> State:
        """The other columns, with random weights of their own, and the classes that columns have seen."""
        axes, widths, state = server.main.axes, self._widths(server), {}
        for column, width in list(enumerate(widths))[1:]:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(random_words(1, server.seed, "column", column)[0] >> 1))
                drawn = axes.state(server.task.build(1))
            drawn = {name: tensor.to(server.device) for name, tensor in drawn.items()}
            state[_section(column)] = at_own_width(axes, drawn, self._window(server, width))
        names = server.trainable()
        for section in (MODEL, *state):
            tensors = {**server.state, **state}[section]
            state |= self.server_optimizer.begin({name: tensors[name] for name in names}, section)
        if self.rows:
            state[SEEN] = {"classes": torch.zeros(len(widths), server.task.classes, device=server.device)}
        return state

    def label_axis(self, server: Server) -> str | None:
        """The axis of the classes, where ``rows`` asks for it."""
        return find_label_axis(server, "method.rows") if self.rows else None

    # --- a round ---

    def members(self, server: Server, round: int) -> list[Member]:
        """The first of the cohort that can hold a column."""
        return server.fleet.members(round, min(self._widths(server)) / server.scale)

    def jobs(self, server: Server, round: int) -> list[Job]:
        """A job for every column that a client trains."""
        widths, found = self._widths(server), []
        for member in self.members(server, round):
            for column in self.trained_by(server, member, round):
                window = self._window(server, widths[column])
                sections, name = (_section(column),), str(column)
                found.append(Job(member.client, member.capacity, window, MODEL, sections, name, member.part))
        return found

    def trained_by(self, server: Server, member: Member, round: int) -> list[int]:
        """The columns that a client trains in a round, together or each by itself no larger than its capacity."""
        if self.one_by_one:
            room = member.capacity * server.scale
            return [column for column, width in enumerate(self._widths(server)) if width <= room]
        turn, coin = map(int, random_words(2, server.seed, "turn", round, member.client))
        order = self._widest_first(server, turn)
        found = self._fitting(server, order, member.capacity)
        if self.turns and coin % 2:
            found = self._narrower(server, order, found, member.capacity) or found
        return sorted(found)

    def _widest_first(self, server: Server, turn: int) -> list[int]:
        """All columns; those of equal width begin with another one at every ``turn``."""
        widths = self._widths(server)
        return sorted(range(len(widths)), key=lambda column: (-widths[column], (column - turn) % len(widths)))

    def _narrower(self, server: Server, order: Sequence[int], found: Sequence[int], capacity: Fraction) -> list[int]:
        """What a client has room for below its widest column; nothing where it has room for all columns, or none."""
        widths = self._widths(server)
        if not 0 < len(found) < len(widths):
            return []
        return self._fitting(server, [each for each in order if widths[each] < widths[found[0]]], capacity)

    def _fitting(self, server: Server, order: Sequence[int], capacity: Fraction) -> list[int]:
        """Of some columns, taken one after the other, those for which there is still room in a device."""
        widths, room, found = self._widths(server), self._parameters(server, capacity * server.scale), []
        for column in order:
            size = self._parameters(server, widths[column])
            if size <= room:
                found.append(column)
                room -= size
        return found

    @adding
    def take(self, round: Round, upload: Upload) -> None:
        """Average the answer, and note the classes that its column has seen now."""
        super().take(round, upload)
        if self.rows:
            seen = round.notes.setdefault(SEEN, round.state[SEEN]["classes"].clone())
            seen[int(upload.job.name), list(upload.labels or ())] = 1

    def finish(self, round: Round) -> State:
        """The averages of the columns, moved on by the server's optimiser."""
        new, names = super().finish(round), round.server.trainable()
        for column in range(len(self._widths(round.server))):
            new = self.server_optimizer.moved(round.state, new, names, _section(column))
        return {**new, SEEN: {"classes": round.notes[SEEN]}} if SEEN in round.notes else new

    # --- what comes of it ---

    def weights(self, server: Server) -> Sequence[str]:
        """Every column's section."""
        return [_section(column) for column in range(len(self._widths(server)))]

    def extent(self, server: Server, section: str) -> Window:
        """The column's width."""
        widths = {_section(column): width for column, width in enumerate(self._widths(server))}
        return self._window(server, widths[section])

    def judged(self, server: Server) -> nn.Module:
        """All columns, side by side."""
        return self._row(server, range(len(self._widths(server))))

    def submodel(self, server: Server, capacity: Fraction) -> nn.Module | None:
        """The columns that a device of a capacity can hold at once; None where it can hold none."""
        found = self._fitting(server, self._widest_first(server, server.round), capacity)
        return self._row(server, sorted(found)) if found else None

    def full_size(self, server: Server) -> int:
        """Of the task's model as wide as the server's, which no column is."""
        model = server.task.build(server.scale)
        whole = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return size({name: whole[name] for name in server.state[MODEL]})

    def _row(self, server: Server, columns: Sequence[int]) -> nn.Module:
        widths, axes = self._widths(server), server.main.axes
        modules = [axes.cut(server.loaded(_section(each)), self._window(server, widths[each])) for each in columns]
        seen = server.state[SEEN]["classes"][list(columns)].bool() if self.rows else None
        return ColumnModel(modules, seen).to(server.device)

    def _widths(self, server: Server) -> list[Fraction]:
        return self.widths(server.fleet, server.scale)

    def _window(self, server: Server, width: Fraction) -> Window:
        return server.scheme.window(server.main.axes, round=0, capacity=width, client=0)

    def _parameters(self, server: Server, width: Fraction) -> int:
        return _size(server.main.axes, width)


@lru_cache(maxsize=64)
def _size(axes: Axes, width: Fraction) -> int:
    """Parameters of a column: asked several times for every client of a round."""
    return axes.parameters(width)


def _section(column: int) -> str:
    return f"column{column}" if column else MODEL
