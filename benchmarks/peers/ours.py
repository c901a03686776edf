"""The work on fedrolex: FedAvg, everyone trains the whole model."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import torch
from work import Work, build, data, report, rows_of

import fedrolex
from fedrolex import Classification, ClientRecipe, Examples, FedAvg, FleetRecipe, Recipe, Training, prepare
from fedrolex.clients.messages import MODEL
from fedrolex.core.allocator import keep_memory
from fedrolex.core.streams import shuffle
from fedrolex.tasks.partition import Partition


def training(work: Work) -> Training:
    """The run, ready for its first round."""
    x, y = data(work)
    examples = Examples(x, y)
    task = Classification(
        "cifar10-shaped",
        partial(build, work),
        examples,
        examples.rows(torch.arange(min(100, len(y)))),  # nothing is evaluated
        Partition.of(range(*rows_of(work, user).indices(len(y))) for user in range(work.users)),
        classes=10,
    )
    recipe = Recipe(
        method=FedAvg(),
        fleet=FleetRecipe(clients=work.users, cohort=work.cohort, capacities=["1"]),
        client=ClientRecipe(epochs=1, batch=work.batch, lr=work.lr, momentum=0.0),
        engine=work.engine,
        device="cpu",
        callbacks=[],  # peers do not measure how far updates point apart
    )
    return prepare(recipe, task)


def first_order(work: Work) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """All rows in the order in which their users go through them in the first round."""
    seed = Recipe().seed
    starts = range(0, work.users * work.images, work.images)
    return np.concatenate([start + shuffle(work.images, seed, "batches", 0, i, 0) for i, start in enumerate(starts)])


def main() -> None:
    work = Work.told()
    keep_memory()  # as the command line does
    torch.set_num_threads(work.threads)
    made = training(work)
    seconds, updates = [], 0
    for round in range(work.warmup + work.rounds):
        start = time.perf_counter()
        row = made.run_round()
        seconds.append(time.perf_counter() - start)
        assert row["clients"] == work.cohort, row["dropped"]
        updates += row["clients"] if round >= work.warmup else 0
    report(work, seconds, updates, made.server.state[MODEL], fedrolex=f"{fedrolex.__version__} (engine {made.ran})")


if __name__ == "__main__":
    main()
