"""Engines of a GPU train in waves, and in smaller ones once memory was not enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch

from fedrolex import FedrolexError
from fedrolex.clients.messages import Failure, Job, RoundPlan, Upload
from fedrolex.clients.work import LocalTraining
from fedrolex.engines.gpu.waves import Waves
from fedrolex.slicing.windows import WHOLE


class Limited(Waves):
    """A device that holds so many clients at once, beside what is kept from before."""

    def __init__(self, room: int, **options: Any) -> None:
        super().__init__(device=torch.device("cpu"), rehearsed=True, **options)
        self.room, self.kept = room, 0
        self.waves: list[int] = []
        self.cleared = 0

    def _wave(self, plan: RoundPlan, jobs: Sequence[Job]) -> list[Upload | Failure]:
        self.waves.append(len(jobs))
        if max(self.kept, len(jobs)) > self.room or self.kept > len(jobs) > self.room - self.kept:
            raise torch.OutOfMemoryError("out of memory")
        self.kept = max(self.kept, len(jobs))
        return [Upload(job, {}, 1, 0.0, 1) for job in jobs]

    def _holds(self) -> bool:
        return self.kept > 0

    def _clear(self) -> None:
        self.kept = 0
        self.cleared += 1


def plan(clients: int) -> RoundPlan:
    jobs = [Job(client, Fraction(1), WHOLE) for client in range(clients)]
    task: Any = object()
    return RoundPlan(0, 0, {}, {"model": {}}, task, LocalTraining(), jobs)


def told(engine: Waves, asked: RoundPlan) -> list[int]:
    answers = list(engine.run(asked))
    assert all(isinstance(answer, Upload) for answer in answers)
    return [answer.job.client for answer in answers]


def test_a_cohort_that_fits_is_one_wave() -> None:
    engine = Limited(8)
    assert told(engine, plan(8)) == list(range(8))
    assert engine.waves == [8]
    assert engine.together


def test_waves_get_smaller_until_they_fit_and_stay_so() -> None:
    engine, asked = Limited(3), plan(8)
    assert told(engine, asked) == list(range(8))
    assert engine.waves == [8, 4, 2, 2, 2, 2]
    assert not engine.together
    engine.waves.clear()
    assert told(engine, asked) == list(range(8))
    assert engine.waves == [2, 2, 2, 2]


def test_what_is_kept_from_other_rounds_goes_first() -> None:
    engine, large = Limited(6), plan(6)
    assert told(engine, large) == list(range(6))
    small = replace(large, jobs=large.jobs[:4])
    assert told(engine, small) == list(range(4))
    assert engine.waves == [6, 4, 4]  # there was no room beside the places of six; without them there is
    assert engine.together


def test_one_client_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(FedrolexError, match="memory is not enough for one client of capacity 1 at a time"):
        told(Limited(0), plan(4))


def test_what_was_captured_for_another_run_is_dropped() -> None:
    engine, first = Limited(8), plan(4)
    told(engine, first)
    told(engine, first)
    assert engine.cleared == 0
    told(engine, replace(first, work=LocalTraining(lr=0.5)))
    assert engine.cleared == 1


def test_other_failures_are_not_taken_for_a_lack_of_memory() -> None:
    class Broken(Limited):
        def _wave(self, plan: RoundPlan, jobs: Sequence[Job]) -> list[Upload | Failure]:
            raise RuntimeError("an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        told(Broken(8), plan(2))
