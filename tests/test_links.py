"""Blocks without weights between them: zero in the model, in every cut, through training, after every fold."""

from __future__ import annotations

import copy

import pytest
import torch
from small import Residual, residual_axes
from torch import nn

from fedrolex import Axes, FedrolexError, Fold, Links, Rolling, Window, coverage, trace


class Plain(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(x)
        return y


def linked(links: Links) -> tuple[Plain, Axes]:
    model = Plain()
    axes = trace(model, torch.randn(2, 3, 6, 6))
    links.unlink(axes, axes.state(model))
    return model, axes


def test_bounds_and_spans() -> None:
    links = Links(["1/2", "1/4", "1/8"])
    _, axes = residual_axes()
    assert links.bounds(16) == [0, 8, 12, 14, 16], "what the shares leave over is one more block"
    assert links.bounds(5) == [0, 2, 3, 4, 5]
    stem = axes.axes["stem"]
    assert links.span(stem, 1).indices().tolist() == [4, 5]
    assert links.span(stem, 1, 2).indices().tolist() == [4, 5, 6]


@pytest.mark.parametrize("reach", ["own", "before"])
def test_masks_follow_the_reach(reach: str) -> None:
    links = Links(["1/2", "1/2"], reach)  # type: ignore[arg-type]
    _, axes = linked(links)
    mask = links.mask(axes, "net.3.weight")
    assert mask is not None
    assert mask[:4, :4].all()
    assert mask[4:, 4:].all()
    assert not mask[:4, 4:].any()
    assert bool(mask[4:, :4].all()) == (reach == "before")
    assert links.mask(axes, "net.0.weight") is None, "inputs are connected to everything"
    assert links.mask(axes, "net.8.weight") is None, "so are classes"


def test_a_column_computes_the_same_alone_and_inside_the_whole() -> None:
    """Block-diagonal: the whole network is the sum of its columns, up to the head's bias."""
    links = Links(["1/2", "1/4", "1/4"])
    model, axes = linked(links)
    model.eval()
    x = torch.randn(5, 3, 6, 6)
    columns = [axes.cut(model, links.window(axes, block)).eval()(x) for block in range(3)]
    bias = model.get_parameter("net.8.bias")
    torch.testing.assert_close(sum(columns) - 2 * bias, model(x), rtol=1e-5, atol=1e-6)


def test_a_prefix_computes_the_same_inside_every_larger_one() -> None:
    """Block-triangular: the first nodes do not see the later ones."""
    links = Links(["1/4", "1/4", "1/2"], "before")
    model, axes = linked(links)
    model.eval()
    x = torch.randn(5, 3, 6, 6)
    hidden = {}
    for last in (0, 1, 2):
        cut = axes.cut(model, links.window(axes, 0, last)).eval()
        weight = cut.get_parameter("net.8.weight")
        weight.data.zero_()
        weight.data[:, :2] = model.get_parameter("net.8.weight")[:, :2].detach()
        hidden[last] = cut(x)
    torch.testing.assert_close(hidden[0], hidden[1])
    torch.testing.assert_close(hidden[0], hidden[2])


@pytest.mark.parametrize("copied", [False, True])
def test_missing_weights_stay_zero_through_training_and_fold(copied: bool) -> None:
    links = Links(["1/2", "1/2"])
    model, axes = linked(links)
    window = Rolling().window(axes, round=3, capacity="3/4")
    cut = axes.cut(model, window, links)
    cut = copy.deepcopy(cut) if copied else cut
    optimiser = torch.optim.SGD(cut.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    for _ in range(4):
        optimiser.zero_grad()
        cut(torch.randn(4, 3, 6, 6)).square().mean().backward()
        optimiser.step()
    mask = axes.take(links.masks(axes), window)["net.3.weight"]
    weight = cut.get_parameter("net.3.weight")
    assert not weight[~mask].any()
    assert weight[mask].all()
    base = axes.state(model)
    fold = Fold(axes, base, links=links)
    own = {**dict(cut.named_parameters()), **dict(cut.named_buffers())}
    fold.add(0, {name: own[name].detach() for name in base}, window)
    new = fold.average()["net.3.weight"]
    assert not new[:4, 4:].any()
    assert not new[4:, :4].any()


def test_missing_weights_are_not_missed_in_the_coverage() -> None:
    links = Links(["1/2", "1/2"])
    _, axes = linked(links)
    fixed = coverage(axes, _Columns(links=links), ["1/2"], rounds=2)
    assert fixed.matrices == 1.0
    assert coverage(axes, _Columns(), ["1/2"], rounds=2).matrices == 0.5


class _Columns(Rolling):
    def window(self, axes: Axes, *, round: int, capacity: object, client: int = 0) -> Window:
        return Links(["1/2", "1/2"]).window(axes, round % 2)


@pytest.mark.parametrize(
    ("shares", "reach"), [([], "own"), (["1/2", "2/3"], "own"), (["0"], "own"), (["1/2"], "after")]
)
def test_bad_links_get_one_clear_line(shares: list[str], reach: str) -> None:
    with pytest.raises(FedrolexError):
        Links(shares, reach)  # type: ignore[arg-type]


def test_a_model_without_blocks_to_separate_is_left_alone() -> None:
    model = Residual()
    axes = trace(model, torch.randn(2, 3, 8, 8))
    assert Links(["1"]).masks(axes) == {}
