"""Spreading examples over clients: every row to one client at most, the same on every platform.

The label-based splits take an *affinity*, shape ``(clients, classes)``: how much of a class a client gets
compared with the others, 0 for none. It is how capacities and data are correlated (see :func:`rare_classes`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedrolex.core import FedrolexError, in_one_line, random_words, shuffle, uniform

Rows = NDArray[np.int64]
Affinity = NDArray[np.float64]
RETRIES = 20


@dataclass(frozen=True)
class Partition(Sequence[Tensor]):
    """The rows each client holds.

    Attributes:
        rows: those of all clients, one after the other, int64; each client's are in ascending order.
        starts: where each client's begin, and the end, int64, shape ``(clients + 1,)``.
    """

    rows: Tensor
    starts: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.rows, Tensor) or not isinstance(self.starts, Tensor):
            raise FedrolexError("rows and starts of a Partition are tensors: make it of lists with Partition.of(parts)")

    @classmethod
    def of(cls, parts: Iterable[Rows | Tensor | Sequence[int]]) -> Self:
        """From one list of rows a client."""
        with in_one_line("parts must be a list with every client's rows"):
            given = [np.asarray(part) for part in parts]
            if any(part.ndim != 1 or (part.size and part.dtype.kind not in "iu") for part in given):
                raise TypeError("rows are whole numbers")
            sorted_parts = [np.sort(part.astype(np.int64)) for part in given]
        starts = np.concatenate([[0], np.cumsum([len(part) for part in sorted_parts])]).astype(np.int64)
        rows = np.concatenate([np.empty(0, np.int64), *sorted_parts])
        return cls(torch.from_numpy(rows), torch.from_numpy(starts))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, client):  # type: ignore[no-untyped-def]
        """Rows of one client."""
        if not -len(self) <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        client %= len(self)
        return self.rows[int(self.starts[client]) : int(self.starts[client + 1])]

    def sizes(self) -> Tensor:
        """Number of rows of each client."""
        return self.starts.diff()

    def label_sets(self, labels: Tensor, classes: int) -> Tensor:
        """Which classes each client holds, bool, shape ``(clients, classes)``."""
        held = torch.zeros(len(self), classes, dtype=torch.bool)
        owner = torch.repeat_interleave(torch.arange(len(self)), self.sizes())
        held[owner, labels.cpu()[self.rows]] = True
        return held


def even(labels: Tensor, clients: int, seed: int, affinity: Affinity | None = None) -> Partition:
    """Equal random parts of all rows; with an affinity, of every class by itself."""
    _check_clients(clients)
    _check_labels(labels)
    if len(labels) < clients:
        raise FedrolexError(f"{len(labels)} examples for {clients} clients: every client needs at least one")
    if affinity is None:
        return Partition.of(np.array_split(shuffle(len(labels), seed, "partition"), clients))
    parts: list[list[Rows]] = [[] for _ in range(clients)]
    for label, rows in _by_class(labels, seed).items():
        for client, share in enumerate(_shares(rows, affinity[:, label])):
            parts[client].append(share)
    return _made(parts, labels)


def heterofl(
    labels: Tensor, test_labels: Tensor, classes: int, clients: int, per_client: int, seed: int
) -> tuple[Partition, Partition]:
    """HeteroFL's split, as FedRolex ran it: at most ``per_client`` labels a client, some data unused.

    Every class is cut, in the order of the data, into ``per_client · clients / classes`` shards. A list with
    every class that many times is shuffled and dealt out in rows of ``per_client``; a label that a client
    drew twice counts once, so its second shard goes to nobody. Test rows follow the same labels.
    """
    _check_held(per_client, classes, labels)
    shards, rest = divmod(per_client * clients, classes)
    if rest or not shards:
        raise FedrolexError(
            f"{clients} clients of {per_client} labels: HeteroFL's split needs clients × labels to be a multiple "
            f"of the {classes} classes; use the partition `labels`"
        )
    deck = np.repeat(np.arange(classes), shards)[shuffle(classes * shards, seed, "labels")]
    drawn = [np.unique(row) for row in deck.reshape(clients, per_client)]
    return _dealt(labels, drawn, shards, seed, "train"), _dealt(test_labels, drawn, shards, seed, "test")


def _dealt(labels: Tensor, drawn: Sequence[Rows], shards: int, seed: int, which: str) -> Partition:
    """To every client one shard of each of its labels, picked at random from those left."""
    left: dict[int, list[Rows]] = {}
    parts: list[list[Rows]] = []
    for client, own in enumerate(drawn):
        picks = random_words(len(own), seed, "shards", which, client)
        parts.append([])
        for label, pick in zip(own.tolist(), picks.tolist(), strict=True):
            if label not in left:
                left[label] = _shards(np.flatnonzero(labels.numpy() == label), shards)
            parts[-1].append(left[label].pop(pick * len(left[label]) >> 64))
    return _made(parts, labels)


def _shards(rows: Rows, count: int) -> list[Rows]:
    """Contiguous shards of equal length; what is left over goes to the first ones, a row each."""
    size = len(rows) // count
    cut = [rows[i * size : (i + 1) * size] for i in range(count)]
    for i, row in enumerate(rows[size * count :]):
        cut[i] = np.append(cut[i], row)
    return cut


def by_label(
    labels: Tensor, classes: int, clients: int, per_client: int, seed: int, affinity: Affinity | None = None
) -> Partition:
    """Exactly ``per_client`` different labels for each client, every label held by (almost) equally many.

    A client gets the labels that the fewest others hold, ties broken by a random order of its own; the rows
    of a label are shared out among the clients that hold it. All data is used as soon as there are enough
    clients to hold every label.
    """
    _check_clients(clients)
    _check_held(per_client, classes, labels)
    weight = np.ones((clients, classes)) if affinity is None else affinity
    holders: list[list[int]] = [[] for _ in range(classes)]
    for client in range(clients):
        drawn = [i for i in shuffle(classes, seed, "labels", client).tolist() if weight[client, i] > 0]
        if len(drawn) < per_client:
            held = f"client {client} may only hold {len(drawn)}"
            raise FedrolexError(f"{per_client} labels a client, but {held}: give fewer rare classes")
        for i in sorted(drawn, key=lambda i: len(holders[i]))[:per_client]:
            holders[i].append(client)
    parts: list[list[Rows]] = [[] for _ in range(clients)]
    for label, rows in _by_class(labels, seed).items():
        who = holders[label]
        if who:
            for client, share in zip(who, _shares(rows, weight[who, label]), strict=True):
                parts[client].append(share)
    return _made(parts, labels)


def dirichlet(
    labels: Tensor,
    clients: int,
    alpha: float,
    seed: int,
    *,
    smallest: int = 10,
    balanced: bool = True,
    affinity: Affinity | None = None,
) -> Partition:
    """Every class shared out by proportions drawn from a Dirichlet distribution of concentration ``alpha``.

    Args:
        smallest: fewest rows a client may have. The draw is repeated at most 20 times; what is then still
            missing is taken, row by row, from the clients that have most.
        balanced: a client that has its fair share already gets no more (as NIID-Bench does); this bends
            the distribution.
    """
    _check_clients(clients)
    if not isinstance(alpha, int | float) or not 0 < alpha <= 1e9:
        raise FedrolexError(f"alpha is {alpha}: give a number above 0, at most 1e9")
    _check_labels(labels)
    if smallest * clients > len(labels):
        raise FedrolexError(f"{len(labels)} examples for {clients} clients of at least {smallest}: there are too few")
    for attempt in range(RETRIES):
        parts = _dirichlet(labels, clients, alpha, seed, attempt, balanced, affinity)
        if min(map(len, parts)) >= smallest:
            return Partition.of(parts)
    _fill_up(parts, smallest, labels, affinity)
    return Partition.of(parts)


def _dirichlet(
    labels: Tensor, clients: int, alpha: float, seed: int, attempt: int, balanced: bool, affinity: Affinity | None
) -> list[Rows]:
    from scipy.special import gammaincinv

    parts: list[list[Rows]] = [[] for _ in range(clients)]
    sizes = np.zeros(clients)
    for label, rows in _by_class(labels, seed, attempt).items():
        weights = gammaincinv(alpha, uniform(random_words(clients, seed, "dirichlet", attempt, label)))
        if affinity is not None:
            weights = weights * affinity[:, label]
        open_ = sizes < len(labels) / clients
        if balanced and (weights * open_).sum() > 0:
            weights = weights * open_
        if not weights.sum() > 0:  # all underflowed: one client that may have it has it all
            able = np.arange(clients) if affinity is None else np.flatnonzero(affinity[:, label] > 0)
            weights[able[int(random_words(1, seed, "dirichlet one", attempt, label)[0] % len(able))]] = 1.0
        for client, share in enumerate(_shares(rows, weights)):
            parts[client].append(share)
            sizes[client] += len(share)
    return [np.concatenate(part) for part in parts]


def _fill_up(parts: list[Rows], smallest: int, labels: Tensor, affinity: Affinity | None) -> None:
    """Move rows from the largest clients to those below ``smallest``, as far as their affinity allows."""
    y = labels.numpy()
    for client in range(len(parts)):
        for donor in sorted(range(len(parts)), key=lambda i: -len(parts[i])):
            missing = min(smallest - len(parts[client]), len(parts[donor]) - smallest)
            if missing <= 0 or donor == client:
                continue
            rows = parts[donor]
            allowed = rows if affinity is None else rows[affinity[client, y[rows]] > 0]
            moved = allowed[len(allowed) - min(missing, len(allowed)) :]
            parts[client] = np.concatenate([parts[client], moved])
            parts[donor] = rows[~np.isin(rows, moved)]
        if len(parts[client]) < smallest:
            lacking = f"client {client} cannot get {smallest} examples of classes it may hold"
            raise FedrolexError(f"{lacking}: lower smallest, or raise alpha")


def shards(labels: Tensor, clients: int, per_client: int, seed: int) -> Partition:
    """McMahan et al.'s split: rows sorted by label, cut into ``per_client`` shards for each client, dealt out."""
    _check_clients(clients)
    _check_labels(labels)
    count = clients * per_client
    if not per_client >= 1 or count > len(labels):
        raise FedrolexError(f"{count} shards of {len(labels)} examples: give 1 or more shards a client, and fewer")
    cut = np.array_split(np.argsort(labels.numpy(), kind="stable"), count)
    dealt = shuffle(count, seed, "shards").reshape(clients, per_client)
    return Partition.of(np.concatenate([cut[i] for i in row]) for row in dealt)


def rare_classes(clients: int, classes: int, small: Sequence[bool], rare: Sequence[int], others: float) -> Affinity:
    """The ``rare`` classes belong to the ``small`` devices, alone or mostly; of shape ``(clients, classes)``.

    ``others`` is what the other devices get of those classes, compared with a small one: 0 is nothing.
    """
    wrong = next((label for label in rare if not 0 <= label < classes), None)
    if wrong is not None:
        raise FedrolexError(f"rare class {wrong}: there are 0 to {classes - 1}")
    if not 0 <= others <= 1:
        raise FedrolexError(f"rare_elsewhere is {others}: give 0 (small devices alone) to 1 (no difference)")
    if not any(small):
        raise FedrolexError("no device is small enough for the rare classes: raise rare_capacity")
    weight = np.ones((clients, classes))
    weight[np.ix_(~np.array(small, dtype=bool), np.array(rare, dtype=int))] = others
    return weight


def hold_out(rows: int, shares: dict[str, float], seed: int) -> dict[str, Tensor]:
    """Rows put aside before anything is spread, by purpose, and the ``rest``; shares are parts of all rows."""
    numbers = all(isinstance(share, int | float) and 0 <= share < 1 for share in shares.values())
    if not numbers or sum(shares.values()) >= 1:
        raise FedrolexError(f"held out {shares}: give parts of the data, at least 0 and together below 1")
    order = torch.from_numpy(shuffle(rows, seed, "hold out"))
    found: dict[str, Tensor] = {}
    for purpose, share in shares.items():
        count = round(share * rows)
        found[purpose], order = order[:count].sort().values, order[count:]
    found["rest"] = order.sort().values
    return found


def _check_clients(clients: object) -> None:
    if not isinstance(clients, int | np.integer) or clients < 1:
        raise FedrolexError(f"{clients!r} clients: give a whole number of 1 or more")


def _check_labels(labels: object) -> None:
    if not isinstance(labels, Tensor):
        raise FedrolexError(f"labels are a {type(labels).__name__}: give a tensor, one for every example")


def _check_held(per_client: int, classes: int, labels: Tensor) -> None:
    _check_labels(labels)
    if not isinstance(per_client, int) or not 1 <= per_client <= classes:
        raise FedrolexError(f"{per_client} labels a client of {classes} classes: give 1 to {classes}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise FedrolexError(f"labels are {int(labels.min())} to {int(labels.max())}, of {classes} classes: give more")


def _by_class(labels: Tensor, seed: int, attempt: int = 0) -> dict[int, Rows]:
    """The rows of every class, in random order."""
    found = {}
    for label in np.unique(labels.numpy()).tolist():
        rows = np.flatnonzero(labels.numpy() == label)
        found[int(label)] = rows[shuffle(len(rows), seed, "rows", label, attempt)]
    return found


def _shares(rows: Rows, weights: Affinity) -> list[Rows]:
    """Rows in consecutive pieces, as large as their weights say."""
    ends = np.floor(np.cumsum(weights) / weights.sum() * len(rows) + 1e-9).astype(np.int64)
    ends[-1] = len(rows)
    return np.split(rows, ends[:-1])


def _made(parts: list[list[Rows]], labels: Tensor) -> Partition:
    whole = [np.concatenate(part) if part else np.empty(0, np.int64) for part in parts]
    poor = next((client for client, part in enumerate(whole) if not len(part)), None)
    if poor is not None:
        raise FedrolexError(f"{len(labels)} examples for {len(parts)} clients: client {poor} would have none")
    return Partition.of(whole)
