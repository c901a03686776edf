"""One round of the paper's cohort on several engines, in turn, on the same machine at the same precision.

Ten clients, two of each capacity from 1 to 1/16, 500 CIFAR-shaped images each, PreResNet18, batch 10 with SGD
(momentum, clipping, label masks: the paper's settings). Images are random: the time of a step does not depend
on them. Time is split into training the cohort, and the rest of a round (averaging, checks, drift).

    python benchmarks/cohort.py --device cuda [--precision bf16] [--compiled] [--rounds 5]
    python benchmarks/cohort.py --device cpu --images 30 [--clients 50 --mix income] [--engines loop crew auto]

On a CPU the engines take turns round by round, and a speedup is the median of the ratios of rounds side by side: a
machine that is busy with something else slows both. ``auto`` says what it chose. Ends with one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fedrolex import Classification, Examples, Recipe
from fedrolex.engines import Auto, Crew, Engine, Graph, Loop, Stack
from fedrolex.models import preresnet18
from fedrolex.runs import Training, prepare
from fedrolex.tasks.partition import Partition
from fedrolex.tasks.pixels import Pixels

FLOOR = 0.93  # milliseconds of a cohort step where batch size costs nothing: ten clients in batches of 500, H200


def paper_cohort(recipe: Recipe, images: int, width: int) -> Training:
    """All clients of the fleet, with as many images each, in every round."""
    generator = torch.Generator().manual_seed(0)
    clients = recipe.fleet.clients or 10
    x = torch.randint(0, 256, (clients * images, 3, 32, 32), dtype=torch.uint8, generator=generator)
    y = torch.arange(clients * images) % 2 + torch.arange(clients * images) // images % 9
    data = Examples(x, y)
    task = Classification(
        "random",
        lambda scale: preresnet18(width=width * scale),
        data,
        data.rows(torch.arange(100)),
        Partition.of(range(i * images, (i + 1) * images) for i in range(clients)),
        pixels=Pixels.of((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), 4, True),
        classes=10,
    )
    return prepare(recipe, task)


def timed(made: Training, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of the engine's work and of the rest, round by round."""
    engine: Engine = made.engine
    spent: list[float] = []

    class Clock:
        @property
        def together(self) -> bool:
            return engine.together

        def run(self, plan: Any) -> Any:
            wait()
            start = time.perf_counter()
            answers = engine.run(plan)
            first = next(answers)  # graph trains the whole cohort before its first answer
            wait()
            total = time.perf_counter() - start
            yield first
            while True:
                start = time.perf_counter()
                answer = next(answers, None)
                wait()
                total += time.perf_counter() - start
                if answer is None:
                    break
                yield answer
            spent.append(total)

    made.engine = Clock()
    whole = []
    for _ in range(rounds):
        start = time.perf_counter()
        row = made.run_round()
        wait()
        whole.append(time.perf_counter() - start)
        assert not row["dropped"], row["dropped"]
    made.engine = engine
    return spent, [all_ - part for all_, part in zip(whole, spent, strict=True)]


def in_turn(engines: Mapping[str, tuple[Training, Callable[[Training], Engine]]], rounds: int) -> dict[str, Any]:
    """Rounds of all engines side by side: milliseconds, and how many times faster than the first."""
    figures: dict[str, Any] = {}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for name, (made, make) in engines.items():
        made.engine = make(made)
        start = time.perf_counter()
        timed(made, 1)
        figures[f"{name}_first_round_seconds"] = round(time.perf_counter() - start, 2)
        if isinstance(made.engine, Auto) and made.engine.choice is not None:
            figures[f"{name}_choice"] = str(made.engine.choice)
            print(f"{name}: {made.engine.choice} ({made.engine.choice.why})")
    for _ in range(rounds):
        for name, (made, _) in engines.items():
            train, rest = timed(made, 1)
            spent[name].append((train[0], rest[0]))
    first = spent[next(iter(engines))]
    for name, pairs in spent.items():
        whole = [sum(pair) for pair in pairs]
        figures[f"{name}_round_ms"] = round(1000 * statistics.median(whole), 1)
        figures[f"{name}_train_ms"] = round(1000 * statistics.median(train for train, _ in pairs), 1)
        ratios = [sum(one) / sum(other) for one, other in zip(first, pairs, strict=True)]
        figures[f"{name}_speedup"] = round(statistics.median(ratios), 2)
        figures[f"{name}_speedup_range"] = [round(min(ratios), 2), round(max(ratios), 2)]
        steps = [one[0] / other[0] for one, other in zip(first, pairs, strict=True)]
        figures[f"{name}_train_speedup"] = round(statistics.median(steps), 2)
        print(
            f"{name:5} {figures[f'{name}_round_ms']} ms a round ({1000 * min(whole):.1f} to {1000 * max(whole):.1f}), "
            f"{figures[f'{name}_speedup']} times as fast ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    return figures


def wait() -> None:
    """For the device to be done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default=None, choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--engines", nargs="+", choices=["loop", "stack", "crew", "auto", "graph"])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--mix", default="uniform", help="of capacities, as in recipes")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    options.precision = options.precision or ("fp32" if on_cpu else "bf16")
    options.engines = options.engines or (["loop", "auto"] if on_cpu else ["loop", "graph"])
    settings = [
        f"precision={options.precision}", f"client.batch={options.batch}", f"fleet.clients={options.clients}",
        f"fleet.cohort={options.clients}", f"fleet.capacities={options.mix}",
        "client.lr=0.02", "client.weight_decay=5e-4", "client.clip=1.0", "client.mask=zero", "method.rows=true",
    ]  # fmt: skip
    recipe = Recipe(device=options.device).with_settings(settings)
    precision: Any = options.precision
    known: dict[str, Callable[[Training], Engine]] = {
        "loop": lambda made: Loop(made.model, precision=precision),
        "stack": lambda made: Stack(made.model, precision=precision),
        "crew": lambda made: Crew(made.model, precision=precision),
        "auto": lambda made: Auto(made.model, precision=precision, rounds=1000),
        "graph": lambda made: Graph(made.model, precision=precision, compiled=options.compiled),
    }
    engines = {name: known[name] for name in options.engines}
    steps = -(-options.images // options.batch)
    figures: dict[str, Any] = {"precision": options.precision, "batch": options.batch, "compiled": options.compiled}
    if on_cpu:
        figures |= in_turn(
            {name: (paper_cohort(recipe, options.images, options.width), make) for name, make in engines.items()},
            options.rounds,
        )
        print(json.dumps(figures))
        return
    for name, make in engines.items():
        made = paper_cohort(recipe, options.images, options.width)
        made.engine = make(made)
        start = time.perf_counter()
        timed(made, 1)
        figures[f"{name}_first_round_seconds"] = round(time.perf_counter() - start, 2)
        train, rest = timed(made, options.rounds if name != "loop" else max(2, options.rounds // 3))
        both = [a + b for a, b in zip(train, rest, strict=True)]
        figures[f"{name}_round_ms"] = round(1000 * statistics.median(both), 1)
        figures[f"{name}_train_ms"] = round(1000 * statistics.median(train), 1)
        figures[f"{name}_rest_ms"] = round(1000 * statistics.median(rest), 1)
        figures[f"{name}_step_ms"] = round(1000 * statistics.median(train) / steps, 3)
        spread = f"{1000 * min(both):.1f} to {1000 * max(both):.1f}"
        print(
            f"{name:5} {figures[f'{name}_round_ms']} ms a round ({spread}), training {figures[f'{name}_train_ms']} ms"
        )
        if torch.cuda.is_available():
            figures[f"{name}_peak_mib"] = torch.cuda.max_memory_allocated() // 2**20
            torch.cuda.reset_peak_memory_stats()
    for name in engines:
        if name != "loop" and "loop" in engines:
            figures[f"{name}_speedup"] = round(figures["loop_round_ms"] / figures[f"{name}_round_ms"], 2)
    if "graph" in engines and options.mix == "uniform" and options.clients == 10:
        figures["floor_ratio"] = round(figures["graph_step_ms"] / FLOOR, 2)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
