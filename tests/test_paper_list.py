"""``fedrolex paper --list``: what cells would cost is what their runs then report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedrolex.cli.app import app
from fedrolex.cli.paper.costs import Needed, PaperCosts
from fedrolex.cli.paper.shelf import Shelf
from fedrolex.recipes.paper import TABLES, cells, find_cell
from fedrolex.recipes.recipe import Recipe

SMALL = ["task.data=digits", "task.model=convnet", "task.width=4", "precision=fp32", "device=cpu", "engine=loop",
         "fleet.clients=20", "fleet.cohort=2"]  # fmt: skip
WORDS = ["task.vocabulary=50", "task.layers=1", "task.stream=16", "task.inner=16", "task.head_dim=4", "task.heads=2"]


def paper(folder: Path, *words: str, settings: list[str] = SMALL) -> Any:
    every = [word for setting in settings for word in ("--set", setting)]
    places = ["--runs", str(folder / "runs"), "--out", str(folder / "out")]
    return CliRunner().invoke(app, ["paper", *words, *places, *every])


def listed(folder: Path, *words: str, settings: list[str] = SMALL) -> dict[str, dict[str, Any]]:
    done = paper(folder, *words, "--list", "--json", settings=settings)
    assert done.exit_code == 0, done.output
    return {each["cell"]: each for each in json.loads(done.stdout)}


def tuned(row: str, *settings: str) -> Recipe:
    return find_cell(f"overall/{row}").recipe("tuned").with_settings(settings)


def test_whole_runs_on_cifar_are_counted_to_the_last_byte() -> None:
    """Runs of 1000 rounds on the images themselves reported these; here nobody has the images."""
    costs = PaperCosts()
    for row, seed, sent, macs in (
        ("only-who-can-1-4", 1, 56_081_440_000, 485_930_647_104_000),
        ("only-who-can-1-4", 2, 56_081_440_000, 508_772_305_152_000),
        ("only-who-can-1-4", 3, 56_081_440_000, 495_314_389_248_000),
        ("fedrolex", 1, 236_959_383_392, 2_003_920_500_000_000),
        ("columns", 1, 98_329_646_144, 837_671_872_368_000),
    ):
        assert costs.needed(tuned(f"cifar10-high/{row}", f"seed={seed}")) == Needed(sent, macs), (row, seed)


@pytest.mark.parametrize("row", ["federated-dropout", "columns"])
def test_a_run_sends_what_the_list_says(row: str, tmp_path: Path) -> None:
    words = ("overall", "--scale", "0.005", "--cell", f"cifar10-high/{row}", "--seeds", "7")
    (before,) = listed(tmp_path, *words).values()
    assert (before["seconds"], before["on"], before["seeds_in_table"], before["macs"]) == (None, None, [], None)
    done = paper(tmp_path, *words, "--json")
    (cell,) = (each for each in json.loads(done.stdout)["cells"] if each["seeds"])
    assert before["bytes"] == cell["runs"][0]["bytes"]
    (after,) = listed(tmp_path, *words).values()
    assert (after["seconds"], after["about"]) == (cell["runs"][0]["seconds"], False)
    assert (after["on"], after["seeds_done"], after["seeds_in_table"]) == (cell["runs"][0]["on"], [7], [7])


def test_time_is_that_of_like_runs_by_rounds(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    run = {"global": 1.0, "bytes": 1, "rounds": 100}
    runs = [{"seed": 1, "seconds": 900.0, "on": "slow", **run}, {"seed": 2, "seconds": 50.0, "on": "fast", **run}]
    cell = {"setup": "cifar10-low", "row": "heterofl", "recipe": "earlier", "runs": runs}
    label = Shelf("overall", "tuned", 1.0, tuple(SMALL), tmp_path).label
    (tmp_path / "out" / f"overall-{label}.json").write_text(json.dumps({"cells": [cell]}))
    found = listed(tmp_path, "overall", "--cell", "cifar10-low", "--cell", "cifar10-high")
    for setup in ("cifar10-low", "cifar10-high"):
        one = found[f"overall/{setup}/heterofl"]
        assert (one["seconds"], one["on"], one["about"], one["seeds_in_table"]) == (500.0, "fast", True, [])
    assert found["overall/cifar10-low/fedrolex"]["seconds"] is None
    assert found["overall/cifar10-low/feddf"]["bytes"] is None, "it sends more than parts of one network"


def test_text_is_counted_by_the_shares_of_the_capacities() -> None:
    costs = PaperCosts()
    sizes = [costs.needed(tuned(f"blogs/{row}", *WORDS)) for row in ("smallest", "everyone-1-4", "largest", "fedrolex")]
    smallest, quarter, largest, parts = (each.bytes or 0 for each in sizes)
    assert 0 < smallest < quarter < largest
    assert smallest < parts < largest
    only = costs.needed(tuned("blogs/only-who-can-1-4", *WORDS))
    assert only == Needed(quarter, None), "as many clients a round, all of this width; sentences are in the data"
    assert costs.needed(tuned("blogs/columns", *WORDS)) == Needed(None, None)


def test_who_trains_what_tells_columns_one_by_one_from_others() -> None:
    costs, small = PaperCosts(), ("task.model=convnet", "task.width=16", "rounds=5")
    at_once, one_by_one = (
        costs.needed(tuned("cifar10-high/columns-one-by-one", f"method.one_by_one={each}", *small))
        for each in ("false", "true")
    )
    assert (at_once.bytes or 0) < (one_by_one.bytes or 0)
    assert (at_once.macs or 0) < (one_by_one.macs or 0)


def test_methods_and_data_that_cannot_be_counted_have_none() -> None:
    costs, nothing = PaperCosts(), Needed(None, None)
    small = ("task.model=convnet", "task.width=4")
    assert costs.needed(tuned("cifar10-high/fed-et", *small)) == nothing
    assert costs.needed(tuned("cifar10-high/fedrolex", "method=scaffold", *small)) == nothing
    assert costs.needed(tuned("cifar10-high/fedrolex", "fleet.stragglers=0.5", *small)) == nothing
    assert costs.needed(tuned("cifar10-high/fedrolex", "fleet.balanced=true", *small)) == nothing
    for more in ("task.limit=500", "task.validation=0.1", "task.public=0.1"):
        held_back = costs.needed(tuned("cifar10-high/fedrolex", more, *small))
        assert held_back.bytes
        assert held_back.macs is None, "which images are held back decides what clients hold"


def test_all_lists_every_cell_of_every_table(tmp_path: Path) -> None:
    settings = ["rounds=2"]
    found = listed(tmp_path, "all", "--kind", "released", settings=[*settings, *SMALL])
    every = [cell.name for table in TABLES for cell in cells(table) if "released" in cell.kinds]
    assert list(found) == [*every, "costs", "lemmas"]
    said = paper(tmp_path, "all", "--kind", "released", "--list", settings=[*settings, *SMALL]).output
    assert "fedrolex paper costs, fedrolex paper lemmas" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["all"], ["all", "--list", "--cell", "cifar10-high"]])
def test_all_is_only_listed(words: list[str], tmp_path: Path) -> None:
    assert "all is for --list, without --cell: give one of overall, rho" in str(paper(tmp_path, *words).exception)
