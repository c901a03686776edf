"""The engine ``ray`` on two nodes of this machine: bits, faults, state, what travels. Methods: test_conformance.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from methods_shared import asked, only, small, wordy
from ray_cluster import added_node, two_nodes
from told import told
from torch import Tensor, nn

from fedrolex import Classification, Examples, FleetRecipe, Recipe, Task, train
from fedrolex.clients import MODEL, Failure, RoundPlan, Upload
from fedrolex.core import METHODS
from fedrolex.engines.ray.cluster import connected
from fedrolex.engines.ray.engine import RayEngine
from fedrolex.engines.ray.pool import Outcome
from fedrolex.engines.ray.wire import Done
from fedrolex.methods import FedRolex
from fedrolex.runs.prepare import prepare
from fedrolex.runs.training import Training

pytestmark = pytest.mark.usefixtures("cluster")
FIVE = 'fleet.capacities=["1", "1/2", "1/4", "1/8"]'


@pytest.fixture
def cluster() -> Any:
    return two_nodes()


def after(made: Training, rounds: int = 2) -> dict[str, Tensor]:
    """All tensors of the server after some rounds."""
    for _ in range(rounds):
        made.run_round()
    return {f"{section}:{name}": t.clone() for section, own in made.server.state.items() for name, t in own.items()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


def with_workers(count: int, *settings: str) -> Training:
    made = small(*settings, FIVE, "engine=loop")
    made.engine = RayEngine(workers=count)
    return made


@pytest.mark.parametrize(
    "settings",
    [
        ["method=fedrolex", "method.weighting=samples"],
        pytest.param(["method=columns", "method.rows=true"], marks=pytest.mark.slow),
    ],
)
def test_the_bits_do_not_depend_on_the_number_of_workers(settings: Sequence[str]) -> None:
    runs = [with_workers(count, "fleet.cohort=6", *settings) for count in (2, 3, 1)]
    first, second, third = (after(made) for made in runs)
    same_bits(first, second)
    same_bits(first, third)
    _, three, one = (made.engine.traffic for made in runs)  # type: ignore[attr-defined]
    assert three.answers > one.answers  # what a single client of a worker trained came as it is
    assert one.sums > 0


def fatal(tmp_path: Path, engine: str, *settings: str) -> Training:
    flag = tmp_path / "flag"
    flag.touch()
    own = ["method=ray_methods:Fatal", f"method.flag={flag}"]
    return small(*own, "fleet.cohort=6", f"engine={engine}", *settings)


def test_the_clients_of_a_worker_that_is_killed_are_trained_by_others(tmp_path: Path) -> None:
    wanted = after(fatal(tmp_path, "ray"), 3)
    made = fatal(tmp_path, "ray", "method.client=3")
    rows = [made.run_round() for _ in range(3)]
    assert (tmp_path / "flag").read_text() == "x"  # it did happen
    assert [row["dropped"] for row in rows] == [{}, {}, {}]
    assert [row["clients"] for row in rows] == [6, 6, 6]
    same_bits(wanted, after(made, 0))
    assert len(made.engine.pool.members) <= 2  # type: ignore[attr-defined]


def test_a_client_that_kills_every_worker_is_dropped_alone(tmp_path: Path) -> None:
    made = fatal(tmp_path, "ray", "method.client=3", "method.times=99")
    row = made.run_round()
    assert row["dropped"] == {"3": "its worker was lost, and the next one, too"}
    assert (tmp_path / "flag").read_text() == "xx"
    assert row["clients"] == 5
    same_bits(after(only(fatal(tmp_path, "ray"), [0, 1, 2, 4, 5]), 1), after(made, 0))


def test_a_node_that_goes_is_noticed_and_one_that_comes_is_used(cluster: Any, tmp_path: Path) -> None:
    node = added_node(cluster, "127.0.0.4")
    cluster.wait_for_nodes()
    wanted = after(fatal(tmp_path, "ray"), 2)
    made = fatal(tmp_path, "loop", "method.pause=1.0")
    made.engine = RayEngine(workers=3)  # SPREAD: one a node
    rows: list[dict[str, Any]] = []
    round = threading.Thread(target=lambda: rows.append(made.run_round()))
    round.start()
    pool = made.engine.pool
    while sum(member.work is not None for member in pool.members) < 3:
        time.sleep(0.05)
    time.sleep(0.5)
    cluster.remove_node(node, allow_graceful=False)
    round.join(60)
    assert not round.is_alive()
    assert rows[0]["dropped"] == {}
    added_node(cluster, "127.0.0.5")
    rows.append(made.run_round())
    assert rows[1]["clients"] == 6
    same_bits(wanted, after(made, 0))


@pytest.mark.parametrize("method", ["scaffold", "dsfl"])
def test_what_clients_keep_goes_with_them_and_survives_a_resume(method: str, tmp_path: Path) -> None:
    words = ["task.width=8", "task.limit=180", f"method={method}", "checkpoint_every=1", "evaluate_every=4", FIVE]
    recipe = replace(
        Recipe(engine="ray", device="cpu", callbacks=[]).with_settings(words),
        fleet=FleetRecipe(clients=6, cohort=3, capacities=["1", "1/2"]),
    )
    train(replace(recipe, rounds=4), out=tmp_path / "straight")
    train(replace(recipe, rounds=2), out=tmp_path / "halves")
    train(replace(recipe, rounds=4), out=tmp_path / "halves", resume=True)
    for file in ("model.safetensors", *(str(p.relative_to(tmp_path / "straight")) for p in clients(tmp_path))):
        assert (tmp_path / "straight" / file).read_bytes() == (tmp_path / "halves" / file).read_bytes(), file


def clients(tmp_path: Path) -> list[Path]:
    """The newest state of every client."""
    newest = {path.stem.split("-")[0]: path for path in sorted((tmp_path / "straight" / "clients").glob("*/*"))}
    assert len(newest) > 3
    return list(newest.values())


def net(scale: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16 * scale), nn.ReLU(), nn.Linear(16 * scale, 3))


def test_a_task_of_ones_own_and_a_method_that_cannot_be_imported_travel_as_they_are() -> None:
    class Mine(FedRolex):
        pass

    Mine.__module__, Mine.__qualname__ = "__main__", "Mine"  # as in a script or a notebook
    METHODS.register("of a script")(Mine)
    x, y = torch.randn(120, 6), torch.randint(0, 3, (120,))
    task = Task.split(lambda scale: net(scale), Examples(x[:90], y[:90]), Examples(x[90:], y[90:]), clients=6)
    fleet = FleetRecipe(clients=6, cohort=4, capacities=["1", "1/2"])
    done = [
        train(Recipe(rounds=2, fleet=fleet, method=Mine(), engine=engine, device="cpu"), task)
        for engine in ("loop", "ray")
    ]
    assert done[1].summary["engine"] == "ray"
    for one, other in zip(done[0].whole.state_dict().values(), done[1].whole.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_worker_that_cannot_make_the_run_once_others_have_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without the user's package, say: the recipe travels as an object then, and nobody answers twice."""
    settings = ["method=fedbe", "method.epochs=1", "fleet.cohort=6"]
    wanted = after(with_workers(2, *settings), 1)
    made = with_workers(2, *settings)
    engine, last = made.engine, asked(made).jobs[-1].client
    assert isinstance(engine, RayEngine)
    taken = engine._taken

    def failing(plan: RoundPlan, outcome: Outcome) -> list[Upload | Failure]:
        if not engine._by_value and outcome.jobs[-1].client == last:
            assert outcome.done is not None
            outcome = replace(outcome, done=Done(failed="no module named own", made=False))
        return taken(plan, outcome)

    monkeypatch.setattr(engine, "_taken", failing)
    same_bits(wanted, after(made, 1))
    assert engine._by_value


def test_clients_data_are_read_by_workers_alone() -> None:
    made = small("engine=ray")
    task = made.server.task
    assert isinstance(task, Classification)
    object.__setattr__(task, "client", None)  # whoever asks for a client's data here fails
    assert made.run_round()["clients"] == 4


def test_a_worker_that_finds_other_data_says_so(tmp_path: Path) -> None:
    made = prepare(Recipe(engine="ray", device="cpu").with_settings(wordy(tmp_path)))
    file = tmp_path / "users.jsonl"
    file.write_text(file.read_text().replace("a b", "b a"))
    assert "the data here are others than those of the driver" in told(made.run_round)


def test_what_travels() -> None:
    """The model goes out once; what each worker adds up is as large as its largest sub-model, in float64.

    There is one worker where the other was on the node that an earlier test took away.
    """
    made = small("engine=ray", 'fleet.capacities=["1/2"]', "method=fedavg", "fleet.cohort=6")
    made.run_round()
    traffic, plan = made.engine.traffic, asked(made)  # type: ignore[attr-defined]
    whole = sum(t.numel() * t.element_size() for t in plan.tensors[MODEL].values())
    part = sum(t.numel() for t in plan.received(plan.jobs[0]).values())
    header = 4096
    assert whole <= traffic.state <= whole + header
    workers = traffic.sums // (8 * part)
    assert workers in (1, 2)
    assert traffic.sums <= workers * (8 * part + header) < workers * 8 * whole / 4
    assert traffic.answers < header


def test_what_is_smaller_than_its_sum_travels_as_it_is() -> None:
    """A client a worker: its sub-model comes back, in its own precision."""
    made = small("engine=ray", 'fleet.capacities=["1/2"]', "fleet.cohort=2")
    made.run_round()
    traffic, plan = made.engine.traffic, asked(made)  # type: ignore[attr-defined]
    parts = sum(t.numel() * t.element_size() for job in plan.jobs for t in plan.received(job).values())
    assert traffic.sums == 0
    assert parts <= traffic.answers <= parts + 4096


def test_a_method_that_does_not_add_what_it_says_is_told() -> None:
    made = small("engine=ray", "method=ray_methods:Forgetful", "fleet.cohort=6")
    assert "take() is marked as adding, and did not add" in told(made.run_round)


def test_sigterm_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that was forked and is ended would wait for the cluster otherwise."""
    import ray

    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # after the cluster of these tests was started
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, lambda *_: None))
    assert connected() is ray
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_run_without_a_recipe_is_left_to_loop() -> None:
    made = small("engine=ray")
    made.origin = None
    said: list[str] = []
    made.say = said.append
    made.run_round()
    assert said == ["engine: loop (workers make a run from its recipe, and this one has none)"]


@pytest.mark.slow
def test_a_worker_that_hangs_is_lost(tmp_path: Path) -> None:
    """A process that is stopped answers nothing, and its connections stay open."""
    wanted = after(fatal(tmp_path, "ray"), 1)
    made = fatal(tmp_path, "ray", "method.pause=1.0")
    rows: list[dict[str, Any]] = []
    round = threading.Thread(target=lambda: rows.append(made.run_round()))
    round.start()
    pool = made.engine.pool  # type: ignore[attr-defined]
    while sum(member.work is not None for member in pool.members) < 2:
        time.sleep(0.05)
    said = pool.ray.get(pool.members[0].handle.ping.remote())
    os.kill(int(said.rpartition(" ")[2]), signal.SIGSTOP)
    round.join(120)
    assert not round.is_alive()
    assert rows[0]["dropped"] == {}
    same_bits(wanted, after(made, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "sent"),
    [(False, signal.SIGINT), (True, signal.SIGINT), (False, signal.SIGTERM), (True, signal.SIGTERM)],
)
def test_a_run_that_is_interrupted_leaves_no_processes(
    address: bool, sent: signal.Signals, cluster: Any, tmp_path: Path
) -> None:
    """Ctrl-C as a terminal does it: the whole group of the run's processes is interrupted; a polite kill meets one."""
    mark = f"FEDROLEX_MARK={uuid4().hex}"
    env = {**os.environ, "FEDROLEX_MARK": mark.partition("=")[2], "RAY_ADDRESS": cluster.address if address else ""}
    words = ["--engine", "ray", "--set", "compare=false", "--set", "rounds=100000", "--out", str(tmp_path / "run")]
    command, free = [sys.executable, "-m", "fedrolex", "train", *words], free_cores()
    run = subprocess.Popen(command, env=env, start_new_session=True, stderr=subprocess.PIPE, text=True)
    metrics, until = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert time.monotonic() < until
        time.sleep(0.2)
    (os.killpg if sent == signal.SIGINT else os.kill)(run.pid, sent)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "go on with: fedrolex resume" in said
    for _ in range(100):
        if not marked(mark) and free_cores() >= free:
            break
        time.sleep(0.2)
    assert not marked(mark)
    assert free_cores() >= free


def free_cores() -> float:
    """Cores of the cluster that nobody holds."""
    import ray

    return float(ray.available_resources().get("CPU", 0.0))  # type: ignore[no-untyped-call,unused-ignore]


def marked(mark: str) -> set[int]:
    """Processes that were started with a variable in their environment."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    return found
