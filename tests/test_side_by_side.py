"""Several runs in one process: the same results as one after the other, and nothing lost when one stops."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fedrolex import Callback, FedrolexError, Recipe, Run, Training, prepare
from fedrolex.cli.app import app
from fedrolex.clients.messages import MODEL, Network, RoundPlan
from fedrolex.engines.cpu.loop import Loop
from fedrolex.engines.gpu.lanes import Lanes
from fedrolex.engines.gpu.ragged import Ragged
from fedrolex.rounds import Engine
from fedrolex.runs import checkpoint
from fedrolex.runs.side_by_side import ReadyRun, already, fits, side_by_side

SMALL = [
    "rounds=3", "task.limit=200", "fleet.clients=8", "fleet.cohort=4", "task.width=8", "compare=false",
    'fleet.capacities=["1", "1/2", "1/4"]', "callbacks=[]",
]  # fmt: skip
RECIPES = {
    "fedrolex": ["method=fedrolex"],
    "heterofl": ["method=heterofl", "client.mask=zero", "method.rows=true", "task.partition=labels"],
    "fedavg": ["method=fedavg", "method.width=1/4"],
    "another fedavg": ["method=fedavg", "method.width=1/4", "client.lr=0.03", "method.weighting=samples"],
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
Job = tuple[Run, Training, Callable[[dict[str, Any]], None] | None]


def recipe(*settings: str, device: Any = "cpu", engine: str = "loop") -> Recipe:
    return Recipe(device=device, engine=engine).with_settings([*SMALL, *settings])


def jobs(folder: Path, recipes: dict[str, Recipe]) -> list[Job]:
    return [(Run.create(folder / name, each), prepare(each), None) for name, each in recipes.items()]


def waiting(made: list[Job]) -> list[Callable[[], ReadyRun]]:
    return [already(job) for job in made]


def of_seeds(*seeds: int) -> dict[str, Recipe]:
    return {str(seed): replace(recipe(), seed=seed) for seed in seeds}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read(folder / "checkpoint.safetensors")[0]


def same_as_alone(folder: Path, recipes: dict[str, Recipe]) -> None:
    found = side_by_side(waiting(jobs(folder / "at-once", recipes)), len(recipes))
    assert [summary["seed"] for summary in found] == [each.seed for each in recipes.values()]
    for run, training, _ in jobs(folder / "alone", recipes):
        run.go(training)
    for name in recipes:
        one, other = tensors(folder / "at-once" / name), tensors(folder / "alone" / name)
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[key]) for key, tensor in one.items()), name


def test_runs_side_by_side_are_those_one_after_the_other(tmp_path: Path) -> None:
    same_as_alone(tmp_path, of_seeds(1, 2, 3))


def test_runs_of_different_recipes_too(tmp_path: Path) -> None:
    same_as_alone(tmp_path, {name: recipe(*settings) for name, settings in RECIPES.items()})


def test_a_capture_pauses_the_other_runs(tmp_path: Path) -> None:
    """What a GPU engine does when it captures, here in rounds of its own: nobody else is in a round meanwhile."""
    from fedrolex.engines.gpu.sharing import GATE

    lock, working, captures = threading.Lock(), set[int](), list[int]()

    class Capturing(Loop):
        def run(self, plan: RoundPlan) -> Any:
            with lock:
                working.add(id(self))
            yield from super().run(plan)
            with lock:
                working.remove(id(self))
            with GATE.alone():
                assert not working
                captures.append(plan.round)

    made = jobs(tmp_path, of_seeds(1, 2, 3))
    for _, training, _ in made:
        training.engine = Capturing()
    side_by_side(waiting(made), len(made))
    assert sorted(captures) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@needs_gpu
@pytest.mark.parametrize("engine", ["graph", "lanes", "loop"])
def test_on_a_gpu_different_recipes_give_the_same_bits(engine: str, tmp_path: Path) -> None:
    """PreResNets with static norms take the ragged kernels; the same bits need the deterministic mode elsewhere."""
    from fedrolex.engines.gpu.precision import deterministic

    network = ["task.model=preresnet18", "task.width=16", "rounds=6"]
    with deterministic(engine != "graph"):
        same_as_alone(
            tmp_path,
            {name: recipe(*network, *each, device="cuda", engine=engine) for name, each in RECIPES.items()},
        )


class Broken(Callback):
    """Fails in the second round."""

    def row(self, training: Training, row: dict[str, Any]) -> None:
        if row["round"] == 1:
            raise FedrolexError("broken")


def test_one_that_fails_in_one_line_leaves_the_others_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = jobs(tmp_path, of_seeds(1))
    broken = replace(recipe(), seed=2, rounds=40)
    made.append((Run.create(tmp_path / "2", broken), prepare(broken, callbacks=[Broken()]), None))
    with pytest.raises(FedrolexError, match="broken"):
        side_by_side(waiting(made), len(made))
    assert "a run has failed, the others go on: callback Broken" in capsys.readouterr().err
    (again, training, _) = jobs(tmp_path / "alone", of_seeds(1))[0]
    wanted = again.go(training)
    summary = json.loads((tmp_path / "1" / "summary.json").read_text())
    assert summary["global_accuracy"] == wanted["global_accuracy"]
    assert not (tmp_path / "2" / "summary.json").exists()


def faulty(folder: Path, seed: int) -> Job:
    def fault() -> dict[str, Any]:
        raise ZeroDivisionError("a fault of the program")

    made = replace(recipe(), seed=seed)
    training = prepare(made)
    training.run_round = fault  # type: ignore[method-assign]
    return Run.create(folder / str(seed), made), training, None


def test_a_fault_of_the_program_stops_the_others_which_can_be_resumed(tmp_path: Path) -> None:
    long = replace(recipe(), rounds=40)
    with pytest.raises(ZeroDivisionError):
        side_by_side([*waiting(jobs(tmp_path, {"1": long})), partial(faulty, tmp_path, 2)], at_once=2)
    run = Run.open(tmp_path / "1")
    assert len(run.rows()) < 40
    summary = run.go(prepare(run.recipe()))
    wanted = Run.create(tmp_path / "alone", long).go(prepare(long))
    assert summary["global_accuracy"] == wanted["global_accuracy"]


def test_runs_are_got_ready_when_there_is_a_place_and_let_go_when_they_are_done(tmp_path: Path) -> None:
    """A table's cells are more than a device holds: of five runs, two at a time, no more than two are ever there."""
    there: weakref.WeakSet[Engine] = weakref.WeakSet()
    seen: list[int] = []

    def ready(seed: int, rounds: int) -> Job:
        made = replace(recipe(), seed=seed, rounds=rounds, checkpoint_every=100)
        training = prepare(made)
        there.add(training.engine)
        seen.append(len(there))
        return Run.create(tmp_path / str(seed), made), training, None

    lengths = [6, 1, 1, 2, 1]
    found = side_by_side([partial(ready, *each) for each in enumerate(lengths)], at_once=2)
    assert [summary["seed"] for summary in found] == [0, 1, 2, 3, 4], "in the order they were given"
    assert [summary["rounds"] for summary in found] == lengths
    assert max(seen) == 2, seen


@pytest.mark.parametrize("fault", [False, True])
def test_after_a_fault_no_more_begin(fault: bool, tmp_path: Path) -> None:
    begun: list[int] = []

    def ready(seed: int) -> Job:
        begun.append(seed)
        if fault:
            return faulty(tmp_path, seed)
        made = replace(recipe(), seed=seed)
        return Run.create(tmp_path / str(seed), made), prepare(made, callbacks=[Broken()]), None

    with pytest.raises(ZeroDivisionError if fault else FedrolexError):
        side_by_side([partial(ready, seed) for seed in range(6)], at_once=2)
    assert len(begun) == 6 if not fault else len(begun) < 6


def test_what_cannot_go_beside_others_is_trained_while_they_wait(tmp_path: Path) -> None:
    """The same bits as alone, though others of the pool are in the middle of their rounds."""
    recipes = {"a": recipe(), "b": recipe(engine="crew"), "c": replace(recipe(), seed=2)}
    same_as_alone(tmp_path, recipes)


def test_what_would_not_give_the_same_bits_goes_alone() -> None:
    training = prepare(recipe())
    assert fits(training)
    main = training.server.main
    drawing = nn.Sequential(main.module, nn.Dropout(0.1))
    training.server.networks = {MODEL: Network(drawing, main.axes)}
    assert not fits(training)
    assert not fits(prepare(recipe(engine="crew")))


def test_engines_of_a_gpu_share_a_process() -> None:
    assert Lanes.shares_process
    assert Ragged.shares_process


def test_from_the_command_line(tmp_path: Path) -> None:
    settings = [part for setting in SMALL for part in ("--set", setting)]
    words = ["train", *settings, "--seeds", "1,2", "--at-once", "2", "--out", str(tmp_path / "run"), "--json"]
    done = CliRunner().invoke(app, [*words, "--device", "cpu", "--engine", "loop"])
    found = json.loads(done.stdout)
    assert [summary["seed"] for summary in found["runs"]] == [1, 2]
    assert (tmp_path / "run" / "seed-2" / "summary.json").is_file()


def test_runs_that_cannot_go_side_by_side_say_so(tmp_path: Path) -> None:
    settings = [part for setting in SMALL for part in ("--set", setting)]
    words = ["train", *settings, "--engine", "crew", "--seeds", "1,2", "--at-once", "2", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, [*words, "--device", "cpu"])
    assert done.exit_code == 0
    said = "is trained while the others wait: engine crew has threads of its own; runs of engine loop"
    assert done.stderr.count(said) == 2
