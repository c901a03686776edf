"""What the paper's tables and figures say of sub-models and of single clients."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from told import told

from fedrolex.cli.paper.details import read_details, submodel_lines, submodels_over_seeds, with_offsets
from fedrolex.cli.paper.figures import _shares, draw_along, draw_traffic
from fedrolex.cli.paper.table import PaperTable
from fedrolex.recipes.paper import find_cell
from fedrolex.runs import Run

WHOLE: dict[str, dict[str, Any]] = {
    "submodels": {"1/16": 0.41, "1": 0.67124, "1/2": 0.5},
    "local": {"clients": [0, 4], "capacities": ["1", "1/16"], "plain": [0.9, 0.125], "masked": [1, 0.98764]},
}


def details(folder: Path, found: object) -> Run:
    (folder / "details.json").write_text(found if isinstance(found, str) else json.dumps(found))
    return Run(folder)


def test_details_are_read_in_per_cent(tmp_path: Path) -> None:
    assert read_details(Run(tmp_path)) == {}
    assert read_details(details(tmp_path, WHOLE)) == {
        "submodels": {"1/16": 41.0, "1": 67.12, "1/2": 50.0},
        "local_by_client": {"clients": [0, 4], "capacities": ["1", "1/16"], "plain": [90.0, 12.5],
                            "masked": [100.0, 98.76]},
    }  # fmt: skip
    assert read_details(details(tmp_path, {"submodels": {}})) == {}
    offsets = {"global_accuracy": 0.71234, "rare_accuracy": 0.5, "submodels": {"1/2": 0.6}}
    assert read_details(details(tmp_path, {"submodels": {}, "offsets": offsets})) == {
        "offsets": {"global": 71.23, "rare": 50.0, "submodels": {"1/2": 60.0}}
    }


@pytest.mark.parametrize(
    "found",
    [
        "", "[]", "{}", '{"submodels": {"1": NaN}}', {"submodels": {"1": 1.2}}, {"submodels": {"x": 0.5}},
        {"submodels": {"1/0": 0.5}}, {"submodels": {"1e-999999999": 0.5}}, {"submodels": {"1": True}},
        {"submodels": {}, "local": None},
        {"submodels": {}, "local": {**WHOLE["local"], "masked": [1]}},
        {"submodels": {}, "local": {**WHOLE["local"], "capacities": ["1"]}},
        {"submodels": {}, "local": {"clients": [0]}},
        {"submodels": {}, "offsets": []}, {"submodels": {}, "offsets": {"global_accuracy": -0.1}},
        {"submodels": {}, "offsets": {"global_accuracy": 0.1, "submodels": {"1": 2}}},
    ],
)  # fmt: skip
def test_damaged_details_are_one_line(tmp_path: Path, found: object) -> None:
    assert told(lambda: read_details(details(tmp_path, found))) == (
        f"{tmp_path / 'details.json'} is damaged: delete it, and the same command measures it again"
    )


def test_submodels_are_means_over_the_seeds_that_have_them() -> None:
    runs: list[dict[str, Any]] = [{"submodels": {"1/16": 40.0, "1": 60.0}}, {"submodels": {"1": 70.0}}, {}]
    found = submodels_over_seeds(runs)
    assert list(found) == ["1", "1/16"], "the largest first"
    assert (found["1"]["mean"], found["1/16"]) == (65.0, {"mean": 40.0, "std": None})
    rows = [{"row": "fedrolex", "submodels": found}, {"row": "columns", "submodels": submodels_over_seeds(runs[1:])}]
    assert submodel_lines([*rows, {"row": "largest"}]) == [
        ("", "1", "1/16"),
        ("fedrolex", "65.00 ± 7.07", "40.00"),
        ("columns", "70.00", ""),
    ]


def test_offsets_are_of_all_runs_or_none() -> None:
    one = {"offsets": {"global": 70.0, "rare": 50.0, "submodels": {"1": 70.0, "1/2": 60.0}}}
    other = {"offsets": {"global": 80.0, "rare": 40.0}}
    found = with_offsets([one, other])
    assert (found["global"]["mean"], found["rare"]["mean"], found["submodels"]["1/2"]["mean"]) == (75.0, 45.0, 60.0)
    assert with_offsets([one, {}]) == with_offsets([]) == {}
    row = {"row": "fedrolex", "submodels": {}, "offsets": with_offsets([one])}
    assert submodel_lines([row]) == [("", "1", "1/2"), ("fedrolex, with offsets", "70.00", "60.00")]


def result(seed: int, **more: Any) -> dict[str, Any]:
    return {"seed": seed, "rounds": 10, "bytes": 2**30, "macs": 10**15, "global": 50.0, "seconds": 1.0,
            "on": "a machine", "curve": {"10": 50.0}, **more}  # fmt: skip


def test_tables_have_submodels_and_a_figure_of_clients(tmp_path: Path) -> None:
    table = PaperTable(tmp_path / "real-world-tuned.json", "real-world, tuned", "command")
    local = {"clients": [0, 1], "capacities": [], "plain": [30.0, 40.0], "masked": [72.5, 100.0]}
    for row, runs in (
        ("fedrolex", [result(1, submodels={"1": 60.0, "1/2": 55.0}, local_by_client=local), result(2)]),
        ("smallest", [result(1)]),
    ):
        cell = find_cell(f"real-world/cifar10-high/{row}")
        table.add(cell, cell.recipe("tuned"), runs)
    written, drawn = table.write(), table.draw(None)
    assert [path.name for path in drawn] == ["real-world-tuned-traffic.png", "real-world-tuned-local.png"]
    assert all(path.stat().st_size > 5000 for path in drawn)
    text = written[1].read_text()
    assert (
        "Accuracy of every capacity's sub-model, %:\n\n|  | 1 | 1/2 |\n|---|---|---|\n| fedrolex | 60.00 | 55" in text
    )
    assert text.count("smallest") == 1, "it has no sub-models"
    kept = json.loads(written[0].read_text())["cells"][0]
    assert kept["submodels"]["1/2"]["mean"] == 55.0
    assert kept["runs"][0]["local_by_client"] == local
    assert '"masked": [72.5, 100.0]' in written[0].read_text(), "a list is a line"
    screen = Console(width=160, record=True)
    table.show(screen)
    assert "cifar10-high: accuracy of every capacity's sub-model" in screen.export_text()
    again = PaperTable(tmp_path / "real-world-tuned.json", "real-world, tuned", "command")
    cell = find_cell("real-world/cifar10-high/fedrolex")
    again.add(cell, cell.recipe("tuned"), [])
    assert again.rows[0] == table.rows[0]


def test_a_table_without_details_has_no_figure_of_clients(tmp_path: Path) -> None:
    table = PaperTable(tmp_path / "overall-tuned.json", "overall, tuned", "command")
    cell = find_cell("overall/cifar10-high/fedrolex")
    table.add(cell, cell.recipe("tuned"), [])
    assert table.draw(None) == []
    table.add(cell, cell.recipe("tuned"), [result(1)])
    assert [path.name for path in table.draw(None)] == ["overall-tuned-traffic.png"]


def test_histograms_count_every_client_once() -> None:
    assert _shares([50, 52.4, 52.5, 100, 97.5], [50 + 2.5 * place for place in range(21)]) == [
        *(0.4, 0.2), *[0.0] * 17, 0.4,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "damage",
    [
        {"rounds": None},
        {"global": "x"},
        {"bytes": None},
        {"seed": [1]},
        {"submodels": [1]},
        {"submodels": {"zz": 1}},
        {"seed": "1"},
        {"global": math.inf},
        {"global": 101},
        {"seconds": "2", "on": "a machine"},
        {"rounds": "many"},
    ],
)
def test_a_table_with_damaged_runs_is_refused(damage: dict[str, Any], tmp_path: Path) -> None:
    run = {"seed": 1, "global": 50.0, "rounds": 3, "bytes": 10, **damage}
    run = {key: value for key, value in run.items() if (key, value) != ("rounds", None)}
    path = tmp_path / "overall-tuned.json"
    path.write_text(json.dumps({"cells": [{"setup": "a", "row": "b", "recipe": "c", "runs": [run]}]}))
    assert "is not a table that fedrolex paper wrote" in told(lambda: PaperTable(path, "", ""))


def test_a_table_whose_cells_have_no_names_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "overall-tuned.json"
    path.write_text(json.dumps({"cells": [{"setup": ["a"], "row": "b", "recipe": "c", "runs": []}]}))
    assert "is not a table that fedrolex paper wrote" in told(lambda: PaperTable(path, "", ""))


def test_a_table_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = PaperTable(tmp_path / "overall-tuned.json", "overall, tuned", "command", ["Scaled: rounds are a tenth."])
    cell = find_cell("overall/cifar10-high/fedrolex")
    table.add(cell, cell.recipe("tuned"), [result(1)])
    table.write()
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert all(b"a tenth" in content for content in kept.values())

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fedrolex.runs.checkpoint.os.fsync", full)
    table.add(cell, cell.recipe("tuned"), [result(2)])
    assert "No space left on device" in told(table.write)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == kept


def lines_drawn(monkeypatch: pytest.MonkeyPatch, draw: Callable[[], None]) -> dict[str, tuple[Any, Any]]:
    """The lines of a figure: label to colour and style."""
    import matplotlib.pyplot as plt

    found: dict[str, tuple[Any, Any]] = {}

    def look(figure: Any) -> None:
        for side in figure.axes:
            for handle, label in zip(*side.get_legend_handles_labels(), strict=True):
                line = handle if hasattr(handle, "get_linestyle") else handle[0]
                found[label] = line.get_color(), line.get_linestyle()

    monkeypatch.setattr(plt, "close", look)
    draw()
    return found


def test_eleven_rows_of_a_figure_can_be_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curve = {"10": 20.0, "20": 30.0}
    rows = [
        {"setup": "cifar10-high", "row": f"row {number}", "gib": 1.0, "rounds": 20, "runs": [{"curve": curve}]}
        for number in range(11)
    ]
    found = lines_drawn(monkeypatch, lambda: draw_traffic(rows, "title", tmp_path / "traffic.png"))
    assert len(found) == len(set(found.values())) == 11


def traffic(setup: str, row: str, gib: float) -> dict[str, Any]:
    return {"setup": setup, "row": row, "gib": gib, "rounds": 20, "runs": [{"curve": {"10": 20.0, "20": 30.0}}]}


def test_a_row_looks_alike_in_every_panel_of_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt

    colours: list[dict[str, Any]] = []
    monkeypatch.setattr(
        plt,
        "close",
        lambda figure: colours.extend({line.get_label(): line.get_color() for line in s.lines} for s in figure.axes),
    )
    rows = [traffic("cifar10-high", "one", 1), traffic("cifar10-high", "two", 1), traffic("cifar10-low", "two", 1)]
    draw_traffic(rows, "title", tmp_path / "traffic.png")
    assert colours[0]["two"] == colours[1]["two"] != colours[0]["one"]


@pytest.mark.parametrize(("gib", "scale", "shown"), [(220.0, "log", {"5", "50"}), (2.0, "linear", {"1.0", "2.0"})])
def test_traffic_can_be_read_where_rows_send_very_different_amounts(
    gib: float, scale: str, shown: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matplotlib's own labels, such as 4 × 10¹, lay one over the other."""
    import matplotlib.pyplot as plt

    axes: list[Any] = []

    def look(figure: Any) -> None:
        axes.extend(
            (s.get_xscale(), {t.get_text() for t in s.get_xticklabels()}, s.xaxis.get_minorticklocs())
            for s in figure.axes
        )

    monkeypatch.setattr(plt, "close", look)
    draw_traffic([traffic("s", "one", 1.0), traffic("s", "two", gib)], "title", tmp_path / "traffic.png")
    ((found, labels, between),) = axes
    assert found == scale
    assert shown <= labels
    assert not len(between)


def test_figures_along_an_axis_show_what_offsets_are_worth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dashed, in the colour of their row; a row or a point without them has the plain one only."""
    plain = {"setup": "cifar10-high", "global": {"mean": 50.0, "std": None}}
    rows = [{**plain, "row": f"{row}-{times}"} for row in ("fedrolex", "columns") for times in (2, 4)]
    rows[0] = {**rows[0], "offsets": {"global": {"mean": 55.0, "std": 1.0}}}
    found = lines_drawn(monkeypatch, lambda: draw_along("γ", rows, "title", tmp_path / "gamma.png"))
    assert list(found) == ["fedrolex", "fedrolex, with offsets", "columns"]
    assert [style for _, style in found.values()] == ["-", "--", "-"]
    assert found["fedrolex"][0] == found["fedrolex, with offsets"][0] != found["columns"][0]
