"""Does a run of a thousand rounds grow? Resident memory, round by round, of tiny runs on a CPU.

    python benchmarks/soak.py [--rounds 1000] [--kinds plain kept compare]

Every kind runs in a process of its own: ``plain`` in memory, ``kept`` in a folder, with checkpoints, evaluation every
ten rounds and all callbacks, ``state`` with clients that keep something (SCAFFOLD), ``compare`` the runs of
``compare: true`` one after the other in one process, ``crew`` with a worker for every core. After a tenth of the rounds
for warming up, a line is put through the memory of the others: its slope is the growth. Resident memory goes up and
down by itself, so what Python holds is counted, too: objects that the garbage collector knows, and tensors.

The last line is one flat JSON object: for every kind, MiB after the warm-up and at the end, growth in MiB a hundred
rounds, growth in objects and tensors.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedrolex import Callback, ClientRecipe, Examples, FleetRecipe, Recipe, Task, Training, train
from fedrolex.core import CALLBACKS
from fedrolex.recipes import alternatives

KINDS = ("plain", "kept", "state", "compare", "crew")
WARM_UP = 0.1
EVERY = 10


def task() -> Task:
    """Three classes of twenty numbers, a small network, ten clients."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 20, generator=generator)
    y = x[:, :3].argmax(1)
    return Task.split(
        build=lambda scale: nn.Sequential(nn.Linear(20, 16 * scale), nn.ReLU(), nn.Linear(16 * scale, 3)),
        train=Examples(x[:240], y[:240]),
        test=Examples(x[240:], y[240:]),
        clients=10,
    )


def megabytes() -> float:
    """Resident memory of this process and its children."""
    own = os.getpid()
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if own in (int(folder.name), parent):
                total += int((folder / "statm").read_text().split()[1])
        except (OSError, ValueError):
            continue
    return total * os.sysconf("SC_PAGE_SIZE") / 2**20


class Watch(Callback):
    """Notes memory, objects and tensors after every tenth round."""

    seen: list[tuple[float, int, int]]

    def __init__(self) -> None:
        self.seen = []

    def row(self, training: Training, row: dict[str, Any]) -> None:
        """Look."""
        if row["round"] % EVERY == 0:
            gc.collect()
            objects = gc.get_objects()
            tensors = sum(issubclass(type(each), torch.Tensor) for each in objects)
            self.seen.append((megabytes(), len(objects), tensors))


WATCH = Watch()


@CALLBACKS.register("soak")
class Watching(Callback):
    """Tells the one watch of this process."""

    def row(self, training: Training, row: dict[str, Any]) -> None:
        """Look."""
        WATCH.row(training, row)


def soak(kind: str, rounds: int) -> None:
    """Train; the last line printed has what was seen."""
    recipe = Recipe(
        rounds=rounds,
        device="cpu",
        engine="crew" if kind == "crew" else "loop",
        callbacks=["soak"],
        evaluate_every=rounds,
        fleet=FleetRecipe(clients=10, cohort=4, capacities=["1", "1/2", "1/4"]),
        client=ClientRecipe(batch=8),
    )
    with tempfile.TemporaryDirectory() as folder:
        if kind == "kept":
            settings = ["callbacks=[drift, tensorboard, soak]", f"evaluate_every={EVERY}", "checkpoint_every=1"]
            train(recipe.with_settings(settings), task(), out=Path(folder) / "run")
        elif kind == "state":
            train(recipe.with_settings(["method=scaffold", "checkpoint_every=5"]), task(), out=Path(folder) / "run")
        elif kind == "compare":
            each = recipe.with_settings([f"rounds={rounds // 4}"])
            for one in [each, *alternatives(each).values()]:
                train(one, task())
        else:
            train(recipe, task())
    print(json.dumps(WATCH.seen))


def figures(kind: str, rounds: int) -> dict[str, float]:
    """A kind in a process of its own, and what is to be said of it."""
    done = subprocess.run(
        [sys.executable, __file__, "--kinds", kind, "--rounds", str(rounds), "--alone"],
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    seen = json.loads(done.stdout.splitlines()[-1])
    rest = seen[int(len(seen) * WARM_UP) :]
    memory, objects, tensors = zip(*rest, strict=True)
    found = {
        f"{kind}_mib_warm": round(memory[0], 1),
        f"{kind}_mib_end": round(memory[-1], 1),
        f"{kind}_mib_a_hundred_rounds": round(slope(memory) * 100 / EVERY, 3),
        f"{kind}_objects": objects[-1] - objects[0],
        f"{kind}_tensors": tensors[-1] - tensors[0],
    }
    print(", ".join(f"{key} {value}" for key, value in found.items()), file=sys.stderr, flush=True)
    return found


def slope(values: tuple[float, ...]) -> float:
    """Of a line through values at equal distances, by least squares."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    above = sum((place - middle) * (value - mean) for place, value in enumerate(values))
    return above / sum((place - middle) ** 2 for place in range(len(values)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        soak(given.kinds[0], given.rounds)
        return
    found: dict[str, float] = {"rounds": given.rounds}
    for kind in given.kinds:
        found |= figures(kind, given.rounds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
