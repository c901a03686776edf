"""Mistakes inside a method's own hooks: one line that names the hook, before anything wrong is trained or saved."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedrolex import FedrolexError, FleetRecipe, LocalTraining, Recipe
from fedrolex.clients import MODEL
from fedrolex.engines.cpu.loop import Loop
from fedrolex.methods import FedRolex
from fedrolex.recipes.images import ImagesRecipe
from fedrolex.runs.prepare import prepare
from fedrolex.runs.training import Training


def training(method: FedRolex, engine: str = "loop") -> Training:
    task, fleet = ImagesRecipe(width=4, limit=60), FleetRecipe(clients=4, cohort=2, capacities=["1", "1/2"])
    return prepare(Recipe(rounds=2, task=task, fleet=fleet, method=method, engine=engine, callbacks=[]))


def with_hook(hook: str, does: Callable[..., Any]) -> FedRolex:
    """FedRolex with another hook; ``does`` gets the plain hook's function first."""
    plain = getattr(FedRolex, hook)
    kind = type("Mistaken", (FedRolex,), {hook: lambda self, *given: does(lambda: plain(self, *given), *given)})
    made: FedRolex = kind()
    return made


def grown(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, MODEL: {name: torch.cat([tensor, tensor]) for name, tensor in state[MODEL].items()}}


@pytest.mark.parametrize(
    ("hook", "does", "told"),
    [
        ("check", lambda plain, _: 1 / 0, "check() of method"),
        ("work", lambda plain, _: None, "give a LocalTraining"),
        ("windows", lambda plain, _: {"a": 1}["x"], "windows() of method"),
        ("begin", lambda plain, _: {"a": 1.0}, "{section: {name: tensor}}"),
        ("begin", lambda plain, server: {MODEL: server.state[MODEL]}, "which the model has"),
        ("jobs", lambda plain, *_: None, "jobs() of method"),
        ("jobs", lambda plain, *_: [*plain(), plain()[0]], "two jobs of one name"),
        (
            "jobs",
            lambda plain, *_: [replace(job, client=-1) for job in plain()[:1]],
            "asks client -1: there are 0 to 3",
        ),
        ("jobs", lambda plain, *_: [replace(job, sections=()) for job in plain()], "no sections"),
        (
            "begin",
            lambda plain, _: {"a:b": {"x": torch.zeros(2)}},
            "a section is called 'a:b': use a word without a colon",
        ),
        ("networks", lambda plain, _: {MODEL: torch.nn.Linear(1, 1)}, "{name: Network}, each from setup.network(...)"),
        ("networks", lambda plain, _: {"other": plain()[MODEL]}, "has no 'model', the main one"),
        ("view", lambda plain, _: 1 / 0, "view() of method"),
        ("label_axis", lambda plain, _: 1 / 0, "label_axis() of method"),
        ("waits_for", lambda plain, _: 1 / 0, "waits_for() of method"),
        ("waits_for", lambda plain, _: "x", "waits_for() of method"),
        (
            "jobs",
            lambda plain, *_: [replace(job, name=None) for job in plain()],
            "gives a job the name None: give text",
        ),
        ("traffic", lambda plain, *_: None, "traffic() of method"),
        ("traffic", lambda plain, *_: (float("nan"), 0), "it must return two whole numbers, bytes"),
        ("take", lambda plain, *_: sys.exit(1), "take() of method"),
        ("begin", lambda plain, _: {"a": {"x": torch.zeros(2, device="meta")}}, "tensors that have values"),
        ("begin", lambda plain, _: {"a": {3: torch.zeros(2)}}, "tensors that have values"),
        ("evaluate", lambda plain, *_: None, "could not be evaluated"),
        ("judged", lambda plain, _: torch.nn.Linear(9, 2), "could not be evaluated"),
        ("jobs", lambda plain, *_: [replace(job, network="other") for job in plain()], "network 'other'"),
        ("send", lambda plain, *_: {"a": 0.5}, "{section: {name: tensor}}"),
        ("take", lambda plain, *_: {"a": 1}["x"], "take() of method"),
        ("take", lambda plain, *_: 1 / 0, "take() of method"),
        ("take", lambda plain, *_: torch.ones(2) + torch.ones(3), "take() of method"),
        ("take", lambda plain, *_: int("x"), "take() of method"),
        ("take", lambda plain, *_: Path("nowhere").read_text(), "take() of method"),
        ("finish", lambda plain, _: None, "finish() of method"),
        ("finish", lambda plain, round: plain()[MODEL], "{section: {name: tensor}}"),
        ("finish", lambda plain, _: {**plain(), "new": {"a": torch.ones(1)}}, "declare it in begin()"),
        ("finish", lambda plain, _: {MODEL: dict(list(plain()[MODEL].items())[1:])}, "the tensors it had"),
        ("finish", lambda plain, _: grown(plain()), "after finish(); it was"),
        ("judged", lambda plain, _: None, "could not be evaluated"),
    ],
)
def test_a_mistake_in_a_hook_is_one_line_that_names_it(hook: str, does: Callable[..., Any], told: str) -> None:
    def used() -> None:
        made = training(with_hook(hook, does))
        made.run_round()
        made.evaluate()

    with pytest.raises(FedrolexError) as raised:
        used()
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_lack_of_memory_inside_a_hook_stays_one() -> None:
    def full(plain: Callable[[], Any], _: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        training(with_hook("finish", full)).run_round()
    with pytest.raises(torch.OutOfMemoryError):
        training(with_hook("take", lambda plain, *_: full(plain, None))).run_round()


def test_what_clients_keep_must_have_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hoarding, "kept", torch.zeros(2))
    with pytest.raises(FedrolexError, match="keep tensors between rounds: say needs = Needs"):
        training(with_hook("work", lambda plain, _: Hoarding())).run_round()


class Forgetful(LocalTraining):
    """Declares a constant that nobody fills."""

    constants = ("anchor",)


class Hoarding(LocalTraining):
    """Keeps what is no tensor, or not finite."""

    kept: Any = None

    def after(self, visit: Any) -> None:
        visit.kept = {"own": type(self).kept}


@pytest.mark.parametrize("engine", ["loop", "crew"])
def test_constants_that_were_declared_must_be_there(engine: str) -> None:
    row = training(with_hook("work", lambda plain, _: Forgetful()), engine).run_round()
    assert row["clients"] == 0
    assert all("declares constants = ('anchor',)" in why for why in row["dropped"].values())


@pytest.mark.parametrize(("value", "told"), [(0.5, "not a tensor"), (torch.tensor([float("nan")]), "not finite")])
def test_what_a_client_keeps_is_looked_at(value: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hoarding, "kept", value)
    row = training(with_hook("work", lambda plain, _: Hoarding())).run_round()
    assert row["clients"] == 0
    assert all(told in why for why in row["dropped"].values())


class Leaving(LocalTraining):
    """Leaves what it is told to in its visit, or exits."""

    what, value = "kept", None

    def before(self, visit: Any) -> None:
        if self.what == "exit":
            sys.exit(3)

    def after(self, visit: Any) -> None:
        setattr(visit, self.what, self.value)


def test_what_a_client_leaves_in_its_visit_has_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    made = training(with_hook("work", lambda plain, _: Leaving()))
    for what, value, told in (
        ("kept", [1], "visit.kept is a list: give tensors by name"),
        ("kept", [], "visit.kept is a list: give tensors by name"),
        ("sent", None, "visit.sent is a NoneType: give tensors by name"),
        ("sent", {"a": 0.5}, "visit.sent has 'a', a float and not a tensor: give one"),
        ("trained", None, "visit.trained is a NoneType: give tensors by name"),
        ("loss", None, "visit.loss is None: give a number"),
    ):
        monkeypatch.setattr(Leaving, "what", what)
        monkeypatch.setattr(Leaving, "value", value)
        assert set(made.run_round()["dropped"].values()) == {told}
    monkeypatch.setattr(Leaving, "what", "exit")
    with pytest.raises(FedrolexError, match="engine loop failed: SystemExit: 3"):
        made.run_round()


class Odd(Loop):
    """An engine that answers otherwise."""

    def __init__(self, answers: Callable[[list[Any]], Any], supported: Any = None) -> None:
        super().__init__()
        self.answers, self.supported = answers, supported

    def supports(self, plan: Any) -> Any:
        return self.supported

    def run(self, plan: Any) -> Any:
        return self.answers(list(super().run(plan)))


def test_an_engine_of_ones_own_gives_one_answer_for_every_job() -> None:
    made = training(FedRolex())
    for engine, told in (
        (Odd(lambda right: None), "TypeError: 'NoneType' object is not iterable"),
        (Odd(lambda right: right[7]), "IndexError"),
        (Odd(lambda right: [None]), "run() must give an Upload or a Failure, one for every job of the plan"),
        (
            Odd(lambda right: [*right, right[0]]),
            "run() must give an Upload or a Failure, one for every job of the plan",
        ),
        (
            Odd(lambda right: right, supported=True),
            "supports() gives True: give the reason against it in words, or None",
        ),
    ):
        made.engine = engine
        with pytest.raises(FedrolexError, match=r"engine test_hooks:Odd failed: ") as raised:
            made.run_round()
        assert told in str(raised.value)
    made.engine = Odd(lambda right: right[:1])
    row = made.run_round()
    assert (row["clients"], list(row["dropped"].values())) == (1, ["the engine gave no answer"])
