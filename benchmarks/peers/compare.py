"""Client updates per second: ours beside Apple's pfl and Flower's simulation, on the same work and cores.

Every run is a process of its own on the same ``--threads`` cores, on an otherwise idle machine: two threads that share
a core with anything else lose up to ten times. In every pair ours runs between the two peers, which take turns to be
first; speed-ups are medians over pairs. Before that, all do one round without dropout from the same weights, and must
arrive where a bare PyTorch loop does.

    pip install -e '.[peers]'
    FEDROLEX_DATA=... python benchmarks/peers/compare.py --pairs 10 [--engine auto] [--out results/peers.json]

Peers may live in environments of their own: ``--pfl-python PATH``, ``--flower-python PATH``. Ends with one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from ours import first_order
from torch import Tensor
from work import Work, build, data, rows_of

SCRIPTS = {"ours": "ours.py", "pfl": "with_pfl.py", "flower": "with_flower.py"}
MODULES = {"pfl": "pfl", "flower": "flwr"}
TOLERANCE = 1e-2  # of the length of the update: with other sums, a pooling may pick another pixel

Report = dict[str, Any]


def run(system: str, command: Sequence[str], work: Work) -> Report:
    """What one run found; a run that fails gets a second try, since processes of torchrun abort now and then."""
    script = Path(__file__).parent / SCRIPTS[system]
    for last in (False, True):
        done = subprocess.run([*command, str(script), work.words()], capture_output=True, text=True, check=False)
        if not done.returncode:
            return last_object(done.stdout)
        if not last:
            print(f"{system} failed, once more: {done.stderr[-300:]}", flush=True)
    raise SystemExit(f"{system} failed:\n{done.stderr[-3000:]}")


def last_object(text: str) -> Report:
    """The JSON object on the last line that has one."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            found: Report = json.loads(line)
            return found
    raise SystemExit(f"no JSON object in the output:\n{text[-3000:]}")


def installed(system: str, python: str) -> bool:
    """Whether an interpreter has a peer; says how to get it if not."""
    look = f"import sys, importlib.util as u; sys.exit(u.find_spec({MODULES[system]!r}) is None)"
    there = subprocess.run([python, "-c", look], check=False).returncode == 0
    if not there:
        print(f"{system}: left out, not installed; pip install -e '.[peers]', or give --{system}-python")
    return there


def bare(work: Work) -> dict[str, Tensor]:
    """One round as a bare loop: the model everyone should arrive at."""
    x, y = data(work)
    total: dict[str, Tensor] = {}
    for user in range(work.users):
        model, rows = build(work), rows_of(work, user)
        optimiser = torch.optim.SGD(model.parameters(), lr=work.lr)
        for inputs, targets in zip(x[rows].split(work.batch), y[rows].split(work.batch), strict=True):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimiser.step()
        for name, tensor in model.state_dict().items():
            total[name] = total.get(name, torch.zeros_like(tensor)) + tensor / work.users
    return total


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """How far apart two models are, over how far the expected one has come from the start."""
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in expected.items()}
    apart = sum(float((found[n].double() - expected[n]).square().sum()) for n in expected)
    moved = sum(float((start[n].double() - expected[n]).square().sum()) for n in expected)
    return float((apart / moved) ** 0.5)


def agree(commands: Mapping[str, Sequence[str]], work: Work, users: int = 10) -> dict[str, float]:
    """The difference of every system from the bare loop, after a round in which all of a few users take part."""
    with tempfile.TemporaryDirectory() as folder:
        order, weights = Path(folder, "order.npy"), Path(folder, "weights.pt")
        plain = replace(work, users=users, cohort=users, warmup=0, rounds=1, dropout=False, save=str(weights))
        np.save(order, first_order(plain))  # ours shuffles; the others take images as they come
        ordered = replace(plain, order=str(order))
        start, expected = build(plain).state_dict(), bare(ordered)
        found = {}
        for system, command in commands.items():
            run(system, command, plain if system == "ours" else ordered)
            found[system] = difference(torch.load(weights), expected, start)
            print(f"{system:6} after one round: {found[system]:.1e} of the update from a bare loop", flush=True)
            if not found[system] < TOLERANCE:
                raise SystemExit(f"{system} does not do the same work: the difference must be below {TOLERANCE}")
    return found


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {name: round(median(values), 3), f"{name}_low": round(min(values), 3), f"{name}_high": round(max(values), 3)}


def figures(reports: Mapping[str, Sequence[Report]]) -> dict[str, Any]:
    """Throughputs of all systems, and ours over each peer's, pair by pair."""
    found: dict[str, Any] = {}
    rates = {system: [one["updates_per_second"] for one in every] for system, every in reports.items()}
    for system, every in rates.items():
        found |= spread(f"{system}_updates_per_second", every)
    for system in rates.keys() - {"ours"}:
        found |= spread(f"{system}_speedup", [a / b for a, b in zip(rates["ours"], rates[system], strict=True)])
    for system, (first, *_) in reports.items():
        found[f"{system}_versions"] = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    same = {(one["parameters"], one["updates"], one["data"]) for every in reports.values() for one in every}
    assert len(same) == 1, f"not the same work: {same}"
    found["parameters"], found["updates_a_run"], found["data"] = same.pop()
    return found


def hardware(threads: int) -> str:
    """In words."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{threads} cores of {model}, CPU only"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--engine", default="auto", help="ours (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="cores everyone gets")
    parser.add_argument("--rounds", type=int, default=Work.rounds, help="timed, in a process")
    parser.add_argument("--warmup", type=int, default=Work.warmup, help="rounds before those, at least 1")
    parser.add_argument("--users", type=int, default=Work.users)
    parser.add_argument("--cohort", type=int, default=Work.cohort)
    parser.add_argument("--pfl-processes", type=int, default=0, help="that share the threads; 0: one for each")
    parser.add_argument("--pfl-python", default=sys.executable)
    parser.add_argument("--flower-python", default=sys.executable)
    parser.add_argument("--out", type=Path, help="JSON file for the figures and where they come from")
    options = parser.parse_args()
    for name in ("pairs", "threads", "rounds", "warmup", "users", "cohort"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}: give at least 1")
    if options.cohort > options.users:
        parser.error(f"--cohort {options.cohort} is more than --users {options.users}")
    if not 0 <= options.pfl_processes <= options.threads:
        parser.error(f"--pfl-processes {options.pfl_processes}: give 1 to {options.threads}, as many as threads")
    if options.engine not in (known := ("auto", "loop", "crew")):
        parser.error(f"--engine {options.engine}: use one of {', '.join(known)}")
    if options.engine not in (known := ("auto", "loop", "crew")):
        parser.error(f"--engine {options.engine}: use one of {', '.join(known)}")
    if options.out is not None and not options.out.resolve().parent.is_dir():
        parser.error(f"--out {options.out}: there is no such folder")
    for name in ("pfl", "flower"):
        if shutil.which(getattr(options, f"{name}_python")) is None:
            parser.error(f"--{name}-python {getattr(options, f'{name}_python')}: there is no such program")
    if not Path(os.environ.get("FEDROLEX_DATA", ""), "cifar-10-batches-bin").is_dir():
        print("no CIFAR-10 under FEDROLEX_DATA: images are random ones, which take as long")
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"the machine is not idle (load {load:.1f}): figures of threads that share cores mean little")
    if hasattr(os, "sched_setaffinity"):  # Linux: what is started from here stays on these cores
        cores = sorted(os.sched_getaffinity(0))[: options.threads]
        if len(cores) < options.threads:
            parser.error(f"{options.threads} threads, but {len(cores)} cores")
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(options.threads)
    options.pfl_processes = options.pfl_processes or options.threads
    commands = {"ours": [sys.executable], "pfl": [options.pfl_python], "flower": [options.flower_python]}
    commands = {system: words for system, words in commands.items() if system == "ours" or installed(system, *words)}
    if "pfl" in commands and options.pfl_processes > 1:
        commands["pfl"] += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.pfl_processes}"]
    names = ("engine", "threads", "rounds", "warmup", "users", "cohort")
    work = Work(**{name: getattr(options, name) for name in names})
    apart = agree(commands, work)
    reports: dict[str, list[Report]] = {system: [] for system in commands}
    turn = [system for system in ("pfl", "ours", "flower") if system in commands]
    for pair in range(options.pairs):
        for system in turn if pair % 2 == 0 else turn[::-1]:
            reports[system].append(run(system, commands[system], work))
        rates = ", ".join(f"{system} {every[-1]['updates_per_second']:.2f}" for system, every in reports.items())
        chosen = reports["ours"][-1]["versions"]["fedrolex"]
        print(f"pair {pair + 1}: {rates} updates a second; ours {chosen}", flush=True)
    settings = {name: getattr(options, name) for name in ("pairs", *names, "pfl_processes")}
    found = {**figures(reports), **settings, "load_before": round(load, 2)}
    found |= {f"{system}_difference": float(f"{value:.1e}") for system, value in apart.items()}
    if options.out is not None:
        changed = [f"--{n.replace('_', '-')} {v}" for n, v in settings.items() if v != parser.get_default(n)]
        told = {
            "what": "client updates a second of ours, pfl and Flower's simulation on pfl's CIFAR-10 setting, in turn",
            "command": " ".join(["python benchmarks/peers/compare.py", *changed]),
            "hardware": hardware(options.threads),
            "date": date.today().isoformat(),
            "figures": found,
        }
        options.out.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
