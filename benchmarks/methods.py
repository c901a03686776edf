"""All methods on one small real task under one split: accuracy over seeds, seconds, bytes, needs.

    python benchmarks/methods.py [--seeds 1,2,3] [--rounds 40] [--out results/methods.json] [--set KEY=VALUE …]

Handwritten digits, twenty devices of five sizes, ten a round. A tenth of the training images is public and a tenth is
for validation, for everyone: methods that need neither do without them too. Methods that train one size train what
the smallest device can hold, and, as a second line, 1/4 on the devices that can hold that. Ends with one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fedrolex import Recipe
from fedrolex.cli.train import find_recipe
from fedrolex.methods.needs import TABLE
from fedrolex.runs import Run, prepare
from fedrolex.runs.run import fedrolex_version

SPLIT = ["compare=false", "task.public=0.1", "task.validation=0.1", "evaluate_every=5"]


def trained(recipe: Recipe) -> dict[str, Any]:
    """The summary of one run."""
    with tempfile.TemporaryDirectory() as scratch:
        return Run.create(Path(scratch) / "run", recipe).go(prepare(recipe))


def lines() -> dict[str, list[str]]:
    """What is run, by name."""
    found: dict[str, list[str]] = {}
    for name, needs in TABLE.items():
        found[f"{name}, 1/16" if needs.one_size else name] = [f"method={name}"]
        if needs.one_size:
            found[f"{name}, who can 1/4"] = [f"method={name}", "method.width=1/4", "method.able_only=true"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", nargs="+", help="names of methods")
    parser.add_argument("--set", nargs="+", default=[], help="settings for all")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    rows: list[dict[str, Any]] = []
    print("| method | accuracy | best | seconds | MiB down and up | needs |\n|---|---|---|---|---|---|")
    for what, settings in lines().items():
        name = settings[0].partition("=")[2]
        if options.only and name not in options.only:
            continue
        every = [
            trained(
                find_recipe("digits").with_settings(
                    [*SPLIT, f"rounds={options.rounds}", f"seed={seed}", *settings, *options.set]
                )
            )
            for seed in seeds
        ]
        found = [100 * one["global_accuracy"] for one in every]
        needs = [key for key, value in asdict(TABLE[name]).items() if value and key != "larger_server"]
        row = {
            "method": what,
            "accuracy": round(statistics.mean(found), 1),
            "spread": round(statistics.stdev(found), 1) if len(found) > 1 else 0.0,
            "best": round(100 * statistics.mean(one["best_global_accuracy"] for one in every), 1),
            "seconds": round(statistics.median(one["seconds"] for one in every), 1),
            "mib": round(every[0]["bytes"] / 2**20, 2),
            "needs": needs,
        }
        rows.append(row)
        accuracy, wanted = f"{row['accuracy']} ± {row['spread']}", ", ".join(needs).replace("_", " ")
        print(f"| {what} | {accuracy} | {row['best']} | {row['seconds']} | {row['mib']} | {wanted} |", flush=True)
    command = f"python benchmarks/methods.py --seeds {options.seeds} --rounds {options.rounds}"
    told = {
        "what": "all methods on digits, twenty devices of five sizes, one split; accuracy in percent over seeds",
        "command": " ".join([command, *(["--set", *options.set] if options.set else [])]),
        "version": f"fedrolex {fedrolex_version()}, torch {torch.__version__}, Python {platform.python_version()}",
        "hardware": f"{torch.get_num_threads()} threads of a {platform.machine()} CPU",
        "seeds": seeds,
        "figures": rows,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps({row["method"]: row["accuracy"] for row in rows}))


if __name__ == "__main__":
    main()
