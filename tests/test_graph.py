"""The rule of a GPU: the first of ragged, stacked and lanes that can; here without a GPU, where ragged cannot."""

from __future__ import annotations

import pytest
import torch

from fedrolex import Recipe, Training, prepare
from fedrolex.clients.messages import MODEL
from fedrolex.engines.gpu.graph import Graph
from fedrolex.engines.gpu.lanes import Lanes
from fedrolex.engines.gpu.stacked import Stacked
from fedrolex.engines.gpu.waves import Waves

BASE = ["task.width=4", "fleet.clients=8", "fleet.cohort=8", "task.limit=160", "callbacks=[]"]
TWO = 'fleet.capacities=["1", "1/2"]'
FOUR = 'fleet.capacities=["1", "1/2", "1/4", "1/8"]'


def training(*settings: str) -> Training:
    made = prepare(Recipe(device="cpu", engine="loop").with_settings([*BASE, *settings]))
    made.engine = Graph(device=torch.device("cpu"), rehearsed=True)
    return made


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        ([TWO], Stacked),  # small convolutions, four clients of each width
        ([FOUR], Lanes),  # only two of each
        ([TWO, "task.model=resnet8", "task.norm=batch"], Lanes),  # batch norms would see what fills up a batch
        ([TWO, "method=fedprox", "fleet.stragglers=0.5"], Stacked),
    ],
)
def test_the_way_can_be_told_in_advance(settings: list[str], way: type[Waves]) -> None:
    made = training(*settings)
    made.run_round()
    assert isinstance(made.engine, Graph)
    assert type(made.engine.way) is way
    assert made.engine.together


@pytest.mark.parametrize(("setting", "reason"), [("method=fjord", "has its own"), ("deadline=60", "deadline")])
def test_what_no_way_can_run_goes_to_loop_and_is_said(setting: str, reason: str) -> None:
    made, said = training(TWO, setting), list[str]()
    made.say = said.append
    made.run_round()
    assert len(said) == 1
    assert said[0].startswith("engine: loop (")
    assert reason in said[0]


def test_what_all_ways_keep_is_given_back_together() -> None:
    made = training(FOUR)
    assert not made.engine.release()
    made.run_round()
    first = {name: tensor.clone() for name, tensor in made.server.state[MODEL].items()}
    assert made.engine.release()
    assert not made.engine.release()
    made.run_round()  # and made anew
    assert any(not torch.equal(tensor, first[name]) for name, tensor in made.server.state[MODEL].items())


def test_only_ragged_kernels_average_where_answers_lie() -> None:
    made = training(FOUR)
    plan = made.plan(made.method.jobs(made.server, 0))
    uploads = list(made.engine.run(plan))
    assert made.engine.average(uploads, [1.0] * len(uploads), None) is None  # type: ignore[arg-type]
