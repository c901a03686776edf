"""Layouts: sizes, positions and their JSON form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrolex import FedrolexError, Window
from fedrolex.slicing import Arc, Cat, Fixed, Layout, Pick, Prod, Ref
from fedrolex.slicing import layout as layouts
from fedrolex.slicing.regions import region_of

SIZES = {"a": 4, "b": 3}

LAYOUTS = st.recursive(
    st.one_of(st.integers(1, 3).map(Fixed), st.sampled_from([Ref("a"), Ref("b")])),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: Prod(tuple(parts))),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: Cat(tuple(parts))),
    ),
    max_leaves=4,
)


def test_a_flattened_feature_map_keeps_all_places_of_a_channel() -> None:
    layout = Prod((Ref("a"), Fixed(2)))
    assert layouts.size(layout, SIZES) == 8
    assert layouts.positions(layout, SIZES, lambda _: np.array([3, 0])).tolist() == [6, 7, 0, 1]


def test_heads_stay_and_the_dimensions_inside_are_cut() -> None:
    layout = Prod((Fixed(2), Ref("a")))
    assert layouts.positions(layout, SIZES, lambda _: np.array([1, 2])).tolist() == [1, 2, 5, 6]


def test_concatenated_parts_shift() -> None:
    layout = Cat((Ref("b"), Ref("a")))
    assert layouts.positions(layout, SIZES, lambda axis: np.array([0]) if axis == "b" else np.array([2])).tolist() == [
        0,
        5,
    ]


@given(LAYOUTS)
def test_json_round_trip(layout: Layout) -> None:
    assert layouts.decode(layouts.encode(layout)) == layout


@pytest.mark.parametrize("bad", [-1, True, None, 1.5, {"prod": 3}, {"cat": [1], "prod": [1]}, [1]])
def test_damaged_json_is_refused_in_one_line(bad: object) -> None:
    with pytest.raises(FedrolexError, match="not a layout"):
        layouts.decode(bad)


@given(LAYOUTS, st.integers(0, 3), st.integers(1, 4), st.integers(0, 2), st.integers(1, 3))
def test_strided_blocks_are_the_positions(layout: Layout, sa: int, wa: int, sb: int, wb: int) -> None:
    """The blocks of a contiguous window cover exactly the positions, in order, with two pieces a leaf at most."""
    import torch

    runs = {"a": Arc(sa, wa, 4), "b": Arc(sb, wb, 3)}
    full = layouts.size(layout, SIZES)
    region = region_of("t", (layout,), SIZES, Window(runs))
    wanted = layouts.positions(layout, SIZES, lambda axis: runs[axis].indices())
    taken = region.take(torch.arange(full))
    assert taken.tolist() == wanted.tolist()
    assert region.pieces is not None
    assert len(region.pieces[0]) <= 2 ** len(list(layouts.refs(layout))) * _leaves(layout)
    picked = region_of(
        "t", (layout,), SIZES, Window({n: Pick(tuple(r.indices().tolist()), r.size) for n, r in runs.items()})
    )
    assert picked.take(torch.arange(full)).tolist() == wanted.tolist()


def _leaves(layout: Layout) -> int:
    return sum(map(_leaves, layout.parts)) if isinstance(layout, Prod | Cat) else 1
