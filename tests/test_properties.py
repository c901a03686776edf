"""Random small networks of the supported layers, random windows: what must hold for every one of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_networks import IMAGE_BLOCKS, WORD_BLOCKS, Images, Words
from torch import Tensor, nn

from fedrolex import Axes, Fold, Window, trace
from fedrolex.slicing import WHOLE, Arc, pick

Drawn = tuple[list[str], list[int]]


def networks(blocks: tuple[str, ...], widths: tuple[int, ...], first: tuple[int, ...]) -> st.SearchStrategy[Drawn]:
    """The kinds of one to three blocks, the width before them and theirs."""
    return st.integers(1, 3).flatmap(
        lambda depth: st.tuples(
            st.lists(st.sampled_from(blocks), min_size=depth, max_size=depth),
            st.tuples(st.sampled_from(first), *[st.sampled_from(widths)] * depth).map(list),
        )
    )


def draw_window(data: st.DataObject, axes: Axes, *, full: bool = False, half: bool = False) -> Window:
    """Any window of the axes that are cut (or half of each; or, full, any order of every axis but the outputs)."""
    spans: dict[str, Any] = {}
    for axis in axes.axes.values():
        if axis.kind in ("outputs", "rows") or (axis.kind != "width" and not full):
            continue
        order = data.draw(st.permutations(range(axis.size)), label=axis.name)
        count = axis.size // 2 if half else axis.size if full else data.draw(st.integers(1, axis.size))
        spans[axis.name] = (
            pick(order[:count], axis.size) if data.draw(st.booleans()) else Arc(order[0], count, axis.size)
        )
    return Window(spans)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def check(
    build: Callable[[list[str], list[int]], nn.Module], drawn: Drawn, x: Tensor, other: Tensor, data: st.DataObject
) -> None:
    """All that is promised of a network traced on ``x`` and run on ``other``."""
    torch.manual_seed(0)
    kinds, widths = drawn
    model = build(kinds, widths).double()
    axes = trace(model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    same_function(model, axes, other, data)
    pasted_and_folded(model, axes, other, draw_window(data, axes))
    averaged(model, axes, [draw_window(data, axes) for _ in range(2)])
    as_built(model, build(kinds, [width // 2 for width in widths]), axes, other, draw_window(data, axes, half=True))


def same_function(model: nn.Module, axes: Axes, x: Tensor, data: st.DataObject) -> None:
    """At full width a cut computes what the model does, in both modes; with its axes in another order, too."""
    for mode in (True, False):
        close(axes.cut(model, WHOLE).train(mode)(x), copy.deepcopy(model).train(mode)(x))
    close(axes.cut(model, draw_window(data, axes, full=True)).eval()(x), model.eval()(x))


def pasted_and_folded(model: nn.Module, axes: Axes, x: Tensor, window: Window) -> None:
    """A cut trains all it has; what comes back is where it was taken from, and the rest keeps its bits."""
    before = {name: tensor.clone() for name, tensor in axes.state(model).items()}
    small = axes.cut(model, window).train()
    assert sum(p.numel() for p in small.parameters()) == axes.parameters(window)
    axes.paste(model, small, window)
    assert all(torch.equal(tensor, before[name]) for name, tensor in axes.state(model).items())

    small(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in small.parameters())
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.sub_(0.1 * torch.randn_like(parameter))
    fold = Fold(axes, before)
    fold.add("client", axes.state(small, window), window)
    after = fold.average()
    inside = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    axes.put(inside, {n: torch.ones_like(t) for n, t in axes.state(small, window).items()}, window)
    for name, tensor in before.items():
        assert torch.equal(after[name][inside[name] == 0], tensor[inside[name] == 0])
    for name, tensor in axes.take(after, window).items():
        if tensor.is_floating_point():
            close(tensor, axes.state(small, window)[name])


def averaged(model: nn.Module, axes: Axes, windows: Sequence[Window]) -> None:
    """Clients of different windows and weights are averaged position by position, where each of them trained."""
    before = {name: tensor.clone() for name, tensor in axes.state(model).items()}
    fold = Fold(axes, before)
    sums, weights = ({name: torch.zeros_like(tensor) for name, tensor in before.items()} for _ in range(2))
    for client, window in enumerate(windows):
        weight = 1.0 + 2 * client
        part = {name: torch.ones_like(t) + client for name, t in axes.take(before, window).items()}
        fold.add(client, part, window, weight)
        for total, value in ((sums, part), (weights, {name: torch.ones_like(t) for name, t in part.items()})):
            placed = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
            axes.put(placed, value, window)
            for name, tensor in placed.items():
                total[name] += (weight * tensor).to(tensor.dtype)
    for name, tensor in fold.average().items():
        if tensor.is_floating_point():
            mean = sums[name] / weights[name].clamp(min=1)
            close(tensor, torch.where(weights[name] > 0, mean, before[name]))


def as_built(model: nn.Module, smaller: nn.Module, axes: Axes, x: Tensor, window: Window) -> None:
    """Half of every axis is the same network built half as wide, with the same weights."""
    cut = axes.cut(model, window).eval()
    smaller.double().eval().load_state_dict(cut.state_dict())
    close(cut(x), smaller(x))


IMAGES = networks(IMAGE_BLOCKS, (2, 4, 6), (2, 4, 6))
WORDS = networks(WORD_BLOCKS, (6, 8, 12, 16), (8, 12, 16))


def images(net: Drawn, data: st.DataObject) -> None:
    check(Images, net, torch.randn(2, 2, 4, 4).double(), torch.randn(3, 2, 4, 4).double(), data)


def words(net: Drawn, data: st.DataObject) -> None:
    build = partial(Words, tied=data.draw(st.booleans()))
    check(build, net, torch.randint(0, 11, (2, 5)), torch.randint(0, 11, (3, 4)), data)


@settings(max_examples=14)
@given(IMAGES, st.data())
def test_every_network_of_images(net: Drawn, data: st.DataObject) -> None:
    images(net, data)


@settings(max_examples=14)
@given(WORDS, st.data())
def test_every_network_of_words(net: Drawn, data: st.DataObject) -> None:
    words(net, data)


@pytest.mark.slow
@settings(max_examples=300)
@given(IMAGES, st.data())
def test_very_many_networks_of_images(net: Drawn, data: st.DataObject) -> None:
    images(net, data)


@pytest.mark.slow
@settings(max_examples=300)
@given(WORDS, st.data())
def test_very_many_networks_of_words(net: Drawn, data: st.DataObject) -> None:
    words(net, data)
