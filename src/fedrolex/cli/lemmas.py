"""The part of ``fedrolex coverage`` that needs no model: rounds until everything was trained."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from rich.console import Console

from fedrolex.cli.console import remark, table
from fedrolex.slicing import width
from fedrolex.theory.lemmas import (
    asymptote,
    expected_rounds,
    random_node_rounds,
    rolling_node_rounds,
    rolling_rounds,
    simulated_node_rounds,
    simulated_rounds,
)

INDICES = (2, 5, 8, 16, 64)
TIMES = (1, 2, 3, 5)


@dataclass(frozen=True)
class LemmaRow:
    """Rounds until each of ``indices`` disjoint sub-models was trained ``times`` times.

    Attributes:
        expected: one drawn at random a round, by Lemma 2 (Lemma 1 for once).
        asymptote: what the paper says that tends to.
        simulated, standard_error: mean over trials, and how well that is known.
        rolling: taken in turn.
    """

    indices: int
    times: int
    expected: float
    asymptote: float
    simulated: float
    standard_error: float
    rolling: int


@dataclass(frozen=True)
class NodeRow:
    """Rounds until every node of a layer was held once.

    Attributes:
        nodes, capacity, width: of the layer, of the client, and how many nodes the client holds at once.
        rolling: a window that moves by one node a round.
        random: expected, distinct nodes drawn anew each round.
        simulated, standard_error: the same, mean over trials, and how well that is known.
    """

    nodes: int
    capacity: str
    width: int
    rolling: int
    random: float
    simulated: float
    standard_error: float


def lemma_rows(indices: Sequence[int], times: Sequence[int], trials: int, seed: int) -> list[LemmaRow]:
    """One row for each pair."""
    return [
        LemmaRow(
            i, m, expected_rounds(i, m), asymptote(i, m), *simulated_rounds(i, m, trials, seed), rolling_rounds(i, m)
        )
        for i in indices
        for m in times
    ]


def node_rows(nodes: int, capacities: Sequence[Fraction], trials: int, seed: int) -> list[NodeRow]:
    """One row for each capacity."""
    rows = []
    for beta in capacities:
        w = width(nodes, beta)
        rolling, random = rolling_node_rounds(nodes, w), random_node_rounds(nodes, w)
        rows.append(NodeRow(nodes, str(beta), w, rolling, random, *simulated_node_rounds(nodes, w, trials, seed)))
    return rows


def show_lemmas(screen: Console, rows: Sequence[LemmaRow], trials: int) -> None:
    """As a table."""
    cells = []
    for row in rows:
        off = (f"{row.asymptote:,.2f}", f"{row.asymptote / row.expected - 1:+.0%}") if row.asymptote > 0 else ("–", "–")
        drawn = (f"{row.expected:,.4f}", f"{row.simulated:,.2f} ± {row.standard_error:.2f}")
        cells.append((str(row.indices), str(row.times), *drawn, *off, f"{row.rolling:,}"))
    ends = [place for place, (row, after) in enumerate(pairwise(rows)) if after.indices != row.indices]
    headings = ("I", "m", "random, expected", f"{trials:,} trials", "asymptote", "it is off by", "rolling, m·I")
    title = "Rounds until each of I disjoint sub-models was trained m times (Lemmas 1 and 2)"
    screen.print(table(headings, cells, title, ends=ends))
    known = [row for row in rows if row.standard_error > 0]
    away = max((abs(row.simulated - row.expected) / row.standard_error for row in known), default=0.0)
    remark(screen, f"±: standard errors. The simulation is at most {away:.1f} of them from the formula.")
    remark(screen, "The asymptote is the paper's, I log I + I (m − 1) log log I: it leaves out a term of order I.")


def show_nodes(screen: Console, rows: Sequence[NodeRow], trials: int) -> None:
    """As a table, and what the lemmas do not say."""
    cells = []
    for row in rows:
        drawn = (f"{row.random:,.4f}", f"{row.simulated:,.2f} ± {row.standard_error:.2f}")
        cells.append((row.capacity, str(row.width), f"{row.rolling:,}", *drawn))
    headings = ("capacity", "nodes held", "rolling by one", "random, expected", f"{trials:,} trials")
    screen.print(table(headings, cells, f"Rounds until each of {rows[0].nodes} nodes of a layer was held once"))
    remark(
        screen,
        "What the lemmas do not say: they are about disjoint sub-models, one a round. Rolling by one node covers a "
        f"layer's nodes later than random windows do when windows are wide ({rolling_node_rounds(16, 8)} against "
        f"{random_node_rounds(16, 8):.2f} rounds for 8 of 16), and weights are another matter still: lockstep rolling "
        "of narrow windows never reaches most of them.",
    )
