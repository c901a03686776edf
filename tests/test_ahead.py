"""Places of ragged cohorts: enough for all rounds looked at, and the same whichever round a run goes on from."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from fedrolex import FedrolexError, Recipe, prepare
from fedrolex.clients import Job, RoundPlan
from fedrolex.clients.messages import MODEL
from fedrolex.engines.gpu.ragged import ahead
from fedrolex.engines.gpu.ragged.ahead import SPARE, Need, by_network, images_of, needs, widths_of

SETTINGS = [
    "fleet.clients=20", "fleet.cohort=4", 'fleet.capacities=["1", "1/2", "1/4"]', "task.model=preresnet18",
    "task.width=4", "engine=loop",
]  # fmt: skip
METHODS = {
    "fedrolex": ["method=fedrolex"],
    "drawn anew": ["method=fed_dropout", "fleet.redrawn=true"],
    "columns": ["method=columns", "method.one_by_one=true"],
    "stragglers": ["method=fedrolex", "fleet.stragglers=0.3"],
}


def plan_of(settings: list[str]) -> RoundPlan:
    made = prepare(Recipe(device="cpu").with_settings([*SETTINGS, *settings]))
    return made.plan(made.method.jobs(made.server, 0))


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_goes_on_has_the_places_of_one_that_was_not_stopped(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "ROUNDS", 2)  # so that later rounds need more
    monkeypatch.setattr(ahead, "SPARE", 0)
    plan = plan_of(METHODS[method])
    live, grown = needs(plan), 0
    built = {name: need.clients for name, need in live.items()}  # steps are tiled for so many
    for round in range(30):
        later = needs(replace(plan, round=round))
        assert {name: list(need.places.items()) for name, need in later.items()} == {
            name: list(need.places.items()) for name, need in live.items()
        }
        for name in live:
            assert (later[name].clients, later[name].images) == (built[name], live[name].images)
        for name, mine in by_network(plan.jobs_of(round)).items():
            images = {job: images_of(plan, job) for job in mine}
            if live.setdefault(name, Need()).grow(plan.networks[name], images, 0):
                built[name], grown = live[name].clients, grown + 1
    assert grown > 0, "nothing was tested"


def test_the_first_rounds_have_places_and_some_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "ROUNDS", 10)
    plan = plan_of(["method=fedrolex"])
    need = needs(plan)[MODEL]
    most: Counter[ahead.Widths] = Counter()
    for round in range(10):
        most |= Counter(widths_of(plan.networks[MODEL], job.window) for job in plan.jobs_of(round))
    assert need.places == {widths: count + SPARE for widths, count in most.items()}
    assert need.clients == 4
    assert need.windows.keys() == most.keys()
    images = {job: images_of(plan, job) for job in plan.jobs_of(0)}
    assert not need.grow(plan.networks[MODEL], images, SPARE)
    assert need.grow(plan.networks[MODEL], dict.fromkeys(images, need.images + 1), SPARE)


def test_a_method_that_cannot_say_who_comes_trains_all_the_same() -> None:
    def unknown(round: int) -> list[Job]:
        raise FedrolexError("not yet")

    assert needs(replace(plan_of(["method=fedrolex"]), jobs_of=unknown)) == {}
