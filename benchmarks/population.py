"""What a population costs that nobody looks at: Stack Overflow's 342,477 users, and a fleet of a million.

A file of generated users (one to five short sentences each) is written in each layout, and one of a hundredth
of the users. In a fresh process each, the file is opened and cohorts of 200 random users are loaded; a round
should cost the same from both. The fleet is drawn from in the same way, against one of 1,000 clients.

    python benchmarks/population.py [--quick] [--users 342477] [--folder DIR] [--layouts hdf5 sqlite npz jsonl]

With all users, writing the HDF5 file takes a minute or two. The files are kept only in a --folder.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py  # type: ignore[import-untyped,import-not-found,unused-ignore]
import numpy as np

from fedrolex.core.streams import random_words, sample
from fedrolex.data.users import open_users
from fedrolex.data.vocabulary import Vocabulary
from fedrolex.rounds.fleet import Fleet

LAYOUTS = {"hdf5": "train.h5", "sqlite": "train.sqlite", "npz": "train.npz", "jsonl": "train.jsonl"}
WORDS = tuple(f"word{number}" for number in range(1000))
COHORT = 200
ROUNDS = 11
BLOCK = 4096  # users generated at once


def population(users: int) -> Iterator[tuple[str, list[list[int]]]]:
    """Name and sentences (indices of WORDS) of every generated user."""
    for start in range(0, users, BLOCK):
        draws = iter(random_words(BLOCK * 6, 0, "population", start).tolist())
        for user in range(start, min(start + BLOCK, users)):
            sentences = []
            for _ in range(next(draws) % 5 + 1):
                draw = next(draws)  # 64 bits: a length, then six words that repeat
                sentences.append([(draw >> 10 * (place % 6)) % len(WORDS) for place in range(draw % 10 + 3)])
            yield f"{user:08d}", sentences


def text(sentence: list[int]) -> str:
    """A sentence as a string."""
    return " ".join(WORDS[index] for index in sentence)


def write_hdf5(path: Path, users: int) -> None:
    """``examples/<user>/tokens``, without the fields that are not read."""
    kind = h5py.string_dtype()
    with h5py.File(path, "w") as file:
        examples = file.create_group("examples")
        for name, sentences in population(users):
            examples.create_group(name).create_dataset("tokens", data=[text(s) for s in sentences], dtype=kind)


def write_sqlite(path: Path, users: int) -> None:
    """Both tables, with the index."""
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
        base.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
        for name, sentences in population(users):
            rows = [("train", name, example(text(sentence).encode())) for sentence in sentences]
            base.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
            base.execute("INSERT INTO client_metadata VALUES (?, ?, ?)", (name, "train", len(sentences)))
        base.execute("CREATE INDEX examples_of_user ON examples (split_name, client_id)")
    base.close()


def write_npz(path: Path, users: int) -> None:
    """The arrays, not compressed."""
    everyone = list(population(users))
    sentences = [sentence for _, those in everyone for sentence in those]
    np.savez(
        path,
        tokens=np.array([index + 1 for sentence in sentences for index in sentence], dtype=np.uint16),
        sent_ptr=np.cumsum([0, *map(len, sentences)]),
        user_ptr=np.cumsum([0, *(len(those) for _, those in everyone)]),
        users=np.array([name for name, _ in everyone]),
        vocab=np.array(WORDS),
        vocab_counts=np.ones(len(WORDS), dtype=np.int64),
    )


def write_jsonl(path: Path, users: int) -> None:
    """A line a user."""
    with path.open("w") as file:
        for name, sentences in population(users):
            file.write(json.dumps({"user": name, "sentences": [text(s) for s in sentences]}) + "\n")


def example(tokens: bytes) -> bytes:
    """A serialised tf.train.Example with the one feature tokens."""

    def block(field: int, content: bytes) -> bytes:
        size, head = len(content), bytearray([field << 3 | 2])
        while size > 127:
            head.append(size & 127 | 128)
            size >>= 7
        return bytes(head) + bytes([size]) + content

    return block(1, block(1, block(1, b"tokens") + block(2, block(1, block(1, tokens)))))


WRITERS = {"hdf5": write_hdf5, "sqlite": write_sqlite, "npz": write_npz, "jsonl": write_jsonl}


def seconds(work: Callable[..., object], *arguments: object) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def reset_peak() -> None:
    """Forget the peak of memory up to now, where the system can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> float:
    """Peak resident memory in MiB, on Linux since the last reset."""
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS


def measure_file(path: Path) -> dict[str, float]:
    """Open a file and load cohorts from it: seconds and MiB; run in a process of its own."""
    vocabulary = Vocabulary(WORDS)
    reset_peak()
    before = peak_memory()
    start = time.perf_counter()
    users = open_users(path)
    opened = time.perf_counter() - start
    mib = peak_memory() - before

    def load(cohort: list[int]) -> None:
        for user in cohort:
            users.sentences(user, vocabulary)

    cohorts = [sample(len(users), min(COHORT, len(users)), 1, "cohort", round).tolist() for round in range(ROUNDS)]
    rounds = [seconds(load, cohort) for cohort in cohorts]
    return {"open": opened, "open_mib": mib, "round": statistics.median(rounds), "mib": peak_memory() - before}


def measure_fleet(clients: int) -> dict[str, float]:
    """Make a fleet and draw cohorts from it: seconds and MiB; run in a process of its own."""
    reset_peak()
    before = peak_memory()
    start = time.perf_counter()
    fleet = Fleet(
        clients=clients,
        cohort=COHORT,
        capacities=["1", "1/2", "1/4", "1/8", "1/16"],
        shares=["0.06", "0.10", "0.11", "0.18", "0.55"],
    )
    fleet.members(0)
    made = time.perf_counter() - start
    rounds = [seconds(fleet.members, round) for round in range(1, ROUNDS)]
    return {"make": made, "round": statistics.median(rounds), "mib": peak_memory() - before}


def alone(*arguments: object) -> dict[str, float]:
    """Run this file in a fresh process and read the last line it prints."""
    done = subprocess.run(
        [sys.executable, __file__, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare_layout(layout: str, folder: Path, users: int) -> dict[str, float]:
    """Figures of one layout, with all users and with a hundredth of them."""
    found = []
    for count in (users // 100, users):
        path = folder / str(count) / LAYOUTS[layout]
        if not path.exists():
            patience = ": a minute or two" if layout == "hdf5" and count > 100_000 else ""
            print(f"writing {count:,} users as {layout}{patience} …", file=sys.stderr, flush=True)
            path.parent.mkdir(exist_ok=True)
            part = path.with_stem("part_train")
            part.unlink(missing_ok=True)
            took = seconds(WRITERS[layout], part, count)
            part.rename(path)
            print(f"  {took:.0f} s, {path.stat().st_size / 2**20:.0f} MiB", file=sys.stderr, flush=True)
        found.append(alone("--measure", path))
    small, large = found
    print(
        f"{layout:7} open {large['open']:.2f} s, {large['open_mib']:.1f} MiB; a cohort {large['round'] * 1e3:.0f} ms "
        f"({small['round'] * 1e3:.0f} ms of a hundredth of the users), {large['mib']:.1f} MiB at the peak"
    )
    return {
        f"{layout}_open_seconds": round(large["open"], 3),
        f"{layout}_open_mib": round(large["open_mib"], 1),
        f"{layout}_peak_mib": round(large["mib"], 1),
        f"{layout}_round_seconds": round(large["round"], 4),
        f"{layout}_round_ratio": round(large["round"] / small["round"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=342_477)
    parser.add_argument("--clients", type=int, default=1_000_000, help="size of the large fleet")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--folder", type=Path, help="where the files go, or lie from an earlier run")
    parser.add_argument("--quick", action="store_true", help="20,000 users, 100,000 clients")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure-fleet", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure_file(options.measure)))
        return
    if options.measure_fleet is not None:
        print(json.dumps(measure_fleet(options.measure_fleet)))
        return
    users, clients = (20_000, 100_000) if options.quick else (options.users, options.clients)
    figures: dict[str, float] = {"users": users, "clients": clients, "cohort": COHORT}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for layout in options.layouts:
            figures |= compare_layout(layout, folder, users)
    small, large = alone("--measure-fleet", 1000), alone("--measure-fleet", clients)
    print(
        f"fleet   make {large['make'] * 1e3:.1f} ms; a cohort {large['round'] * 1e3:.2f} ms "
        f"({small['round'] * 1e3:.2f} ms of 1,000 clients), {large['mib']:.1f} MiB at the peak"
    )
    figures |= {
        "fleet_make_seconds": round(large["make"], 5),
        "fleet_round_seconds": round(large["round"], 6),
        "fleet_round_ratio": round(large["round"] / small["round"], 2),
        "fleet_peak_mib": round(large["mib"], 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
