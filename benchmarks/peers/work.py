"""The work all systems are given: who holds which images, the model, and how a run is told and reported.

The setting is that of pfl's own CIFAR-10 benchmark: 1000 users with 50 images each, 50 of them a round, one local
epoch in batches of 10 (five steps) with plain SGD, a small network of two convolutions. Images are CIFAR-10's where
``FEDROLEX_DATA`` has them, else random ones of that shape: the time of a step does not depend on them. They are stored
as the model takes them (float32, normalised, channels last in memory, as pfl stores them), so nobody converts any.

Needs torch and numpy alone: a peer's interpreter need not have fedrolex.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MEAN, SPREAD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A run, described in full.

    Attributes:
        users, images: how many users, and how many images each holds.
        cohort: users a round.
        batch, lr: of a local step.
        warmup, rounds: rounds that are not timed, at least one, and rounds that are.
        threads: of torch, or processes of one thread.
        dropout: whether the model has its dropout; without, all systems compute the same.
        order: ``.npy`` file of rows, int64: images in this order; none is the order of the files.
        save: ``.pt`` file for the weights after the last round; none is nowhere.
        engine: ours; peers ignore it.
    """

    users: int = 1000
    images: int = 50
    cohort: int = 50
    batch: int = 10
    lr: float = 0.1
    warmup: int = 1
    rounds: int = 2
    threads: int = 2
    dropout: bool = True
    order: str = ""
    save: str = ""
    engine: str = "auto"

    @staticmethod
    def told() -> Work:
        """What the command line says: one JSON object."""
        return Work(**json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})

    def words(self) -> str:
        """As the command line says it."""
        return json.dumps(asdict(self))


@lru_cache(maxsize=1)
def data(work: Work) -> tuple[Tensor, Tensor]:
    """Inputs ``(n, 3, 32, 32)`` and targets ``(n,)`` of all users, one user after the other; see :func:`rows_of`."""
    count = work.users * work.images
    files = sorted(Path(os.environ.get("FEDROLEX_DATA", ""), "cifar-10-batches-bin").glob("data_batch_*.bin"))
    if files:
        records = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])[:count]
        pixels, labels = records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]
    else:
        generator = np.random.default_rng(0)
        pixels = generator.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
        labels = generator.integers(0, 10, count, dtype=np.uint8)
    assert len(labels) == count, f"{len(labels)} images are too few for {work.users} users with {work.images} each"
    if work.order:
        rows = np.load(work.order)
        pixels, labels = pixels[rows], labels[rows]
    x = torch.from_numpy(pixels).contiguous(memory_format=torch.channels_last).float() / 255
    x = (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(SPREAD)[:, None, None]
    return x, torch.from_numpy(labels).long()


def rows_of(work: Work, user: int) -> slice:
    """Where the images of a user are."""
    return slice(user * work.images, (user + 1) * work.images)


def build(work: Work, scale: int = 1) -> nn.Sequential:
    """The network: two convolutions, one pooling, one hidden layer; always the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second, hidden = 32 * scale, 64 * scale, 128 * scale
        model = nn.Sequential(
            nn.Conv2d(3, first, 3),
            nn.ReLU(),
            nn.Conv2d(first, second, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25 if work.dropout else 0.0),
            nn.Flatten(),
            nn.Linear(second * 14 * 14, hidden),
            nn.ReLU(),
            nn.Dropout(0.5 if work.dropout else 0.0),
            nn.Linear(hidden, 10),
        )
        for layer in model:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
    return model


def report(work: Work, seconds: list[float], updates: int, state: dict[str, Tensor], **versions: str) -> None:
    """Print what a run found, as one JSON object on the last line.

    Args:
        work: what was asked for.
        seconds: of every round, those that warm up included.
        updates: client updates that were averaged in the timed rounds.
        state: the averaged model after the last round.
        versions: of the packages that did it.
    """
    timed = seconds[work.warmup :]
    if work.save:
        torch.save({name: tensor.detach().cpu() for name, tensor in state.items()}, work.save)
    found: dict[str, Any] = {
        "updates_per_second": updates / sum(timed),
        "seconds": [round(value, 3) for value in timed],
        "updates": updates,
        "parameters": sum(tensor.numel() for tensor in state.values()),
        "data": "cifar10" if Path(os.environ.get("FEDROLEX_DATA", ""), "cifar-10-batches-bin").is_dir() else "random",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **versions},
    }
    print(json.dumps(found), flush=True)
