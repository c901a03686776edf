"""Recipes: a method's section is the method's own; what a recipe says is checked where it is read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from told import told
from typer.testing import CliRunner

from fedrolex import (
    METHODS,
    ClientRecipe,
    FedAvg,
    FedProx,
    FedRolex,
    ImagesRecipe,
    LocalTraining,
    Measure,
    Recipe,
    Scaffold,
    ServerOptimizer,
    WordsRecipe,
    prepare,
)
from fedrolex.cli.app import app
from fedrolex.recipes import find_recipe, recipe_names
from fedrolex.recipes.decode import read_yaml
from fedrolex.recipes.settings import carried

RECIPE = Recipe(device="cpu").with_settings(["task.width=8", "fleet.clients=4", "fleet.cohort=2", "rounds=1"])


def method(*words: str) -> dict[str, Any]:
    """The section ``method`` after some words."""
    found: dict[str, Any] = RECIPE.with_settings(words).encode()["method"]
    return found


# --- a method's own section ---


def test_a_key_of_another_method_is_refused_with_that_methods_name() -> None:
    said = told(lambda: method("method=heterofl", "method.mu=5"))
    assert "heterofl has no mu; fedprox has (heterofl has weighting, norms, rows, server_optimizer, rounding)" in said
    assert "heterofl has no keys; fedselect has" in told(lambda: method("method=heterofl", "method.keys=3"))
    assert "fedavg, fedprox, fedbe have" not in told(lambda: method("method.width=1"))
    assert "images has no vocabulary; words has" in told(lambda: RECIPE.with_settings(["task.vocabulary=9"]))


def test_an_unknown_key_is_refused_with_a_near_one() -> None:
    assert "unknown key 'method.weigting': did you mean 'weighting'?" in told(lambda: method("method.weigting=uniform"))
    assert "did you mean 'server_optimizer'?" in told(lambda: method("method.server={name: adam}"))
    assert "did you mean 'server_scale'?" in told(lambda: RECIPE.with_settings(["fleet.server=2"]))
    assert "known are weighting, norms" in told(lambda: method("method.zzz=1"))


def test_another_method_starts_its_own_section_and_keeps_what_means_the_same() -> None:
    before = ["method.rounding=ceil", "method.rows=true", "method.overlap=0.5", "method.server_optimizer=adam"]
    found = RECIPE.with_settings(before).with_settings(["method=fedprox"]).encode()["method"]
    assert (found["rounding"], found["rows"], found["mu"]) == ("ceil", True, 0.01)
    assert found["server_optimizer"]["name"] == "adam"
    assert "overlap" not in found
    assert method("method=fedprox", "method.mu=2")["mu"] == 2
    assert method("method.mu=2", "method=fedprox")["mu"] == 2, "whatever the order"
    assert method("method.rows=true", "method=fedrolex")["rows"], "the same method keeps all"
    assert method("method.name=fedavg") == method("method=fedavg")


def test_a_methods_own_default_is_not_taken_away_by_anothers() -> None:
    assert method("method=fedbe")["weighting"] == "samples"
    assert method("method.weighting=samples", "method=heterofl")["weighting"] == "samples"
    assert carried(FedProx(mu=3, width="1/2", rounding="ceil"), FedAvg, able_only=True) == FedAvg(
        width="1/2", rounding="ceil", able_only=True
    )
    assert carried(FedAvg(server_optimizer=ServerOptimizer(name="sgd")), Scaffold) == Scaffold()


def test_in_python_a_method_is_its_class() -> None:
    recipe = Recipe(method=Scaffold(option="I"), client=ClientRecipe(lr=0.5), evaluation=Measure(batch=7))
    assert recipe.encode()["method"] == {
        "name": "scaffold", "width": None, "able_only": False, "own_width": False, "rounding": "floor", "option": "I",
        "denominator": "momentum", "weighting": "uniform",
    }  # fmt: skip
    assert recipe.client.momentum == 0.9
    assert Recipe.decode(recipe.encode()) == recipe

    class Mine(LocalTraining):
        pass

    assert "comes from a method's work()" in told(lambda: Recipe(client=Mine()))


@pytest.mark.parametrize("name", recipe_names())
def test_embedded_recipes_are_of_the_newest_format_and_read_back(name: str) -> None:
    text = (Path(sys.modules["fedrolex"].__file__ or "").parent / "recipes" / f"{name}.yaml").read_text()
    assert "format: 2" in text
    recipe = find_recipe(name)
    assert Recipe.decode(recipe.encode()) == recipe


def test_the_quickstart_carries_no_setting_of_another_method() -> None:
    recipe = find_recipe("digits")
    assert recipe.method == FedRolex()
    assert recipe.with_settings(["method=scaffold"]).method == Scaffold()


# --- YAML ---


def read(text: str, folder: Path) -> Recipe:
    (folder / "mine.yaml").write_text(text)
    return Recipe.read(folder / "mine.yaml")


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n", "null\n", "{}\n"])
def test_an_empty_file_is_no_recipe(text: str, tmp_path: Path) -> None:
    assert "mine.yaml is empty: give keys and values, such as format: 2" in told(lambda: read(text, tmp_path))
    result = CliRunner().invoke(app, ["train", str(tmp_path / "mine.yaml"), "--out", str(tmp_path / "run")])
    assert "mine.yaml is empty" in str(result.exception)
    assert read("format: 2\n", tmp_path) == Recipe()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rounds: 3\nseed: 1\nrounds: 4\n", "has the key 'rounds' twice, again in line 3: keep one"),
        ("client:\n  lr: 0.1\n  lr: 0.2\n", "has the key 'lr' twice, again in line 3"),
        ("task: {models: {1: vgg11, 1.0: resnet8}}\n", "has the key 1.0 twice"),
        ("'rounds': 3\n\"rounds\": 3\n", "has the key 'rounds' twice"),
    ],
)
def test_a_key_that_is_there_twice_is_refused_by_its_name(text: str, says: str, tmp_path: Path) -> None:
    assert says in told(lambda: read(text, tmp_path))
    assert "--set client has the key 'lr' twice" in told(lambda: RECIPE.with_settings(["client={lr: 1, lr: 2}"]))


def test_keys_may_be_merged(tmp_path: Path) -> None:
    data = "client: &c\n  {lr: 0.5, batch: 4}\nevaluation: {batch: 4}\nrounds: 3\n"
    assert read(data, tmp_path).client.lr == 0.5
    (tmp_path / "mine.yaml").write_text("a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: [*b, *a], y: 4}\n")
    found = read_yaml((tmp_path / "mine.yaml").read_text(), "it")
    assert found == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}, "c": {"x": 3, "y": 4}}


def test_merges_of_merges_do_not_multiply() -> None:
    lines = ["x0: &x0 {a: 1}", *(f"x{i}: &x{i} {{<<: [{', '.join([f'*x{i - 1}'] * 10)}]}}" for i in range(1, 30))]
    assert read_yaml("\n".join(lines), "it")["x29"] == {"a": 1}


def test_a_mix_does_not_take_shares_that_are_given_too() -> None:
    for words in (
        ["fleet.shares=[1,0,0,0,0]", "fleet.capacities=income"],
        ["fleet.capacities=income", "fleet.shares=[1]"],
    ):
        assert "has its own shares: leave fleet.shares out" in told(lambda words=words: RECIPE.with_settings(words))  # type: ignore[misc]


@pytest.mark.parametrize("number", ["true", "1.0"])
def test_only_a_whole_number_is_a_format(number: str, tmp_path: Path) -> None:
    assert "recipe key format is" in told(lambda: read(f"format: {number}\n", tmp_path))


@pytest.mark.parametrize("section", ["task", "method"])
def test_no_name_is_not_the_default_one(section: str, tmp_path: Path) -> None:
    assert "''" in told(lambda: read(f"{section}: ''\n", tmp_path))
    assert read(f"{section}: {{}}\n", tmp_path) == Recipe()


def test_all_images_cannot_be_put_aside() -> None:
    said = told(lambda: prepare(RECIPE.with_settings(["task.validation=0.9999", "task.limit=20"])))
    assert said == "task.validation and task.public leave no image to train on: put fewer aside"


@pytest.mark.parametrize("number", ["1:30", "1:30.5", "010", "-1:30"])
def test_numbers_are_not_counted_in_sixties_or_eights(number: str, tmp_path: Path) -> None:
    said = told(lambda: read(f"rounds: {number}\n", tmp_path))
    assert said == f"recipe key rounds is '{number}' (str): expected int"
    if ":" in number:
        assert f"deadline is '{number}' (str)" in told(lambda: read(f"deadline: {number}\n", tmp_path))
    found = read("rounds: 1_000\ndeadline: 1.5\nseed: -3\nquorum: 0x2\n", tmp_path)
    assert (found.rounds, found.deadline, found.seed, found.quorum) == (1000, 1.5, -3, 2)


# --- what a recipe says is checked where it is read ---


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fleet.cohort=99"], "a cohort of 99 of 20 clients"),
        (["fleet.clients=0"], "a cohort of 10 of 0 clients"),
        (["fleet.clients=null"], "fleet.clients is null"),
        (["fleet.capacities=[0]"], "capacity 0 is outside"),
        (["fleet.capacities=['1/0']"], "capacity '1/0' is not a number"),
        (["fleet.shares=[abc, 1, 1, 1, 1]"], "fleet.shares: share 'abc' is not a number"),
        (["fleet.shares=['1e99999999', 1, 1, 1, 1]"], "fleet.shares: share '1e99999999' is not a number"),
        (["fleet.shares=[2, -1, 0, 0, 0]"], "fleet.shares is 2, -1, 0, 0, 0: give shares that are at least 0"),
        (["fleet.shares=[1]"], "1 shares for 5 capacities"),
        (["fleet.availability=0"], "availability 0.0 is outside"),
        (["fleet.stragglers=2"], "fleet.stragglers is 2.0"),
        (["fleet.trace=[]"], "trace is empty"),
        (["fleet.trace=[[-3, 1]]"], "names client -3"),
        (["task.validation=1"], "together below 1"),
        (["task.public=0.5", "task.validation=0.5"], "together below 1"),
        (["task.public=digits"], "which is what is learned"),
        (["task.partition={name: labels, rare: [1], rare_elsewhere: 2}"], "rare_elsewhere is 2.0"),
        (["task.partition={name: labels, rare: [1]}", "fleet.redrawn=true"], "it needs fleet.redrawn=false"),
        (["method.overlap=1/0"], "overlap '1/0' is not a number"),
        (["method=heterofl", "fleet.server_scale=2"], "nodes that nobody trains"),
        (
            ["method=fedavg", "method.width=1", "method.able_only=true", "fleet.capacities=['1/2']"],
            "nobody in the fleet",
        ),
        (["method=fjord", "method.widths=['1/2', '1']"], "method.widths has no 1/4"),
        (["method=dsfl", "fleet.redrawn=true"], "capacities cannot be redrawn"),
        (["method=fedselect", "client.mask=zero"], "fedselect needs client.mask none"),
        (["method=scaffold", "client.optimizer=adam"], "scaffold needs client.optimizer sgd"),
        (["task.models={1: vgg11}"], "task.models needs a method that compares"),
        (["method=feddf", "task.models={1/3: vgg11}"], "capacity 1/3, which nobody in the fleet has"),
        (["task=words", "fleet.clients=null", "method=feddf"], "feddf compares scores of classes"),
    ],
)
def test_show_refuses_what_train_refuses(words: list[str], says: str, tmp_path: Path) -> None:
    settings = [word for each in words for word in ("--set", each)]
    shown = CliRunner().invoke(app, ["show", "digits", *settings])
    assert shown.stdout == ""
    assert says in str(shown.exception)
    trained = CliRunner().invoke(app, ["train", "digits", *settings, "--out", str(tmp_path / "run")])
    assert str(trained.exception) == str(shown.exception)
    assert "\n" not in str(shown.exception)


# --- what is of a wrong kind in Python ---


@dataclass(frozen=True, kw_only=True)
class Listing(FedAvg):
    """A method with a list of anything."""

    items: list[Any] = field(default_factory=list)


def ring() -> list[Any]:
    """A list that contains itself."""
    items: list[Any] = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda: Recipe(data=3), "data is 3: give text, the path of a file or folder"),  # type: ignore[arg-type]
        (lambda: Recipe(weights=3), "weights is 3: give text"),  # type: ignore[arg-type]
        (lambda: ImagesRecipe(data=3), "task.data is 3: give text"),  # type: ignore[arg-type]
        (lambda: ImagesRecipe(partition="iid"), "task.partition is 'iid': give PartitionRecipe"),  # type: ignore[arg-type]
        (lambda: ImagesRecipe(validation=3), "task.validation is 3, task.public is None: give parts of the data"),
        (lambda: ImagesRecipe(public=1), "task.public is 1: give parts of the data, at least 0 and together below 1"),
        (lambda: WordsRecipe(data=3), "task.data is 3: give text"),  # type: ignore[arg-type]
        (lambda: WordsRecipe(word_list=3), "task.word_list is 3: give text"),  # type: ignore[arg-type]
        (lambda: RECIPE.with_settings([None]), "--set None is not KEY=VALUE"),  # type: ignore[list-item]
        (lambda: RECIPE.with_settings(None), "settings is None: give a list of KEY=VALUE words"),  # type: ignore[arg-type]
        (lambda: RECIPE.with_settings("rounds=3"), "settings is 'rounds=3': give a list of KEY=VALUE words"),
        (lambda: RECIPE.write(Path("nowhere/recipe.yaml")), "cannot write recipe nowhere/recipe.yaml: "),
        (
            lambda: Recipe(method=Listing(items=ring())).encode(),
            "the recipe cannot be written as plain data: Recursion",
        ),
        (lambda: METHODS.name_of(FedAvg()), "a FedAvg has no name to be found by: give a class or a function"),
    ],
)
def test_a_wrong_kind_is_one_line(mistake: Callable[[], object], says: str) -> None:
    assert says in told(mistake)


def test_a_line_that_quotes_something_long_keeps_its_beginning_and_its_end() -> None:
    said = told(lambda: Recipe(engine="a" * 10_000))
    assert said.startswith("engine is 'aaa")
    assert said.endswith("or package.module:Name of your own")
    assert len(said) < 700
