"""What runs show: dropped clients, tables on narrow screens, comparisons that go on after an interruption."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from told import told
from typer.testing import CliRunner

from fedrolex import FedDF, FleetRecipe, Recipe, Run
from fedrolex.cli import progress
from fedrolex.cli.app import app
from fedrolex.cli.progress import dropped
from fedrolex.cli.results import show_results, verdict
from fedrolex.cli.train import Planned, of_one_precision
from fedrolex.methods import Columns
from fedrolex.recipes import alternatives
from fedrolex.runs.prepare import beside
from fedrolex.runs.training import LATE

QUICK = ["task.width=4", "task.limit=200", "rounds=2", "compare=true", "device=cpu"]


def test_dropped_clients_have_a_line_a_reason() -> None:
    row = {"round": 3, "dropped": {**{str(i): "sent nothing" for i in range(11)}, "20": "is odd", "21": LATE}}
    assert dropped(row) == [
        "round 3: clients 0, 1, 2, 3, 4, 5, 6, 7 and 3 more dropped: sent nothing",
        "round 3: client 20 dropped: is odd",
    ]


@pytest.mark.parametrize("width", [60, 80, 160])
def test_a_table_fits_its_screen(width: int) -> None:
    result = {
        "method": "everyone trains 1 (a bound: they cannot)", "seed": 1, "bytes": 2**24, "bytes_of_full_model": 2**25,
        "seconds": 12.0, "global_accuracy": 0.5, "local_accuracy": 0.6, "local_accuracy_masked": 0.7, "run": "here",
        "validation_accuracy": 0.4, "dropped": 3, "public_examples": 5,
    }  # fmt: skip
    out = io.StringIO()
    show_results(Console(file=out, width=width), [result, {**result, "seed": 2}])
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "everyone trains 1 (a bound: they cannot)" in text
    assert "50.0%" in text
    assert ("70.0%" in text) == (width == 160)
    assert "3 answers dropped" in text
    assert "5 examples put aside as public data" in text


def test_an_interrupted_comparison_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the second of five runs, by the name of the first."""
    go, calls = Run.go, []

    def interrupted(self: Run, *words: Any) -> Any:
        calls.append(self.folder.name)
        if calls == ["run", "run-alone-1"]:
            raise KeyboardInterrupt
        return go(self, *words)

    monkeypatch.setattr(Run, "go", interrupted)
    settings = [word for each in QUICK for word in ("--set", each)]
    first = CliRunner().invoke(app, ["train", "digits", "--out", str(tmp_path / "run"), *settings])
    assert first.exit_code == 130
    assert f"go on with: fedrolex resume {tmp_path / 'run'}\n" in first.stderr
    again = CliRunner().invoke(app, ["resume", str(tmp_path / "run")])
    assert again.exit_code == 0, again.output
    assert calls[2:] == ["run", "run-alone-1", "run-alone-2", "run-alone-3", "run-alone-4"]
    assert f"{tmp_path / 'run'} is finished: its files are checked, nothing is trained\n" in again.stderr
    assert "only who can trains 1/4" in again.stdout
    assert (tmp_path / "run" / "accuracy.png").is_file()


def test_in_a_pipe_a_long_run_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENCE", -1)
    settings = [word for each in (*QUICK, "compare=false") for word in ("--set", each)]
    done = CliRunner().invoke(app, ["train", "digits", "--out", str(tmp_path / "run"), *settings])
    assert "fedrolex, seed 1: round 1 of 2, " in done.stderr
    quiet = CliRunner().invoke(app, ["train", "digits", "--out", str(tmp_path / "two"), "--json", *settings])
    assert "round 1 of 2" not in quiet.stderr


def test_sections_of_a_recipe_are_recipes() -> None:
    wrong: Any = {"name": "feddf"}
    assert "give a Method, or start from plain words" in told(lambda: Recipe(method=wrong))
    assert Recipe(method=FedDF()).method.name == "feddf"


def test_a_comparison_is_on_the_same_data() -> None:
    recipe = Recipe().with_settings(["method=feddf", "task.models={1: resnet8}"])
    for other in alternatives(recipe).values():
        task: Any = other.task
        assert (task.public, task.validation, task.models) == (0.1, 0.1, {})


def test_columns_stand_beside_everything_but_themselves() -> None:
    """Also where the server alone is larger than its devices; not where a single column would be left."""
    assert list(alternatives(Recipe()))[3:] == ["columns 1/2, 1/4, 1/8, 1/16 one by one"]
    itself = Recipe().with_settings(["method=columns", "method.one_by_one=true"])
    assert len(alternatives(itself)) == 3
    assert len(alternatives(itself.with_settings(["method.columns=[1/4, 1/8]"]))) == 4
    wide = Recipe().with_settings(["fleet.capacities=[1]", "fleet.server_scale=4"])
    assert list(alternatives(wide)) == ["everyone trains 1", "columns 1, 1"]


@pytest.mark.parametrize(
    ("capacities", "name"),
    [
        ("[1, 1/2, 1/4]", "columns 1/2, 1/4 one by one"),
        ("[1, 9/10, 8/10, 7/10]", "columns 9/10, 4/5, 7/10"),  # one by one: two and a half times the widest
        ("[1, 1/2, 7/20]", "columns 1/2, 7/20 one by one"),
        ("[1, 1/2, 3/8]", "columns 1/2, 3/8"),
    ],
)
def test_columns_are_compared_one_by_one_where_that_costs_little(capacities: str, name: str) -> None:
    recipe = Recipe().with_settings([f"fleet.capacities={capacities}"])
    found = list(alternatives(recipe).items())
    assert found[-1][0] == name
    assert isinstance(found[-1][1].method, Columns)
    assert found[-1][1].method.one_by_one == name.endswith("one by one")


def test_columns_that_were_compared_together_by_an_earlier_version_go_on_so(tmp_path: Path) -> None:
    """With their own name beside their number, also one run a seed."""
    recipe = Recipe(compare=True)
    together = replace(list(alternatives(recipe).values())[-1], method=Columns())
    run = tmp_path / "run"
    assert list(beside(run, recipe))[-1][0] == "columns 1/2, 1/4, 1/8, 1/16 one by one"
    for there in ("run-alone-4", "seeds-alone-4/seed-2"):
        Run.create(tmp_path / there, together)
    for folder in (run, tmp_path / "seeds"):
        what, place, other = list(beside(folder, recipe))[-1]
        assert (what, place.name) == ("columns 1/2, 1/4, 1/8, 1/16", f"{folder.name}-alone-4")
        assert other == together


@pytest.mark.parametrize(
    ("fleet", "names"),
    [
        ("capacities: [1]", ["everyone trains 1"]),
        ("capacities: rho:1", ["everyone trains 1", "columns 1/16, 1/16"]),
        ("shares: [0, 0, 0, 0, 1]", ["everyone trains 1/16", "columns 1/2, 1/4, 1/8, 1/16 one by one"]),
        ("capacities: rho:0.5", ["everyone trains 1/16", "only who can trains 1",
                                 "everyone trains 1 (a bound: they cannot)", "columns 1/16, 1/16"]),
        ("{clients: 3, cohort: 2}", ["everyone trains 1/4", "only who can trains 1/2",
                                     "everyone trains 1 (a bound: they cannot)",
                                     "columns 1/2, 1/4, 1/8, 1/16 one by one"]),
    ],
)  # fmt: skip
def test_alternatives_are_of_the_sizes_that_devices_have(fleet: str, names: list[str]) -> None:
    settings = yaml.safe_load(fleet if fleet[0] == "{" else f"{{{fleet}}}")
    found = alternatives(replace(Recipe(), fleet=FleetRecipe(**settings)))
    assert list(found) == names


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (0.8, "fedrolex beats the best of what else is in this table (only who can trains 1/4) by 10.0 points."),
        (0.7, "fedrolex is as good as the best of what else is in this table (only who can trains 1/4)."),
        (None, "fedrolex was not measured: there is nothing to compare."),
        (
            0.6,
            "Here the fleet does better without fedrolex: only who can trains 1/4, by 10.0 points. Its recipe is run-2",
        ),
    ],
)
def test_the_verdict_leaves_the_bound_out(own: float | None, says: str) -> None:
    methods = ["fedrolex", *alternatives(Recipe())]
    scores = dict(zip(methods, (own, 0.5, 0.7, 0.9, 0.65), strict=True))
    results = [
        {"method": what, "global_accuracy": score, "run": f"run-{place}"}
        for place, (what, score) in enumerate(scores.items())
    ]
    assert verdict(results, methods).startswith(says)


@pytest.mark.parametrize(("examples", "said"), [(100, True), (400, False)])
def test_the_verdict_says_what_chance_makes_of_few_examples(examples: int, said: bool) -> None:
    """0.7 and 0.8: two standard errors are 13 points of 100 examples, 6.5 of 400; three seeds measure more."""
    one = [
        {"method": what, "global_accuracy": score, "test_examples": examples, "run": what}
        for what, score in (("columns", 0.8), ("everyone trains 1/4", 0.7))
    ]
    methods = ["columns", "everyone trains 1/4"]
    assert ("Chance alone" in verdict(one, methods)) == said
    assert "Chance alone" not in verdict(one * 3, methods)


def test_runs_of_one_process_have_one_precision() -> None:
    kinds = [Recipe(), Recipe(), Recipe(), Recipe(precision="bf16"), Recipe(precision="bf16")]
    plans = [Planned(what, Path(what), recipe, Path(), Path()) for what, recipe in zip("abcde", kinds, strict=True)]
    assert ["".join(plan.what for plan in some) for some in of_one_precision(plans)] == ["abc", "de"]
