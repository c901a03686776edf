"""Accuracy against ε: digits on a hundred devices of three sizes, private averages with more and less noise.

    python benchmarks/privacy.py [--seeds 1 2 3] [--rounds 60] [--figure docs/privacy.svg]

Ends with one JSON object: for every noise ε, δ and the accuracies of the seeds.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fedrolex import Recipe, Run, prepare
from fedrolex.cli.figures import page
from fedrolex.recipes import find_recipe

NOISES = (0.0, 0.3, 0.6, 1.0, 2.0, 4.0)
SETTINGS = ["task.width=8", "fleet.clients=100", "fleet.cohort=40", "fleet.capacities=[1, 1/2, 1/4]", "callbacks=[]",
            "method=private", "method.quantile=null", "method.clip=1", "client.lr=0.1", "client.batch=8",
            "client.epochs=2", "evaluate_every=1000", "engine=loop", "device=cpu"]  # fmt: skip


def trained(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """The summary of a run."""
    return Run.create(folder, recipe).go(prepare(recipe))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    base = replace(find_recipe("digits").with_settings(SETTINGS), rounds=given.rounds, compare=False)
    found: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        for noise in NOISES:
            runs = []
            for seed in given.seeds:
                recipe = replace(base.with_settings([f"method.noise={noise}"]), seed=seed)
                runs.append(trained(recipe, Path(folder) / f"{noise}-{seed}"))
            scores = [run["global_accuracy"] for run in runs]
            epsilon = None if not noise else round(runs[0]["epsilon"], 3)
            found.append({"noise": noise, "epsilon": epsilon, "delta": runs[0]["delta"], "accuracy": scores})
            print(runs[0]["privacy"], [f"{score:.3f}" for score in scores], flush=True)
    if given.figure is not None:
        draw(found, given.figure)
    about = {"torch": torch.__version__, "machine": platform.machine(), "seeds": given.seeds, "rounds": given.rounds}
    print(json.dumps({**about, "settings": SETTINGS, "found": found}))


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Accuracy over ε; a line for no noise."""
    with page(path, 1, (6, 3.6), "both") as axes:
        noisy = [each for each in found if each["epsilon"] is not None]
        means = [sum(each["accuracy"]) / len(each["accuracy"]) for each in noisy]
        axes.plot([each["epsilon"] for each in noisy], means, marker="o", color="#2a6fbb")
        for each in noisy:
            axes.plot([each["epsilon"]] * len(each["accuracy"]), each["accuracy"], ".", color="#2a6fbb", alpha=0.4)
        plain = [each for each in found if each["epsilon"] is None]
        for each in plain:
            axes.axhline(sum(each["accuracy"]) / len(each["accuracy"]), color="#c1762a", linestyle="--")
        axes.set_xscale("log")
        axes.set(xlabel="ε (one client added or removed)", ylabel="accuracy on unseen digits", ylim=(0, 1))


if __name__ == "__main__":
    main()
