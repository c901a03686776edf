"""Which columns, trained by whom, and how they count, beside what the same fleet could do without any.

scikit-learn's digits, 40 clients of five capacities, five of them a round, 80 rounds, a convolutional network: a run
takes two seconds, so that many seeds can be had on a CPU. Three splits: two labels a client; three labels, of which 7
to 9 are on devices of 1/8 and below only; and evenly. Choose by validation (a sixth of what clients would hold); the
test set is for the end.

    python benchmarks/columns.py [--seeds 12] [--splits two rare even] [--only NAME ...] [--out results/columns.json]

Ends with one flat JSON object: mean validation accuracy (per cent) by split and variant.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Collection
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from fedrolex import prepare
from fedrolex.core.version import code_version
from fedrolex.recipes import find_recipe

Row = dict[str, Any]
Results = dict[str, dict[str, Row]]
Measured = Callable[[list[str], int], Row]

SETTINGS = [
    "engine=loop", "device=cpu", "compare=false", "callbacks=[]", "client.mask=zero", "task.validation=0.15",
    "fleet.clients=40", "fleet.cohort=5", "rounds=80", "client.milestones=[64, 76]", "mean_over=10", "method.rows=true",
]  # fmt: skip
SPLITS = {
    "two": "task.partition={name: labels, labels: 2}",
    "rare": "task.partition={name: labels, labels: 3, rare: [7, 8, 9], rare_capacity: 1/8}",
    "even": "task.partition=iid",
}
ONE_BY_ONE = ["method=columns", "method.one_by_one=true"]
VARIANTS: dict[str, list[str]] = {
    "everyone trains 1 (a bound)": ["method=fedavg", "method.width=1", "method.own_width=true"],
    "everyone trains 1/4 (a bound)": ["method=fedavg", "method.width=1/4", "method.own_width=true"],
    "everyone trains 1/16": ["method=fedavg", "method.width=1/16", "method.own_width=true"],
    "only who can trains 1/2": ["method=columns", "method.columns=[1/2]"],
    "only who can trains 1/4": ["method=columns", "method.columns=[1/4]"],
    "only who can trains 1/8": ["method=columns", "method.columns=[1/8]"],
    "only who can trains 1/4, two models": ["method=columns", "method.columns=[1/4, 1/4]"],
    "both models of 1/4": [*ONE_BY_ONE, "method.columns=[1/4, 1/4]"],
    "heterofl": ["method=heterofl"],
    "fedrolex": ["method=fedrolex"],
    "columns": ["method=columns"],
    "columns in turns": ["method=columns", "method.turns=true"],
    "columns in turns, stratified": ["method=columns", "method.turns=true", "fleet.stratified=true"],
    "columns 1/2, 1/4, 1/8": ["method=columns", "method.columns=[1/2, 1/4, 1/8]"],
    "columns, two of 1/2": ["method=columns", "method.columns=[1/2, 1/2, 1/4, 1/8, 1/16]"],
    "columns, server momentum": ["method=columns", "method.server_optimizer={name: sgd, momentum: 0.9, lr: 0.3}"],
    "one by one": ONE_BY_ONE,
    "one by one, stratified": [*ONE_BY_ONE, "fleet.stratified=true"],
    "one by one, 1 too": [*ONE_BY_ONE, "method.columns=[1, 1/2, 1/4, 1/8, 1/16]"],
    "one by one, 1/4, 1/8, 1/16": [*ONE_BY_ONE, "method.columns=[1/4, 1/8, 1/16]"],
    "one by one, two each": [*ONE_BY_ONE, "method.columns=[1/2, 1/4, 1/4, 1/8, 1/8, 1/16, 1/16]"],
}  # fmt: skip


def trained(settings: list[str], seed: int) -> dict[str, float]:
    """What a run comes to: accuracies in per cent, and what clients sent and computed."""
    training = prepare(find_recipe("digits").with_settings([*settings, f"seed={seed}"]))
    rows = [training.run_round() for _ in range(80)]
    found = training.evaluate()
    shares = {"validation": "validation_accuracy", "test": "global_accuracy", "rare": "rare_accuracy"}
    return {
        **{name: 100 * found[key] for name, key in shares.items() if key in found},
        "mib": sum(row["bytes_up"] + row["bytes_down"] for row in rows) / 2**20,
        "gmacs": sum(row["macs"] for row in rows) / 1e9,
    }


def over_seeds(settings: list[str], seeds: int) -> Row:
    """Means over seeds, and the standard error of the validation accuracy's."""
    every = [trained(settings, seed) for seed in range(1, seeds + 1)]
    means = {name: round(mean(each[name] for each in every), 2) for name in every[0]}
    error = stdev(each["validation"] for each in every) / sqrt(seeds) if seeds > 1 else None
    return {**means, "error": error and round(error, 2), "seeds": [round(each["validation"], 1) for each in every]}


def compare(
    doc: str | None, names: Collection[str], measured: Measured, said: Callable[[Row], str], what: str
) -> Results:
    """What the command line asks for: every variant on every split, shown as they are done, written in the end.

    Args:
        doc: what the program is.
        names: of the variants that can be asked for.
        measured: what settings come to over so many seeds.
        said: the line of such a row.
        what: the figures are, for the file.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=list(SPLITS))
    parser.add_argument("--only", nargs="+", choices=names, default=list(names))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: Results = {}
    for split in options.splits:
        found[split] = {}
        for name in options.only:
            row = found[split][name] = measured([*SETTINGS, SPLITS[split], *VARIANTS[name]], options.seeds)
            print(f"{split:5} {name:40} {said(row)}", flush=True)
    if options.out is not None:
        about = {
            "what": f"scikit-learn's digits, 40 clients, 5 a round, 80 rounds: {what}, means over seeds 1 to N, %",
            "command": f"python benchmarks/{Path(sys.argv[0]).name} --seeds {options.seeds}",
            "version": f"fedrolex {code_version()}, torch {torch.__version__}",
            "hardware": f"one core of {platform.machine()}",
            "settings": SETTINGS,
            "splits": SPLITS,
            "variants": {name: VARIANTS[name] for name in options.only},
            "results": found,
        }
        options.out.write_text(json.dumps(about, indent=1) + "\n")
    return found


def main() -> None:
    def said(row: Row) -> str:
        shares = f"validation {row['validation']:5.1f} ± {row['error'] or 0:.1f}  test {row['test']:5.1f}"
        return f"{shares}  {row['gmacs']:6.1f} GMACs  {row['mib']:6.1f} MiB"

    found = compare(__doc__, VARIANTS, over_seeds, said, "accuracy")
    print(json.dumps({f"{s}: {name}": row["validation"] for s, rows in found.items() for name, row in rows.items()}))


if __name__ == "__main__":
    main()
