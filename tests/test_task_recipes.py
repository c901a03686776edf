"""Tasks and fleets as recipes say them: mixes of capacities, mistakes."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from fedrolex import (
    FedrolexError,
    Recipe,
    prepare,
    train,
)
from fedrolex.cli.app import app


@pytest.mark.parametrize(
    ("mix", "levels", "shares"),
    [
        ("uniform", ["1", "1/2", "1/4", "1/8", "1/16"], None),
        ("income", ["1", "1/2", "1/4", "1/8", "1/16"], ["0.06", "0.10", "0.11", "0.18", "0.55"]),
        ("rho:0.3", ["1", "1/16"], ["3/10", "7/10"]),
        ("gamma:4", ["1/4"], None),
    ],
)
def test_mixes_of_capacities(mix: str, levels: list[str], shares: list[str] | None) -> None:
    recipe = Recipe().with_settings([f"fleet.capacities={mix}", "fleet.clients=100"])
    assert (recipe.fleet.capacities, recipe.fleet.shares) == (levels, shares)
    fleet = recipe.fleet.build(0)
    counts = [sum(fleet.capacity(c) == level for c in range(100)) for level in fleet.levels]
    assert counts == [round(100 * float(share)) for share in fleet.level_shares]


def test_a_mix_takes_the_place_of_another() -> None:
    recipe = Recipe().with_settings(["fleet.capacities=income", "fleet.clients=20"])
    counts = [
        sum(recipe.fleet.build(0).capacity(c) == level for c in range(20)) for level in recipe.fleet.build(0).levels
    ]
    assert counts == [1, 2, 2, 4, 11]
    assert recipe.with_settings(["fleet.capacities=uniform"]).fleet.shares is None


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "blogs", "stackexchange", "stackoverflow", "digits"])
def test_every_recipe_is_complete(name: str) -> None:
    found = CliRunner().invoke(app, ["show", name])
    assert found.exit_code == 0, found.output
    assert Recipe.decode(__import__("yaml").safe_load(found.stdout)).encode()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["fleet.capacities=rho:2"],
            "fleet.capacities is 'rho:2': use a list, uniform, income, rho:SHARE or gamma:FACTOR",
        ),
        (["fleet.capacities=incom"], "fleet.capacities is 'incom'"),
        (["task=texts"], "task.name is 'texts': use one of images, words, or package.module:Name of your own"),
        (["task.partition=dirichlet", "task.partition.alpha=0"], "task.partition.alpha is 0.0: give a number above 0"),
        (["task.partition={name: heterofl, labels: 11}", "fleet.clients=20"], "11 labels a client of 10 classes"),
        (["task.partition={name: shards, rare: [1]}"], "task.partition.rare needs one of iid, labels, dirichlet"),
        (["task.data=cifar11"], "task.data is 'cifar11', and there is no such folder"),
        (["task.norm=layer"], "task.norm is 'layer'"),
        (["client.mask=minus"], "client.mask is 'minus'"),
        (["evaluation.statistics=test"], "evaluation.statistics is 'test'"),
        (["fleet.clients=null"], "fleet.clients is null"),
        (["task=words", "task.slice=ffn"], "task.slice is 'ffn'"),
        (
            ["task=words", "task.data=stackoverflow", "data=/nowhere"],
            "stackoverflow is not in /nowhere: put stackoverflow.sqlite",
        ),
        (["task.data=cifar10", "data=/nowhere"], "cifar10 is not in /nowhere"),
        (["task.validation=0.6", "task.public=0.5"], "give parts of the data"),
        (["task.partition=dirichlet", "task.partition.alpha=.inf"], "task.partition.alpha is inf"),
        ([f"client.lr={'9' * 400}"], "recipe key client.lr is"),
        (["fleet.capacities=[]"], "fleet.capacities is empty"),
        (["fleet.capacities=rho:1e99999999"], "fleet.capacities is 'rho:1e99999999'"),
        (["fleet.capacities=['1e-99999999']"], "capacity '1e-99999999' is not a number"),
        ([r'task.data="a\0b"'], "recipe key task.data is"),
        (["task.width=100000000000"], "the model cannot be made"),
        (["client.milestones=[-1]"], "client.milestones is [-1]"),
        (["fleet.trace=[[0]]", "quorum=2", "rounds=1"], None),
    ],
)
def test_mistakes_in_a_recipe(settings: list[str], message: str | None) -> None:
    if message is None:
        with pytest.raises(FedrolexError, match="fewer than 2 clients were there"):
            train(Recipe(device="cpu").with_settings(settings))
        return
    with pytest.raises(FedrolexError) as error:
        prepare(Recipe(device="cpu").with_settings(settings))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
