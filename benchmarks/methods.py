"""All methods on one small real task under one split: accuracy over seeds, seconds, bytes, needs.

    python benchmarks/methods.py [--seeds 1,2,3] [--rounds 40] [--out results/methods.json] [--set KEY=VALUE …]

Handwritten digits, twenty devices of five sizes, ten a round. A tenth of the training images is public and a tenth is
for validation, for everyone: methods that need neither do without them too. Methods that train one size train what
the smallest device can hold, and, as a second line, 1/4 on the devices that can hold that. Two more lines are bounds:
everyone trains the full model, which they cannot; and the full model on the public images with their true labels, which
is the most that Fed-ET's server could learn if all labels it makes were right. "families" are a VGG, two ResNets and a
ConvNet at two widths side by side. Ends with one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fedrolex import METHODS, FedET, Needs, Recipe, Run, __version__, prepare
from fedrolex.methods.distillation import Public
from fedrolex.methods.fedet import Consensus
from fedrolex.recipes import find_recipe

FAMILIES = 'task.models={1: "vgg11:4", 1/2: "resnet8:8", 1/4: "resnet8:4"}'
BOUND = "public images, true labels (a bound for fedet)"
SPLIT = ["compare=false", "task.public=0.1", "task.validation=0.1", "evaluate_every=5"]


def trained(recipe: Recipe) -> dict[str, Any]:
    """The summary of one run."""
    with tempfile.TemporaryDirectory() as scratch:
        return Run.create(Path(scratch) / "run", recipe).go(prepare(recipe))


def needs_of_all() -> dict[str, Needs]:
    """What every published method needs, by its name."""
    return {name: METHODS.find(name).needs for name in METHODS.own() if name != "submodels"}


def lines() -> dict[str, list[str]]:
    """What is run, by name."""
    found: dict[str, list[str]] = {}
    for name, needs in needs_of_all().items():
        found[f"{name}, 1/16" if needs.one_size else name] = [f"method={name}"]
        if needs.one_size:
            found[f"{name}, who can 1/4"] = [f"method={name}", "method.width=1/4", "method.able_only=true"]
    found["feddf, families, at most 50 steps"] = ["method=feddf", FAMILIES, "method.steps=50"]
    found["fedet, families"] = ["method=fedet", FAMILIES]
    found["dsfl, families"] = ["method=dsfl", FAMILIES]
    found["fedavg, everyone trains 1 (they cannot)"] = ["method=fedavg", "method.width=1"]
    return found


def on_public_images(recipe: Recipe) -> float:
    """Accuracy in percent of Fed-ET's server model after as many steps as in a run, on true labels."""
    made = prepare(recipe)
    task, method, model = made.server.classification, made.method, made.server.main.module
    assert isinstance(method, FedET)
    assert task.public is not None
    inputs, y = task.inputs(task.public.x), task.public.y
    nobody = torch.zeros(len(y), dtype=torch.bool)
    consensus = Consensus(y, torch.zeros(len(y), task.classes), nobody)
    for round in range(recipe.rounds):
        method.teach(model, Public(inputs, recipe.seed, round), consensus)
    return 100 * float(made.measure(task, model)["global_accuracy"])


def with_spread(row: dict[str, Any]) -> str:
    """An accuracy; one seed has no spread."""
    return f"{row['accuracy']}" if row["spread"] is None else f"{row['accuracy']} ± {row['spread']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", nargs="+", help="names of methods or of lines")
    parser.add_argument("--set", nargs="+", default=[], help="settings for all")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    rows: list[dict[str, Any]] = []
    print("| method | accuracy | best | seconds | MiB down and up | needs |\n|---|---|---|---|---|---|")
    for what, settings in lines().items():
        name = settings[0].partition("=")[2]
        if options.only and not {name, what} & {*options.only}:
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
        needs = [
            key
            for key, value in asdict(METHODS.find(name).needs).items()
            if value and key not in ("larger_server", "families")
        ]
        row = {
            "method": what,
            "accuracy": round(statistics.mean(found), 1),
            "spread": round(statistics.stdev(found), 1) if len(found) > 1 else None,
            "best": round(100 * statistics.mean(one["best_global_accuracy"] for one in every), 1),
            "seconds": round(statistics.median(one["seconds"] for one in every), 1),
            "mib": round(every[0]["bytes"] / 2**20, 2),
            "needs": needs,
        }
        rows.append(row)
        accuracy, wanted = with_spread(row), ", ".join(needs).replace("_", " ")
        print(f"| {what} | {accuracy} | {row['best']} | {row['seconds']} | {row['mib']} | {wanted} |", flush=True)
    if not options.only or {"fedet", BOUND} & {*options.only}:
        settings = [*SPLIT, "method=fedet", *options.set]
        recipes = [find_recipe("digits").with_settings([*settings, f"seed={seed}"]) for seed in seeds]
        bound = [on_public_images(replace(recipe, rounds=options.rounds)) for recipe in recipes]
        what = BOUND
        spread = round(statistics.stdev(bound), 1) if len(bound) > 1 else None
        rows.append({"method": what, "accuracy": round(statistics.mean(bound), 1), "spread": spread})
        print(f"| {what} | {with_spread(rows[-1])} | | | | |", flush=True)
    command = f"python benchmarks/methods.py --seeds {options.seeds} --rounds {options.rounds}"
    told = {
        "what": "all methods on digits, twenty devices of five sizes, one split; accuracy in percent over seeds",
        "command": " ".join([command, *(["--set", *options.set] if options.set else [])]),
        "version": f"fedrolex {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "hardware": f"{torch.get_num_threads()} threads of a {platform.machine()} CPU",
        "seeds": seeds,
        "figures": rows,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps({row["method"]: row["accuracy"] for row in rows}))


if __name__ == "__main__":
    main()
