"""Callbacks: what they are told, what they may add, and what becomes of one that fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_runs import FEW, finished, same

from fedrolex import (
    Callback,
    FedrolexError,
    Round,
    Run,
    Training,
    Upload,
    prepare,
    train,
)
from fedrolex.rounds.server import State
from fedrolex.runs import checkpoint as checkpoints


class Spy(Callback):
    """Writes down what it is told, adds a number to the metrics, and fails where it is asked to."""

    def __init__(self, fails_in: str = "", at: int = 0, why: str = "no disk") -> None:
        self.told: list[str] = []
        self._fails_in, self._at, self._why = fails_in, at, why

    def _tell(self, hook: str, round: int) -> None:
        self.told.append(hook)
        if hook == self._fails_in and round == self._at:
            raise RuntimeError(self._why)

    def begin(self, training: Training, folder: Path | None) -> None:
        self._tell("begin", training.server.round)

    def round_begins(self, round: Round) -> None:
        self._tell("round_begins", round.number)

    def folded(self, round: Round, uploads: Sequence[Upload]) -> None:
        self._tell("folded", round.number)

    def round_ends(self, round: Round, new: State, row: dict[str, Any]) -> None:
        self._tell("round_ends", round.number)
        row["seen"] = len(new["model"])

    def row(self, training: Training, row: dict[str, Any]) -> None:
        self._tell("row", row["round"])

    def end(self, training: Training) -> None:
        self._tell("end", training.server.round)


def test_a_callback_is_told_of_everything_and_may_add_to_the_metrics(tmp_path: Path) -> None:
    spy = Spy()
    Run.create(tmp_path / "run", FEW).go(prepare(FEW, callbacks=[spy]))
    one = ["round_begins", *["folded"] * 5, "round_ends", "row"]
    assert spy.told == ["begin", *one * 3, "end"]
    rows = Run(tmp_path / "run").rows()
    assert [row["seen"] for row in rows] == [10] * 3
    assert all("drift" in row for row in rows)
    assert not (tmp_path / "run" / "tensorboard").exists()


@pytest.mark.parametrize(("hook", "kept"), [("round_begins", 1), ("folded", 1), ("round_ends", 1), ("row", 2)])
@pytest.mark.parametrize("method", ["fedrolex", "scaffold"])
def test_a_callback_that_fails_is_one_line_and_loses_no_finished_round(
    hook: str, kept: int, method: str, tmp_path: Path
) -> None:
    recipe = FEW.with_settings([f"method={method}"])
    whole = Run.create(tmp_path / "whole", recipe)
    whole.go(prepare(recipe, callbacks=[Spy()]))
    broken = Run.create(tmp_path / "broken", recipe)
    with pytest.raises(FedrolexError) as caught:
        broken.go(prepare(recipe, callbacks=[Spy(hook, 1)]))
    assert str(caught.value) == f"callback Spy failed in {hook}(): RuntimeError: no disk"
    assert len(broken.rows()) == kept
    assert checkpoints.read(broken.checkpoint)[1]["round"] == str(kept)
    broken.go(prepare(recipe, callbacks=[Spy()]))
    assert same(finished(broken.folder), finished(whole.folder))


def test_metrics_that_are_no_json_are_one_line(tmp_path: Path) -> None:
    class Wrong(Callback):
        def round_ends(self, round: Round, new: State, row: dict[str, Any]) -> None:
            row["tensor"] = new["model"]

    run = Run.create(tmp_path / "run", FEW)
    with pytest.raises(FedrolexError, match="the metrics of round 0 cannot be written as JSON"):
        run.go(prepare(FEW, callbacks=[Wrong()]))
    assert run.rows() == []


def test_callbacks_in_python_need_no_name() -> None:
    spy = Spy()
    done = train(FEW.with_settings(["rounds=1"]), callbacks=[spy])
    assert spy.told[-1] == "end"
    assert done.rows[0]["seen"] == 10


def test_all_numbers_are_on_the_board(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    recipe = FEW.with_settings(["callbacks=[drift, tensorboard]", "evaluation.metrics=[top5]", "rounds=2"])
    Run.create(tmp_path / "run", recipe).go(prepare(recipe))
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    tags = set(board.Tags()["scalars"])
    assert {"train_loss", "loss", "global_accuracy", "top5", "drift/1", "clients"} <= tags
    assert {"bytes_down", "bytes_up", "seconds"} <= tags
    assert not {"round", "void", "dropped"} & tags
    assert [event.step for event in board.Scalars("train_loss")] == [0, 1]
