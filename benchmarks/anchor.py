"""The published LeNet anchor: FedAvg, FedProx and SCAFFOLD on CIFAR-10 in four splits, over seeds.

    FEDROLEX_DATA=... python benchmarks/anchor.py [--seeds 1,2,3] [--at-once 6] [--out results/anchor.json]

Recipe ``niid``: ten clients that all take part, fifty rounds of ten epochs. What is compared is the best accuracy of a
run, as published (Flower's niid_bench baseline, which follows NIID-Bench). Several runs share a GPU. Ends with one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fedrolex.cli.train import find_recipe
from fedrolex.runs import Run, prepare
from fedrolex.runs.run import environment

SPLITS = {
    "iid": ["task.partition.name=iid"],
    "dirichlet 0.5": ["task.partition.name=dirichlet", "task.partition.alpha=0.5"],
    "2 labels": ["task.partition.name=labels", "task.partition.labels=2"],
    "3 labels": ["task.partition.name=labels", "task.partition.labels=3"],
}
METHODS = {
    "fedavg": ["method.name=fedavg"],
    "fedprox": ["method.name=fedprox", "method.mu=0.01"],
    "scaffold": ["method.name=scaffold"],
}
PUBLISHED = {
    "iid": {"fedavg": (71.32, 0.33), "fedprox": (71.26, 1.18), "scaffold": (71.66, 1.13)},
    "dirichlet 0.5": {"fedavg": (62.47, 0.43), "fedprox": (65.63, 0.08), "scaffold": (68.08, 0.96)},
    "2 labels": {"fedavg": (51.17, 1.09), "fedprox": (50.44, 0.79), "scaffold": (49.42, 2.18)},
    "3 labels": {"fedavg": (59.11, 0.87), "fedprox": (59.20, 1.18), "scaffold": (61.00, 0.91)},
}


def trained(settings: list[str]) -> tuple[float, float, float]:
    """Best and last accuracy in percent, and seconds of training."""
    recipe = find_recipe("niid").with_settings(settings)
    with tempfile.TemporaryDirectory() as scratch:
        found = Run.create(Path(scratch) / "run", recipe).go(prepare(recipe))
    return 100 * found["best_global_accuracy"], 100 * found["global_accuracy"], found["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--splits", nargs="+", default=list(SPLITS), choices=list(SPLITS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--at-once", type=int, default=6, help="runs that share the device")
    parser.add_argument("--set", nargs="+", default=[], help="settings for all")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    figures: dict[str, Any] = {"seeds": seeds, "settings": options.set, **environment()}
    print("| split | method | best accuracy | last | published best |\n|---|---|---|---|---|", flush=True)
    with ProcessPoolExecutor(options.at_once, mp_context=get_context("spawn")) as pool:
        runs = {
            (split, method): [
                pool.submit(trained, [*SPLITS[split], *METHODS[method], f"seed={seed}", *options.set]) for seed in seeds
            ]
            for split in options.splits
            for method in options.methods
        }
        for (split, method), futures in runs.items():
            best, last, seconds = zip(*(future.result() for future in futures), strict=True)
            mean, spread = statistics.mean(best), statistics.stdev(best) if len(best) > 1 else 0.0
            theirs, theirs_spread = PUBLISHED[split][method]
            key = f"{split} {method}".replace(" ", "_")
            figures |= {
                f"{key}_best": round(mean, 2),
                f"{key}_spread": round(spread, 2),
                f"{key}_last": round(statistics.mean(last), 2),
                f"{key}_published": theirs,
                f"{key}_seconds": round(statistics.mean(seconds), 1),
            }
            print(
                f"| {split} | {method} | {mean:.1f} ± {spread:.1f} | {statistics.mean(last):.1f} "
                f"| {theirs:.1f} ± {theirs_spread:.1f} |",
                flush=True,
            )
            if options.out is not None:
                options.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
