"""Real processes on loopback, with TLS and a key for every node: a SuperLink and SuperNodes of three capacities."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="needs fedrolex[flower]")

from flower_grid import Done, simulated

from fedrolex import FedrolexError, Run
from fedrolex.flower.certificates import make_key
from fedrolex.flower.loopback import Loopback, family

APP = Path(__file__).parents[1] / "examples" / "flower"
SET = ["task.width=8", "task.limit=180", "fleet.clients=3", "fleet.cohort=3", "device=cpu", "callbacks=[drift]",
       "fleet.capacities=[1, 1/2, 1/4]", "evaluate_every=1", "checkpoint_every=1"]  # fmt: skip
NODES = [{"client": place, "capacity": capacity} for place, capacity in enumerate(("1", "1/2", "1/4"))]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    with Loopback(tmp_path_factory.mktemp("fleet"), NODES, {"OMP_NUM_THREADS": "1"}) as started:
        yield started


def same_bits(one: Done, other: Done) -> bool:
    return all(torch.equal(one.tensors[name], tensor) for name, tensor in other.tensors.items())


def test_three_devices_over_tls_give_the_bits_of_a_simulation_and_strangers_are_refused(
    fleet: Loopback, tmp_path: Path
) -> None:
    make_key(fleet.folder / "stranger")  # which nobody registers
    fleet.start_node(0, "stranger")
    said = fleet.run(APP, {"set": ";".join([*SET, "rounds=2"]), "out": str(tmp_path / "run")})
    assert "round 1: 3 devices" in said
    run = Done.of(tmp_path / "run")
    assert [row["clients"] for row in run.rows] == [3, 3]
    assert same_bits(run, simulated(tmp_path / "same", *SET, "rounds=2"))
    stranger = fleet.processes.pop("stranger")
    assert stranger.wait(30) != 0
    assert "305" in fleet.log("stranger").read_text() or "public key" in fleet.log("stranger").read_text()


def waits_for(what: str, file: Path, seconds: float = 600) -> None:
    """Until a file holds something."""
    ends = time.monotonic() + seconds
    while not (file.is_file() and what in file.read_text(errors="replace")):
        assert time.monotonic() < ends, f"no {what!r} in {file}"
        time.sleep(0.1)


def working(fleet: Loopback, name: str, program: str, after: int = 0) -> int:
    """The process in which Flower runs an app for a SuperLink or SuperNode: a grandchild."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        for process in family(fleet.processes[name].pid):
            with suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
                if process != after and any(word.endswith(program.encode()) for word in words):
                    return process
        time.sleep(0.02)
    raise AssertionError(f"no {program} for {name}")


@pytest.mark.slow
def test_a_device_that_is_killed_in_a_round_costs_the_round_its_part_only(tmp_path: Path) -> None:
    with Loopback(tmp_path / "fleet", NODES, {"OMP_NUM_THREADS": "1"}) as fleet:
        metrics = tmp_path / "run" / "metrics.jsonl"

        def kill() -> None:
            waits_for('"round": 0', metrics)
            working(fleet, "node1", "flwr-clientapp")
            fleet.kill("node1")

        killer = threading.Thread(target=kill)
        killer.start()
        config = {"set": ";".join([*SET, "rounds=3"]), "out": str(tmp_path / "run"), "timeout": 60.0}
        fleet.run(APP, config)
        killer.join()
    rows = Run.open(tmp_path / "run").rows()
    assert not rows[0]["dropped"]
    assert all(row["clients"] == 2 and not row["void"] for row in rows[1:])
    assert list(rows[1]["dropped"]) == ["1"]
    wanted = simulated(tmp_path / "same", *SET, "rounds=3", "fleet.trace=[[0, 1, 2], [0, 2], [0, 2]]")
    assert same_bits(Done.of(tmp_path / "run"), wanted)


@pytest.mark.slow
def test_a_server_that_is_killed_goes_on_to_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    """First its app alone, then all of the SuperLink, as a power cut would; SCAFFOLD, whose devices keep something."""
    metrics, settings = tmp_path / "run" / "metrics.jsonl", [*SET, "method=scaffold", "rounds=5", "checkpoint_every=2"]
    nodes = [{**node, "folder": str(tmp_path / "kept")} for node in NODES]
    config = {"set": ";".join(settings), "out": str(tmp_path / "run")}
    with Loopback(tmp_path / "fleet", nodes, {"OMP_NUM_THREADS": "1"}) as fleet:

        def begun(until: str) -> threading.Thread:
            """A run in the background, which has come so far."""

            def run() -> None:
                with suppress(FedrolexError):  # its server dies
                    fleet.run(APP, config)

            running = threading.Thread(target=run)
            running.start()
            waits_for(until, metrics)
            return running

        running = begun('"round": 1')
        killed = working(fleet, "superlink", "flwr-serverapp")
        os.kill(killed, signal.SIGKILL)
        running.join(300)
        done = len(Run.open(tmp_path / "run").rows())
        assert 2 <= done < 5
        running = begun('"round": 3')
        working(fleet, "superlink", "flwr-serverapp", after=killed)
        fleet.kill("superlink")
        running.join(300)
        assert len(Run.open(tmp_path / "run").rows()) < 5
        fleet.start_superlink()
        fleet.run(APP, config)
    assert [row["round"] for row in Run.open(tmp_path / "run").rows()] == [0, 1, 2, 3, 4]
    assert same_bits(Done.of(tmp_path / "run"), simulated(tmp_path / "same", *settings))


@pytest.mark.slow
def test_secure_sums_over_processes_are_the_plain_average_within_rounding(tmp_path: Path) -> None:
    nodes = [{"client": client, "capacity": "1"} for client in range(3)]
    settings = [*SET, "rounds=1", "fleet.capacities=[1]"]
    with Loopback(tmp_path / "fleet", nodes, {"OMP_NUM_THREADS": "1"}) as fleet:
        fleet.run(APP, {"set": ";".join(settings), "out": str(tmp_path / "run"), "secure": True})
    run, wanted = Done.of(tmp_path / "run"), simulated(tmp_path / "same", *settings)
    assert run.rows[0]["clients"] == 3
    for name, tensor in wanted.tensors.items():
        assert float((run.tensors[name] - tensor).abs().max()) < 1e-6


@pytest.mark.parametrize("capacity", ["3/0", "2", "half"])
def test_a_capacity_that_is_none_starts_nothing(capacity: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedrolex.flower.loopback", capacity, "--folder", str(tmp_path / "fleet")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2
    assert "error: capacity" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "fleet").exists()
