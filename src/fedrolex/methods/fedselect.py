"""Federated Select: a client asks for the rows it needs, and gets those rows alone.

Charles, Bonawitz, Chiknavaryan, McMahan, Agüera y Arcas, "Federated Select: A Primitive for Communication- and
Memory-Efficient Federated Learning", 2022. The other sub-model methods are special cases of
:class:`~fedrolex.slicing.schemes.Select`: their keys are windows. Here clients choose by their data: the words they
read or write (rows of the embedding, which is the output layer too), or the classes they have (rows of the output
layer). Everything else is FedRolex. Keys say something about a client's data: the server learns the keys.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedrolex.clients import LocalTraining
from fedrolex.core import FedrolexError
from fedrolex.methods.averaging import find_label_axis
from fedrolex.methods.fedrolex import FedRolex
from fedrolex.methods.needs import Needs
from fedrolex.rounds import Fleet, Server
from fedrolex.slicing import Scheme, Select
from fedrolex.tasks import Examples, Task

KNOWN = 10_000  # clients whose keys are remembered


class Selected:
    """A task as clients with keys see it: numbers of words or classes are places among a client's keys.

    A word that is not among the keys is read as the unknown word, and ignored where it should be predicted. With
    ``count``, every client has so many keys; with None, what it has data of.
    """

    def __init__(self, task: Task, count: int | None) -> None:
        self.task, self.count = task, count
        self.keys = lru_cache(maxsize=KNOWN)(self._keys)

    def _keys(self, client: int) -> Tensor:
        """A client's keys, int64, ascending."""
        return own_keys(self.task, self.task.client(client), self.count)

    def client(self, number: int) -> Examples:
        """A client's examples, in places."""
        data, keys = self.task.client(number), self.keys(number)
        ignored = self.task.ignored
        places = torch.full((self.task.classes,), 0 if ignored is None else ignored)
        places[keys] = torch.arange(len(keys))
        places = places.to(data.y.device)
        if ignored is None:
            held = torch.isin(data.y, keys.to(data.y.device))
            return Examples(data.x[held], places[data.y[held]])
        return Examples(places[data.x], places[data.y])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)


def own_keys(task: Task, data: Examples, count: int | None) -> Tensor:
    """The keys of a client with this data, int64, ascending; words always have the padding, number 0.

    ``count`` keys are the most frequent of the client's own, filled up with the lowest numbers (which are the most
    frequent words of all); None is what the client has.
    """
    own = task.labels(data)
    always = [] if task.ignored is None else [task.ignored]
    if count is not None:
        said = data.y if task.ignored is None else torch.cat([data.y.flatten(), data.x.flatten()])
        often = torch.bincount(said, minlength=task.classes)[own]
        own = own[torch.argsort(often, descending=True, stable=True)][: max(0, count - len(always))]
    mine = set(own.tolist()) | set(always)
    for number in range(task.classes):
        if count is None or len(mine) >= min(count, task.classes):
            break
        mine.add(number)
    return torch.tensor(sorted(mine), dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class FedSelect(FedRolex):
    """FedRolex on the rows that clients ask for.

    Attributes:
        keys: how many words or classes a client asks for; null is all that the client has.
    """

    keys: int | None = None
    needs = Needs(keys=True, larger_server=True, at_hand=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys is not None and self.keys < 2:
            raise FedrolexError(f"method.keys is {self.keys}: give at least 2, or null for all that a client has")
        if self.rows:
            raise FedrolexError("method.rows does not go with fedselect: clients train the rows they ask for only")

    def check_fleet(self, fleet: Fleet, client: LocalTraining, scale: int) -> None:
        """Nothing is left to mask."""
        super().check_fleet(fleet, client, scale)
        if client.mask != "none":
            raise FedrolexError("fedselect needs client.mask none: classes a client does not have are not sent to it")

    def view(self, task: Task) -> Task:
        """The task in places among each client's keys."""
        return cast(Task, Selected(task, self.keys))

    def windows(self, server: Server) -> Scheme:
        """A client's keys, and FedRolex's windows elsewhere."""
        axis, view = find_label_axis(server, "fedselect"), cast(Selected, server.view)
        return Select(keys=lambda _, client: {axis: view.keys(client).tolist()}, base=super().windows(server))

    def submodel(self, server: Server, capacity: Fraction) -> nn.Module | None:
        """None: a client's sub-model knows the client's classes only."""
        return None
