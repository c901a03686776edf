"""Federated Select: a client asks for the rows it needs, and gets those alone.

Charles, Bonawitz, Chiknavaryan, McMahan, Agüera y Arcas, "Federated Select: A Primitive for Communication- and
Memory-Efficient Federated Learning", 2022. The other sub-model methods are special cases of :class:`Select`: their
keys are windows. Here clients choose by their data: the words they read or write (rows of the embedding, which is the
output layer too), or the classes they have (rows of the output layer). Everything else is FedRolex. What a client asks
for says something about its data: the server learns it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedrolex.clients.work import LocalTraining
from fedrolex.core.errors import FedrolexError
from fedrolex.methods.fedrolex import fedrolex
from fedrolex.methods.method import Method
from fedrolex.slicing.windows import Rounding
from fedrolex.tasks.task import Examples, Task

KNOWN = 10_000  # clients whose keys are remembered


@dataclass(frozen=True, kw_only=True)
class OwnKeys:
    """A client's keys: the numbers of its words or classes.

    Attributes:
        count: keys of every client: the most frequent of its own, filled up with the lowest numbers (which are the most
            frequent words of all); None is just what it has.
    """

    count: int | None = None

    def of(self, task: Task, data: Examples) -> Tensor:
        """The keys of a client with this data, int64, ascending; words always have the padding, number 0."""
        own = task.labels(data)
        always = [] if task.ignored is None else [task.ignored]
        if self.count is not None:
            said = torch.cat([data.y.flatten(), data.x.flatten()]) if task.ignored is not None else data.y
            often = torch.bincount(said, minlength=task.classes)[own]
            own = own[torch.argsort(often, descending=True, stable=True)][: max(0, self.count - len(always))]
        mine = set(own.tolist()) | set(always)
        for number in range(task.classes):
            if self.count is None or len(mine) >= min(self.count, task.classes):
                break
            mine.add(number)
        return torch.tensor(sorted(mine), dtype=torch.int64)


class Selected:
    """A task as clients with keys see it: numbers of words or classes are places among a client's keys.

    What is not among them is the unknown word where it is read, and ignored where it should be predicted.
    """

    def __init__(self, task: Task, keys: OwnKeys) -> None:
        self.task, self._keys = task, keys
        self._known: dict[int, Tensor] = {}

    def keys(self, client: int) -> Tensor:
        """A client's keys."""
        if client not in self._known:
            if len(self._known) >= KNOWN:
                self._known.clear()
            self._known[client] = self._keys.of(self.task, self.task.client(client))
        return self._known[client]

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


def fedselect(
    client: LocalTraining,
    *,
    count: int | None = None,
    overlap: str | float = 1,
    rounding: Rounding = "floor",
) -> Method:
    """FedRolex on the rows that clients ask for."""
    if client.mask != "none":
        raise FedrolexError("fedselect needs client.mask none: classes a client does not have are not sent to it")
    if count is not None and count < 2:
        raise FedrolexError(f"method.keys is {count}: give at least 2, or null for all that a client has")
    return replace(fedrolex(client, overlap=overlap, rounding=rounding), name="fedselect", keys=OwnKeys(count=count))
