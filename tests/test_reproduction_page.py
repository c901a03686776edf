"""The figures on the page about the paper are those of the runs in results/paper/."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from fedrolex.cli.paper.orders import read_orders

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reproduction.md").read_text()
NUMBER = re.compile(r"\d+\.\d+")
OVERALL = ("overall-tuned", "overall-tuned-redrawn")
WITH_OFFSETS = "overall-tuned-changed-7a033a92"
LONGER = "overall-tuned-redrawn-changed-ae110644"


def runs(table: str, setup: str, row: str, folder: str = "paper") -> list[dict[str, Any]]:
    cells = json.loads((ROOT / "results" / folder / f"{table}.json").read_text())["cells"]
    (found,) = (cell["runs"] for cell in cells if (cell["setup"], cell["row"]) == (setup, row))
    return sorted(found, key=lambda run: int(run["seed"]))


def lines(heading: str, page: str = PAGE) -> dict[str, list[float]]:
    """The rows of the first table after a piece of text: name to every number with a decimal point, in order."""
    below = page[page.index(heading) :].splitlines()
    begin = next(at for at, line in enumerate(below) if line.startswith("|"))
    table = []
    for line in below[begin:]:
        if not line.startswith("|"):
            break
        table.append([part.strip() for part in line.strip("|").split("|")])
    return {row[0]: [float(n) for n in NUMBER.findall(" ".join(row[1:]))] for row in table[2:]}


def spread(table: str, row: str) -> list[float]:
    """Every seed's accuracy, their mean and their standard deviation, as printed."""
    each = [run["global"] for run in runs(table, "cifar10-high", row)]
    return [*each, mean(each), stdev(each)]


OWN = "| capacities belong to devices |"
DRAWN = "| capacities drawn anew every round, as released |"


@pytest.mark.parametrize(
    ("heading", "name", "table", "row"),
    [
        (OWN, "columns 1/2, 1/4, 1/8, 1/16 one by one", "overall-tuned", "columns-one-by-one"),
        (OWN, "columns 1/2, 1/4, 1/8, 1/16 in turns", "overall-tuned", "columns"),
        (OWN, "only who can trains 1/4, two models of it", "overall-tuned", "only-who-can-1-4-twice"),
        (OWN, "only who can trains 1/2", "overall-tuned", "only-who-can-1-2"),
        (OWN, "only who can trains 1/4", "overall-tuned", "only-who-can-1-4"),
        (OWN, "only who can trains 1/8", "overall-tuned", "only-who-can-1-8"),
        (OWN, "HeteroFL", "overall-tuned", "heterofl"),
        (OWN, "Federated Dropout, draws aligned", "overall-tuned", "federated-dropout"),
        (OWN, "everyone trains 1/16", "overall-tuned", "smallest"),
        (OWN, "FedRolex", "overall-tuned", "fedrolex"),
        (OWN, "everyone trains 1/4 (a bound: 40 of 100 cannot)", "overall-tuned", "everyone-1-4"),
        (DRAWN, "FedRolex, 1500 rounds", LONGER, "fedrolex"),
        (DRAWN, "FedRolex", "overall-tuned-redrawn", "fedrolex"),
        (DRAWN, "HeteroFL", "overall-tuned-redrawn", "heterofl"),
        (DRAWN, "columns", "overall-tuned-redrawn", "columns"),
        (DRAWN, "Federated Dropout, draws aligned", "overall-tuned-redrawn", "federated-dropout"),
    ],
)
def test_seeds_of_two_labels(heading: str, name: str, table: str, row: str) -> None:
    wanted = spread(table, row)
    assert lines(heading)[name][: len(wanted)] == pytest.approx(wanted, abs=0.0051)


def test_the_claims_on_top_are_those_of_the_tables() -> None:
    """A line begins with what the paper says; its bold and plain figures are means, and differences of means."""
    claims = {line.split("|")[1].strip(): line for line in PAGE.splitlines() if line.startswith("| ")}

    def of(table: str, row: str) -> float:
        return mean(float(run["global"]) for run in runs(table, "cifar10-high", row))

    fixed, drawn = ({row: of(table, row) for row in ("fedrolex", "heterofl")} for table in OVERALL)
    smallest = of("overall-tuned", "smallest")
    reached = claims["FedRolex reaches 69.44 % on CIFAR-10 with two labels a client"]
    for mean_of in (drawn["fedrolex"], of(LONGER, "fedrolex"), fixed["fedrolex"]):
        assert f"{mean_of:.1f} %" in reached
    ahead = claims["it is ahead of HeteroFL"]
    assert f"by {drawn['heterofl'] - drawn['fedrolex']:.1f} points in the mean redrawn" in ahead
    assert f"by {fixed['heterofl'] - fixed['fedrolex']:.1f} fixed" in ahead
    dropout = of("overall-tuned", "federated-dropout") - fixed["fedrolex"]
    assert f"in the mean it is {dropout:.1f} points behind" in claims["it is ahead of Federated Dropout"]
    gap = claims["it is 31 points ahead of the smallest model that everyone can train"]
    assert f"everyone at 1/16 has {smallest:.1f} %" in gap
    assert [round(of(table, "fedrolex") - smallest) for table in ("overall-tuned-redrawn", LONGER)] == [7, 10]
    columns = of("overall-tuned", "columns-one-by-one") - of("overall-tuned", "only-who-can-1-4")
    assert f"by {columns:.1f} points with two labels" in PAGE
    behind = [
        runs("gamma-tuned", "cifar10-high", f"own-size-{times}")[0]["global"]
        - runs("gamma-tuned", "cifar10-high", f"fedrolex-{times}")[0]["global"]
        for times in (2, 4, 8)
    ]
    four, sixteen, more = (round(each) for each in behind)
    assert f"{four}, {sixteen} and {more} points behind" in claims["a server larger than every client works (Figure 4)"]


def test_every_row_of_two_labels_is_checked() -> None:
    checked = test_seeds_of_two_labels.pytestmark[0].args[1]  # type: ignore[attr-defined]
    for heading in (OWN, DRAWN):
        assert {name for where, name, _, _ in checked if where == heading} == set(lines(heading))


@pytest.mark.parametrize(
    ("name", "capacity"),
    [("columns one by one: the row", "1"), ("its column of 1/2 alone", "1/2"), ("of 1/4", "1/4"), ("of 1/8", "1/8"),
     ("of 1/16", "1/16")],
)  # fmt: skip
def test_columns_one_by_one_with_offsets(name: str, capacity: str) -> None:
    each = runs("overall-tuned", "cifar10-high", "columns-one-by-one")
    wanted = []
    for shares in ([run["submodels"] for run in each], [run["offsets"]["submodels"] for run in each]):
        own = [share[capacity] for share in shares]
        wanted += [*own, mean(own)]
    assert lines("### Offsets of classes")[name] == pytest.approx(wanted, abs=0.051)


def as_trained_and_with_offsets(width: str) -> tuple[list[float], list[float]]:
    """Of only who can, by seed; these runs were measured with offsets, and their sub-model of 1 without."""
    each = runs(WITH_OFFSETS, "cifar10-high", f"only-who-can-1-{width}")
    return [run["submodels"]["1"] for run in each], [run["global"] for run in each]


@pytest.mark.parametrize("width", ["4", "2"])
def test_single_models_with_offsets(width: str) -> None:
    plain, offset = as_trained_and_with_offsets(width)
    wanted = [*plain, mean(plain), *offset, mean(offset)]
    assert lines("### Offsets of classes")[f"only who can trains 1/{width}"] == pytest.approx(wanted, abs=0.051)


def test_the_lead_of_columns_is_the_same_with_offsets() -> None:
    row = runs("overall-tuned", "cifar10-high", "columns-one-by-one")
    plain, offset = as_trained_and_with_offsets("4")
    leads = [run["offsets"]["global"] - other for run, other in zip(row, offset, strict=True)]
    assert "{:.1f}, {:.1f} and {:.1f} points, {:.1f} in the mean".format(*leads, mean(leads)) in PAGE
    trained = mean(run["global"] - other for run, other in zip(row, plain, strict=True))
    assert f"as trained it is {trained:.1f} over these runs" in PAGE
    assert "{:.1f}, {:.1f} and {:.1f} points".format(*leads) in (ROOT / "README.md").read_text()
    assert mean(offset) > mean(as_trained_and_with_offsets("2")[1])  # 1/4 is the best single model


RELEASED = [
    ("HeteroFL, released", "overall-released-changed-4ece91d3", "heterofl"),
    ("FedRolex, released", "overall-released-changed-4ece91d3", "fedrolex"),
    ("Federated Dropout, released", "overall-released-changed-4ece91d3", "federated-dropout"),
    ("FedRolex, printed", "overall-printed-changed-4ece91d3", "fedrolex"),
]


@pytest.mark.parametrize(("name", "table", "row"), RELEASED)
def test_the_authors_code(name: str, table: str, row: str) -> None:
    (run,) = runs(table, "cifar10-high", row)
    found = lines("### As the authors' code ran")[name]
    assert found[0] == pytest.approx(run["global"], abs=0.0051)
    wanted = [run["local"], run["offsets"]["global"]]
    assert found[3:5] == pytest.approx(wanted, abs=0.0051)
    wanted = [*(run["submodels"][capacity] for capacity in ("1/2", "1/4", "1/8", "1/16")), run["bytes"] / 2**30]
    assert found[5:] == pytest.approx(wanted, abs=0.051)
    rounds = ("500", "750", "1000", "1500", "2000", "2500")
    wanted = [run["curve"][at] for at in rounds]
    assert lines("Global accuracy after so many rounds:")[name] == pytest.approx(wanted, abs=0.051)


def test_what_is_said_of_the_authors_code() -> None:
    """The paper's figures and spreads are those of its Table 3."""
    found = {name: runs(table, "cifar10-high", row)[0] for name, table, row in RELEASED}
    ours = {name: run["global"] for name, run in found.items()}
    far = [
        abs(ours[f"{name}, released"] - told) / spread_of
        for name, told, spread_of in (("HeteroFL", 63.90, 2.74), ("Federated Dropout", 46.64, 3.05))
    ]
    assert max(far) < 1.4
    rolex, hetero = ours["FedRolex, released"], ours["HeteroFL, released"]
    assert f"it ends {69.44 - rolex:.1f} points below the paper, and {hetero - rolex:.1f} behind HeteroFL" in PAGE
    first, second = (found[f"{name}, released"]["curve"] for name in ("HeteroFL", "FedRolex"))
    ahead = [int(at) for at in first if first[at] > second[at]]
    assert min(ahead) == 375
    assert len(ahead) == len([at for at in first if int(at) >= 375])
    printed = found["FedRolex, printed"]["curve"].values()
    assert (round(max(printed), 1), round(ours["FedRolex, printed"], 1)) == (38.2, 30.0)
    assert f"FedRolex {rolex - ours['Federated Dropout, released']:.1f} points ahead of that" in PAGE


def test_why_leaving_devices_out_at_a_half_gets_worse() -> None:
    def over_seeds(width: str, what: str, *rounds: int) -> list[float]:
        every = runs(WITH_OFFSETS, "cifar10-high", f"only-who-can-1-{width}")
        return [mean(run[what][str(at)] for run in every) for at in rounds]

    assert (
        "({:.2f}, after 800 rounds {:.2f}, in the end {:.2f})".format(*over_seeds("2", "test_loss", 450, 800, 1000))
        in PAGE
    )
    assert "that of 1/4 stays ({:.2f}, {:.2f}, {:.2f})".format(*over_seeds("4", "test_loss", 450, 800, 1000)) in PAGE
    fall = over_seeds("2", "curve", 500, 800, 1000)
    assert "from {:.1f} % after 500 rounds to {:.1f} after 800 and {:.1f} in the end".format(*fall) in PAGE
    assert over_seeds("2", "train_loss", 550, 1000) == pytest.approx([0.15, 0.02], abs=0.005)
    early, late = (runs(WITH_OFFSETS, "cifar10-high", f"only-who-can-1-{width}") for width in ("2", "4"))
    apart = [one["curve"]["500"] - other["global"] for one, other in zip(early, late, strict=True)]
    assert (
        f"{-mean(apart):.1f} points behind 1/4 in the mean, {-min(apart):.1f} behind to {max(apart):.1f} ahead" in PAGE
    )


def test_what_an_earlier_fall_of_the_rate_does_to_heterofl_and_fedrolex() -> None:
    cells = json.loads((ROOT / "results" / "early_decay" / "overall-tuned.json").read_text())["cells"]
    early = {c["row"]: [run["global"] for run in c["runs"]] for c in cells if c["setup"] == "cifar10-high"}
    late = {
        row: [run["global"] for run in runs("overall-tuned", "cifar10-high", row)] for row in ("fedrolex", "heterofl")
    }
    for row in late:
        told = [f"{share:.2f}" for share in (*early[row], *late[row][:2])]
        assert all(share in PAGE for share in told)
    leads = [
        [one - other for one, other in zip(of["heterofl"][:2], of["fedrolex"][:2], strict=True)] for of in (early, late)
    ]
    assert "its lead there is {:.1f} and {:.1f} points, not {:.1f} and {:.1f}".format(*leads[0], *leads[1]) in PAGE


def test_how_fedrolex_loses_with_rare_classes() -> None:
    (run,) = runs("rare-tuned", "cifar10-rare", "fedrolex")
    assert (round(run["curve"]["150"]), round(run["global"])) == (55, 28)


def test_short_runs_of_the_full_network() -> None:
    def told(table: str, row: str) -> str:
        (run,) = runs(table, "cifar10-high", row)
        return f"{run['global']:.1f} ({run['offsets']['global']:.1f})"

    table = lines("| 100 rounds | r = 0 |")["FedRolex, overlap r of consecutive windows"]
    every = [runs("overlap-tuned-x0.1", "cifar10-high", f"fedrolex-{r}")[0] for r in ("0", "0.25", "0.5", "0.75", "1")]
    wanted = [share for run in every for share in (run["global"], run["offsets"]["global"])]
    assert table == pytest.approx(wanted, abs=0.051)
    part = PAGE[PAGE.index("## The full network, for fewer rounds") :]
    shares = [told("rho-tuned-x0.25", f"fedrolex-{share}") for share in ("0.0", "0.2")]
    clients = [told("participation-tuned-x0.1", f"{row}-5") for row in ("fedrolex", "heterofl")]
    for words in (*shares, *clients):
        assert words in part


@pytest.mark.parametrize(
    ("name", "row"),
    [("columns, two of the clients' size", "columns"), ("everyone trains its own size", "own-size"),
     ("FedRolex", "fedrolex")],
)  # fmt: skip
def test_a_server_larger_than_every_client(name: str, row: str) -> None:
    each = [run for times in (2, 4, 8) for run in runs("gamma-tuned", "cifar10-high", f"{row}-{times}")]
    wanted = [share for run in each for share in (run["global"], run["offsets"]["global"])]
    assert lines("## A server larger than every client")[name] == pytest.approx(wanted, abs=0.0051)


@pytest.mark.parametrize(("name", "row"), [("HeteroFL", "heterofl"), ("FedRolex", "fedrolex")])
def test_rare_classes_with_offsets(name: str, row: str) -> None:
    (run,) = runs("rare-tuned", "cifar10-rare", row)
    wanted = [run["global"], run["offsets"]["global"], run["rare"], run["offsets"]["rare"]]
    assert lines("FedRolex and HeteroFL, seed 1, 220.7 GiB each")[name] == pytest.approx(wanted, abs=0.0051)


@pytest.mark.parametrize(
    ("name", "row"),
    [("HeteroFL", "heterofl"), ("only who can trains 1/4", "only-who-can-1-4"), ("FedRolex", "fedrolex"),
     ("columns in turns", "columns"), ("everyone trains 1/16", "smallest")],
)  # fmt: skip
def test_a_hundred_classes_as_far_as_they_were_trained(name: str, row: str) -> None:
    cut = json.loads((ROOT / "results" / "first_rounds.json").read_text())["runs"]
    (curve,) = [run["global_accuracy"] for run in cut if run["cell"] == f"overall/cifar100-high/{row}@tuned"]
    wanted = [curve[rounds] for rounds in ("100", "200", "300", "450") if rounds in curve]
    assert lines("## A hundred classes")[name] == pytest.approx(wanted, abs=0.0051)


def test_what_offsets_gain_is_said_as_measured() -> None:
    cells = [("overall-tuned", "columns-one-by-one")]
    cells += [("gamma-tuned", f"{row}-{times}") for row in ("own-size", "fedrolex") for times in (2, 4, 8)]
    cells += [("gamma-tuned", f"columns-{times}") for times in (2, 4)]
    gains = [
        run["offsets"]["global"] - run["global"] for cell in cells for run in runs(cell[0], "cifar10-high", cell[1])
    ]
    for width in ("4", "2"):
        plain, offset = as_trained_and_with_offsets(width)
        gains += [more - less for less, more in zip(plain, offset, strict=True)]
    assert len(gains) == 17
    assert (round(min(gains), 1), round(max(gains), 1)) == (2.5, 9.7)
    assert "2.5 to 9.7 points in each of the 17 tuned runs" in PAGE
    assert "2.5 to 9.7 points in 17 runs" in (ROOT / "docs" / "training.md").read_text()


@pytest.mark.parametrize(("name", "row"), [("columns", "columns"), ("HeteroFL", "heterofl"), ("FedRolex", "fedrolex")])
def test_what_devices_are_given(name: str, row: str) -> None:
    for prefix, table in (("", "overall-tuned"), ("capacities drawn anew: ", "overall-tuned-redrawn")):
        longer = ", 1000 rounds" if prefix and row == "fedrolex" else ""
        found = lines("Accuracy of what a device of each capacity would be given")[prefix + name + longer]
        each = [run["submodels"] for run in runs(table, "cifar10-high", row)]
        wanted = [mean(of[capacity] for of in each) for capacity in ("1", "1/2", "1/4", "1/8", "1/16")]
        assert found == pytest.approx(wanted, abs=0.051)


@pytest.mark.parametrize(
    ("heading", "name", "table", "setup", "row"),
    [
        ("## Five labels", "FedRolex, capacities drawn anew", "overall-tuned-redrawn", "cifar10-low", "fedrolex"),
        ("## Five labels", "FedRolex", "overall-tuned", "cifar10-low", "fedrolex"),
        ("## Five labels", "HeteroFL", "overall-tuned", "cifar10-low", "heterofl"),
        ("## Five labels", "columns", "overall-tuned", "cifar10-low", "columns"),
        ("## Five labels", "only who can trains 1/4", "overall-tuned", "cifar10-low", "only-who-can-1-4"),
        ("## Five labels", "everyone trains 1/16", "overall-tuned", "cifar10-low", "smallest"),
        ("## Classes that only", "columns", "rare-tuned", "cifar10-rare", "columns"),
        ("## Classes that only", "only who can trains 1/8", "rare-tuned", "cifar10-rare", "only-who-can-1-8"),
        ("## Classes that only", "only who can trains 1/4", "rare-tuned", "cifar10-rare", "only-who-can-1-4"),
        ("## Classes that only", "everyone trains 1/16", "rare-tuned", "cifar10-rare", "smallest"),
    ],
)
def test_other_splits(heading: str, name: str, table: str, setup: str, row: str) -> None:
    each = [run["global"] for run in runs(table, setup, row)]
    assert lines(heading)[name][: len(each)] == pytest.approx(each, abs=0.0051)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("everyone trains 1 (a bound: four of five devices cannot)", "largest"),
        ("HeteroFL", "heterofl"),
        ("FedRolex", "fedrolex"),
        ("only who can trains 1/4", "only-who-can-1-4"),
        ("columns", "columns"),
        ("everyone trains 1/16", "smallest"),
    ],
)
def test_words(name: str, row: str) -> None:
    found, each = lines("## Words")[name], runs("overall-tuned-x0.25", "blogs", row)
    shares = [run["global"] for run in each]
    assert found[:3] == pytest.approx([*shares, mean(shares)], abs=0.0051)
    assert found[-1] == pytest.approx(mean(run["bytes"] for run in each) / 2**30, abs=0.051)
    if row in ("heterofl", "fedrolex", "columns"):
        wanted = [mean(run["submodels"][capacity] for run in each) for capacity in ("1/2", "1/4", "1/8", "1/16")]
        assert found[3:-1] == pytest.approx(wanted, abs=0.051)


def test_words_one_by_one() -> None:
    (run,) = runs("overall-tuned-x0.25", "blogs", "columns-one-by-one")
    other = runs("overall-tuned-x0.25", "blogs", "only-who-can-1-4")[0]
    said = f"they have {run['global']:.2f} %, as exclusion has, for {run['bytes'] / 2**30:.1f} GiB"
    assert said in PAGE
    assert f"{other['global']:.2f}" == f"{run['global']:.2f}"
    assert f"for {run['bytes'] / other['bytes']:.1f} times the bytes (one seed)" in PAGE


TWO, BALANCED = "tuned-x0.2-changed-3d36ccbd", "tuned-x0.2-changed-805a092a"
Cells = list[tuple[str, str, str]]
"""Table, row, and which accuracy."""


def of(table: str, *rows: object) -> Cells:
    return [(f"{table}-{TWO}", str(row), "global") for row in rows]


@pytest.mark.parametrize(
    ("heading", "name", "cells"),
    [
        *(
            ("| two labels a client |", name, [*of("overall", row), *more])
            for name, row, more in [
                ("everyone trains 1 (a bound)", "largest", []),
                ("columns one by one, two each", "columns-twice-one-by-one", []),
                *(
                    (name, row, [(f"overall-{BALANCED}", row, "global")])
                    for name, row in [("columns one by one", "columns-one-by-one"), ("HeteroFL", "heterofl"),
                                      ("only who can trains 1/4", "only-who-can-1-4"), ("FedRolex", "fedrolex")]
                ),
                ("columns in turns", "columns", []),
                ("Federated Dropout, draws aligned", "federated-dropout", []),
                ("everyone trains 1/16", "smallest", []),
            ]
        ),
        *(
            ("| a server γ times", name, of("gamma", *(f"{row}-{times}" for times in (2, 4, 8, 16))))
            for name, row in [("everyone trains its own size", "own-size"), ("columns", "columns"),
                              ("FedRolex", "fedrolex"), ("Federated Dropout, draws aligned", "federated-dropout")]
        ),
        ("| a share ρ", "FedRolex", of("rho", *(f"fedrolex-{share}" for share in ("0.0", 0.2, 0.5, 0.8, "1.0")))),
        *(
            ("| | household", name,
             [*(of("real-world", row) if row != "heterofl" else []), *of("rare", row), (f"rare-{TWO}", row, "rare")])
            for name, row in [("columns one by one", "columns-one-by-one"), ("columns in turns", "columns"),
                              ("only who can trains 1/8", "only-who-can-1-8"), ("HeteroFL", "heterofl"),
                              ("only who can trains 1/4", "only-who-can-1-4"), ("FedRolex", "fedrolex"),
                              ("everyone trains 1/16", "smallest")]
        ),
        ("| the appendix |", "FedRolex, clients weigh alike, by size, by updates, by both",
         of("weighting", "uniform", "size", "updates", "hybrid")),
        ("| the appendix |", "FedRolex, overlap 0, 0.25, 0.5, 0.75, 1",
         of("overlap", *(f"fedrolex-{share}" for share in (0, 0.25, 0.5, 0.75, 1)))),
        *(
            ("| the appendix |", f"{name}, 5, 10, 20 clients a round",
             of("participation", *(f"{row}-{clients}" for clients in (5, 10, 20))))
            for name, row in [("FedRolex", "fedrolex"), ("HeteroFL", "heterofl")]
        ),
    ],
)  # fmt: skip
def test_a_small_network(heading: str, name: str, cells: Cells) -> None:
    wanted = []
    for table, row, which in cells:
        setup = "cifar10-rare" if table.startswith("rare") else "cifar10-high"
        for run in runs(table, setup, row, "small"):
            wanted += [run[which], run["offsets"][which]]
    assert lines(heading)[name] == pytest.approx(wanted, abs=0.051)


def test_every_row_of_a_small_network_is_checked() -> None:
    checked = test_a_small_network.pytestmark[0].args[1]  # type: ignore[attr-defined]
    for heading in dict.fromkeys(heading for heading, _, _ in checked):
        assert {name for where, name, _ in checked if where == heading} == set(lines(heading))


def test_the_page_of_columns_has_the_figures_of_its_benchmark() -> None:
    page = (ROOT / "docs" / "methods" / "columns.md").read_text()
    found = json.loads((ROOT / "results" / "columns.json").read_text())["results"]
    rows = [line.strip("|").split("|") for line in page[page.index("| validation accuracy") :].splitlines()[2:]]
    table = {row[0].strip(): [float(n) for n in NUMBER.findall(" ".join(row[1:]))] for row in rows if len(row) == 6}
    assert len(table) == 13
    for name, (two, rare, even, gmacs, mib) in table.items():
        shares = [found[split][name]["validation"] for split in ("two", "rare", "even")]
        assert [two, rare, even] == pytest.approx(shares, abs=0.051), name
        assert (gmacs, mib) == pytest.approx((found["two"][name]["gmacs"], found["two"][name]["mib"]), abs=0.051)


def test_the_page_of_training_has_the_figures_of_offsets() -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    found = json.loads((ROOT / "results" / "offsets.json").read_text())["results"]
    table, measures = lines("## Scores that can be compared", page), ("as trained", "offsets", "linear")
    assert table.keys() == found["two"].keys()
    for name in found["two"]:
        shares = [found[split][name][measure] for split in ("two", "rare", "even") for measure in measures]
        assert table[name] == pytest.approx(shares, abs=0.051), name
    rows = [found["two"][name] for name in ("columns in turns", "one by one", "one by one, two each")]
    for measure, words in (
        ("offsets, by column", "{:.1f}, {:.1f} and {:.1f} % (in turns"),
        ("offsets", "{:.1f}, {:.1f} and {:.1f}."),
    ):
        assert words.format(*(row[measure] for row in rows)) in page
    curves = json.loads((ROOT / "results" / "offsets_cifar10.json").read_text())["curves"]
    table, at = lines("On CIFAR-10 (20,000 of the images", page), ("20", "50", "100", "150", "200")
    for name, row in (("FedRolex", "fedrolex"), ("HeteroFL", "heterofl"), ("columns in turns", "columns"),
                      ("only who can trains 1/4", "only-who-can-1-4")):  # fmt: skip
        shares = [curves[row][measure][rounds] for rounds in at for measure in ("as_trained", "offsets")]
        assert table[name] == pytest.approx(shares, abs=0.051), name


@pytest.mark.parametrize("which", ["paper", "small"])
def test_every_run_of_the_tables_is_asked_for_in_the_file_that_makes_them_again(which: str) -> None:
    asked: dict[str, set[tuple[str, int]]] = {}
    for order in read_orders(ROOT / "results" / f"{which}.yaml", 1, []):
        shelf = order.shelf(Path("runs"))
        runs_of_order = {(cell.label, seed) for cell in order.chosen() for seed in order.seeds}
        asked.setdefault(f"{shelf.table}-{shelf.label}", set()).update(runs_of_order)
    for path in (ROOT / "results" / which).glob("*.json"):
        there = {
            (f"{cell['setup']}/{cell['row']}", seed)
            for cell in json.loads(path.read_text())["cells"]
            for seed in cell["seeds"]
        }
        assert there <= asked[path.stem], path
