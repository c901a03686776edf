"""Spreading examples over clients: every row to one client at most, the same on every platform."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedrolex.errors import FedrolexError
from fedrolex.streams import shuffle


def even(rows: int, clients: int, seed: int) -> list[Tensor]:
    """Equal random parts."""
    if rows < clients:
        raise FedrolexError(f"{rows} examples for {clients} clients: every client needs at least one")
    order = shuffle(rows, seed, "partition")
    return [torch.from_numpy(np.sort(part)) for part in np.array_split(order, clients)]


def by_label(labels: Tensor, clients: int, per_client: int, seed: int) -> list[Tensor]:
    """Exactly ``per_client`` different labels for each client, every label held by (almost) equally many.

    Labels are dealt round by round from shuffled decks, and the rows of a label are shared out evenly among
    the clients that hold it.
    """
    found = np.unique(labels.numpy())
    if not 1 <= per_client <= len(found):
        raise FedrolexError(f"{per_client} labels a client of {len(found)}: give 1 to {len(found)}")
    holders: dict[int, list[int]] = {int(label): [] for label in found}
    for client in range(clients):
        drawn = shuffle(len(found), seed, "labels", client).tolist()
        for i in sorted(drawn, key=lambda i: len(holders[int(found[i])]))[:per_client]:
            holders[int(found[i])].append(client)
    parts: list[list[np.ndarray[tuple[int], np.dtype[np.int64]]]] = [[] for _ in range(clients)]
    for label, who in holders.items():
        rows = np.flatnonzero(labels.numpy() == label)
        rows = rows[shuffle(len(rows), seed, "rows", label)]
        for client, share in zip(who, np.array_split(rows, max(1, len(who))), strict=False):
            parts[client].append(share)
    if any(sum(map(len, part)) == 0 for part in parts):
        raise FedrolexError(
            f"{len(labels)} examples for {clients} clients of {per_client} labels: some would have none"
        )
    return [torch.from_numpy(np.sort(np.concatenate(part))) for part in parts]


def alike(labels: Tensor, parts: list[Tensor], test_labels: Tensor) -> list[Tensor]:
    """For each client, the test rows whose label it holds."""
    return [torch.nonzero(torch.isin(test_labels, labels[part].unique())).flatten() for part in parts]
