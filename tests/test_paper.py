"""Every cell of the paper is a recipe."""

from __future__ import annotations

import pytest
from told import told

from fedrolex.methods import FedAvg, FedRolex, SubModels
from fedrolex.recipes import find_recipe
from fedrolex.recipes.images import ImagesRecipe
from fedrolex.recipes.paper import TABLES, cells, find_cell
from fedrolex.recipes.paper_numbers import Printed
from fedrolex.recipes.paper_setups import PAPER_SETUPS, SETUPS


@pytest.mark.parametrize("table", TABLES)
def test_every_cell_is_a_recipe_of_every_kind(table: str) -> None:
    every = cells(table)
    assert len({cell.name for cell in every}) == len(every)
    assert {cell.setup for cell in every} <= set(SETUPS)
    for cell in every[:: 1 if table == "overall" else 3]:
        for kind in cell.kinds:
            recipe = cell.recipe(kind)
            assert recipe.fleet.redrawn == (kind in ("released", "tuned-redrawn")), cell.name


def test_what_the_kinds_are() -> None:
    name = "overall/cifar10-high/fedrolex"
    printed, released, tuned = (find_recipe(f"{name}@{kind}") for kind in ("printed", "released", "tuned"))
    assert isinstance(printed.task, ImagesRecipe)
    assert isinstance(printed.method, FedRolex)
    assert (printed.rounds, printed.client.milestones, printed.client.decay) == (2500, (800, 1500), 0.1)
    assert (printed.client.optimizer, printed.client.lr, printed.client.batch) == ("sgd", 2e-4, 10)
    assert (printed.client.clip, printed.client.mask, printed.method.rows) == (None, "none", False)
    assert (printed.task.partition.name, printed.evaluation.statistics) == ("labels", "recalibrated")
    assert isinstance(released.method, FedRolex)
    assert (released.client.optimizer, released.client.batch, released.client.decay) == ("adam", 128, 0.25)
    assert (released.evaluation.statistics, released.evaluation.batch) == ("test-batch", 100)
    assert (released.method.rounding, released.client.mask, released.method.rows) == ("ceil", "zero", True)
    assert isinstance(tuned.task, ImagesRecipe)
    assert (tuned.rounds, tuned.client.lr, tuned.task.padding) == (1000, 0.02, "mean")
    dropout = find_recipe("overall/cifar10-high/federated-dropout@released").method
    assert isinstance(dropout, SubModels)
    assert dropout.scheme.endswith("RandomMiswired")
    largest = find_recipe("overall/cifar10-high/largest@printed")
    assert isinstance(largest.method, FedAvg)
    assert (largest.rounds, largest.client.milestones, largest.method.width) == (1250, (500, 1000), "1")


@pytest.mark.parametrize(
    ("name", "rounds", "milestones"),
    [
        ("rho/cifar10-high/fedrolex-0.2", 1250, (500, 1000)),
        ("rho/cifar10-low/fedrolex-0.3", 1500, (700, 1200)),
        ("rho/cifar10-high/fedrolex-0.7", 1500, (700, 1200)),
        ("rho/cifar10-high/fedrolex-0.8", 1250, (500, 1000)),
        ("rho/cifar100-high/fedrolex-0.5", 2000, (1000, 1500)),
        ("gamma/cifar10-high/fedrolex-4", 1500, (800, 1200)),
        ("gamma/cifar100-low/columns-16", 1500, (800, 1200)),
        ("real-world/cifar10-low/fedrolex", 2000, (800, 1250)),
        ("overall/cifar10-low/smallest", 1500, (500, 1000)),
        ("overall/cifar100-low/largest", 3500, (1000, 1500)),
        ("overall/stackoverflow/fedrolex", 1200, (600, 800)),
        ("overall/stackoverflow/largest", 1000, (300,)),
        ("gamma/stackoverflow/fedrolex-4", 1500, (800,)),
    ],
)
def test_every_table_has_the_schedule_that_is_printed_for_it(
    name: str, rounds: int, milestones: tuple[int, ...]
) -> None:
    for kind in {"printed", "released"} & {*find_cell(name).kinds}:
        recipe = find_recipe(f"{name}@{kind}")
        assert (recipe.rounds, recipe.client.milestones) == (rounds, milestones)
        assert recipe.evaluate_every == rounds // 20
    assert find_recipe(f"{name}@tuned").rounds == (400 if "stackoverflow" in name else 1000)


def test_text_has_rows_and_kinds_of_its_own() -> None:
    """No classes, so nothing by class; the released Transformer trains nothing; stand-ins have none of its numbers."""
    every = {(cell.setup, cell.row): cell for cell in cells("overall")}
    assert every["stackoverflow", "fedrolex"].kinds == ("printed", "tuned", "tuned-redrawn")
    assert every["blogs", "fedrolex"].kinds == ("tuned", "tuned-redrawn")
    assert (every["stackoverflow", "largest"].printed, every["blogs", "largest"].printed) == (
        Printed(29.79, 0.32),
        None,
    )
    assert not any(cell.quoted for (setup, _), cell in every.items() if setup not in PAPER_SETUPS)
    for cell in every.values():
        if cell.setup in ("stackoverflow", "blogs", "stackexchange"):
            recipe = cell.recipe("tuned")
            assert (recipe.client.lr, recipe.client.optimizer) == (0.001, "adam"), cell.name
            assert not getattr(recipe.method, "rows", False), cell.name
    printed = every["stackoverflow", "fedrolex"].recipe("printed").client
    assert (printed.optimizer, printed.lr, printed.momentum, printed.batch) == ("sgd", 2e-4, 0.9, 24)


def test_what_the_paper_prints_stands_beside() -> None:
    printed = {cell.row: cell.printed for cell in cells("overall") if cell.setup == "cifar10-high"}
    assert printed["fedrolex"] is not None
    assert (printed["fedrolex"].mean, printed["fedrolex"].std, printed["fedrolex"].local) == (69.44, 1.5, 95.95)
    assert printed["columns"] is None
    assert [cell.row for cell in cells("overall") if cell.quoted and cell.setup == "cifar10-low"] == [
        "feddf",
        "ds-fl",
        "fed-et",
    ]


def test_a_cell_of_one_kind_needs_none() -> None:
    assert find_recipe("rare/cifar10-rare/columns") == find_recipe("rare/cifar10-rare/columns@tuned")


def test_a_scaled_cell_has_fewer_rounds_and_the_same_shape() -> None:
    cell = find_cell("overall/cifar10-high/fedrolex")
    recipe = cell.recipe("printed", 0.01)
    assert (recipe.rounds, recipe.client.milestones) == (25, [8, 15])
    assert cell.recipe("printed") == find_recipe(f"{cell.name}@printed")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("overall/cifar10-high/fedrolx@tuned", "no cell 'overall/cifar10-high/fedrolx'"),
        ("overal/cifar10-high/fedrolex@tuned", "overal"),
        ("overall/cifar10-high/fedrolex@tunde", "tunde"),
        ("overall/cifar10-high/ds-fl@released", "released"),
        ("overall/cifar10-high/fedrolex", "in several kinds: give overall/cifar10-high/fedrolex@KIND"),
    ],
)
def test_names_that_are_not(name: str, said: str) -> None:
    assert said in told(lambda: find_recipe(name))
