"""Windows against the paper and against counting."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from fractions import Fraction
from itertools import combinations, pairwise
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import hand_made

from fedrolex import (
    Axes,
    Blocks,
    FedrolexError,
    Ordered,
    Random,
    Rolling,
    Scheme,
    Select,
    Static,
    Window,
    coverage,
    spread,
)
from fedrolex.slicing import Arc, Axis, Pick, exact, pick, width

PINNED = [10, 12, 16, 17, 18, 19, 31, 33, 35, 36, 37, 42, 47, 48, 51, 62]


def one(size: int) -> Axes:
    return hand_made({"k": size}, {"v": ["k"], "u": ["k"]})


def held(scheme: Scheme, axes: Axes, round: int, capacity: str, client: int = 0, axis: str = "k") -> list[int]:
    window = scheme.window(axes, round=round, capacity=capacity, client=client)
    return [int(i) for i in window[axis].indices()] if axis in window else list(range(axes.axes[axis].size))


# --- rolling ---


def test_the_papers_worked_example() -> None:
    """Five nodes, a large client of four from a, a small one of three from c, three rounds."""
    axes = one(5)
    scheme = Rolling(offset=lambda axis, place, round, client: 2 * client)
    seen = [
        "/".join(
            "".join("abcde"[i] for i in held(scheme, axes, j, beta, client))
            for client, beta in [(0, "4/5"), (1, "3/5")]
        )
        for j in range(3)
    ]
    assert seen == ["abcd/cde", "bcde/dea", "cdea/eab"]


def test_the_formula_starts_every_capacity_at_the_round() -> None:
    axes = one(8)
    assert held(Rolling(), axes, 3, "1/2") == [3, 4, 5, 6]
    assert held(Rolling(), axes, 3, "1/4") == [3, 4]
    assert held(Rolling(), axes, 4, "1/2") == [4, 5, 6, 7], "start + width = K does not wrap"
    assert held(Rolling(), axes, 6, "1/2") == [6, 7, 0, 1], "wraps past the end"
    assert held(Rolling(), axes, 11, "1/2") == [3, 4, 5, 6], "a cycle later the same"
    assert held(Rolling(), axes, 3, "1") == [3, 4, 5, 6, 7, 0, 1, 2], "a full window only rotates"


@pytest.mark.parametrize(("overlap", "stride"), [(1, 1), ("1/2", 1 + 8), (0, 1 + 16), ("0.75", 1 + 4)])
def test_stride_from_the_overlap_of_the_appendix(overlap: str, stride: int) -> None:
    axes = one(64)
    assert held(Rolling(overlap=overlap), axes, 3, "1/4")[0] == 3 * stride % 64


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 20))
def test_node_coverage_time_of_rolling(size: int, width_: int, times: int) -> None:
    """Every node is covered m = q·w + r times (1 ≤ r ≤ w) after exactly q·K + K − w + r rounds."""
    w = min(width_, size)
    axis = Axis("k", size, "width", ())
    q, r = (times - 1) // w, (times - 1) % w + 1
    needed = q * size + size - w + r
    scheme = Rolling()

    def fewest(rounds: int) -> int:
        counts = [0] * size
        for j in range(rounds):
            for i in scheme.span(axis, 0, j, Fraction(w, size), 0).indices():
                counts[i] += 1
        return min(counts)

    assert fewest(needed) >= times > fewest(needed - 1)


def test_a_full_cycle_trains_every_node_equally() -> None:
    axes = one(12)
    counts = [0] * 12
    for j in range(5, 17):
        for i in held(Rolling(), axes, j, "1/3"):
            counts[i] += 1
    assert counts == [4] * 12


@pytest.mark.parametrize(("beta", "share"), [("1/2", 0.984), ("1/4", 0.484), ("1/8", 0.234), ("1/16", 0.109)])
def test_lockstep_rolling_trains_a_band_of_the_weights(beta: str, share: float) -> None:
    """Between two axes of 64 exactly the pairs at circular distance below w, a share (2w − 1)/K, ever meet."""
    axes = hand_made({"in": 64, "out": 64}, {"w": ["out", "in"]})
    w = width(64, exact(beta))
    reached = coverage(axes, Rolling(), [beta], rounds=64)
    assert reached.nodes == 1.0
    assert reached.matrices == pytest.approx((2 * w - 1) / 64)
    assert round(reached.matrices, 3) == share
    band = {(o, i) for o in range(64) for i in range(64) if min((o - i) % 64, (i - o) % 64) < w}
    met = {
        (o, i)
        for j in range(64)
        for o in held(Rolling(), axes, j, beta, axis="out")
        for i in held(Rolling(), axes, j, beta, axis="in")
    }
    assert met == band


@pytest.mark.parametrize(("beta", "share"), [("1/2", 1.0), ("1/4", 0.734), ("1/8", 0.359), ("1/16", 0.172)])
def test_lockstep_rolling_between_axes_of_64_and_128(beta: str, share: float) -> None:
    axes = hand_made({"in": 64, "out": 128}, {"w": ["out", "in"]})
    assert round(coverage(axes, Rolling(), [beta], rounds=128).matrices, 3) == share


def test_spread_reaches_the_weights_that_lockstep_does_not() -> None:
    axes = hand_made({"in": 64, "out": 64}, {"w": ["out", "in"]})
    assert coverage(axes, Rolling(), ["1/4"] * 10, rounds=25).matrices < 0.49
    assert coverage(axes, Rolling(offset=spread(10)), ["1/4"] * 10, rounds=25).matrices == 1.0


def test_spread_differs_by_axis_and_client_and_is_reproducible() -> None:
    axes = hand_made({"in": 64, "out": 64}, {"w": ["out", "in"]})
    scheme = Rolling(offset=spread(10))
    starts = {(axis, c): held(scheme, axes, 3, "1/4", c, axis)[0] for axis in ("in", "out") for c in range(10)}
    assert len(set(starts.values())) > 12
    assert [starts["in", c] for c in range(4)] == [54, 6, 23, 39], "⌊64·frac(t·∛2)⌋ + 3, t = 30 … 33"


# --- the others ---


def test_blocks_are_disjoint_and_in_turn() -> None:
    axes = one(8)
    assert [held(Blocks(), axes, j, "1/4") for j in range(5)] == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]]
    assert held(Blocks(per_client=True), axes, 0, "1/4", client=2) == [4, 5]


def test_the_last_block_ends_with_the_axis() -> None:
    axes = one(7)
    assert [held(Blocks(), axes, j, "3/7") for j in range(3)] == [[0, 1, 2], [3, 4, 5], [4, 5, 6]]


def test_static_windows_are_nested_prefixes() -> None:
    axes = one(16)
    windows = [held(Static(), axes, 9, beta) for beta in ("1/8", "1/4", "1/2")]
    assert windows == [[0, 1], [0, 1, 2, 3], list(range(8))]


def test_random_windows_by_scope() -> None:
    axes = one(64)

    def draw(scope: str, round: int, beta: str, client: int) -> list[int]:
        return held(Random(seed=1, scope=scope), axes, round, beta, client)  # type: ignore[arg-type]

    assert draw("client", 0, "1/4", 0) != draw("client", 0, "1/4", 1)
    assert draw("client", 0, "1/4", 0) == draw("client", 0, "1/4", 0)
    assert draw("capacity", 0, "1/4", 0) == draw("capacity", 0, "1/4", 1)
    assert draw("capacity", 0, "1/4", 0) != draw("capacity", 1, "1/4", 0)
    assert set(draw("round", 0, "1/8", 3)) < set(draw("round", 0, "1/4", 5)), "one draw a round, small inside large"
    assert draw("client", 2, "1/4", 7) == PINNED, "the same on every platform"


def test_random_windows_are_uniform() -> None:
    """Each index with frequency w/K: χ² over 2000 draws of 4 of 16 stays below its 99.9 % quantile."""
    axes = one(16)
    counts = [0] * 16
    for j in range(2000):
        for i in held(Random(), axes, j, "1/4"):
            counts[i] += 1
    assert sum((c - 500) ** 2 / 500 for c in counts) < 37.7


def first_coverage(size: int, w: int) -> float:
    """Expected rounds until random windows have covered every node once (inclusion and exclusion)."""
    terms = ((-1) ** (i + 1) * comb(size, i) / (1 - comb(size - i, w) / comb(size, w)) for i in range(1, size + 1))
    return float(sum(terms))


@pytest.mark.parametrize(("size", "w", "expected"), [(5, 3, 3.2222), (5, 4, 2.25), (8, 2, 10.3955), (16, 4, 12.5563)])
def test_first_coverage_of_random_windows(size: int, w: int, expected: float) -> None:
    assert round(first_coverage(size, w), 4) == expected
    axis = Axis("k", size, "width", ())
    times = []
    for trial in range(400):
        left, rounds = set(range(size)), 0
        while left:
            left -= set(Random(seed=trial).span(axis, 0, rounds, Fraction(w, size), 0).indices().tolist())
            rounds += 1
        times.append(rounds)
    mean = sum(times) / len(times)
    deviation = (sum((t - mean) ** 2 for t in times) / (len(times) - 1)) ** 0.5
    assert abs(mean - expected) < 4 * deviation / len(times) ** 0.5


def test_random_pairs_meet_with_the_product_of_their_shares() -> None:
    """Two nodes of different axes meet in w_in·w_out/(K_in·K_out) of the rounds."""
    axes = hand_made({"in": 8, "out": 8}, {"w": ["out", "in"]})
    met = dict.fromkeys(((o, i) for o in range(8) for i in range(8)), 0)
    for j in range(1500):
        window = Random().window(axes, round=j, capacity="1/2")
        for o in window["out"].indices().tolist():
            for i in window["in"].indices().tolist():
                met[o, i] += 1
    assert all(abs(count / 1500 - 0.25) < 0.06 for count in met.values())


def test_nodes_of_one_axis_meet_more_rarely() -> None:
    """Two nodes of the same axis meet in w(w − 1)/(K(K − 1)) of the rounds."""
    axes = one(8)
    pairs = dict.fromkeys(combinations(range(8), 2), 0)
    for j in range(1500):
        for pair in combinations(held(Random(), axes, j, "1/2"), 2):
            pairs[pair] += 1
    assert all(abs(count / 1500 - 4 * 3 / (8 * 7)) < 0.06 for count in pairs.values())


def test_ordered_windows_nest_inside_the_clients() -> None:
    axes = one(10)
    scheme = Ordered(widths=("1/5", "2/5", "3/5", "4/5", "1"))
    assert held(scheme, axes, 4, "3/5") == [0, 1, 2, 3, 4, 5]
    assert scheme.inner(axes, "3/5", "1/5")["k"] == Arc(0, 2, 6)
    with pytest.raises(FedrolexError, match="larger than the client's capacity"):
        scheme.inner(axes, "1/5", "2/5")


def test_select_is_the_primitive() -> None:
    """Keys of a rolling window give the rolling window, byte for byte; any other list is taken as it is."""
    axes = one(8)
    rolling = Rolling().window(axes, round=6, capacity="1/2")
    assert Select(keys=lambda round, client: {"k": [6, 7, 0, 1]}).window(axes, round=6, capacity="1") == rolling
    odd = Select(keys=lambda round, client: {"k": [5, 1, 2]}).window(axes, round=0, capacity="1")
    assert odd["k"] == Pick((5, 1, 2), 8)
    mixed = hand_made({"k": 8, "j": 8}, {"w": ["k", "j"]})
    both = Select(keys=lambda round, client: {"k": [5]}, base=Rolling()).window(mixed, round=1, capacity="1/4")
    assert both["j"] == Arc(1, 2, 8)
    assert both["k"].indices().tolist() == [5]


# --- widths and capacities ---


@pytest.mark.parametrize(
    ("size", "beta", "floor", "ceil"),
    [
        (3, "1/3", 1, 1),
        (12, "1/16", 1, 1),
        (12, "1/8", 1, 2),
        (10, "0.1", 1, 1),
        (10, "0.3", 3, 3),
        (7, "1/2", 3, 4),
        (1, "1/16", 1, 1),
    ],
)
def test_widths_are_exact_and_never_zero(size: int, beta: str, floor: int, ceil: int) -> None:
    assert width(size, exact(beta)) == floor
    assert width(size, exact(beta), "ceil") == ceil


def test_a_third_of_three_thirds() -> None:
    assert width(3, exact("1/3") * 3) == 3
    assert exact(0.1) * 10 == 1, "a float is the decimal it prints as"


@pytest.mark.parametrize("bad", ["0", "1.5", "half", 0, 1.5, -1, "", "1/0", "nan", "inf", True, "2/1"])
def test_bad_capacities_get_one_clear_line(bad: object) -> None:
    with pytest.raises(FedrolexError, match="capacity") as caught:
        exact(bad)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert "1/4" in str(caught.value)


@given(st.integers(1, 9), st.data())
def test_a_contiguous_list_becomes_a_run(size: int, data: st.DataObject) -> None:
    chosen = data.draw(st.permutations(range(size)).map(lambda order: order[: data.draw(st.integers(1, size))]))
    span = pick(chosen, size)
    assert span.indices().tolist() == chosen
    contiguous = all((a + 1) % size == b for a, b in pairwise(chosen))
    assert isinstance(span, Arc) == contiguous
    assert Window.decode(Window({"k": span}).encode()) == Window({"k": span})


def test_windows_made_of_numpys_numbers_travel_as_json() -> None:
    """Rounds, offsets and sizes may be NumPy's whole numbers, which JSON does not know."""
    number: Any = np.int64
    rolled = Rolling(offset=lambda *_: number(1)).window(one(8), round=number(2), capacity="1/2")
    for window in (rolled, Window({"k": pick(np.array([3, 1]), number(8))})):
        assert Window.decode(json.loads(json.dumps(window.encode()))) == window


def test_a_pickled_window_is_found_in_another_process() -> None:
    """Hashes of names differ from process to process: one that was pickled would hide the window in every dict."""
    window = Window({"k": Arc(0, 2, 4)})
    hash(window)
    code = (
        "import pickle, sys; from fedrolex.slicing import Arc, Window;"
        "sys.exit(Window({'k': Arc(0, 2, 4)}) not in {pickle.loads(sys.stdin.buffer.read())})"
    )
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(window), check=True)


def test_where_nothing_is_cut_everything_is_reached() -> None:
    found = coverage(one(4).freeze("k"), Rolling(), ["1/2"], rounds=1)
    assert (found.nodes, found.weights, found.matrices, found.untouched) == (1.0, 1.0, 1.0, 0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Arc(8, 1, 8), "start must be in"),
        (lambda: Arc(0, 9, 8), "width in"),
        (lambda: pick([], 8), "at least one"),
        (lambda: pick([1, 1], 8), "twice"),
        (lambda: pick([8], 8), "index 8"),
        (lambda: Rolling(overlap=2), "overlap"),
        (lambda: Rolling(overlap="1/0"), "overlap '1/0' is not a number"),
        (lambda: Rolling(overlap="1e-999999999"), "overlap '1e-999999999' is not a number"),
        (lambda: Rolling(rounding="up"), "rounding"),  # type: ignore[arg-type]
        (lambda: Random(scope="fleet"), "scope"),  # type: ignore[arg-type]
        (lambda: Rolling().window(one(4), round=-1, capacity="1"), "not a whole number"),
        (lambda: Window.decode({"k": [1, 2]}), "not a window"),
        (lambda: Select(keys=lambda r, c: {"z": [1]}).window(one(4), round=0, capacity="1"), "no axis 'z'"),
    ],
)
def test_bad_windows_get_one_clear_line(make: object, says: str) -> None:
    with pytest.raises(FedrolexError, match=says):
        make()  # type: ignore[operator]
