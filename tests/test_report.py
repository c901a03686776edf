"""The page of ``fedrolex report``: what it holds, counted again by hand, and how it behaves in a real browser."""

from __future__ import annotations

import base64
import json
import re
import shutil
from fractions import Fraction
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Browser, opened
from run_folders import stopped, whole
from typer.testing import CliRunner

from fedrolex import Examples, FedrolexError, FleetRecipe, Recipe, Run, Task, Training, train
from fedrolex.cli.app import app
from fedrolex.report import page_of, write_report
from fedrolex.report.coverage import NEVER, OUTSIDE
from fedrolex.report.kept import NAME
from fedrolex.report.told import faults, told
from fedrolex.report.write import filled, known
from fedrolex.runs.load import made_again

NASTY = "a<b>&amp;\"'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    whole(folder / "rolling", "rounds=6", "fleet.stragglers=0.4")
    whole(folder / "row", "method=columns", "method.columns=[1/2, 1/4]")
    stopped(folder / "static", "method=heterofl", rounds=3)
    run = whole(folder / "drawn <b>", "method=fed_dropout", "evaluate_every=1")
    rows = run.rows()
    rows[1] |= {"void": True, "dropped": {"3": NASTY, "4": "sent a value that is not finite"}}
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def page(runs: Path) -> Path:
    names = ("rolling", "row", "static", "drawn <b>")
    return write_report([runs / name for name in names], runs / "report.html")


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


# --- what is in it ---


def test_the_page_has_every_run_and_loads_nothing(page: Path, runs: Path) -> None:
    text = page.read_text()
    found = data_of(text)
    assert [run["name"] for run in found["runs"]] == ["rolling", "row", "static", "drawn <b>"]
    assert [run["state"] for run in found["runs"]] == ["finished", "finished", "stopped", "finished"]
    assert [run["missing"] for run in found["runs"]] == [{}] * 4
    for place, name in enumerate(("rolling", "row", "static", "drawn <b>")):
        rows = Run(runs / name).rows()
        told = [[row["round"] + 1, row["global_accuracy"]] for row in rows if "global_accuracy" in row]
        assert found["runs"][place]["curves"]["global_accuracy"] == told
        assert found["runs"][place]["costs"]["bytes_up"] == [row["bytes_up"] for row in rows]
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", text)
    assert "default-src 'none'" in text


@pytest.mark.parametrize("damage", [None, "cells", "metrics", "bytes"])
def test_a_second_report_traces_nothing_unless_the_run_has_changed(
    damage: str | None, runs: Path, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(Path(shutil.copytree(runs / "rolling", tmp_path / "rolling")))
    made: list[Run] = []

    def noted(run: Run, *about: Any) -> Training:
        made.append(run)
        return made_again(run)

    monkeypatch.setattr("fedrolex.report.write.made_again", noted)
    text = (run.folder / NAME).read_text()
    if damage == "cells":
        (run.folder / NAME).write_text(text.replace('"share": 1.0', '"share": 0.5', 1))
        assert (run.folder / NAME).read_text() != text
    elif damage == "metrics":
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in run.rows()[:-1]))
    elif damage == "bytes":
        (run.folder / NAME).write_bytes(b"\xff{" + text.encode()[:50])
    found = known(run)
    assert len(made) == (damage is not None)
    before = data_of(page.read_text())["runs"][0]
    for part in ("windows", "coverage", "local"):
        assert (json.loads(json.dumps(found[part])) == before[part]) == (damage != "metrics" or part == "local")
    assert (run.folder / NAME).read_text() == text or damage == "metrics"
    known(run)
    assert len(made) == (damage is not None)


def test_nothing_is_kept_where_code_of_ones_own_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trusting.py").write_text("from fedrolex.methods import FedRolex\nclass Trusting(FedRolex): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = whole(tmp_path / "run", "method=trusting:Trusting", "rounds=1")
    assert "windows" in known(run)
    assert not (run.folder / NAME).exists()


def test_text_of_runs_is_never_markup(page: Path) -> None:
    class Tags(HTMLParser):
        found: list[str]

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            self.found.append(tag)

    tags = Tags()
    tags.found = []
    tags.feed(page.read_text())
    assert "img" not in tags.found
    assert "b" not in tags.found
    assert tags.found.count("script") == 2
    assert data_of(page.read_text())["runs"][3]["faults"]["reasons"][0]["why"] in (
        NASTY, "sent a value that is not finite",
    )  # fmt: skip


def test_windows_are_those_that_were_trained(page: Path, runs: Path) -> None:
    run = data_of(page.read_text())["runs"][0]
    pictures, rows = run["windows"], Run(runs / "rolling").rows()
    training = made_again(Run(runs / "rolling"))
    axes = training.server.main.axes
    assert [(axis["name"], axis["size"]) for axis in pictures["axes"]] == [(a.name, a.size) for a in axes.cut_axes]
    assert [round for round, _ in pictures["rounds"]] == [1, 2, 3, 4, 5, 6]
    lost = 0
    for (round, jobs), row in zip(pictures["rounds"], rows, strict=True):
        members = training.server.fleet.members(round - 1)
        assert len(jobs) == len(members)
        for (_, level, window, taken), member in zip(jobs, members, strict=True):
            assert Fraction(pictures["levels"][level]) == member.capacity
            assert bool(taken) == (str(member.client) not in row["dropped"])
            lost += not taken
            for place, axis in enumerate(axes.cut_axes):  # Equation (4) of the paper
                wide = max(1, int(member.capacity * axis.size))
                start = (round - 1) % axis.size
                assert pictures["spans"][pictures["windows"][window][place]] == [start, wide]
    assert lost == sum(len(row["dropped"]) for row in rows) > 0


def test_coverage_counts_answers_that_were_used(page: Path) -> None:
    run = data_of(page.read_text())["runs"][0]
    pictures = run["windows"]
    (part,) = run["coverage"]
    for place, axis in enumerate(pictures["axes"]):
        counts = [0] * axis["size"]
        for _, jobs in pictures["rounds"]:
            for _, _, window, taken in jobs:
                start, wide = pictures["spans"][pictures["windows"][window][place]]
                for step in range(wide * taken):
                    counts[(start + step) % axis["size"]] += 1
        assert part["by_node"][place]["range"] == [min(counts), max(counts)]
        cells = base64.b64decode(part["by_node"][place]["cells"])
        assert [cell == NEVER for cell in cells] == [count == 0 for count in counts]


def test_weights_that_nobody_trained_are_counted_and_drawn(tmp_path: Path) -> None:
    whole(tmp_path / "run", "rounds=1", 'fleet.capacities=["1/2", "1/4"]', "fleet.server_scale=2")
    (part,) = known(Run(tmp_path / "run"))["coverage"]
    assert part["nodes"] == 0.25  # half of what is half the server's: the first quarter of every axis
    assert 0 < part["weights"] < 0.25
    assert part["never"] > 0
    matrix = next(each for each in part["by_weight"] if each["share"] == 1 / 16)  # cut along both its sides
    cells = torch.frombuffer(bytearray(base64.b64decode(matrix["cells"])), dtype=torch.uint8)
    cells = cells.view(matrix["rows"], matrix["columns"])
    held = [side // 4 for side in cells.shape]
    assert bool((cells[: held[0], : held[1]] > NEVER).all())
    assert bool((cells[held[0] :] == NEVER).all())
    assert bool((cells[:, held[1] :] == NEVER).all())


def test_columns_are_covered_as_far_as_they_reach(page: Path) -> None:
    parts = data_of(page.read_text())["runs"][1]["coverage"]
    assert [part["section"] for part in parts] == ["model", "column1"]
    assert [(part["nodes"], part["weights"], part["never"]) for part in parts] == [(1.0, 1.0, 0)] * 2
    cells = base64.b64decode(parts[1]["by_node"][0]["cells"])
    assert cells.count(OUTSIDE) == len(cells) * 3 // 4


def test_local_accuracies_have_the_mean_that_the_run_reported(page: Path, runs: Path) -> None:
    for run in data_of(page.read_text())["runs"]:
        rows = [row for row in Run(runs / run["name"]).rows() if "local_accuracy" in row]
        if run["state"] == "finished":  # test examples are all of a client's classes, here the same for everyone
            mean = sum(run["local"]["plain"]) / len(run["local"]["plain"])
            assert mean == pytest.approx(rows[-1]["local_accuracy"], abs=0.02)
        assert len(run["local"]["plain"]) == len(run["local"]["masked"]) == len(run["local"]["clients"])


def test_answers_of_clients_add_up_to_the_local_accuracy(tmp_path: Path) -> None:
    x, y = torch.randn(80, 4), torch.arange(80) % 4
    task = Task.split(
        build=lambda scale: torch.nn.Linear(4, 4),
        train=Examples(x[:40], y[:40]),
        test=Examples(x[40:], y[40:]),
        clients=5,
    )
    torch.manual_seed(0)
    model = task.build(1)
    found, metrics = task.by_client(model), task.evaluate(model)
    assert found is not None
    assert sorted(found) == [0, 1, 2, 3, 4]
    right, masked, total = (sum(column) for column in zip(*found.values(), strict=True))
    assert (right / total, masked / total) == (metrics["local_accuracy"], metrics["local_accuracy_masked"])
    assert task.by_client(model, apart=True) == found


def test_faults_are_told_by_reason() -> None:
    rows: list[dict[str, Any]] = [
        {"round": 0, "void": False, "dropped": {"1": "late"}},
        {"round": 1, "void": True, "dropped": {"1": "late", "2": "odd"}},
    ]
    found = faults(rows)
    assert (found["dropped"], found["void"]) == ([1, 2], [2])
    assert found["reasons"] == [
        {"why": "late", "answers": 2, "clients": ["1"], "first": 1, "last": 2, "more": 0},
        {"why": "odd", "answers": 1, "clients": ["2"], "first": 2, "last": 2, "more": 0},
    ]


# --- where something is missing ---


def test_a_task_given_in_python_is_asked_for(tmp_path: Path) -> None:
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    layers = (lambda n: torch.nn.Linear(4, n), lambda n: torch.nn.ReLU(), lambda n: torch.nn.Linear(n, 3))
    task = Task.split(
        build=lambda scale: torch.nn.Sequential(*(layer(8 * scale) for layer in layers)),
        train=Examples(x[:40], y[:40]),
        test=Examples(x[40:], y[40:]),
        clients=4,
    )
    recipe = Recipe(rounds=2, fleet=FleetRecipe(clients=4, cohort=2), device="cpu", engine="loop")
    train(recipe, task, out=tmp_path / "mine")
    (without,), (given,) = (data_of(page_of([tmp_path / "mine"], each))["runs"] for each in (None, task))
    assert set(without["missing"]) == {"windows", "coverage", "local"}
    assert "task was given in Python" in without["missing"]["local"]
    assert len(without["curves"]["global_accuracy"]) == 1
    assert given["missing"] == {}
    assert len(given["local"]["plain"]) == 4


def test_data_that_is_gone_is_said_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDROLEX_DATA", str(tmp_path))
    run = whole(tmp_path / "run", "rounds=2")
    text = (run.folder / "recipe.yaml").read_text()
    (run.folder / "recipe.yaml").write_text(text.replace("data: digits", "data: cifar10"))
    found = known(run)
    assert found["curves"]["global_accuracy"]
    assert "windows" not in found
    assert "cifar" in found["missing"]["windows"]


def test_what_cannot_be_a_report_is_refused(tmp_path: Path, runs: Path) -> None:
    with pytest.raises(FedrolexError, match="is not a run"):
        page_of([tmp_path])
    with pytest.raises(FedrolexError, match="a report of 0 runs"):
        page_of([])
    with pytest.raises(FedrolexError, match="is a folder: name the page's file"):
        write_report([runs / "static"], tmp_path)
    with pytest.raises(FedrolexError, match="there is no folder"):
        write_report([runs / "static"], tmp_path / "nowhere" / "page.html")
    (tmp_path / ".page.html.new").mkdir()  # where the page is written before it is put in its place
    with pytest.raises(FedrolexError, match=r"^cannot write \S+/page.html: Is a directory; what was there"):
        write_report([runs / "static"], tmp_path / "page.html")


def test_numbers_that_are_none_make_no_page_fail(tmp_path: Path) -> None:
    run = whole(tmp_path / "run", "rounds=2")
    rows = run.rows()
    rows[0] |= {"macs": float("nan"), "mine": 10**400, "odd": [1]}
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run.folder / "environment.json").unlink()
    (found,) = data_of(filled({"version": "", "title": "", "runs": [told(run)]}))["runs"]
    assert found["costs"]["macs"][0] is None
    assert "mine" not in found["curves"]
    assert found["environment"] == {}


def test_the_command_takes_the_folder_of_several_seeds(tmp_path: Path) -> None:
    for seed in (2, 10):
        whole(tmp_path / "runs" / f"seed-{seed}", "rounds=1", f"seed={seed}")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert done.stdout == f"report: {tmp_path / 'page.html'}\n"
    assert [run["seed"] for run in data_of((tmp_path / "page.html").read_text())["runs"]] == [2, 10]


def test_a_model_that_takes_no_examples_has_no_local_accuracies(tmp_path: Path) -> None:
    found = known(whole(tmp_path / "run", "method=fedgkt", "rounds=1"))
    assert set(found["missing"]) == {"local"}
    assert "does not answer single clients' examples" in found["missing"]["local"]


# --- in a browser ---


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with opened(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_drawn_without_errors(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.show(page, width, 900, dark)
    assert browser.run("return document.documentElement.dataset.ready") == "yes"
    assert browser.console() == []
    assert browser.run("return document.documentElement.scrollWidth") <= width
    headings = browser.run("return [...document.querySelectorAll('h2')].map((each) => each.textContent)")
    assert headings == ["Curves", "Windows", "Coverage", "Local accuracy", "Costs", "Faults", "Recipe"]
    assert browser.run("return document.querySelectorAll('#curves path').length") == 4
    assert browser.run("return document.querySelectorAll('#local svg').length") == 4
    assert browser.run("return document.querySelectorAll('#coverage canvas').length") > 2
    assert browser.run("return document.querySelectorAll('.missing').length") == 0
    assert NASTY in browser.run("return document.body.innerText")
    light = browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light is not dark


def test_the_stepper_moves_the_windows(browser: Browser, page: Path) -> None:
    browser.show(page)
    state = "return [document.querySelector('#now').textContent, document.querySelector('#windows canvas').toDataURL()]"
    first = browser.run(state)
    browser.click("#next-round")
    second = browser.run(state)
    browser.click("#round-before")
    assert (first[0], second[0]) == ("round 1 of 6", "round 2 of 6")
    assert first[1] != second[1]
    assert browser.run(state) == first
    browser.click("#over-rounds canvas")  # its middle
    assert browser.run("return document.querySelector('#now').textContent") == "round 4 of 6"
    assert browser.console() == []


def test_runs_metrics_and_sections_are_chosen_by_buttons(browser: Browser, page: Path) -> None:
    browser.show(page)
    before = browser.run("return document.querySelector('#curves path').getAttribute('d')")
    browser.click("section [aria-label=metric] button:nth-child(2)")
    browser.click("section [aria-label=across] button:nth-child(2)")
    assert browser.run("return document.querySelector('#curves path').getAttribute('d')") != before
    browser.click("#windows [aria-label=run] button:nth-child(2)")
    browser.click("#windows [aria-label=section] button:nth-child(2)")
    browser.click("#coverage [aria-label=run] button:nth-child(4)")
    assert "round 1 of 4" in browser.run("return document.querySelector('#now').textContent")
    assert browser.console() == []
