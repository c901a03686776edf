"""Several runs in one process on one GPU, at once and one after the other: the same tensors, in less time.

Four different recipes (FedRolex, HeteroFL, FedAvg at a quarter of the width with two settings), and eight seeds of one.
A small synthetic set of 32×32 images is made here: every class is a pattern under noise. PreResNet18, cohorts of 10 of
100 clients, capacities from 1 to 1/16.

    python benchmarks/side_by_side.py [--rounds 30] [--groups recipes seeds]
    python benchmarks/side_by_side.py --engine lanes --deterministic
    python benchmarks/side_by_side.py --device cpu --engine loop --width 8 --images 20 --rounds 3   # to try it

Every run is trained to its end with evaluations and checkpoints, alone and beside the others. All tensors of both
checkpoints are compared bit by bit: ragged kernels give the same bits every time, other engines only with
``--deterministic``. Times of rounds leave out the first five, in which steps are captured: alone, the mean over runs
and rounds; at once, the time from when every run is past its fifth round until the first is at its end, by the number
of rounds that all runs finish in it. Ends with one JSON object; the exit status is 1 where tensors differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedrolex import Classification, Examples, Recipe, Run, Training, prepare
from fedrolex.engines.gpu.precision import deterministic
from fedrolex.models import preresnet18
from fedrolex.runs import checkpoint
from fedrolex.runs.side_by_side import QUEUES, already, fits, side_by_side
from fedrolex.tasks.partition import Partition
from fedrolex.tasks.pixels import Pixels

CLIENTS = 100
FIRST = 5  # rounds that are not timed
DIFFERENT = {
    "fedrolex": ["method=fedrolex", "client.mask=zero", "method.rows=true"],
    "heterofl": ["method=heterofl", "client.momentum=0.9"],
    "fedavg": ["method=fedavg", "method.width=1/4"],
    "fedavg-other": ["method=fedavg", "method.width=1/4", "client.lr=0.02", "client.batch=16"],
}
SEEDS = 8


def synthetic(images: int, width: int) -> Classification:
    """Ten patterns under noise, as many images a client, of four classes each."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 3, 32, 32, generator=generator)

    def drawn(y: torch.Tensor) -> Examples:
        noise = torch.rand(len(y), 3, 32, 32, generator=generator)
        return Examples((255 * (0.3 * patterns[y] + 0.7 * noise)).to(torch.uint8), y)

    rows = torch.arange(CLIENTS * images)
    train = drawn((rows % 4 + rows // images) % 10)
    return Classification(
        "synthetic",
        lambda scale: preresnet18(width=width * scale),
        train,
        drawn(torch.arange(1000) % 10),
        Partition.of(range(i * images, (i + 1) * images) for i in range(CLIENTS)),
        pixels=Pixels.of((0.5,) * 3, (0.25,) * 3, 4, True),
    )


class Watch:
    """When every run finished each of its rounds."""

    def __init__(self, runs: int) -> None:
        self.times: list[list[float]] = [[] for _ in range(runs)]

    def of(self, run: int) -> Callable[[dict[str, Any]], None]:
        """Told of a run's rounds."""
        return lambda _: self.times[run].append(time.perf_counter())

    def alone(self) -> float:
        """Milliseconds of a round, where runs go one after the other."""
        return 1000 * statistics.mean(
            after - before
            for times in self.times
            for before, after in zip(times[FIRST - 1 :], times[FIRST:], strict=False)
        )

    def at_once(self) -> float:
        """Milliseconds for each round that any run finishes, while all runs are past their first rounds."""
        begin, end = max(times[FIRST - 1] for times in self.times), min(times[-1] for times in self.times)
        done = sum(begin < moment <= end for times in self.times for moment in times)
        return 1000 * (end - begin) / done if done else float("nan")


def made(name: str, recipe: Recipe, folder: Path, task: Classification) -> tuple[Run, Training]:
    """A run in a folder, ready to go."""
    return Run.create(folder / name, recipe, own_task=True), prepare(recipe, task)


def different(one: Path, other: Path) -> tuple[int, int, float]:
    """Of two checkpoints: how many tensors, how many of them differ, and by how much at most, relative to a norm."""
    first, second = (checkpoint.read(folder / "checkpoint.safetensors")[0] for folder in (one, other))
    assert first.keys() == second.keys()
    unequal = [name for name in first if not torch.equal(first[name], second[name])]
    apart = [float((first[n] - second[n]).norm() / first[n].norm().clamp_min(1e-12)) for n in unequal]
    return len(first), len(unequal), max(apart, default=0.0)


def compared(recipes: Mapping[str, Recipe], task: Classification) -> dict[str, Any]:
    """Train recipes alone and at once; prints a table, returns the figures."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        warm = replace(next(iter(recipes.values())), rounds=1)
        run, training = made("warm", warm, folder, task)  # what is compiled once in a process
        run.go(training)
        alone, together = Watch(len(recipes)), Watch(len(recipes))
        begin = time.perf_counter()
        for number, (name, recipe) in enumerate(recipes.items()):
            run, training = made(name, recipe, folder / "alone", task)
            run.go(training, alone.of(number))
            del training
        alone_seconds = time.perf_counter() - begin
        begin = time.perf_counter()
        both = [made(name, recipe, folder / "at-once", task) for name, recipe in recipes.items()]
        assert all(fits(training) for _, training in both)
        done = side_by_side(
            [already((run, training, together.of(n))) for n, (run, training) in enumerate(both)], len(both)
        )
        at_once_seconds = time.perf_counter() - begin
        found = {name: different(folder / "alone" / name, folder / "at-once" / name) for name in recipes}
    print(f"{'run':16} {'accuracy':>8} {'tensors':>8} {'differ':>7} {'at most by':>11}")
    for summary, (name, (tensors, unequal, apart)) in zip(done, found.items(), strict=True):
        print(f"{name:16} {100 * summary['global_accuracy']:7.1f}% {tensors:8} {unequal:7} {apart:11.2g}")
    slow, fast = alone.alone(), together.at_once()
    print(
        f"{slow:.1f} ms a round alone, {fast:.1f} at once: {slow / fast:.2f} times as many; "
        f"whole runs took {alone_seconds:.1f} s and {at_once_seconds:.1f} s"
    )
    return {
        "runs": len(recipes),
        "equal": not any(unequal for _, unequal, _ in found.values()),
        "tensors": sum(tensors for tensors, _, _ in found.values()),
        "apart": max(apart for _, _, apart in found.values()),
        "alone_round_ms": round(slow, 2),
        "at_once_round_ms": round(fast, 2),
        "speedup": round(slow / fast, 2),
        "alone_seconds": round(alone_seconds, 1),
        "at_once_seconds": round(at_once_seconds, 1),
        "engine": done[0]["engine"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--engine", default="graph", choices=["graph", "lanes", "ragged", "loop"])
    parser.add_argument("--precision", default="bf16", choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--groups", nargs="+", default=["recipes", "seeds"], choices=["recipes", "seeds"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--images", type=int, default=100, help="of each client")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--deterministic", action="store_true")
    options = parser.parse_args()
    if options.rounds <= FIRST and options.device == "cuda":
        parser.error(f"--rounds is {options.rounds}: the first {FIRST} are not timed, give more")
    if min(options.rounds, options.images, options.width) < 1:
        parser.error("give at least 1 to --rounds, --images and --width")
    os.environ.setdefault(*QUEUES)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: use --device cpu --engine loop, to try this script")
    if options.device == "cpu" and options.engine != "loop":
        parser.error(f"the engine {options.engine} needs --device cuda")
    precision: Any = options.precision if options.device == "cuda" else "fp32"
    rounds = max(options.rounds, FIRST + 1)
    recipe = Recipe(device=options.device, engine=options.engine, precision=precision, rounds=rounds).with_settings(
        [
            f"fleet.clients={CLIENTS}", "fleet.cohort=10", "client.batch=10", "client.lr=0.05", "client.clip=1.0",
            "evaluate_every=10", "checkpoint_every=10", "callbacks=[drift]",
        ]
    )  # fmt: skip
    groups = {
        "recipes": {name: recipe.with_settings(settings) for name, settings in DIFFERENT.items()},
        "seeds": {f"seed-{seed}": replace(recipe, seed=seed) for seed in range(1, SEEDS + 1)},
    }
    task = synthetic(options.images, options.width)
    figures: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0) if options.device == "cuda" else None,
        "torch": torch.__version__,
        "precision": precision,
        "rounds": rounds,
    }
    with deterministic(options.deterministic):
        for group in options.groups:
            print(f"--- {group}", flush=True)
            figures |= {f"{group}_{what}": value for what, value in compared(groups[group], task).items()}
    print(json.dumps(figures))
    exact = options.deterministic or options.engine in ("graph", "ragged") or options.device == "cpu"
    sys.exit(exact and not all(figures[f"{group}_equal"] for group in options.groups))


if __name__ == "__main__":
    main()
