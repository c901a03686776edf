"""One round of the paper's cohort on several engines, on the same machine at the same precision.

Ten clients, two of each capacity from 1 to 1/16, 500 CIFAR-shaped images each, PreResNet18, batch 10 with SGD
(clipping, label masks: the paper's settings). Images are random: the time of a step does not depend on them.

    python benchmarks/cohort.py --device cuda [--precision bf16] [--rounds 20] [--batch 128 --optimizer adam]
    python benchmarks/cohort.py --device cuda --seeds 4 [--engines graph]
    python benchmarks/cohort.py --device cuda --fleet 100 --rounds 40 [--engines graph]
    python benchmarks/cohort.py --device cuda --words --clients 200
    python benchmarks/cohort.py --device cuda --model lenet --mix '["1"]' --batch 64 --precision fp32
    python benchmarks/cohort.py --device cpu --images 30 [--clients 50 --mix income] [--engines loop crew auto]

On a GPU a round is everything but evaluation; its parts (load, train, fold) are timed in rounds of their own, waiting
for the device after each. ``--seeds`` trains so many cohorts side by side; ``--fleet`` draws every round's cohort from
so many clients, as real runs do, so that its widths change. On a CPU the engines take turns round by
round, and a speedup is the median of the ratios of rounds side by side: a machine that is busy with something else
slows both. ``auto`` says what it chose. Ends with one JSON object.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedrolex import ENGINES, Classification, Examples, FedrolexError, Recipe, Training, prepare
from fedrolex.clients.messages import MODEL
from fedrolex.core.allocator import keep_memory
from fedrolex.engines.gpu.graph import Graph
from fedrolex.engines.gpu.ragged import Ragged
from fedrolex.engines.gpu.sharing import GATE, own_stream
from fedrolex.models import LeNet, preresnet18
from fedrolex.rounds.engine import Engine
from fedrolex.runs.side_by_side import QUEUES
from fedrolex.tasks.partition import Partition
from fedrolex.tasks.pixels import Pixels

ON_CPU = ("loop", "crew", "auto")
ON_GPU = ("loop", "graph", "ragged", "stacked", "lanes")
FLOOR = 0.93  # milliseconds of a cohort step where batch size costs nothing: ten clients in batches of 500, H200


def paper_cohort(recipe: Recipe, images: int, build: Callable[[int], nn.Module]) -> Training:
    """A fleet of clients with as many images each."""
    generator = torch.Generator().manual_seed(0)
    clients = recipe.fleet.clients or 10
    x = torch.randint(0, 256, (clients * images, 3, 32, 32), dtype=torch.uint8, generator=generator)
    y = torch.arange(clients * images) % 2 + torch.arange(clients * images) // images % 9
    data = Examples(x, y)
    task = Classification(
        "random",
        build,
        data,
        data.rows(torch.arange(clients * images).repeat(2)[:10_000]),
        Partition.of(range(i * images, (i + 1) * images) for i in range(clients)),
        pixels=Pixels.of((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), 4, True),
        classes=10,
    )
    return prepare(recipe, task)


def word_cohort(recipe: Recipe) -> Training:
    """Users with 25 to 128 sentences of random words, and the paper's Transformer of 3 million parameters."""
    draw = np.random.default_rng(0)
    chances = 1 / (np.arange(12_000) + 5)
    chances /= chances.sum()
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = folder / "users.jsonl"
    with open(file, "w") as out:
        for user in range(3 * (recipe.fleet.cohort or 200)):
            count = int(draw.integers(25, 129))
            said = [" ".join(f"w{w}" for w in draw.choice(12_000, 12, p=chances)) for _ in range(count)]
            out.write(json.dumps({"user": f"u{user}", "sentences": said}) + "\n")
    return prepare(recipe.with_settings([f"task.data={file}"]))


def engine_for(name: str, precision: Any, made: Training) -> Engine:
    """An engine by name, for a run's device."""
    found: Engine = ENGINES.find(name)(precision=precision, device=made.server.device)
    return found


def timed(made: Training, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of the engine's work and of the rest, round by round."""
    engine: Engine = made.engine
    spent: list[float] = []

    class Clock(Engine):
        def supports(self, plan: Any) -> str | None:
            return engine.supports(plan)

        def average(self, *answers: Any) -> Any:
            return engine.average(*answers)

        def run(self, plan: Any) -> Any:
            wait()
            start = time.perf_counter()
            answers = engine.run(plan)
            first = next(answers)  # graph trains the whole cohort before its first answer
            wait()
            total = time.perf_counter() - start
            self.together = engine.together
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

    made.engine = Clock(precision=engine.precision, device=engine.device)
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
        if name == "auto":
            figures["auto_choice"] = type(made.engine).__name__.lower()
            print(f"auto: {figures['auto_choice']}")
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


def cpu_floor(made: Training) -> dict[str, float]:
    """What a round's multiplications would take at the speed of a large float32 product, measured here and now."""
    a = torch.randn(2048, 2048)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    speed = 2 * 2048**3 / best
    plan, of_one = made.plan(made.method.jobs(made.server, made.server.round)), dict[Fraction, float]()
    work = 0.0
    for job in plan.jobs:
        data = plan.task.client(job.client)
        if job.capacity not in of_one:
            module = plan.axes(job).cut(plan.networks[job.network].module, job.window).train()
            x = plan.task.inputs(data.x[: plan.work.batch])
            with FlopCounterMode(display=False) as counter:
                plan.task.loss(module(x), data.y[: plan.work.batch]).backward()
            of_one[job.capacity] = counter.get_total_flops() / len(x)
        work += of_one[job.capacity] * len(data) * plan.work.epochs
    return {
        "gflop": round(work / 1e9, 1),
        "product_gflops": round(speed / 1e9, 1),
        "floor_ms": round(1000 * work / speed, 1),
    }


def wait() -> None:
    """For the device to be done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rounds_of(made: Training, rounds: int) -> list[float]:
    """Milliseconds of whole rounds."""
    found = []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        row = made.run_round()
        wait()
        found.append(1000 * (time.perf_counter() - start))
        assert not row["dropped"], row["dropped"]
    return found


def parts_of(made: Training, rounds: int) -> dict[str, float]:
    """Milliseconds of the parts of a round, median: load, train, fold, other; and of an evaluation."""
    engine: Any = made.engine
    way = engine.way if isinstance(engine, Graph) else engine
    spent: dict[str, list[float]] = {"load": [], "train": [], "fold": []}
    inner: Any = way.places[MODEL] if isinstance(way, Ragged) else way
    names = {"load": ["_load", "_fill"], "train": ["_train"]}
    if isinstance(way, Ragged):
        names = {"load": ["start", "fill"], "train": ["launch", "join"]}

    def watched(what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            wait()
            start = time.perf_counter()
            found = work(*arguments)
            wait()
            spent[what][-1] += 1000 * (time.perf_counter() - start)
            return found

        return run

    before = {name: getattr(inner, name) for group in names.values() for name in group}
    for what, group in names.items():
        for name in group:
            setattr(inner, name, watched(what, before[name]))
    engine.average = watched("fold", engine.average)
    whole = []
    for _ in range(rounds):
        for parts in spent.values():
            parts.append(0.0)
        whole += rounds_of(made, 1)
    for name in before:
        delattr(inner, name)
    del engine.average
    found = {f"{what}_ms": round(statistics.median(parts), 1) for what, parts in spent.items()}
    found["other_ms"] = round(statistics.median(whole) - sum(found.values()), 1)
    made.evaluate()
    wait()
    start = time.perf_counter()
    made.evaluate()
    wait()
    return {**found, "evaluate_ms": round(1000 * (time.perf_counter() - start), 1)}


@contextmanager
def utilisation() -> Iterator[list[float]]:
    """How busy the GPU is inside, in percent of the time, as its driver says; nothing where it does not."""
    seen: list[float] = []
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    try:
        driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        yield seen
        return

    def read() -> None:
        for line in driver.stdout or ():
            with suppress(ValueError):
                seen.append(float(line))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield seen
    finally:
        driver.terminate()
        reader.join(2)


def seeds_together(makes: list[Callable[[], Training]], rounds: int) -> float:
    """Milliseconds of a round of one seed, where all are trained side by side."""
    made = [make() for make in makes]

    def train(one: Training) -> None:
        with own_stream(one.server.device):
            for _ in range(rounds):
                one.run_round()
                GATE.pause()

    with ThreadPoolExecutor(len(made)) as pool:
        list(pool.map(train, made))  # compile and capture
        wait()
        start = time.perf_counter()
        list(pool.map(train, made))
        wait()
    return 1000 * (time.perf_counter() - start) / rounds / len(made)


def on_gpu(options: argparse.Namespace, makes: Mapping[str, Callable[[], Training]]) -> dict[str, Any]:
    """Rounds of every engine, their parts, and how far from what the GPU could do."""
    figures: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0)}
    for name, make in makes.items():
        torch.cuda.reset_peak_memory_stats()
        made = make()
        figures[f"{name}_first_round_seconds"] = round(rounds_of(made, 1)[0] / 1000, 2)
        rounds_of(made, 0 if name == "loop" else 2)
        with utilisation() as seen:
            whole = rounds_of(made, options.rounds if name != "loop" else max(1, options.rounds // 10))
        figures[f"{name}_round_ms"] = round(statistics.median(whole), 1)
        figures[f"{name}_round_range_ms"] = [round(min(whole), 1), round(max(whole), 1)]
        figures[f"{name}_utilisation_percent"] = round(statistics.mean(seen[1:]), 1) if len(seen) > 1 else None
        if name != "loop":
            figures |= {f"{name}_{part}": ms for part, ms in parts_of(made, options.rounds).items()}
        figures[f"{name}_peak_mib"] = torch.cuda.max_memory_allocated() // 2**20
        print(f"{name:5} {figures[f'{name}_round_ms']} ms a round ({min(whole):.1f} to {max(whole):.1f})", flush=True)
        del made
        torch.cuda.empty_cache()
    if options.seeds > 1 and "graph" in makes:
        together = seeds_together([makes["graph"]] * options.seeds, options.rounds)
        figures["seeds"] = options.seeds
        figures["seed_round_ms"] = round(together, 1)
        figures["seeds_speedup"] = round(figures["graph_round_ms"] / together, 2)
        print(f"{options.seeds} seeds side by side: {together:.1f} ms a seed and round")
    for name in makes if "loop" in makes else ():
        if name != "loop":
            figures[f"{name}_speedup"] = round(figures["loop_round_ms"] / figures[f"{name}_round_ms"], 2)
    paper = not options.words and options.mix == "uniform" and options.clients == 10 and not options.fleet
    if "graph" in makes and paper:
        floor = FLOOR * options.images / 10
        figures["floor_ratio"] = round(figures["graph_train_ms"] / floor, 2)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default=None, choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--rounds", type=int, default=None, help="timed; 5 on a CPU, 20 on a GPU")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--model", default="preresnet18", choices=["preresnet18", "lenet"])
    parser.add_argument("--width", type=int, default=None, help="64, of a LeNet 6")
    parser.add_argument("--batch", type=int, default=None, help="10, with words 8")
    parser.add_argument("--optimizer", default=None, choices=["sgd", "adam"])
    parser.add_argument("--engines", nargs="+", choices=list(dict.fromkeys([*ON_CPU, *ON_GPU])))
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument(
        "--fleet", type=int, default=None, help="clients that cohorts are drawn from; as many as a cohort has"
    )
    parser.add_argument("--mix", default="uniform", help="of capacities, as in recipes")
    parser.add_argument("--words", action="store_true", help="next-word prediction instead of images")
    parser.add_argument("--seeds", type=int, default=1, help="cohorts side by side")
    options = parser.parse_args()
    for name in ("rounds", "images", "width", "batch", "clients", "seeds"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}: give at least 1")
    on_cpu = options.device == "cpu"
    if on_cpu:
        keep_memory()  # as the command line does
    if not on_cpu and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: use --device cpu")
    if options.fleet is not None and options.words:
        parser.error("--fleet is for images: cohorts of words are always drawn from more users")
    if options.fleet is not None and options.fleet < options.clients:
        parser.error(f"--fleet {options.fleet} has no {options.clients} clients for a cohort")
    if on_cpu and options.seeds > 1:
        parser.error("--seeds needs --device cuda")
    wrong = next((name for name in options.engines or () if name not in (ON_CPU if on_cpu else ON_GPU)), None)
    if wrong is not None:
        parser.error(f"the engine {wrong} needs --device {'cuda' if on_cpu else 'cpu'}")
    if options.words and (options.model != parser.get_default("model") or options.width is not None):
        parser.error("--model and --width are for images: the words' model is a Transformer")
    if options.seeds > 1:
        os.environ.setdefault(*QUEUES)
    options.precision = options.precision or ("fp32" if on_cpu else "bf16")
    options.engines = options.engines or (["loop", "auto"] if on_cpu else ["loop", "graph"])
    options.rounds = options.rounds or (5 if on_cpu else 20)
    options.batch = options.batch or (8 if options.words else 10)
    options.optimizer = options.optimizer or ("adam" if options.words else "sgd")
    settings = [
        f"precision={options.precision}", f"client.batch={options.batch}", f"client.optimizer={options.optimizer}",
        f"client.lr={0.001 if options.optimizer == 'adam' else 0.02}", f"fleet.cohort={options.clients}",
        f"fleet.capacities={options.mix}", "engine=loop", "callbacks=[drift]",
    ]  # fmt: skip
    if options.words:
        settings += ["task=words", "fleet.clients=null", "task.vocabulary=10000"]
    else:
        settings += [f"fleet.clients={options.fleet or options.clients}", "client.weight_decay=5e-4", "client.clip=1.0"]
        settings += ["client.mask=zero", "method.rows=true"]
    try:
        recipe = Recipe(device=options.device).with_settings(settings)
    except FedrolexError as error:
        parser.error(str(error))
    engines: dict[str, Callable[[Training], Engine]] = {
        name: partial(engine_for, name, options.precision) for name in options.engines
    }

    def build(scale: int) -> nn.Module:
        if options.model == "lenet":
            return LeNet(width=(options.width or 6) * scale)
        return preresnet18(width=(options.width or 64) * scale)

    def cohort() -> Training:
        return word_cohort(recipe) if options.words else paper_cohort(recipe, options.images, build)

    def with_engine(make: Callable[[Training], Engine]) -> Training:
        made = cohort()
        made.engine = make(made)
        return made

    figures: dict[str, Any] = {"precision": options.precision, "batch": options.batch, "optimizer": options.optimizer}
    if on_cpu:
        figures |= in_turn({name: (cohort(), make) for name, make in engines.items()}, options.rounds)
        figures |= cpu_floor(cohort())
        print("the round's {gflop} GFLOP take {floor_ms} ms at a large matrix product's speed".format(**figures))
        for name in engines:
            figures[f"{name}_floor_ratio"] = round(figures[f"{name}_round_ms"] / figures["floor_ms"], 2)
    else:
        figures |= on_gpu(options, {name: partial(with_engine, make) for name, make in engines.items()})
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
