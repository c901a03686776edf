"""What the engine ``ray`` costs, what it sends, and how a round grows with workers and clients.

    python benchmarks/scaling.py overhead [--images 500] [--pairs 1]      # one worker against loop, the paper's cohort
    python benchmarks/scaling.py bytes                                   # through the object store, beside sub-models
    python benchmarks/scaling.py memory                                  # the driver's, cohorts of 10 and of 1000
    python benchmarks/scaling.py growth                                  # a model of a round's time, fitted and checked

Everything runs on one machine, with a local cluster.

``overhead``: ten clients, two of each capacity from 1 to 1/16, 500 CIFAR-shaped random images each, PreResNet18, batch
10 (benchmarks/cohort.py). ``loop`` with one thread and ``ray`` with one worker of one core take turns, and a ratio is
the median over pairs of rounds: of seconds, and of seconds that cores were busy with it, which other programs on the
machine change less.

``bytes``: of a round of that cohort, with one step a client, on one worker and on two; and of a round of two clients on
two workers, where nothing can be added up. Out goes the model, once to a node, whatever its number of workers; back
come, from every worker, its clients' sub-models or, where that is less, their sum, two values of float32 for one.

``memory``: the peak of this process during rounds of 10, 100 and 1000 of a thousand clients.

``growth``: with A seconds that a round costs the driver, M for every worker, and L the longest shard at the speed of a
single worker, a round takes A + M·w + S·L, where S is how much slower workers are beside each other than alone. Rounds
of 10 and 20 clients give A, M and S; those of 40 are predicted. Of every kind of round the quickest counts, since other
programs on the machine only make rounds slower.

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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cohort import paper_cohort
from torch import nn

from fedrolex import Recipe, Training
from fedrolex.core.allocator import keep_memory
from fedrolex.engines.cpu.loop import Loop
from fedrolex.engines.ray.engine import RayEngine
from fedrolex.engines.ray.shards import dealt
from fedrolex.models import preresnet18

MIB = 2**20


def recipe(clients: int, cohort: int, *settings: str) -> Recipe:
    """The paper's client settings, two of each capacity in ten clients."""
    words = [
        f"fleet.clients={clients}", f"fleet.cohort={cohort}", "fleet.capacities=uniform", "client.batch=10",
        "client.lr=0.02", "client.weight_decay=5e-4", "client.clip=1.0", "client.mask=zero", "method.rows=true",
        "engine=loop", "callbacks=[drift]", *settings,
    ]  # fmt: skip
    return Recipe(device="cpu").with_settings(words)


def made(clients: int, cohort: int, images: int, width: int, workers: int | None) -> Training:
    """A run on ``loop``, or on so many workers."""

    def build(scale: int) -> nn.Module:
        return preresnet18(width=width * scale)

    training = paper_cohort(recipe(clients, cohort), images, build)
    training.engine = Loop() if workers is None else RayEngine(workers=workers, cores=1)
    return training


def warm(training: Training) -> None:
    """Have the engine ready: workers there, the run made by them; its smallest job is trained, and not counted."""
    plan = training.plan(training.method.jobs(training.server, training.server.round))
    smallest = sorted(plan.jobs, key=lambda job: job.capacity)[:2]  # one for each of two workers
    for _ in training.engine.run(replace(plan, jobs=smallest)):
        pass


def seconds(training: Training, rounds: int = 1) -> list[float]:
    """Of whole rounds."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        row = training.run_round()
        found.append(time.perf_counter() - began)
        assert not row["dropped"], row["dropped"]
    return found


def sizes(training: Training) -> dict[str, int]:
    """Bytes of the model, of all sub-models of a cohort, and of the largest."""
    plan = training.plan(training.method.jobs(training.server, training.server.round))
    parts = [training.server.bytes(job) for job in plan.jobs]
    whole = sum(t.numel() * t.element_size() for t in training.server.state["model"].values())
    return {"model_bytes": whole, "submodels_bytes": sum(parts), "largest_submodel_bytes": max(parts)}


def sent(options: argparse.Namespace) -> dict[str, Any]:
    """What goes through the object store, by clients and workers, beside the sizes of sub-models."""
    flat: dict[str, float] = {}
    for clients, workers in ((10, 1), (10, 2), (2, 2)):
        training = made(10, clients, options.images, options.width, workers)
        warm(training)
        found = sizes(training)  # of the next round: windows are of the same size in every one, capacities are drawn
        seconds(training)
        engine = training.engine
        assert isinstance(engine, RayEngine)
        traffic = engine.traffic
        found |= {"out_bytes_per_node": traffic.state, "back_bytes": traffic.sums + traffic.answers}
        found["beside_bytes"] = traffic.asked
        of = f"{clients}_clients_{workers}_workers"
        print(f"{clients} clients, {workers} workers: {found}", flush=True)
        flat |= {f"{name}_{of}": value for name, value in found.items()}
        flat[f"back_to_submodels_{of}_ratio"] = round(found["back_bytes"] / found["submodels_bytes"], 3)
    return {"images": options.images, "width": options.width, **flat}


def busy(training: Training) -> float:
    """Seconds that cores have been busy with a run's process and, where it has any, its workers."""
    found = time.process_time()
    if isinstance(training.engine, RayEngine):
        pool = training.engine.pool
        for said in pool.ray.get([member.handle.ping.remote() for member in pool.members]):
            fields = Path(f"/proc/{said.rpartition(' ')[2]}/stat").read_text().rpartition(")")[2].split()
            found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def overhead(options: argparse.Namespace) -> dict[str, Any]:
    """One worker against ``loop``, round by round in turn."""
    runs = {
        name: made(10, 10, options.images, options.width, workers) for name, workers in (("loop", None), ("ray", 1))
    }
    for training in runs.values():
        warm(training)
    spent: dict[str, list[float]] = {name: [] for name in runs}
    worked: dict[str, list[float]] = {name: [] for name in runs}
    figures: dict[str, Any] = {"images": options.images, "pairs": options.pairs}
    for _ in range(options.pairs):
        for name, training in runs.items():
            before = busy(training)
            spent[name] += seconds(training)
            worked[name].append(busy(training) - before)
            print(f"{name:5} {spent[name][-1]:.2f} s, cores {worked[name][-1]:.2f} s", flush=True)
    for what, times in (("", spent), ("core_", worked)):
        ratios = [ray / loop for loop, ray in zip(times["loop"], times["ray"], strict=True)]
        for name in runs:
            figures[f"{name}_{what}seconds"] = round(statistics.median(times[name]), 2)
        figures[f"overhead_{what}ratio"] = round(statistics.median(ratios), 3)
        figures[f"overhead_{what}ratio_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
    return figures


def peak() -> int:
    """Bytes that this process has had in memory at most since the last call; the kernel starts anew."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """The driver's peak during a round, by cohort, beside the bytes of all its updates; a process for each."""
    figures: dict[str, Any] = {"width": options.width, "images": options.images, "workers": 2}
    for cohort in (10, 100, 1000):
        command = [sys.executable, __file__, "memory", f"--cohort={cohort}"]
        command += [f"--images={options.images}", f"--width={options.width}"]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        figures |= json.loads(said.splitlines()[-1])
        print(f"cohort {cohort}: {figures[f'driver_mib_{cohort}']} MiB at the driver", flush=True)
    figures["driver_1000_to_10_ratio"] = round(figures["driver_mib_1000"] / figures["driver_mib_10"], 3)
    return figures


def memory_of(options: argparse.Namespace) -> dict[str, Any]:
    """Of one cohort."""
    cohort = options.cohort
    training = made(1000, cohort, options.images, options.width, 2)
    warm(training)
    peak()
    times = seconds(training)
    return {
        f"driver_mib_{cohort}": round(peak() / MIB, 1),
        f"updates_mib_{cohort}": round(sizes(training)["submodels_bytes"] / MIB, 1),
        f"seconds_{cohort}": round(times[0], 2),
    }


def growth(options: argparse.Namespace) -> dict[str, Any]:
    """A + M·w + S·L, fitted to small cohorts and checked on a larger one."""
    found: dict[tuple[int, int], tuple[float, float]] = {}
    alone: dict[Any, float] = {}
    for workers in (1, 2):
        runs = {clients: made(clients, clients, options.images, options.width, workers) for clients in (10, 20, 40)}
        times: dict[int, list[float]] = {clients: [] for clients in runs}
        for training in runs.values():
            warm(training)
            seconds(training)
        for _ in range(options.pairs):
            for clients, training in runs.items():
                times[clients] += seconds(training)
        for clients, training in runs.items():
            engine, plan = training.engine, training.plan(training.method.jobs(training.server, training.server.round))
            assert isinstance(engine, RayEngine)
            alone = alone or {job.capacity: engine.costs.of(plan, job) for job in plan.jobs}
            costs = [alone[job.capacity] for job in plan.jobs]
            shards = dealt(plan.jobs, costs, workers)
            longest = max(sum(alone[job.capacity] for job in shard) for shard in shards)
            found[clients, workers] = min(times[clients]), longest
            print(f"{clients} clients, {workers} workers: {min(times[clients]):.2f} s, L {longest:.2f} s", flush=True)
    return {**fitted(found), **{f"seconds_{n}_clients_{w}_workers": round(t, 3) for (n, w), (t, _) in found.items()}}


def fitted(found: dict[tuple[int, int], tuple[float, float]]) -> dict[str, Any]:
    """The constants, and how far the larger cohort is from what they predict."""

    def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
        (t1, l1), (t2, l2) = points
        slope = (t2 - t1) / (l2 - l1)
        return slope, t1 - slope * l1

    one, two = line([found[10, 1], found[20, 1]]), line([found[10, 2], found[20, 2]])
    each = two[1] - one[1]
    figures: dict[str, Any] = {
        "driver_seconds": round(one[1] - each, 3),
        "seconds_per_worker": round(each, 3),
        "slower_alone_ratio": round(one[0], 3),
        "slower_beside_another_ratio": round(two[0], 3),
    }
    for workers, (slope, fixed) in ((1, one), (2, two)):
        time_, longest = found[40, workers]
        figures[f"predicted_to_seen_{workers}_ratio"] = round((fixed + slope * longest) / time_, 3)
    figures["two_workers_speedup"] = round(found[40, 1][0] / found[40, 2][0], 2)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "bytes", "memory", "growth"])
    parser.add_argument("--images", type=int, default=None, help="of a client; 500, for growth 50, else 10")
    parser.add_argument("--width", type=int, default=None, help="of the PreResNet18; 64, for memory and growth 16")
    parser.add_argument("--pairs", type=int, default=None, help="of rounds; 1, for growth 8")
    parser.add_argument("--cohort", type=int, default=None, help="memory of one cohort, in this process")
    options = parser.parse_args()
    usual = {"overhead": (500, 64, 1), "bytes": (10, 64, 1), "memory": (10, 16, 1), "growth": (50, 16, 8)}
    images, width, pairs = usual[options.what]
    options.images, options.width = options.images or images, options.width or width
    options.pairs = options.pairs or pairs
    keep_memory()
    torch.set_num_threads(1)
    remembered = memory_of if options.cohort else memory
    work = {"overhead": overhead, "bytes": sent, "memory": remembered, "growth": growth}[options.what]
    print(json.dumps({"what": options.what, **work(options)}))


if __name__ == "__main__":
    main()
