"""The lemmas against closed forms, counting and drawing; the parts of ``fedrolex coverage`` made of them."""

from __future__ import annotations

import json
from fractions import Fraction
from functools import cache
from math import comb, fsum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedrolex import FedrolexError
from fedrolex.cli.app import app
from fedrolex.theory.lemmas import (
    asymptote,
    expected_rounds,
    random_node_rounds,
    rolling_node_rounds,
    rolling_rounds,
    simulated_node_rounds,
    simulated_rounds,
)

TIMES = (1, 2, 3, 5)
EXPECTED = {
    2: (3, 5.5, 7.875, 12.4609),
    5: (11.4167, 19.0414, 25.9868, 39.0148),
    8: (21.7429, 34.8847, 46.6907, 68.6141),
    16: (54.0917, 82.7873, 108.1899, 154.8380),
    64: (303.609, 433.861, 547.166, 752.242),
}
PAIRS = [(i, m, rounds) for i, row in EXPECTED.items() for m, rounds in zip(TIMES, row, strict=True)]
NODES = [(5, 3, 3.2222), (5, 4, 2.25), (8, 2, 10.3955), (16, 4, 12.5563), (16, 8, 5.535), (16, 2, 26.4231)]


@pytest.mark.parametrize(("indices", "times", "rounds"), PAIRS)
def test_lemma_2(indices: int, times: int, rounds: float) -> None:
    assert expected_rounds(indices, times) == pytest.approx(rounds, abs=6e-4 if indices == 64 else 6e-5)


def harmonic(indices: int) -> float:
    """Lemma 1: I(1 + 1/2 + … + 1/I)."""
    return fsum(indices / i for i in range(1, indices + 1))


@pytest.mark.parametrize("indices", [1, 2, 7, 64, 512, 100_000])
def test_lemma_2_of_once_is_lemma_1(indices: int) -> None:
    assert expected_rounds(indices) == pytest.approx(harmonic(indices), rel=1e-10)


def by_states(indices: int, times: int) -> Fraction:
    """Expected rounds exactly: what is left of a state, (draws still missing of each index), sorted."""

    @cache
    def left(state: tuple[int, ...]) -> Fraction:
        if not any(state):
            return Fraction(0)
        after = [tuple(sorted((*state[:i], n - 1, *state[i + 1 :]))) for i, n in enumerate(state) if n]
        return sum(map(left, after), Fraction(indices)) / len(after)

    return left((times,) * indices)


@pytest.mark.parametrize(("indices", "times"), [(1, 1), (1, 20), (2, 9), (3, 4), (4, 3), (6, 2)])
def test_lemma_2_against_the_chain_of_states(indices: int, times: int) -> None:
    assert expected_rounds(indices, times) == pytest.approx(float(by_states(indices, times)), rel=1e-10)


@pytest.mark.parametrize(("indices", "times"), [(512, 20), (4096, 3), (64, 500)])
def test_lemma_2_of_large_numbers(indices: int, times: int) -> None:
    """The trapezoid rule, with the series written out: all derivatives vanish at both ends, so it is exact."""
    t = np.linspace(0, 2 * times + 100, 200_001)[1:]
    series, term = np.zeros_like(t), np.exp(-t)
    for power in range(times):
        series += term
        term = term * t / (power + 1)
    inner = 1 - (1 - np.minimum(series, 1)) ** indices
    assert expected_rounds(indices, times) == pytest.approx(indices * (inner.sum() + 0.5) * (t[1] - t[0]), rel=1e-8)


def test_the_papers_asymptote_is_far_off_and_rolling_is_exact() -> None:
    assert asymptote(64, 1) == pytest.approx(64 * np.log(64))
    assert asymptote(64, 5) == pytest.approx(631.0316, abs=1e-4)
    assert asymptote(64, 5) / expected_rounds(64, 5) == pytest.approx(0.84, abs=0.01)
    assert asymptote(2, 5) < 0 < expected_rounds(2, 5)
    assert rolling_rounds(64, 5) == 320


@pytest.mark.parametrize(("indices", "times"), [(2, 1), (2, 5), (8, 3), (16, 5)])
def test_drawing_agrees_with_the_lemmas(indices: int, times: int) -> None:
    mean, error = simulated_rounds(indices, times, 4000, seed=1)
    assert 0 < error < expected_rounds(indices, times) / 50
    assert abs(mean - expected_rounds(indices, times)) < 4 * error
    assert (mean, error) == simulated_rounds(indices, times, 4000, seed=1)
    assert mean != simulated_rounds(indices, times, 4000, seed=2)[0]


# --- nodes ---


@pytest.mark.parametrize("size", range(1, 13))
def test_rolling_over_nodes_by_brute_force(size: int) -> None:
    for width in range(1, size + 1):
        for times in (1, 2, width, width + 1, 2 * width + 1):
            held, rounds = [0] * size, 0
            while min(held) < times:
                for i in range(width):
                    held[(rounds + i) % size] += 1
                rounds += 1
            assert rolling_node_rounds(size, width, times) == rounds


def test_rolling_over_sixteen_nodes() -> None:
    assert [rolling_node_rounds(16, width) for width in (8, 4, 2, 1)] == [9, 13, 15, 16]


@pytest.mark.parametrize(("size", "width", "rounds"), NODES)
def test_random_windows(size: int, width: int, rounds: float) -> None:
    assert random_node_rounds(size, width) == pytest.approx(rounds, abs=6e-5)
    mean, error = simulated_node_rounds(size, width, 3000)
    assert abs(mean - random_node_rounds(size, width)) < 4 * error


def by_count(size: int, width: int) -> float:
    """Expected rounds from how many nodes are still missing: each round takes a hypergeometric number of them."""
    left = [0.0]
    for missing in range(1, size + 1):
        chances = [comb(missing, k) * comb(size - missing, width - k) / comb(size, width) for k in range(width + 1)]
        later = sum(chances[k] * left[missing - k] for k in range(1, min(width, missing) + 1))
        left.append((1 + later) / (1 - chances[0]))
    return left[size]


@pytest.mark.parametrize(("size", "width"), [(1, 1), (9, 9), (20, 7), (64, 4), (512, 32), (512, 256)])
def test_random_windows_against_the_chain_of_counts(size: int, width: int) -> None:
    assert random_node_rounds(size, width) == pytest.approx(by_count(size, width), rel=1e-9)


def test_windows_of_one_node_collect_coupons() -> None:
    assert random_node_rounds(512, 1) == pytest.approx(harmonic(512), rel=1e-12)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda: expected_rounds(0), "indices is 0"),
        (lambda: expected_rounds(3, 0), "times is 0"),
        (lambda: asymptote(1), "give 2 or more"),
        (lambda: simulated_rounds(3, 1, 0), "trials is 0"),
        (lambda: rolling_node_rounds(4, 5), "a window of 5 of 4 nodes"),
        (lambda: random_node_rounds(4, 0), "a window of 0 of 4 nodes"),
    ],
)
def test_a_mistake_gets_one_clear_line(mistake: Any, says: str) -> None:
    with pytest.raises(FedrolexError, match=says):
        mistake()


# --- the command ---

SMALL = ["small:Residual", "--input", "2x3x8x8", "--capacity", "1/2", "--rounds", "2"]


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["coverage", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_without_a_model_the_lemmas_come_first() -> None:
    found = json.loads(run("--rounds", "1", "--capacity", "1/4", "--nodes", "16", "--trials", "300", "--json"))
    assert list(found) == ["model", "results", "lemmas", "nodes"]
    assert found["model"] == "fedrolex.models:preresnet18"
    assert [(row["indices"], row["times"]) for row in found["lemmas"]] == [(i, m) for i, m, _ in PAIRS]
    row = next(row for row in found["lemmas"] if (row["indices"], row["times"]) == (8, 3))
    assert list(row) == ["indices", "times", "expected", "asymptote", "simulated", "standard_error", "rolling"]
    assert (round(row["expected"], 4), row["rolling"]) == (46.6907, 24)
    (node,) = found["nodes"]
    assert list(node) == ["nodes", "capacity", "width", "rolling", "random", "simulated", "standard_error"]
    assert (node["nodes"], node["capacity"], node["width"], node["rolling"]) == (16, "1/4", 4, 13)
    assert round(node["random"], 4) == 12.5563


def test_with_a_model_they_come_when_asked_for(tmp_path: Path) -> None:
    plain = json.loads(run(*SMALL, "--json"))
    assert (plain["lemmas"], plain["nodes"]) == ([], [])
    assert "Lemma" not in run(*SMALL)
    figure = tmp_path / "coverage.png"
    asked = run(*SMALL, "--indices", "3", "--times", "2", "--trials", "50", "--figure", str(figure))
    for text in ("Lemmas 1 and 2", "9.6389", "What the lemmas do not say", "9 against 5.54", "unevenness"):
        assert text in asked
    assert figure.read_bytes()[:4] == b"\x89PNG"


def test_a_figure_needs_a_format(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "a.txt", "must end in .png"), (tmp_path / "none" / "a.png", "cannot write")):
        result = CliRunner().invoke(app, ["coverage", *SMALL, "--trials", "2", "--figure", str(path)])
        assert isinstance(result.exception, FedrolexError)
        assert says in str(result.exception)
