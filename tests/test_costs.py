"""What sub-models cost: the paper's table to the digit, and layers counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from small import Residual
from torch import Tensor, nn
from typer.testing import CliRunner

from fedrolex import Axes, FedRolex, FedrolexError, FleetRecipe, Hints, trace
from fedrolex.cli.costs import costs_command
from fedrolex.models import WordTransformer, preresnet18
from fedrolex.theory.costs import Cost, cost, fleet_mean, paper_rounding

CAPACITIES = ("1", "1/2", "1/4", "1/8", "1/16")
INCOME = ("0.06", "0.10", "0.11", "0.18", "0.55")


@pytest.fixture(scope="module")
def ten_axes() -> Axes:
    model = preresnet18()
    return trace(model, model.slicing_example())


@pytest.fixture(scope="module")
def ten(ten_axes: Axes) -> list[Cost]:
    model = preresnet18()
    return [cost(model, ten_axes, beta, model.slicing_example()) for beta in CAPACITIES]


def test_the_papers_model(ten: list[Cost]) -> None:
    assert [c.parameters for c in ten] == [11172170, 2796714, 701018, 176178, 44510]
    assert [c.paper_flops for c in ten] == [557656064, 140416000, 35604992, 9151744, 2413184]
    assert [c.macs for c in ten] == [555422720, 139299328, 35046656, 8872576, 2273600]
    assert [c.bytes for c in ten] == [4 * c.parameters for c in ten]
    assert [f"{c.bytes / 2**20:.2f}" for c in (ten[0], ten[-1])] == ["42.62", "0.17"]


def test_the_papers_means_are_means_of_rounded_numbers(ten: list[Cost]) -> None:
    mean = fleet_mean(ten)
    assert (mean.parameters, mean.paper_flops) == (2978118, 149048396.8)
    assert f"{mean.bytes / 2**20:.2f}" == "11.36"
    assert paper_rounding([c.parameters for c in ten]) == 2978123.2, "2.9781232 M in the paper"
    assert paper_rounding([c.paper_flops or 0 for c in ten]) == 149048384, "149.048384 M in the paper"
    assert paper_rounding([7]) == 7
    assert paper_rounding([1234567, 12]) == 617291


def test_a_fleet_with_the_shares_of_household_incomes(ten: list[Cost]) -> None:
    mean = fleet_mean(ten, INCOME)
    assert mean.paper_flops is not None
    assert (round(mean.parameters / 1e6, 4), round(mean.paper_flops / 1e6, 2)) == (1.0833, 54.39)


def test_a_hundred_classes() -> None:
    model = preresnet18(classes=100)
    axes = trace(model, model.slicing_example())
    found = [cost(model, axes, beta, model.slicing_example()) for beta in CAPACITIES]
    assert [c.parameters for c in found] == [11218340, 2819844, 712628, 182028, 47480]
    assert fleet_mean(found).parameters == 2996064


def test_the_papers_rule_by_hand() -> None:
    """8×8 pixels; a layer counts once for each of its parameter tensors."""
    model, example = Residual(), torch.randn(2, 3, 8, 8)
    axes = trace(model, example, Hints(factory=lambda sizes: Residual(sizes["stem"], sizes["a"])))
    stem, norm, a, b, head = 64 * 8 * 27, 2 * 8 * 64, 64 * 6 * 72, 64 * 8 * 54, 5 * 32
    found = cost(model, axes, "1", example)
    assert found.macs == stem + a + b + head
    assert found.paper_flops == 2 * stem + 2 * norm + 2 * a + b + 2 * head
    assert cost(model, axes, "1", torch.randn(6, 3, 8, 8)) == found, "of one example, whatever the batch"


class Up(nn.Module):
    """Grouped and transposed convolutions, none with a bias."""

    def __init__(self, wide: int = 8) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, wide, 3, stride=2, bias=False)
        self.b = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        self.up = nn.ConvTranspose2d(wide, 5, 3, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(input=self.b(self.a(x)))
        return y


def test_without_biases_and_norms_the_rule_counts_multiply_accumulates() -> None:
    model, example = Up(), torch.randn(2, 3, 9, 9)
    axes = trace(model, example, Hints(factory=lambda sizes: Up(sizes["a"])))
    for beta, wide in (("1", 8), ("1/2", 4)):
        found = cost(model, axes, beta, example)
        assert found.paper_flops == found.macs == 16 * wide * (27 + 9 + 45)


def test_the_rule_says_nothing_about_attention_or_a_traced_program() -> None:
    words = WordTransformer(vocabulary=50)
    example = words.slicing_example()
    found = cost(words, trace(words, example), "1", example)
    layer = 4 * 128 * 96 + 2 * 128 * 2048 + 2 * 20 * 96
    assert (found.macs, found.paper_flops) == (20 * (3 * layer + 128 * 50), None)
    model, image = Residual(), torch.randn(2, 3, 8, 8)
    program = cost(model, trace(model, image), "1/2", image)
    assert program.paper_flops is None
    assert program.macs == 64 * (4 * 27 + 3 * 36 + 4 * 27) + 5 * 16
    assert fleet_mean([program]).paper_flops is None


def test_shares_with_a_mistake(ten: list[Cost]) -> None:
    for shares, says in ((["1"], "1 shares for 5 costs"), (["1"] * 5, "adding up to 1"), (["a"] * 5, "not numbers")):
        with pytest.raises(FedrolexError, match=says):
            fleet_mean(ten, shares)
    with pytest.raises(FedrolexError, match="no costs"):
        fleet_mean([])


# --- the command ---

app = typer.Typer()
app.command()(costs_command)


class Scaled(Residual):
    def slicing_example(self) -> Tensor:
        return torch.randn(2, 3, 8, 8)


class StandIn:
    """As much of a recipe as the command looks at."""

    def __init__(self, build: Any, frozen: tuple[str, ...] = (), **fleet: Any) -> None:
        self.fleet = FleetRecipe(**fleet)
        self.method = FedRolex(rounding="ceil")
        self.task = SimpleNamespace(make_model=build, make_models=dict, frozen_axes=lambda: frozen)

    def with_settings(self, settings: list[str]) -> StandIn:
        return self


def run(monkeypatch: pytest.MonkeyPatch, recipe: StandIn, *words: str) -> str:
    monkeypatch.setattr("fedrolex.cli.costs.find_recipe", lambda name: recipe)
    result = CliRunner().invoke(app, ["mine", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_papers_figures_are_printed_beside_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ten_axes: Axes
) -> None:
    monkeypatch.setattr("fedrolex.cli.costs.trace", lambda model, example: ten_axes)  # traced once for all tests
    figure = tmp_path / "costs.png"
    printed = run(monkeypatch, StandIn(lambda server: preresnet18()), "--figure", str(figure))
    for text in ("2,978,118", "149,048,397", "11.36", "2.9781232", "149.048384", "six digits", "0.04451"):
        assert text in printed
    assert figure.read_bytes()[:4] == b"\x89PNG"
    mixed = run(monkeypatch, StandIn(lambda server: preresnet18(), shares=list(INCOME)))
    assert "1,083,306" in mixed
    assert "six digits" not in mixed


def test_capacities_are_parts_of_the_largest_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server twice as wide: its clients of capacity 1 hold half of it. Frozen axes stay whole."""
    fleet: dict[str, Any] = {"capacities": ["1", "1/2"], "shares": ["1/4", "3/4"], "server_scale": 2}

    def build(server: int) -> Scaled:
        return Scaled(stream=8 * server, inner=6 * server)

    found = json.loads(run(monkeypatch, StandIn(build, **fleet), "--json"))
    sizes = [sum(p.numel() for p in Residual(*wide).parameters()) for wide in ((8, 6), (4, 3))]
    assert [(c["capacity"], c["of_server"]) for c in found["capacities"]] == [("1", "1/2"), ("1/2", "1/4")]
    assert [c["parameters"] for c in found["capacities"]] == sizes
    assert found["mean"]["parameters"] == sizes[0] / 4 + sizes[1] * 3 / 4
    assert found["server_parameters"] == sum(p.numel() for p in build(2).parameters())
    assert found["paper"] is None
    frozen = json.loads(run(monkeypatch, StandIn(build, ("a",), **fleet), "--json"))
    whole = [sum(p.numel() for p in Residual(*wide).parameters()) for wide in ((8, 12), (4, 12))]
    assert [c["parameters"] for c in frozen["capacities"]] == whole
