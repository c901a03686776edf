"""What docs/your-own-method.md shows works, as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from told import told

from fedrolex import ClientRecipe, FedRolex, FleetRecipe, Recipe, train
from fedrolex.core.registry import METHODS
from fedrolex.recipes.images import ImagesRecipe
from fedrolex.runs.prepare import prepare

PAGE = Path(__file__).parents[1] / "docs" / "your-own-method.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """Everything the page's Python defines; its training calls run, too."""
    module = sys.modules.setdefault("shown", ModuleType("shown"))  # dataclasses ask for the module of their class
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), vars(module))
    return vars(module)


def tiny(**changes: Any) -> Recipe:
    task = ImagesRecipe(data="digits", width=8, limit=200)
    fleet = FleetRecipe(clients=6, cohort=4, capacities=["1", "1/2"])
    return Recipe(**{"rounds": 3, "task": task, "fleet": fleet, "engine": "loop", "device": "cpu", **changes})


def test_the_page_is_about_as_long_as_it_says() -> None:
    first, second = (next(b for b in BLOCKS if f'register("{name}")' in b) for name in ("clipped", "feddyn"))
    assert len(first.splitlines()) <= 40
    assert len(second.splitlines()) <= 80


def test_both_methods_learn(shown: dict[str, Any]) -> None:
    for method in (shown["Clipped"](most=5.0), shown["FedDyn"](alpha=0.1, width="1")):
        client = ClientRecipe(lr=0.05, momentum=0.0, epochs=2)
        done = train(tiny(method=method, client=client, rounds=25))
        assert done.summary["global_accuracy"] > 0.7


def test_a_clipped_change_is_no_longer_than_it_may_be(shown: dict[str, Any]) -> None:
    training = prepare(
        tiny(method=shown["Clipped"](most=0.01), fleet=FleetRecipe(clients=6, cohort=1, capacities=["1"]))
    )
    before = {name: tensor.clone() for name, tensor in training.server.state["model"].items()}
    training.run_round()
    moved = torch.stack([(training.server.state["model"][n] - t).norm() for n, t in before.items()]).norm()
    assert float(moved) == pytest.approx(0.01, rel=1e-3)


def test_feddyn_is_what_its_paper_says(shown: dict[str, Any]) -> None:
    """One full-batch step a client: g₁ = −α · (trained − received), h = −α / m · Σ (trained − received)."""
    alpha, fleet = 0.5, FleetRecipe(clients=4, cohort=2, capacities=["1"])
    client = ClientRecipe(lr=0.1, momentum=0.0, batch=1000)
    training = prepare(tiny(method=shown["FedDyn"](alpha=alpha), fleet=fleet, client=client))
    server = training.server
    before = {name: tensor.clone() for name, tensor in server.state["model"].items()}
    training.run_round()
    taken = [m.client for m in server.fleet.members(0)]
    assert server.clients is not None
    kept = [server.clients.get(client) for client in taken]
    for name in server.trainable():
        changes = [-g[name].to(before[name]) / alpha for g in kept if g is not None]
        h = -alpha / 4 * sum(changes)
        torch.testing.assert_close(server.state["h"][name], h, rtol=1e-4, atol=1e-6)
        mean = before[name] + sum(changes) / 2
        torch.testing.assert_close(server.state["model"][name], mean - h / alpha, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ["crew"])
@pytest.mark.parametrize("name", ["clipped", "feddyn"])
def test_other_engines_give_the_same(shown: dict[str, Any], name: str, engine: str) -> None:
    method = METHODS.find(name)()
    one, other = (prepare(tiny(method=method, engine=each)) for each in ("loop", engine))
    for training in (one, other):
        for _ in range(2):
            training.run_round()
    assert other.engine.supports(other.plan(method.jobs(other.server, 2))) is None
    for section, tensors in one.server.state.items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(other.server.state[section][key], tensor, rtol=1e-3, atol=1e-4)


def test_two_jobs_a_client_and_an_ensemble(shown: dict[str, Any]) -> None:
    training = prepare(tiny(method=shown["Twice"]()))
    row = training.run_round()
    assert row["clients"] == 4
    moved = {section: any(not torch.equal(training.server.state[section][n], t) for n, t in first.items())
             for section, first in prepare(tiny(method=shown["Twice"]())).server.state.items()}  # fmt: skip
    assert moved == {"model": True, "second": True}
    judged = training.method.judged(training.server)
    assert isinstance(judged, shown["Sum"])
    x = training.server.task.example()
    judged.eval()
    torch.testing.assert_close(judged(x), sum(part(x) for part in judged.parts))
    assert 0 <= training.evaluate()["global_accuracy"] <= 1


class Forgotten(FedRolex):
    """A setting, and no decorator that makes it one."""

    trust: float = 0.5


def test_a_setting_without_the_decorator_is_refused() -> None:
    assert told(Forgotten).startswith("trust of method Forgotten is no setting yet: put @dataclass(frozen=True,")
