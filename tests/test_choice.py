"""The engine that is chosen by measurement: what it chooses, that measuring changes nothing, that a run keeps it."""

from __future__ import annotations

import json
import threading
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedrolex import Classification, Examples, FedrolexError, train
from fedrolex.clients.work import LocalTraining
from fedrolex.engines import Auto, Choice, Crew, Loop
from fedrolex.engines import auto as autos
from fedrolex.engines import crew as crews
from fedrolex.engines import loop as loops
from fedrolex.engines.auto import Times, choose, decide
from fedrolex.engines.cpu.crew import first_together
from fedrolex.runs import Recipe, Run, Training, prepare
from fedrolex.runs import checkpoint as checkpoints
from fedrolex.tasks.partition import Partition

SETTINGS = ["task.width=8", "fleet.clients=10", "fleet.cohort=8", "rounds=4", "checkpoint_every=1", "task.limit=400",
            'fleet.capacities=["1", "1/4"]', "engine=auto"]  # fmt: skip
RECIPE = Recipe(device="cpu").with_settings(SETTINGS)
ONE, NARROW = Fraction(1), Fraction(1, 16)
CREW = Choice("crew", 2, ("1/4",), "because")


def test_the_fastest_is_chosen_by_what_the_whole_cohort_takes() -> None:
    times = {ONE: Times(1.0, 1.0, 1.0), NARROW: Times(0.1, 0.06, 0.03)}
    few, many = ({ONE: 2, NARROW: count} for count in (1, 20))
    assert decide(times, few, 2).engine == "crew", "a little faster is faster"
    assert decide(times, many, 2) == Choice("crew", 2, ("1/16",), decide(times, many, 2).why)
    assert decide({ONE: Times(1.0, 0.5, 0.49)}, {ONE: 4}, 2).stacked == (), "stacks must be clearly faster too"
    assert decide({ONE: Times(1.0, 2.0, 2.0)}, {ONE: 4}, 2).engine == "loop"
    assert decide({ONE: Times(float("inf"), float("inf"), float("inf"))}, {ONE: 4}, 2).engine == "loop"


@pytest.mark.parametrize(("costs", "workers", "together"), [
    ([1.0, 1.0], 2, 0), ([1.0, 1.0, 1.0], 2, 1), ([9.0, 1.0, 1.0], 2, 1), ([9.0], 2, 1), ([], 2, 0),
    ([4.0, 2.0, 1.0, 1.0], 2, 0), ([1.0] * 7, 4, 3), ([1.0] * 8, 4, 0), ([3.0, 2.0], 1, 0),
])  # fmt: skip
def test_what_does_not_come_out_even_is_done_by_all_workers_first(
    costs: list[float], workers: int, together: int
) -> None:
    assert first_together(costs, workers) == together


def choice_for(recipe: Recipe) -> Choice:
    made = prepare(recipe)
    return choose(made._plan(), made.model, "fp32", recipe.rounds)


def test_measuring_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autos, "SHORT", 0.0)
    made, other = prepare(RECIPE), prepare(RECIPE)
    before = torch.get_rng_state()
    assert "measured" in choose(made._plan(), made.model, "fp32", RECIPE.rounds).why
    assert torch.equal(before, torch.get_rng_state())
    for name, tensor in other.state.items():
        assert torch.equal(made.state[name], tensor), name
    made.engine, other.engine = Loop(made.model), Loop(other.model)
    assert made.run_round()["train_loss"] == other.run_round()["train_loss"]


def test_a_short_run_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Times:
        raise AssertionError

    monkeypatch.setattr(autos, "_times", never)
    choice = choice_for(RECIPE)
    assert choice.engine == "loop"
    assert "short" in choice.why


def test_a_deadline_needs_loop() -> None:
    assert "deadline" in choice_for(RECIPE.with_settings(["deadline=9"])).why


def fixed(monkeypatch: pytest.MonkeyPatch, *choices: Choice) -> list[Choice]:
    """Measurements that come out as told, and those that are left."""
    left = list(choices)
    monkeypatch.setattr(autos, "choose", lambda *_: left.pop(0))
    return left


def finished(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    tensors, _ = checkpoints.read(folder / "checkpoint.safetensors")
    return tensors, [{k: v for k, v in row.items() if k != "seconds"} for row in Run(folder).rows()]


def test_a_resumed_run_keeps_its_engine_and_its_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = fixed(monkeypatch, CREW, CREW, Choice("loop", why="would be taken now"))
    Run.create(tmp_path / "whole", RECIPE).go(prepare(RECIPE))
    assert "engine: crew of 2, stacks of 1/4 (because)" in capsys.readouterr().err

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Run.create(tmp_path / "cut", RECIPE).go(prepare(RECIPE), stop)
    again = prepare(RECIPE)
    summary = Run.open(tmp_path / "cut").go(again)
    assert len(left) == 1, "nothing was measured again"
    assert isinstance(again.engine, Auto)
    assert again.engine.choice == CREW
    assert summary["engine"] == "crew of 2, stacks of 1/4"
    tensors, rows = finished(tmp_path / "whole")
    others, found = finished(tmp_path / "cut")
    assert found == rows
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"engine": "graph"}', '{"engine": "crew", "workers": 2, "stacked": ["x"]}']
)
def test_a_damaged_record_is_refused_in_one_line(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed(monkeypatch, CREW)
    Run.create(tmp_path / "run", RECIPE).go(prepare(RECIPE))
    (tmp_path / "run" / "engine.json").write_text(text)
    with pytest.raises(FedrolexError, match="damaged"):
        Run.open(tmp_path / "run").go(prepare(RECIPE))


def test_a_record_says_everything() -> None:
    assert Choice.decode(json.loads(json.dumps(CREW.encode()))) == CREW


def test_the_summary_names_the_engine_of_the_recipe(tmp_path: Path) -> None:
    recipe = RECIPE.with_settings(["engine=crew", "rounds=1"])
    assert Run.create(tmp_path / "run", recipe).go(prepare(recipe))["engine"] == "crew"
    assert not (tmp_path / "run" / "engine.json").exists()


def words(tmp_path: Path) -> Recipe:
    from test_tasks import WORDS, corpus

    file = corpus(tmp_path / "users.jsonl")
    return Recipe(device="cpu").with_settings([*WORDS, f"task.data={file}", "task.dropout=0.3", "client.lr=0.02"])


def with_dropout() -> Training:
    """Eight clients of two capacities with six images each, and a network without buffers, which can be stacked."""

    def build(scale: int) -> nn.Module:
        torch.manual_seed(0)
        first = nn.Conv2d(3, 8 * scale, 3)
        return nn.Sequential(first, nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(8 * scale * 36, 5))

    draw = torch.Generator().manual_seed(0)
    data = Examples(torch.randn(48, 3, 8, 8, generator=draw), torch.arange(48) % 5)
    parts = Partition.of(range(6 * client, 6 * client + 6) for client in range(8))
    settings = ["fleet.clients=8", "fleet.cohort=8", 'fleet.capacities=["1", "1/2"]', "client.batch=2", "client.lr=0.1"]
    recipe = Recipe(device="cpu").with_settings(settings)
    return prepare(recipe, Classification("tiny", build, data, data, parts, classes=5))


@pytest.mark.parametrize("stacked", [(), None])
def test_dropout_draws_what_it_would_for_a_client_alone(stacked: Any) -> None:
    plain, crew = with_dropout(), with_dropout()
    engine = crew.engine = Crew(crew.model, workers=2, stacked=stacked, fewest=2)
    before = {name: tensor.clone() for name, tensor in plain.state.items()}
    for made in (plain, crew):
        made.run_round()
    assert not engine.draws
    assert any(member._modules for member in engine._members) == (stacked is None)
    for name, tensor in plain.state.items():
        change = float((tensor - before[name]).norm())
        assert float((crew.state[name] - tensor).norm()) <= 1e-4 * change, name


def test_dropout_on_several_threads_is_the_same_every_time(tmp_path: Path) -> None:
    recipe = words(tmp_path)
    states = []
    for _ in range(2):
        made = prepare(recipe)
        made.engine = Crew(made.model, workers=2)
        made.run_round()
        assert not made.engine.draws
        states.append(made.state)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_model_that_draws_otherwise_is_left_to_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws of threads that share a generator would differ from run to run; loop's bits come out instead."""
    monkeypatch.setattr(loops, "has_dropout", lambda _: False)
    recipe = words(tmp_path)
    plain, crew = prepare(recipe), prepare(recipe)
    engine = crew.engine = Crew(crew.model, workers=2)
    for made in (plain, crew):
        for _ in range(2):
            made.run_round()
    assert engine.draws
    assert all(torch.equal(plain.state[name], crew.state[name]) for name in plain.state)


def test_workers_leave_torch_as_it_was_and_stop_when_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the wait for workers that are busy: when it gets through, none is."""
    threads = torch.get_num_threads()
    made = prepare(RECIPE)  # PyTorch may start a thread of its own
    running = threading.active_count()
    made.engine = Crew(made.model, workers=2, stacked=())
    made.run_round()
    assert threading.active_count() == running
    assert torch.get_num_threads() == threads
    made.round = 0  # the same clients again
    step, busy = LocalTraining.step, []

    def slow(*arguments: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        busy.append(1)
        time.sleep(0.3)
        busy.pop()
        return step(*arguments)

    def interrupted(_: Any) -> None:
        while not busy:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalTraining, "step", slow)
    monkeypatch.setattr(crews, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.run_round()
    assert busy == []
    assert threading.active_count() == running
    assert torch.get_num_threads() == threads
    monkeypatch.undo()
    made.run_round()


def test_handing_over_to_loop_is_said_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Recipe(device="cpu", engine="crew").with_settings(["rounds=1", "deadline=100", "task.limit=200"])
    trained = train(recipe, out=tmp_path / "run")
    assert "engine: loop (only it can interrupt a client at its deadline)" in capsys.readouterr().err
    assert trained.summary["engine"] == "loop"
