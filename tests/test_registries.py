"""Everything by name, the package's or one's own: classes that recipes name, and what is wrong with a name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from told import told
from torch import nn

from fedrolex import (
    CALLBACKS,
    DATASETS,
    ENGINES,
    METHODS,
    METRICS,
    MODELS,
    SCHEMES,
    TASKS,
    Callback,
    Classification,
    Examples,
    FedAvg,
    Fleet,
    FleetRecipe,
    HeteroFL,
    ImageModel,
    ImageSet,
    ImagesRecipe,
    Recipe,
    Task,
    TaskRecipe,
    prepare,
    train,
)
from fedrolex.core.registry import Registry
from fedrolex.tasks.masking import Mask

RECIPE = Recipe(device="cpu").with_settings(["task.width=8", "fleet.clients=4", "fleet.cohort=2", "rounds=1"])


# --- what a class of one's own may look like ---


@dataclass(frozen=True, kw_only=True)
class Odd(FedAvg):
    """Settings of many types, without any check of its own."""

    kind: Literal["plain", "fancy"] = "plain"
    parts: Sequence[Fraction | str | float] = ()
    pair: tuple[int, int] = (1, 2)
    more: dict[str, float] = field(default_factory=dict)
    many: list[list[int]] | None = None
    anything: Any = None


def odd(**settings: Any) -> Odd:
    made = Recipe.decode({"method": {"name": "test_registries:Odd", **settings}}).method
    assert isinstance(made, Odd)
    return made


def test_settings_of_ones_own_are_read_by_their_annotations() -> None:
    assert odd(kind="fancy", parts=["1/2", 0.5], pair=[3, 4], more={"a": 1}, many=[[1], []], anything=[{}]) == Odd(
        kind="fancy", parts=("1/2", 0.5), pair=(3, 4), more={"a": 1.0}, many=[[1], []], anything=[{}]
    )
    assert "method.kind is 'fncy' (did you mean 'fancy'?)" in told(lambda: odd(kind="fncy"))
    assert "expected {key: value, ...}" in told(lambda: odd(more=[1]))
    assert "recipe key method.many is [[1], 2]" in told(lambda: odd(many=[[1], 2]))


@dataclass(frozen=True, kw_only=True)
class Fails(FedAvg):
    """A check of its own that is not one of ours."""

    most: float = 1.0

    def __post_init__(self) -> None:
        if self.most > 1:
            raise ValueError(f"{self.most}\nis too much")


def test_a_check_of_ones_own_is_one_line() -> None:
    data = {"method": {"name": "test_registries:Fails", "most": 2}}
    assert "recipe method: ValueError: 2.0" in told(lambda: Recipe.decode(data))


@dataclass(frozen=True, kw_only=True)
class Coins(TaskRecipe):
    """A task of one's own, as a section of a recipe."""

    sides: int = 2

    def open(self, fleet: FleetRecipe, *, seed: int, folder: Path, mask: Mask) -> tuple[Task, Fleet]:
        made = fleet.build(seed)
        x = torch.randn(60, 4, generator=torch.Generator().manual_seed(seed))
        data = Examples(x, x[:, : self.sides].argmax(1))
        parts = list(torch.arange(60).view(made.clients, -1))
        return Classification("coins", self.network, data, data, parts), made

    def network(self, scale: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8 * scale), nn.ReLU(), nn.Linear(8 * scale, self.sides))


def test_a_task_of_ones_own_is_a_section() -> None:
    recipe = RECIPE.with_settings(["task=test_registries:Coins", "task.sides=3"])
    assert recipe.task == Coins(sides=3)
    assert train(recipe).summary["task"] == "coins"
    said = told(lambda: prepare(recipe.with_settings(["method=feddf"])))
    assert "feddf needs public examples" in said


# --- registries ---

REFUSED: list[tuple[Registry, str, str]] = [
    (METHODS, "method=", "method.name is"),
    (TASKS, "task=", "task.name is"),
    (ENGINES, "engine=", "engine is"),
    (MODELS, "task.model=", "task.model is"),
    (METRICS, "evaluation.metrics=", "evaluation.metrics is"),
    (CALLBACKS, "callbacks=", "callbacks is"),
]


@pytest.mark.parametrize(("registry", "key", "begins"), REFUSED)
def test_a_name_that_is_wrong_is_one_line(registry: Registry, key: str, begins: str) -> None:
    def given(name: str) -> str:
        value = f"['{name}']" if registry in (METRICS, CALLBACKS) else name
        return told(lambda: prepare(RECIPE.with_settings([key + value])))

    first = registry.own()[-1]
    assert given(first[:-1] + "z").startswith(f"{begins} '{first[:-1]}z' (did you mean '{first}'?): use one of ")
    assert f"{begins} 'nowhere.at_all:It': cannot import 'nowhere.at_all'" in given("nowhere.at_all:It")
    assert f"{begins} 'test_registries:Nothing': test_registries has no 'Nothing'" in given("test_registries:Nothing")
    assert f"not a {registry.kind}: give {registry.expected}" in given("test_registries:RECIPE")


def test_a_module_that_fails_when_it_is_asked_for_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> Any:
        raise RuntimeError(f"no {name} today")

    module = ModuleType("moody")
    module.__getattr__ = fails  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "moody", module)
    said = told(lambda: METHODS.find("moody:Method"))
    assert (
        said
        == "method.name is 'moody:Method': moody fails when it is asked for 'Method': RuntimeError: no Method today"
    )


def test_a_scheme_and_a_data_set_that_are_wrong() -> None:
    assert "method.scheme is 'rollin' (did you mean 'rolling'?)" in told(lambda: SCHEMES.find("rollin"))
    assert "not a scheme: give a subclass of fedrolex.Scheme" in told(lambda: SCHEMES.find("test_registries:Odd"))
    data = RECIPE.with_settings(["task.data=test_registries:Coins"])
    assert "task.data test_registries:Coins: TypeError" in told(lambda: prepare(data))
    assert "give a function of (folder, seed)" in told(lambda: DATASETS.find("test_registries:RECIPE"))


def give_up(asked: ImageModel) -> nn.Module:
    raise RuntimeError("no such\nmodel")


def no_module(asked: ImageModel) -> Any:
    return asked


def no_images(folder: Path, seed: int) -> Any:
    return folder


def float_images(folder: Path, seed: int) -> ImageSet:
    x, y = torch.rand(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
    return ImageSet(x, y, x, y, ("a",))


def no_engine(**options: Any) -> Any:
    return options


class Needy(Callback):
    def __init__(self, what: str) -> None:
        self.what = what


@pytest.mark.parametrize(
    ("word", "says"),
    [
        (
            "task.model=test_registries:give_up",
            "task.model test_registries:give_up: the model cannot be made: RuntimeError: no",
        ),
        ("task.model=test_registries:no_module", "made a ImageModel, not a torch.nn.Module"),
        ("task.data=test_registries:no_images", "gave a PosixPath: give a function of (folder, seed)"),
        ("task.data=test_registries:float_images", "train_x of an ImageSet is torch.float32 (4, 1, 8, 8)"),
        (
            "engine=test_registries:no_engine",
            "engine test_registries:no_engine gave a dict: give a subclass of fedrolex.Engine",
        ),
        ("engine=test_registries:Odd", "engine test_registries:Odd: "),
        ("callbacks=['test_registries:Needy']", "callback test_registries:Needy cannot be made: TypeError"),
    ],
)
def test_what_is_brought_and_does_not_do_is_one_line(word: str, says: str) -> None:
    assert says in told(lambda: prepare(RECIPE.with_settings([word])))


def test_a_decorator_makes_a_name_and_a_taken_one_is_refused() -> None:
    registry = Registry("thing", "thing", "a function", {"old": "fedrolex.tasks.metrics:top5"})

    @registry.register("mine")
    def mine() -> None:
        """A thing."""

    assert registry.find("mine") is mine
    assert registry.origins() == {"old": "fedrolex", "mine": "test_registries"}
    assert registry.register("mine")(mine) is mine, "the same line may run again"
    assert "already, from fedrolex" in told(lambda: registry.register("old")(mine))
    assert "use a word without a colon" in told(lambda: registry.register("a:b")(mine))
    assert "is a int, not a thing: give a function" in told(lambda: registry.register("three")(3))


def test_a_recipe_names_a_class_so_that_another_process_finds_it() -> None:
    assert Recipe(method=Odd()).encode()["method"]["name"] == "test_registries:Odd"
    assert METHODS.name_of(HeteroFL) == "heterofl"

    class Inside(FedAvg):
        pass

    recipe = Recipe(method=Inside())
    assert "is defined inside a function" in told(lambda: Recipe.decode(recipe.encode()))
    METHODS.register("inside, for a test")(Inside)
    assert Recipe.decode(recipe.encode()) == recipe


# --- models by capacity ---


def test_models_may_be_ones_own_and_may_have_a_width() -> None:
    task = ImagesRecipe(models={"1": "vgg11:4", "1/2": "test_registries:tiny:3", "1/4": "test_registries:tiny"})
    widths = {str(capacity): model for capacity, model in task.make_models().items()}
    assert [widths[key][1].out_features for key in ("1/2", "1/4")] == [3, 5]  # type: ignore[index]
    assert "task.models[1] is 'vgg11:0'" in told(lambda: ImagesRecipe(models={"1": "vgg11:0"}))
    assert "task.models[1] is 'vgg12'" in told(lambda: ImagesRecipe(models={"1": "vgg12"}))


def tiny(asked: ImageModel) -> nn.Module:
    wide = asked.wide(5)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(asked.channels * asked.size**2, wide), nn.ReLU(), nn.Linear(wide, asked.classes)
    )


def test_finding_the_packages_own_things_does_not_look_into_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    assert METHODS.find("fedavg") is FedAvg
    assert "" not in sys.path
    told(lambda: METHODS.find("no_such_module:It"))
    assert "" in sys.path
