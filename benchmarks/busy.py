"""The quickstart beside another busy process: how many times as long its rounds take as alone.

The other process is a single thread that never waits, as a browser or a build may be. Rounds with and without it take
turns in blocks, each block in a process of its own; the ratio is that of the medians over blocks. On an otherwise idle
machine:

    python benchmarks/busy.py [--rounds 20] [--blocks 5] [--threads 2] [--engines auto loop]

Ends with one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch

from fedrolex import ENGINES, Recipe, prepare

BUSY = "while True: pass"


def seconds(engine: str, rounds: int, threads: int) -> float:
    """Of some rounds of the quickstart with their evaluations, in this process."""
    torch.set_num_threads(threads)
    recipe = Recipe(device="cpu", engine=engine)
    made = prepare(recipe)
    made.run_round()
    made.evaluate()
    start = time.perf_counter()
    for number in range(1, rounds + 1):
        made.run_round()
        if number % recipe.evaluate_every == 0:
            made.evaluate()
    return time.perf_counter() - start


def block(engine: str, rounds: int, threads: int, *, busy: bool) -> float:
    """The same in a process of its own, alone or beside a busy one."""
    other = subprocess.Popen([sys.executable, "-c", BUSY]) if busy else None
    try:
        words = [sys.executable, __file__, "--measure", engine, "--rounds", str(rounds), "--threads", str(threads)]
        return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1])
    finally:
        if other is not None:
            other.kill()
            other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=5, help="of rounds, alone and beside a busy process each")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of PyTorch")
    parser.add_argument("--engines", nargs="+", default=["auto", "loop"], choices=ENGINES.names())
    parser.add_argument("--measure", metavar="ENGINE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in ("rounds", "blocks", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}: give at least 1")
    if options.measure:
        print(seconds(options.measure, options.rounds, options.threads))
        return
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"the machine is not idle (load {load:.1f}): there is no alone to compare with")
    figures: dict[str, object] = {"rounds": options.rounds, "threads": options.threads, "load_before": round(load, 2)}
    for engine in options.engines:
        alone, beside = [], []
        for _ in range(options.blocks):
            alone.append(block(engine, options.rounds, options.threads, busy=False))
            beside.append(block(engine, options.rounds, options.threads, busy=True))
        per_round = [1000 * statistics.median(each) / options.rounds for each in (alone, beside)]
        ratio = per_round[1] / per_round[0]
        print(
            f"{engine}: {per_round[0]:.0f} ms a round alone, {per_round[1]:.0f} ms beside a busy process: {ratio:.2f}"
        )
        figures |= {
            f"{engine}_alone_ms": round(per_round[0], 1),
            f"{engine}_busy_ms": round(per_round[1], 1),
            f"{engine}_busy_ratio": round(ratio, 2),
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
