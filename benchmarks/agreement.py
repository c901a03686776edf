"""Whether two engines train equally well: accuracy after some rounds, over seeds.

    python benchmarks/agreement.py [--engines loop graph] [--seeds 5] [--rounds 20] [--out results/agreement.json]

Handwritten digits and a PreResNet18, methods that train sub-models. Engines round differently, so that runs part after
some rounds; what must agree is how good they are. ``difference`` is the mean over seeds of the second engine's accuracy
minus the first's, in points, ``error`` its standard error; ``z`` is their ratio. Ends with one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch

from fedrolex.recipes import find_recipe
from fedrolex.runs.environment import environment
from fedrolex.runs.prepare import prepare

METHODS = ("fedrolex", "heterofl", "fed_dropout")
ENGINES = ("auto", "loop", "crew", "graph", "lanes", "ragged")


def accuracy(method: str, engine: str, seed: int, rounds: int) -> float:
    """In percent, after the last round."""
    settings = [f"method={method}", f"engine={engine}", f"seed={seed}", f"rounds={rounds}", "callbacks=[]"]
    made = prepare(find_recipe("digits").with_settings([*settings, "task.model=preresnet18", "task.width=16"]))
    for _ in range(rounds):
        made.run_round()
    return 100 * float(made.evaluate()["global_accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--engines", nargs=2, default=["loop", "graph" if cuda else "crew"], choices=ENGINES)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side, each a process")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds}: give at least 2, for an error of the mean")
    if options.rounds < 1 or options.at_once < 1:
        parser.error("--rounds and --at-once are at least 1")
    wrong = next((engine for engine in options.engines if engine in ENGINES[3:] and not cuda), None)
    if wrong is not None:
        parser.error(f"the engine {wrong} needs a CUDA device")
    if options.out is not None and not options.out.resolve().parent.is_dir():
        parser.error(f"--out {options.out}: there is no such folder")
    first, second = options.engines
    figures: dict[str, object] = {"engines": [first, second], "rounds": options.rounds, "seeds": options.seeds}
    seeds = range(1, options.seeds + 1)
    with ProcessPoolExecutor(options.at_once, mp_context=get_context("spawn")) as pool:
        runs = {
            pool.submit(accuracy, method, engine, seed, options.rounds): (method, engine, seed)
            for seed in seeds
            for method in options.methods
            for engine in options.engines
        }
        found: dict[tuple[str, str, int], float] = {}
        for future in as_completed(runs):
            method, engine, seed = runs[future]
            found[method, engine, seed] = future.result()
            print(f"{method}, {engine}, seed {seed}: {found[method, engine, seed]:.2f} %", flush=True)
    for method in options.methods:
        both = [(found[method, first, seed], found[method, second, seed]) for seed in seeds]
        apart = [b - a for a, b in both]
        error = statistics.stdev(apart) / len(apart) ** 0.5
        means = [statistics.mean(column) for column in zip(*both, strict=True)]
        figures |= {
            f"{method}_{first}": round(means[0], 2),
            f"{method}_{second}": round(means[1], 2),
            f"{method}_difference": round(statistics.mean(apart), 2),
            f"{method}_error": round(error, 2),
            f"{method}_z": round(statistics.mean(apart) / error, 2) if error else 0.0,
        }
        print(f"{method}: {first} {means[0]:.1f}, {second} {means[1]:.1f}, {statistics.mean(apart):+.2f} ± {error:.2f}")
    line = json.dumps({**figures, **environment()})
    if options.out is not None:
        options.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
