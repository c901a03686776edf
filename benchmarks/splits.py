"""How far the draw of the split alone moves an accuracy: one recipe, two labels a client, several splits.

Everyone trains a quarter-width PreResNet18 on CIFAR-10. With two labels a client, a pair of classes is told apart by
the clients that hold both, and 45 pairs share about 92 such clients: which pairs go without is luck. ``numpy:SEED`` is
the same kind of split drawn by numpy's RandomState, as a program that shares no code with this package drew it.

    FEDROLEX_DATA=... python benchmarks/splits.py [--splits 0 11 numpy:0 numpy:11] [--padding mean] [--rounds 1000]

``--draws N`` trains nothing: it compares N splits of each kind by the pairs that no client holds, and by the clients
with one label only.

Splits are trained side by side; everything but the split (cohorts, batches, weights) follows its number. Ends with one
JSON object: accuracies in per cent, and for every split the number of pairs of classes that no client holds.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from fedrolex import Classification, Recipe, Run, prepare
from fedrolex.data.where import data_folder
from fedrolex.recipes import find_recipe
from fedrolex.runs.side_by_side import ReadyRun, already, side_by_side
from fedrolex.tasks.partition import Partition, heterofl

LABELS, CLIENTS, CLASSES = 2, 100, 10


def task_of(recipe: Recipe, split: str, seed: int) -> Classification:
    """The recipe's task, its images spread as ``split`` says."""
    task, _ = recipe.task.open(recipe.fleet, seed=seed, folder=data_folder(None), mask=recipe.client.mask)
    assert isinstance(task, Classification)
    if not split.startswith("numpy:"):
        return task
    drawn = np.random.RandomState(seed)
    shards = LABELS * CLIENTS // CLASSES
    dealt = drawn.permutation(np.tile(np.arange(CLASSES), shards)).reshape(CLIENTS, LABELS)
    own = [np.unique(labels) for labels in dealt]
    parts, test_parts = (dealt_out(y.numpy(), own, shards, drawn) for y in (task.train.y, task.test.y))
    return replace(task, parts=Partition.of(parts), test_parts=[torch.from_numpy(rows) for rows in test_parts])


def dealt_out(y: Any, own: list[Any], shards: int, drawn: np.random.RandomState) -> list[Any]:
    """To every client one shard of each of its labels, drawn from those left."""
    left = {label: np.array_split(np.flatnonzero(y == label), shards) for label in range(CLASSES)}
    return [np.concatenate([left[label].pop(drawn.randint(len(left[label]))) for label in labels]) for labels in own]


def strangers(task: Classification) -> int:
    """How many pairs of classes no client holds both of."""
    held = Partition.of(task.parts).label_sets(task.train.y, CLASSES)
    return sum(not bool((held[:, one] & held[:, other]).any()) for one, other in combinations(range(CLASSES), 2))


def drawn(count: int) -> dict[str, float]:
    """Means over so many draws of each kind: pairs of classes that no client holds, and clients with one label."""
    shards = LABELS * CLIENTS // CLASSES
    y = torch.arange(CLASSES).repeat_interleave(shards)
    totals: dict[str, list[int]] = {"ours": [0, 0], "numpy": [0, 0]}
    for seed in range(count):
        held = heterofl(y, y, CLASSES, CLIENTS, LABELS, seed)[0].label_sets(y, CLASSES).numpy()
        dealt = np.random.RandomState(seed).permutation(y.numpy()).reshape(CLIENTS, LABELS)
        other = np.zeros_like(held)
        np.put_along_axis(other, dealt, True, axis=1)
        for name, labels in (("ours", held), ("numpy", other)):
            pairs = combinations(range(CLASSES), 2)
            totals[name][0] += sum(not (labels[:, one] & labels[:, two]).any() for one, two in pairs)
            totals[name][1] += int((labels.sum(1) == 1).sum())
    whats = ("pairs_apart", "one_label")
    return {f"{what}_{name}": n / count for name, both in totals.items() for what, n in zip(whats, both, strict=True)}


def job(split: str, options: argparse.Namespace, folder: Path) -> tuple[ReadyRun, int]:
    """The run of a split, and the pairs of classes that never meet in it."""
    seed, rounds = int(split.removeprefix("numpy:")), options.rounds
    recipe = find_recipe("cifar10").with_settings([
        "task.width=16", 'fleet.capacities=["1"]', f"task.padding={options.padding}", f"rounds={rounds}",
        f"client.milestones=[{rounds * 6 // 10}, {rounds * 17 // 20}]", f"evaluate_every={max(1, rounds // 20)}",
        "callbacks=[]", f"seed={seed}", f"precision={options.precision}", *options.set,
    ])  # fmt: skip
    task = task_of(recipe, split, seed)

    def say(row: dict[str, Any]) -> None:
        if "global_accuracy" in row:
            print(f"{split}: round {row['round'] + 1}: {100 * row['global_accuracy']:.2f}", flush=True)

    recipe = replace(recipe, task=Recipe().task)
    return (Run.create(folder / split.replace(":", "-"), recipe, own_task=True), prepare(recipe, task), say), strangers(
        task
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", nargs="+", default=["0", "11", "numpy:0", "numpy:11"])
    parser.add_argument("--padding", choices=["black", "mean"], default="mean")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--set", action="append", default=[], help="as for fedrolex train")
    parser.add_argument("--draws", type=int, help="count over so many splits, and train nothing")
    options = parser.parse_args()
    if options.draws:
        print(json.dumps(drawn(options.draws)))
        return
    with TemporaryDirectory() as folder:
        jobs, pairs = zip(*(job(split, options, Path(folder)) for split in options.splits), strict=True)
        found = [100 * float(summary["global_accuracy"]) for summary in side_by_side([*map(already, jobs)], len(jobs))]
    accuracies = {f"accuracy_{split}": round(each, 2) for split, each in zip(options.splits, found, strict=True)}
    apart = {f"pairs_apart_{split}": count for split, count in zip(options.splits, pairs, strict=True)}
    print(json.dumps({"rounds": options.rounds, "padding": options.padding, **accuracies, **apart}))


if __name__ == "__main__":
    main()
