"""The published LeNet anchor: FedAvg, FedProx and SCAFFOLD on CIFAR-10 in four splits, over seeds.

    FEDROLEX_DATA=... python benchmarks/anchor.py [--seeds 1,2,3] [--at-once 6] [--out results/anchor.json]

Recipe ``niid``: ten clients that all take part, fifty rounds of ten epochs. What is compared is the best accuracy of a
run, as published by Flower's niid_bench baseline and, for two splits, on NIID-Bench's leader board. Several runs share
a GPU; what ``--out`` has is not run again. Ends with one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fedrolex import Run, prepare
from fedrolex.recipes import find_recipe
from fedrolex.runs.environment import environment

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
LEADER_BOARD = {  # NIID-Bench's own, FedProx with its best of four penalties
    "dirichlet 0.5": {"fedavg": 68.2, "fedprox": 67.9, "scaffold": 69.8},
    "2 labels": {"fedavg": 49.8, "fedprox": 50.7, "scaffold": 49.1},
}


def trained(settings: list[str]) -> dict[str, float]:
    """Best and last accuracy in percent, and seconds of training."""
    recipe = find_recipe("niid").with_settings(settings)
    with tempfile.TemporaryDirectory() as scratch:
        found = Run.create(Path(scratch) / "run", recipe).go(prepare(recipe))
    return {
        "best": round(100 * found["best_global_accuracy"], 2),
        "last": round(100 * found["global_accuracy"], 2),
        "seconds": round(found["seconds"], 1),
    }


def summary(runs: dict[str, dict[str, float]]) -> tuple[list[str], dict[str, float | None]]:
    """A table and flat figures, from runs by ``split, method, seed``."""
    lines = [
        "| split | method | seeds | best accuracy | last | Flower's best | NIID-Bench's |",
        "|---|---|---|---|---|---|---|",
    ]
    figures: dict[str, float | None] = {}
    for split in SPLITS:
        for method in METHODS:
            found = [run for name, run in runs.items() if name.startswith(f"{split}, {method}, ")]
            if not found:
                continue
            best, last, seconds = ([run[key] for run in found] for key in ("best", "last", "seconds"))
            spread = statistics.stdev(best) if len(best) > 1 else None
            theirs, theirs_spread = PUBLISHED[split][method]
            original = LEADER_BOARD.get(split, {}).get(method, "")
            ours = f"{statistics.mean(best):.1f}" + ("" if spread is None else f" ± {spread:.1f}")
            lines.append(
                f"| {split} | {method} | {len(found)} | {ours} "
                f"| {statistics.mean(last):.1f} | {theirs:.1f} ± {theirs_spread:.1f} | {original} |"
            )
            key = f"{split} {method}".replace(" ", "_")
            figures |= {
                f"{key}_best": round(statistics.mean(best), 2),
                f"{key}_spread": None if spread is None else round(spread, 2),
                f"{key}_last": round(statistics.mean(last), 2),
                f"{key}_published": theirs,
                f"{key}_seconds": round(statistics.mean(seconds), 1),
            }
    return lines, figures


def seeds(text: str) -> list[int]:
    """``1,2,3``"""
    return [int(seed) for seed in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=seeds, default="1,2,3")
    parser.add_argument("--splits", nargs="+", default=list(SPLITS), choices=list(SPLITS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--at-once", type=int, default=6, help="runs that share the device")
    parser.add_argument("--set", nargs="+", default=[], help="settings for all")
    parser.add_argument("--out", type=Path, help="where runs are kept; those it has already are not repeated")
    options = parser.parse_args()
    kept: dict[str, Any] = {"settings": options.set, **environment(), "runs": {}}
    if options.out is not None and options.out.exists():
        kept = json.loads(options.out.read_text())
        if kept["settings"] != options.set:
            raise SystemExit(f"{options.out} has runs with other settings ({kept['settings']}): give another --out")
    runs: dict[str, dict[str, float]] = kept["runs"]
    with ProcessPoolExecutor(options.at_once, mp_context=get_context("spawn")) as pool:
        started = {
            pool.submit(trained, [*SPLITS[split], *METHODS[method], f"seed={seed}", *options.set]): name
            for seed in options.seeds
            for split in options.splits
            for method in options.methods
            if (name := f"{split}, {method}, {seed}") not in runs
        }
        failed = 0
        for future in as_completed(started):
            name = started[future]
            if (wrong := future.exception()) is not None:
                print(f"{name}: {wrong}", flush=True)
                failed += 1
                continue
            runs[name] = future.result()
            print(
                f"{name}: best {runs[name]['best']}, last {runs[name]['last']}, {runs[name]['seconds']} s", flush=True
            )
            if options.out is not None:
                whole = options.out.with_suffix(".part")
                whole.write_text(json.dumps({**kept, **summary(runs)[1]}, indent=1) + "\n")
                whole.replace(options.out)
    lines, figures = summary(runs)
    print("\n".join(lines))
    print(json.dumps({**figures, **environment()}))
    if failed:
        raise SystemExit(f"{failed} of {len(started)} runs failed")


if __name__ == "__main__":
    main()
