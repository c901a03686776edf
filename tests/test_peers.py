"""The comparison with other simulators: its arithmetic, and the same work for everyone."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import compare
import pytest
import torch
from work import Work, build, data

TINY = Work(users=4, images=20, cohort=4, threads=1, engine="loop", warmup=1, rounds=1)


def report(rate: float, **other: Any) -> dict[str, Any]:
    versions = {"torch": "2", "python": "3"}
    return {"updates_per_second": rate, "updates": 8, "parameters": 5, "data": "random", "versions": versions, **other}


def test_speedups_are_medians_over_pairs() -> None:
    ours, pfl = [report(10.0), report(30.0), report(20.0)], [report(10.0), report(10.0), report(40.0)]
    found = compare.figures({"ours": ours, "pfl": pfl})
    assert (found["ours_updates_per_second"], found["pfl_updates_per_second"]) == (20.0, 10.0)
    assert [found[f"pfl_speedup{end}"] for end in ("", "_low", "_high")] == [1.0, 0.5, 3.0]
    assert found["pfl_versions"] == "torch 2, python 3"
    assert "flower_speedup" not in found
    assert all(not isinstance(value, dict | list) for value in found.values())


def test_runs_that_did_other_work_are_not_compared() -> None:
    with pytest.raises(AssertionError, match="not the same work"):
        compare.figures({"ours": [report(1.0)], "pfl": [report(1.0, updates=7)]})


def test_the_last_object_is_found_among_other_output() -> None:
    assert compare.last_object('{"a": 1}\nround 2\n{"a": 3}\nbye\n') == {"a": 3}
    with pytest.raises(SystemExit, match="no JSON object"):
        compare.last_object("bye\n")


def test_a_difference_is_a_part_of_the_update() -> None:
    start, end = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])}
    assert compare.difference(end, end, start) == 0
    assert compare.difference(start, end, start) == 1


def test_a_peer_that_is_not_there_is_left_out_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(compare.MODULES, "pfl", "no_such_module")
    assert not compare.installed("pfl", sys.executable)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "pip install -e '.[peers]'" in said


def test_the_work_is_that_of_pfls_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDROLEX_DATA", raising=False)
    assert sum(p.numel() for p in build(Work()).parameters()) == 1_626_442
    x, y = data(TINY)
    assert (x.shape, y.shape) == ((80, 3, 32, 32), (80,))
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert build(TINY)(x[:2]).shape == (2, 10)


def test_ours_arrives_where_a_bare_loop_does() -> None:
    assert compare.agree({"ours": [sys.executable]}, TINY, users=2)["ours"] < compare.TOLERANCE


@pytest.mark.parametrize("system", ["pfl", "flower"])
def test_a_peer_arrives_where_a_bare_loop_does(system: str) -> None:
    if any(importlib.util.find_spec(module) is None for module in compare.MODULES.values()):
        pytest.skip("needs an environment of its own, Flower's simulation has another Ray: pip install -e '.[peers]'")
    assert compare.agree({system: [sys.executable]}, TINY, users=2)[system] < compare.TOLERANCE


def test_ours_reports_what_it_did() -> None:
    script = Path(compare.__file__).parent / "ours.py"
    words = replace(TINY, cohort=2).words()
    done = subprocess.run([sys.executable, str(script), words], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["updates"], found["parameters"], len(found["seconds"])) == (2, 1_626_442, 1)
    assert found["updates_per_second"] == pytest.approx(2 / found["seconds"][0], rel=0.02)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--pairs 0", "--pairs is 0"),
        ("--threads 0", "--threads is 0"),
        ("--cohort 5000", "--cohort 5000 is more than --users 1000"),
        ("--engine graph", "--engine graph: use one of"),
        ("--pfl-processes 3", "--pfl-processes 3: give 1 to 2"),
        ("--out nowhere/x.json", "there is no such folder"),
        ("--flower-python nowhere/python", "there is no such program"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    words: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py", *words.split()])
    with pytest.raises(SystemExit) as told:
        compare.main()
    assert told.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
