"""The engine by rule, and how many threads a network is worth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedrolex import LocalTraining, Recipe, prepare, train
from fedrolex.core import threads
from fedrolex.core.threads import spread_over, threads_for
from fedrolex.engines.auto import choose
from fedrolex.engines.cpu.crew import Crew
from fedrolex.engines.cpu.loop import Loop
from fedrolex.tasks.measure import Measure

SETTINGS = ["task.width=8", "task.limit=200", "fleet.clients=6", "fleet.cohort=4", "callbacks=[]"]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_the_rule() -> None:
    assert isinstance(choose(device=torch.device("cpu")), Crew)
    assert isinstance(choose(), Crew)
    torch.set_num_threads(1)
    engine = choose(precision="bf16")
    assert isinstance(engine, Loop)
    assert engine.precision == "bf16"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    from fedrolex.engines.gpu.graph import Graph

    assert isinstance(choose(precision="bf16", device=torch.device("cuda")), Graph)


def test_the_summary_names_the_engine_that_ran() -> None:
    recipe = Recipe(device="cpu", engine="auto").with_settings([*SETTINGS, "rounds=1"])
    assert train(recipe).summary["engine"] == "crew"
    assert train(recipe.with_settings(["deadline=100"])).summary["engine"] == "loop"


def test_a_small_network_is_worth_one_thread() -> None:
    assert threads_for(2**18) == 1
    assert threads_for(2**18 + 1) == 2
    with spread_over(1):
        assert torch.get_num_threads() == threads_for(2**20) == 1
    assert torch.get_num_threads() == 2


@dataclass(frozen=True, kw_only=True)
class Watched(LocalTraining):
    """Notes how many threads steps are spread over."""

    seen: Any = None

    def objective(self, scores: Tensor, y: Tensor, loss: Any, held: Tensor | None) -> Tensor:
        self.seen.add(torch.get_num_threads())
        return super().objective(scores, y, loss, held)


@pytest.mark.parametrize("engine", ["loop", "crew"])
@pytest.mark.parametrize(("small", "expected"), [(2**18, 1), (0, 2)])
def test_rounds_of_a_small_network_are_computed_on_one_thread(
    engine: str, small: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "SMALL", small)
    made = prepare(Recipe(device="cpu", engine=engine).with_settings([*SETTINGS, "fleet.cohort=1"]))
    made.work = Watched(seen=set())
    evaluated = set[int]()

    class Noted(Measure):
        def __call__(self, *of: Any) -> dict[str, Any]:
            evaluated.add(torch.get_num_threads())
            return super().__call__(*of)

    made.measure = Noted()
    made.run_round()
    made.evaluate()
    assert made.work.seen == {expected}  # one client is what all workers share
    assert evaluated == {expected}
    assert torch.get_num_threads() == 2
