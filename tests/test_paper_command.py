"""``fedrolex paper``: cells are trained once, go on where they were stopped, and are collected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from fedrolex import FedrolexError
from fedrolex.cli.app import app
from fedrolex.recipes.paper import cells
from fedrolex.recipes.paper_setups import PAPER_SETUPS, Kind
from fedrolex.recipes.recipe import Recipe
from fedrolex.runs import Run

SMALL = [
    "task.data=digits", "task.model=convnet", "task.width=4", "task.limit=300", "fleet.clients=20", "fleet.cohort=2",
    "precision=fp32", "device=cpu", "engine=loop",
]  # fmt: skip


def paper(folder: Path, *words: str, settings: list[str] = SMALL) -> Any:
    every = [word for setting in settings for word in ("--set", setting)]
    places = ["--runs", str(folder / "runs"), "--out", str(folder / "out")]
    return CliRunner().invoke(app, ["paper", *words, *places, *every])


def test_cells_are_trained_once_and_collected_over_seeds(tmp_path: Path) -> None:
    words = ("rho", "--scale", "0.002", "--cell", "cifar10-high/fedrolex-0.2", "--seeds")
    first = paper(tmp_path, *words, "1", "--json")
    assert first.exit_code == 0, first.output
    (run,) = (tmp_path / "runs").rglob("summary.json")
    before = run.stat().st_mtime_ns
    second = paper(tmp_path, *words, "1,2", "--json")
    assert second.exit_code == 0, second.output
    found = json.loads(second.stdout)
    assert run.stat().st_mtime_ns == before, "what is done is not trained again"
    (cell,) = (each for each in found["cells"] if each["seeds"])
    summaries = [json.loads(path.read_text()) for path in (tmp_path / "runs").rglob("summary.json")]
    values = sorted(100 * summary["global_accuracy"] for summary in summaries)
    assert (cell["row"], cell["seeds"], cell["rounds"]) == ("fedrolex-0.2", [1, 2], 2)
    assert cell["global"]["mean"] == pytest.approx(sum(values) / 2)
    assert cell["global"]["std"] == pytest.approx((values[1] - values[0]) / 2**0.5)
    written = sorted(path.suffix for path in (tmp_path / "out").iterdir())
    assert written == [".json", ".md", ".png", ".png", ".png"], "along the axis, against bytes, and over clients"
    assert "--scale 0.002" in found["command"]
    assert "x0.002-changed-" in found["title"]


@pytest.mark.parametrize("at_once", ["1", "2"])
def test_a_cell_that_fails_leaves_those_after_it_alone(at_once: str, tmp_path: Path) -> None:
    """One whose folder is a run of another recipe's checkpoint, say; it is told again in the end."""
    words = ("rho", "--scale", "0.001", "--cell", "cifar10-high/fedrolex-0.2", "--cell", "cifar10-high/fedrolex-0.5")
    assert paper(tmp_path, *words).exit_code == 0
    for path in (tmp_path / "runs").rglob("summary.json"):
        path.unlink()
    (damaged,) = (tmp_path / "runs").rglob("fedrolex-0.2/seed-1/checkpoint.safetensors")
    damaged.write_bytes(b"no checkpoint")
    done = paper(tmp_path, *words, "--at-once", at_once, "--seeds", "1")
    assert isinstance(done.exception, FedrolexError)
    assert "checkpoint" in str(done.exception)
    (finished,) = (tmp_path / "runs").rglob("summary.json")
    assert "fedrolex-0.5" in str(finished)
    assert "cifar10-high/fedrolex-0.2, seed 1, has failed, the others go on" in done.stderr


@pytest.mark.parametrize("name", ["cifar10-high/fedrolex-0.2", "rho/cifar10-high/fedrolex-0.2"])
def test_a_run_that_was_stopped_while_it_was_measured_is_measured_again(name: str, tmp_path: Path) -> None:
    """Summary and model are written before what it is worth to every capacity and client."""
    words = ("rho", "--scale", "0.001", "--cell", name)
    assert paper(tmp_path, *words).exit_code == 0
    (details,) = (tmp_path / "runs").rglob("details.json")
    (table,) = (tmp_path / "out").glob("*.json")
    whole, there = json.loads(details.read_text()), table.read_text()
    details.unlink()
    table.unlink()
    listed = paper(tmp_path, *words, "--list", "--missing", "--json")
    assert [cell["cell"] for cell in json.loads(listed.stdout)] == ["rho/cifar10-high/fedrolex-0.2"]
    assert paper(tmp_path, *words).exit_code == 0
    assert json.loads(details.read_text()) == whole
    assert json.loads(table.read_text())["cells"] == json.loads(there)["cells"]


def test_details_are_wanted_by_who_asks_for_them(tmp_path: Path) -> None:
    """A run that was stopped while it was measured is done for a table that is without details, and only for that."""
    words = ("rho", "--scale", "0.001", "--cell", "cifar10-high/fedrolex-0.2")
    bare = [*SMALL, "callbacks=[]"]
    assert paper(tmp_path, *words, settings=bare).exit_code == 0
    (summary,) = (tmp_path / "runs").rglob("summary.json")
    assert not list((tmp_path / "runs").rglob("details.json"))
    before = summary.stat().st_mtime_ns
    assert paper(tmp_path, *words, settings=bare).exit_code == 0
    assert summary.stat().st_mtime_ns == before
    assert paper(tmp_path, *words).exit_code == 0
    (details,) = (tmp_path / "runs").rglob("details.json")
    details.write_text("{}")
    said = paper(tmp_path, *words)
    assert said.exit_code == 0
    assert "left out" in said.stderr
    assert "details.json is damaged" in said.stderr


def test_no_table_is_written_without_a_result(tmp_path: Path) -> None:
    missing = paper(tmp_path, "rho", "--cell", "cifar10-high/fedrolex-0.2", "--data", str(tmp_path), settings=[])
    assert isinstance(missing.exception, FedrolexError)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [("costs", "--cell", "foo"), ("lemmas", "--seeds", "1"), ("costs", "--scale", "0.1")])
def test_what_is_computed_takes_no_choice_of_runs(words: tuple[str, ...], tmp_path: Path) -> None:
    assert "is computed, without any run" in str(paper(tmp_path, *words, settings=[]).exception)


def test_names_of_listed_cells_are_unbroken_and_changes_are_said(tmp_path: Path) -> None:
    words = ["paper", "overall", "--list", "--cell", "cifar10-high", "--set", "precision=fp32", "--out", str(tmp_path)]
    listed = CliRunner().invoke(app, words).stdout
    assert "overall/cifar10-high/columns-twice-one-by-one" in listed
    assert "Changed: precision=fp32." in listed
    assert "69.44" in next(line for line in listed.splitlines() if "cifar10-high/fedrolex " in line), "the paper's"


def test_results_of_other_machines_stay_in_the_table(tmp_path: Path) -> None:
    words = ("overall", "--scale", "0.001", "--json", "--cell", "cifar10-high/fedrolex", "--seeds")
    first = json.loads(paper(tmp_path, *words, "1").stdout)
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    second = json.loads(paper(tmp_path, *words, "2").stdout)
    (there,), (both,) = ([each for each in found["cells"] if each["seeds"]] for found in (first, second))
    assert both["seeds"] == [1, 2]
    assert both["runs"][0] == there["runs"][0]
    assert list(both["runs"][1]["curve"].values())[-1] == pytest.approx(both["runs"][1]["global"], abs=0.005)
    for loss in ("train_loss", "test_loss"):
        assert both["runs"][1][loss].keys() == both["runs"][1]["curve"].keys()
    (path,) = (tmp_path / "out").glob("*.json")
    path.write_text(path.read_text().replace(there["recipe"], "0" * 8))
    third = json.loads(paper(tmp_path, *words, "2").stdout)
    assert [each["seeds"] for each in third["cells"] if each["seeds"]] == [[2]], "of another recipe"
    path.write_text('{"cells": [{"row": 1}]}')
    assert "move it away, or give another --out" in str(paper(tmp_path, *words, "3").exception)
    assert not list((tmp_path / "runs").rglob("seed-3")), "said before anything is trained"


def test_what_is_in_the_table_can_be_left_out(tmp_path: Path) -> None:
    """On another machine only the table is there, not the runs."""
    words = ("rho", "--scale", "0.001", "--json", "--missing", "--cell", "cifar10-high/fedrolex-0.2", "--seeds")
    assert paper(tmp_path, *words, "1").exit_code == 0
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert json.loads(paper(tmp_path, *words, "1", "--list").stdout) == []
    shown = [word for word in words if word != "--json"]
    assert "Nothing is missing" in paper(tmp_path, *shown, "1", "--list").output
    (row,) = json.loads(paper(tmp_path, *words, "1,2", "--list").stdout)
    assert (row["seeds"], row["seeds_in_table"]) == ([2], [1])
    both = json.loads(paper(tmp_path, *words, "1,2").stdout)
    assert [each["seeds"] for each in both["cells"] if each["seeds"]] == [[1, 2]]
    assert [path.parent.name for path in (tmp_path / "runs").rglob("summary.json")] == ["seed-2"]


def test_rare_classes_are_a_column_of_their_own(tmp_path: Path) -> None:
    words = ("rare", "--scale", "0.001", "--json", "--cell", "cifar10-rare/columns")
    (cell,) = (each for each in json.loads(paper(tmp_path, *words).stdout)["cells"] if each["seeds"])
    assert 0 <= cell["rare"]["mean"] <= 100


def test_a_cell_that_was_stopped_goes_on(tmp_path: Path) -> None:
    words = ("overall", "--scale", "0.002", "--cell", "cifar10-high/columns", "--json")
    assert paper(tmp_path, *words).exit_code == 0
    (whole,) = (path.parent for path in (tmp_path / "runs").rglob("summary.json"))
    rows = Run.open(whole).rows()
    (whole / "summary.json").unlink()
    again = paper(tmp_path, *words)
    assert again.exit_code == 0, again.output
    assert (whole / "summary.json").is_file()
    assert Run.open(whole).rows() == rows


def test_changed_settings_are_kept_apart_and_said(tmp_path: Path) -> None:
    words = ("overall", "--scale", "0.001", "--cell", "cifar10-high/fedrolex")
    assert paper(tmp_path, *words).exit_code == 0
    other = paper(tmp_path, *words, settings=[*SMALL, "client.lr=0.5"])
    assert other.exit_code == 0, other.output
    assert "client.lr=0.5" in other.output
    assert len(list((tmp_path / "runs" / "overall").iterdir())) == 2


def test_what_is_measured_otherwise_is_kept_apart(tmp_path: Path) -> None:
    words = ("overall", "--scale", "0.001", "--cell", "cifar10-high/fedrolex")
    for more in ([], ["evaluation.statistics=test-batch"], ["evaluate_every=1"]):
        done = paper(tmp_path, *words, settings=[*SMALL, *more])
        assert done.exit_code == 0, done.output
    runs = [Run.open(path.parent) for path in (tmp_path / "runs").rglob("recipe.yaml")]
    assert sorted(run.recipe().evaluation.statistics for run in runs) == ["recalibrated", "test-batch"]


def test_runs_of_another_recipe_are_left_out_and_named(tmp_path: Path) -> None:
    words = ("rho", "--scale", "0.001", "--json", "--cell")
    assert paper(tmp_path, *words, "cifar10-high/fedrolex-0.2").exit_code == 0
    (run,) = (path.parent for path in (tmp_path / "runs").rglob("recipe.yaml"))
    recipe = Run.open(run).recipe()
    for changed, other in (
        ("client.lr", recipe.with_settings(["client.lr=0.7"])),
        ("evaluation", recipe.with_settings(["evaluation.statistics=test-batch"])),
    ):
        other.write(run / "recipe.yaml")
        for path in (tmp_path / "out").glob("*.json"):
            path.unlink()
        done = paper(tmp_path, *words, "cifar10-high/fedrolex-0.3")
        assert done.exit_code == 0, done.output
        assert [each["row"] for each in json.loads(done.stdout)["cells"] if each["seeds"]] == ["fedrolex-0.3"]
        said = f"{run} is a run of another recipe ({changed})"
        assert f"left out: {said}" in done.stderr
        assert said in str(paper(tmp_path, *words, "cifar10-high/fedrolex-0.2").exception)


@pytest.mark.parametrize("text", ["", "[]", '{"rounds": 1}', '{"rounds": 1, "seed": 1, "global_accuracy": 0.5}'])
def test_a_damaged_summary_is_left_out_and_written_again(tmp_path: Path, text: str) -> None:
    words = ("overall", "--scale", "0.001", "--cell", "cifar10-high/fedrolex", "--json")
    first = paper(tmp_path, *words)
    (path,) = (tmp_path / "runs").rglob("summary.json")
    path.write_text(text)
    assert [each["seeds_done"] for each in json.loads(paper(tmp_path, *words, "--list").stdout)] == [[]]
    again = paper(tmp_path, *words)
    assert json.loads(again.stdout) == json.loads(first.stdout)


def test_a_setting_of_one_method_goes_with_its_cell(tmp_path: Path) -> None:
    """Other cells of the table, whose methods do not know the setting, refused it."""
    words = ("overall", "--cell", "cifar10-high/columns", "--scale", "0.002", "--json")
    done = paper(tmp_path, *words, settings=[*SMALL, "method.turns=false"])
    assert [row["row"] for row in json.loads(done.stdout)["cells"] if row["seeds"]] == ["columns"]
    refused = paper(tmp_path, *words, "--cell", "cifar10-high/fedrolex", settings=[*SMALL, "method.turns=false"])
    assert "fedrolex has no turns" in str(refused.exception)


def test_the_list_says_what_was_changed(tmp_path: Path) -> None:
    found = json.loads(paper(tmp_path, "participation", "--list", "--json", settings=[*SMALL, "rounds=7"]).stdout)
    assert {each["rounds"] for each in found} == {7}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["overal"], "overal"),
        (["overall", "--kind", "tund"], "tund"),
        (["overall", "--scale", "0"], "scale is 0.0"),
        (["overall", "--cell", "cifar10"], "cell 'cifar10' is not in overall"),
        (
            ["overall", "--cell", "cifar10-high/ds-fl", "--kind", "released"],
            "from another one: use kind tuned",
        ),
        (
            ["overall", "--cell", "blogs/columns", "--kind", "released"],
            "no kind released: use kind tuned or",
        ),
        (["overall", "--seeds", "1,x"], "not a list of numbers"),
        (["rare", "--kind", "printed", "--list"], "rare has no cells of kind printed: use tuned"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    done = paper(tmp_path, *words)
    assert said in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_the_list_names_every_cell(tmp_path: Path) -> None:
    done = paper(tmp_path, "gamma", "--kind", "released", "--list", "--json")
    images = [cell.name for cell in cells("gamma") if cell.setup in PAPER_SETUPS]
    assert [each["cell"] for each in json.loads(done.stdout)] == images
    assert not list(tmp_path.iterdir())


# --- several tables at once ---


def test_a_file_trains_cells_of_several_tables_and_kinds(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("""
- {table: rho, cells: [cifar10-high/fedrolex-0.2], seeds: [1, 2]}
- {table: gamma, cells: [cifar10-high/columns-4], scale: 0.5, settings: [client.lr=0.3]}
- {table: rho, cells: [cifar10-high/fedrolex-0.3], kind: released}
""")
    listed = json.loads(paper(tmp_path, str(plan), "--scale", "0.002", "--list", "--json").stdout)
    assert [row["cell"].rpartition("/")[2] for row in listed] == ["fedrolex-0.2", "columns-4", "fedrolex-0.3"]
    assert not (tmp_path / "runs").exists()
    done = paper(tmp_path, str(plan), "--scale", "0.002", "--at-once", "2", "--json")
    assert done.exit_code == 0, done.output
    found = {
        (each["title"].partition("-changed")[0], cell["row"]): (cell["seeds"], cell["rounds"])
        for each in json.loads(done.stdout)
        for cell in each["cells"]
        if cell["seeds"]
    }
    assert found == {
        ("rho, tuned-x0.002", "fedrolex-0.2"): ([1, 2], 2),
        ("gamma, tuned-x0.001", "columns-4"): ([1], 1),
        ("rho, released-x0.002", "fedrolex-0.3"): ([1], 3),
    }
    rates = {Run.open(path.parent).recipe().client.lr for path in (tmp_path / "runs" / "gamma").rglob("recipe.yaml")}
    assert rates == {0.3}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("summary.json")}
    assert len(before) == 4
    assert paper(tmp_path, str(plan), "--scale", "0.002").exit_code == 0
    assert all(path.stat().st_mtime_ns == at for path, at in before.items()), "what is done is not trained again"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no list of orders"),
        ("table: rho", "no list of orders"),
        ("- rho", "entry 1: file is 'rho'"),
        ("- {table: rho}\n- {tabel: rho}", "entry 2: has an unknown key 'tabel': did you mean 'table'?"),
        ("- {table: roh}", "entry 1: "),
        ("- {table: rho, cells: [cifar10]}", "entry 1: cell 'cifar10' is not in rho"),
        ("- {table: rho, kind: tund}", "tund"),
        ("- {table: rho, seeds: [1, 1]}", "seeds are [1, 1]: give at least one, each once"),
        ("- {table: rho, scale: 2}", "scale is 2.0"),
        ("- {kind: tuned}", "entry 1"),
        ("- {table: rho, seeds: [-1]}", "from 0 to 2^63 - 1"),
        ("- {table: rho, settings: [seed=7]}", "settings have a seed"),
        ("- {table: rho, settings: [roundz=7]}", "unknown key 'roundz'"),
        ("- {table: rho, settings: [rounds]}", "entry 1: "),
        ("- {table: overall, kind: printed, cells: [cifar10-high, cifar10-high/feddf]}", "feddf has no kind printed"),
        ("- {table: rho, table: gamma}", "twice"),
    ],
)
def test_mistakes_in_a_file_are_one_line(text: str, said: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(text)
    done = paper(tmp_path, str(plan))
    assert isinstance(done.exception, FedrolexError), done.output
    assert said in str(done.exception)
    assert "\n" not in str(done.exception)
    assert not (tmp_path / "runs").exists()


def test_orders_of_one_table_are_one_table(tmp_path: Path) -> None:
    """Settings that change no result, or stand in another order, make no other table; another recipe is refused."""
    plan, cell = tmp_path / "plan.yaml", "table: rho, scale: 0.002, cells: [cifar10-high/fedrolex-0."
    plan.write_text(f"""
- {{{cell}1], settings: [device=cpu]}}
- {{{cell}2, cifar10-high/fedrolex-0.1]}}
""")
    found = json.loads(paper(tmp_path, str(plan), "--list", "--json").stdout)
    assert [row["cell"][-3:] for row in found] == ["0.1", "0.2"]
    (table,) = json.loads(paper(tmp_path, str(plan), "--json").stdout)
    assert [cell["row"] for cell in table["cells"] if cell["seeds"]] == ["fedrolex-0.1", "fedrolex-0.2"]
    plan.write_text(f"""
- {{{cell}1], settings: [client.lr=0.1, client.lr=0.2]}}
- {{{cell}1], settings: [client.lr=0.2, client.lr=0.1]}}
""")
    assert "by two recipes of one name" in str(paper(tmp_path, str(plan)).exception)


def test_seeds_of_a_cell_that_is_asked_for_twice_are_listed_together(tmp_path: Path) -> None:
    plan, cell = tmp_path / "plan.yaml", "table: rho, scale: 0.002, cells: [cifar10-high/fedrolex-0.1]"
    plan.write_text(f"- {{{cell}}}\n- {{{cell}, seeds: [2, 1]}}\n")
    (row,) = json.loads(paper(tmp_path, str(plan), "--list", "--json").stdout)
    assert row["seeds"] == [1, 2]


def test_a_file_says_it_all(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("- {table: rho}")
    assert "leave --cell, --kind and --seeds out" in str(paper(tmp_path, str(plan), "--seeds", "1").exception)
    assert "cannot read" in str(paper(tmp_path, str(tmp_path / "none.yaml")).exception)


def test_costs_and_lemmas_need_no_training(tmp_path: Path) -> None:
    assert "2.9781232" in paper(tmp_path, "costs", settings=[]).output
    assert "Lemmas 1 and 2" in paper(tmp_path, "lemmas", settings=[]).output
    rows = json.loads(paper(tmp_path, "lemmas", "--json", settings=[]).stdout)["lemmas"]
    assert len(rows) == 20
    assert all(abs(row["simulated"] - row["expected"]) < 3 * row["standard_error"] for row in rows)
    harmonic = {row["indices"]: row["expected"] for row in rows if row["times"] == 1}
    assert harmonic == pytest.approx({n: n * sum(1 / k for k in range(1, n + 1)) for n in harmonic}, rel=1e-9)


def test_kinds_are_those_that_the_documentation_names() -> None:
    assert get_args(Kind) == ("printed", "released", "tuned", "tuned-redrawn")
    assert Recipe().with_settings(["method=fedrolex", "method.weighting=hybrid"]).method.weighting == "hybrid"  # type: ignore[attr-defined]
