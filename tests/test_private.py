"""Differential privacy for sub-models: what a single client can change is bounded, whatever its window."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods_shared import small
from scipy.stats import norm as gaussian
from torch import Tensor

pytest.importorskip("dp_accounting", reason="needs fedrolex[flower]")

from fedrolex import FedrolexError, Recipe, Run, Upload, prepare
from fedrolex.clients import MODEL
from fedrolex.methods import Private
from fedrolex.privacy.accountant import epsilon
from fedrolex.rounds import Average, Round
from fedrolex.runs import Training
from fedrolex.slicing import Fold

FIXED = ["method=private", "method.quantile=null"]


def begun(made: Training) -> Round:
    """A round in which everyone is asked, and nobody has answered."""
    members = [replace(job) for job in made.method.jobs(made.server, made.server.round)]
    plan = made.plan(members)
    return Round(made.server, plan, Average(plan, made.engine))


def moved(round: Round, place: int, size: float, seed: int = 0) -> Upload:
    """A client's answer, ``size`` away from what it was given."""
    job = round.plan.jobs[place]
    draw = torch.Generator().manual_seed(seed * 1000 + place)
    received = round.plan.received(job)
    change = {n: torch.randn(t.shape, generator=draw) for n, t in received.items()}
    length = sqrt(sum(float(t.square().sum()) for t in change.values()))
    return Upload(job, {n: t + size / length * change[n] for n, t in received.items()}, 10, 1.0, 1)


def everyone(*settings: str) -> Training:
    return small(*FIXED, "fleet.cohort=6", *settings)


@pytest.mark.parametrize("scheme", ["rolling", "static", "random"])
def test_without_noise_and_clip_it_is_the_sum_over_the_expected_number(scheme: str) -> None:
    made = everyone("method.noise=0", "method.clip=1e9", f"method.scheme={scheme}", "method.least=0")
    round = begun(made)
    uploads = [moved(round, place, 0.3) for place in range(6)]
    for upload in uploads:
        made.method.take(round, upload)
    new = made.method.finish(round)[MODEL]
    fold = Fold(made.server.main.axes, made.server.state[MODEL])  # everyone takes part: expected is what there is
    for upload in uploads:
        fold.add(upload.job.client, upload.tensors, upload.job.window)
    for name, tensor in fold.average().items():
        torch.testing.assert_close(new[name], tensor, rtol=0, atol=1e-6)


@given(
    st.integers(0, 5),
    st.floats(0.01, 100),
    st.sampled_from(["rolling", "static", "random", "blocks"]),
    st.integers(0, 9),
)
def test_removing_any_client_changes_the_sum_by_the_clip_at_most(
    gone: int, size: float, scheme: str, seed: int
) -> None:
    made = everyone("method.noise=0", "method.clip=0.5", f"method.scheme={scheme}")
    method = made.method

    def total(places: list[int]) -> Tensor:
        round = begun(made)
        for place in places:
            method.take(round, moved(round, place, size, seed))
        return torch.cat([tensor.flatten() for tensor in round.notes["sums"].values()])

    both = list(range(6)), [place for place in range(6) if place != gone]
    assert float((total(both[0]) - total(both[1])).norm()) <= 0.5 * (1 + 1e-6)


def test_noise_is_what_was_promised_where_somebody_is_expected_and_nowhere_else() -> None:
    made = everyone(
        "method.noise=2", "method.clip=0.5", "task.width=16", 'fleet.capacities=["1/2", "1/4"]', "method.least=0.5"
    )
    round = begun(made)
    for place in range(6):
        made.method.take(round, moved(round, place, 0.0))
    new, old = made.method.finish(round)[MODEL], made.server.state[MODEL]
    method = made.method
    assert isinstance(method, Private)
    seen: dict[float, list[Tensor]] = {}
    for name in made.server.trainable():
        counts = method.expected(made.server, 0, name).expand(old[name].shape)
        for count in counts.unique().tolist():
            seen.setdefault(count, []).append((new[name] - old[name])[counts == count])
    assert sorted(seen) == [0, 3, 6]
    assert not torch.cat(seen[0]).any()
    for count in (3, 6):
        values = torch.cat(seen[count]).double()
        assert float(values.std()) == pytest.approx(2 * 0.5 / max(count, 3), rel=5 / sqrt(len(values)))


def test_the_share_of_noise_between_changes_and_count_is_the_papers() -> None:
    assert Private(noise=1.0).noise_on_changes(100) == pytest.approx(1.005038, abs=1e-6)
    with pytest.raises(FedrolexError, match=r"set method.count_noise above 0.5"):
        Private(noise=1.0).noise_on_changes(10)
    assert Private(noise=1.0, quantile=None).noise_on_changes(10) == 1.0


def test_the_clip_finds_the_median_of_the_norms() -> None:
    made = small("method=private", "method.noise=0", "fleet.cohort=6", "method.clip=0.1", "method.clip_rate=0.2")
    draw, method = np.random.default_rng(0), made.method
    clips = []
    for _ in range(120):
        round = begun(made)
        for place in range(6):
            method.take(round, moved(round, place, float(np.exp(draw.normal(log(2.0), 0.5)))))
        made.server.state["clip"] = method.finish(round)["clip"]
        clips.append(float(made.server.state["clip"]["norm"]))
    assert np.median(clips[60:]) == pytest.approx(2.0, rel=0.15)


def test_samples_are_poisson() -> None:
    made = small(*FIXED, "fleet.clients=40", "fleet.cohort=10", "task.limit=400")
    sizes = [len(made.method.members(made.server, round)) for round in range(400)]
    assert np.mean(sizes) == pytest.approx(10, abs=0.5)
    assert np.var(sizes) == pytest.approx(40 * 0.25 * 0.75, rel=0.3)
    first = [[m.client for m in made.method.members(made.server, 5)] for _ in range(2)]
    assert first[0] == first[1]


def exact(noise: float, rounds: int, delta: float) -> float:
    """ε of so many Gaussian mechanisms on everyone, from Balle and Wang's formula, by bisection."""
    sigma = noise / sqrt(rounds)
    low, high = 0.0, 1000.0
    for _ in range(200):
        middle = (low + high) / 2
        off, half = middle * sigma, 1 / (2 * sigma)
        found = gaussian.cdf(half - off) - exp(middle + gaussian.logcdf(-half - off))
        low, high = (middle, high) if found > delta else (low, middle)
    return high


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (2.0, 10), (5.0, 100)])
def test_the_accountant_agrees_with_the_exact_formula_and_the_simple_bound(noise: float, rounds: int) -> None:
    delta = 1e-5
    found = epsilon(noise, 1.0, rounds, delta)
    assert found == pytest.approx(exact(noise, rounds, delta), rel=1e-2)
    bound = min(a * rounds / (2 * noise**2) + log(1 / delta) / (a - 1) for a in np.linspace(1.01, 200, 20_000))
    assert found <= bound
    assert epsilon(noise, 0.1, rounds, delta) < found
    assert epsilon(0.0, 0.1, rounds, delta) == float("inf")
    assert epsilon(noise, 0.1, 0, delta) == 0


def test_a_run_says_what_it_promises_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    settings = ["method=private", "method.noise=0.4", "method.count_noise=1", "task.limit=180", "fleet.clients=6",
                "fleet.cohort=3", "rounds=2", "task.width=8", "checkpoint_every=1", "engine=loop",
                "callbacks=[]"]  # fmt: skip
    recipe = Recipe(device="cpu").with_settings(settings)
    summary = Run.create(tmp_path / "run", recipe).go(prepare(recipe))
    assert summary["epsilon"] == epsilon(0.4, 0.5, 2, 6**-1.1)
    assert "for a client added or removed with all its data" in summary["privacy"]
    assert "2 rounds" in summary["privacy"]
    assert "follows from the seed" in summary["privacy"]

    def stop(row: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    again = Run.create(tmp_path / "again", recipe)
    with pytest.raises(KeyboardInterrupt):
        again.go(prepare(recipe), stop)
    again.go(prepare(recipe))
    assert again.checkpoint.read_bytes()[-1000:] == Run.open(tmp_path / "run").checkpoint.read_bytes()[-1000:]


def test_noise_on_devices_is_nobodys_to_know() -> None:
    method = Private(noise=1.0, quantile=None).on_devices()
    made = everyone()
    draws = [method._random(made.server, 0).standard_normal() for _ in range(2)]
    assert draws[0] != draws[1]
    assert method.secret


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["method.weighting=samples"], "uniform"),
        (["method.norms=per_capacity"], "shared"),
        (["method.rows=true"], "rows"),
        (["method.quantile=1"], "between 0 and 1"),
        (["method.noise=-1"], "method.noise"),
        (["method.quantile=0.5", "method.noise=1"], "count_noise"),
        (["fleet.stratified=true"], "draw every client by itself"),
        (["fleet.balanced=true"], "fleet.balanced is true: private averages draw every client by itself"),
    ],
)
def test_what_would_tell_more_is_refused(settings: list[str], said: str) -> None:
    with pytest.raises(FedrolexError, match=said):
        small(*FIXED, *settings)


def test_levels_are_fractions() -> None:
    made = everyone()
    method = made.method
    assert isinstance(method, Private)
    name = made.server.trainable()[0]
    largest = float(method.expected(made.server, 0, name).max())
    assert largest == sum(made.server.fleet.capacity(client) >= Fraction(1, 2) for client in range(6))
