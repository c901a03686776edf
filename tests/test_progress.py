"""What is shown of runs while they go on."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from fedrolex.cli.progress import Watched, columns


def row(round: int, accuracy: float | None = None, dropped: int = 0) -> dict[str, Any]:
    known = {} if accuracy is None else {"global_accuracy": accuracy}
    lost = {str(client): "failed" for client in range(dropped)}
    return {"round": round, "bytes_down": 1024, "bytes_up": 512, "dropped": lost, **known}


def test_a_watched_run_says_where_it_is() -> None:
    run = Watched("mine, seed 1", 10, now=100.0)
    assert (run.score, run.spark, run.left, run.dropped) == ("", "", "", "")
    run.add(row(0), now=130.0)
    run.add(row(1, 0.25, dropped=2), now=140.0)
    assert run.left == "0:02:40 left"  # 8 rounds of (140 - 100) / 2 seconds
    assert run.line() == "mine, seed 1: round 2 of 10, 25.0%, 3.0 KiB sent, 2 dropped, 0:02:40 left"


def test_a_spark_line_goes_from_the_lowest_to_the_highest() -> None:
    run = Watched("mine", 40)
    for round, accuracy in enumerate([0.1, 0.2, 0.3, 0.2]):
        run.add(row(round, accuracy), float(round))
    assert run.spark == "▁▅█▅"
    for round in range(4, 40):
        run.add(row(round, 0.5), float(round))
    assert run.spark == "▁" * 12


def test_rounds_that_are_made_again_count_once() -> None:
    run = Watched("mine", 10, [row(0, 0.1), row(1, 0.2, dropped=3), row(2, 0.3)])
    assert (run.done, run.sent) == (3, "4.5 KiB")
    run.add(row(1, 0.2), 1.0)
    assert (run.done, run.sent, run.dropped, run.score) == (2, "3.0 KiB", "", "20.0%")


def test_the_time_left_is_that_of_the_latest_rounds() -> None:
    run = Watched("mine", 100)
    for round in range(20):
        run.add(row(round), 1000.0 * (round + 1))
    for round in range(20, 40):
        run.add(row(round), 20_000.0 + (round - 19))
    assert run.left == "0:01:00 left"


@pytest.mark.parametrize("width", [70, 100, 140])
def test_the_live_line_fits_its_screen(width: int) -> None:
    out = io.StringIO()
    screen = Console(file=out, width=width, force_terminal=True, legacy_windows=False)
    run = Watched("fedrolex, seed 1", 40, [row(each, each / 40, dropped=1) for each in range(20)], now=0.0)
    run.add(row(20, 0.6), 10.0)
    with Progress(*columns(screen), console=screen) as bar:
        bar.add_task("", total=run.rounds, completed=run.done, run=run)
    last = out.getvalue().split("\r")[-1]
    assert all(word in last for word in ("21/40", "60.0%", "0:03:10 left", "20 dropped"))
    assert ("KiB" in last) == (width >= 95)
    assert ("▁" in last) == (width >= 80)
