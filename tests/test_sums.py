"""Sums that depend on no order, and the rest of what the engine ``ray`` is made of that needs no cluster."""

from __future__ import annotations

import socket
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods_shared import small
from small import hand_made
from told import told
from torch import Tensor

from fedrolex import Axes, Fold, Random, Rolling, Window
from fedrolex.clients import Job
from fedrolex.engines.ray.cluster import check_answers
from fedrolex.engines.ray.engine import RayEngine
from fedrolex.engines.ray.shards import Costs, dealt, in_order
from fedrolex.engines.ray.wire import Box, named, pack, unpack
from fedrolex.slicing import WHOLE
from fedrolex.slicing.sums import ExactFold, ExactSum, grade_of

CPU = torch.device("cpu")


def axes() -> Axes:
    return hand_made({"in": 6, "out": 4}, {"weight": ["out", "in"], "bias": ["out"]})


def updates(count: int, seed: int, *, spread: float = 0.0) -> list[tuple[dict[str, Tensor], Window, float]]:
    """Parts of clients with random windows and weights; sizes differ by powers of ten up to ``spread``."""
    draw, found = torch.Generator().manual_seed(seed), []
    for client in range(count):
        window = Random(seed=seed).window(axes(), round=0, capacity=Fraction(1 + client % 3, 3), client=client)
        base = {"weight": torch.zeros(4, 6), "bias": torch.zeros(4)}
        size = 10 ** (spread * float(torch.rand((), generator=draw)))
        parts = {n: size * torch.randn(t.shape, generator=draw) for n, t in axes().take(base, window).items()}
        found.append((parts, window, float(torch.rand((), generator=draw)) + 0.1))
    return found


def base() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(7)
    return {"weight": torch.randn(4, 6, generator=draw), "bias": torch.randn(4, generator=draw)}


@given(st.permutations(range(9)), st.lists(st.integers(0, 3), min_size=9, max_size=9), st.floats(0, 12))
def test_any_order_and_any_split_give_the_same_bits(order: list[int], owners: list[int], spread: float) -> None:
    clients = updates(9, 1, spread=spread)
    straight = ExactFold(axes(), base())
    for number, (part, window, weight) in enumerate(clients):
        straight.add(number, part, window, weight)
    folds = [ExactFold(axes(), base()) for _ in range(4)]
    for number in order:
        part, window, weight = clients[number]
        folds[owners[number]].add(number, part, window, weight)
    together = ExactFold(axes(), base())
    for fold in folds:
        together.merge(fold.grades(fold.hull()), fold.hull())
    for name, wanted in straight.totals().items():
        assert torch.equal(together.totals()[name], wanted)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2**-32), (torch.float64, 2**-52)])
def test_a_sum_is_right_to_many_bits(dtype: torch.dtype, close: float) -> None:
    draw = torch.Generator().manual_seed(3)
    terms = [torch.randn(4, 6, generator=draw, dtype=dtype) for _ in range(50)]
    exact = ExactSum((4, 6), CPU)
    for term in terms:
        exact.add(axes().region("weight", WHOLE), term, 0.3)
    wanted = torch.stack(terms).double().mul(0.3).sum(0)
    largest = max(float(term.abs().max()) for term in terms)
    assert float((exact.total() - wanted).abs().max()) <= 50 * close * largest


def test_grades() -> None:
    assert [grade_of(value) for value in (0.0, 0.9, 1.0, 15.9, 16.0, 0.01)] == [0, 0, 4, 4, 8, -4]
    assert "cannot be added up" in told(lambda: grade_of(2.0**1000))


def test_counting_and_sums_make_the_same_average_as_adding() -> None:
    whole, parts, sums = Fold(axes(), base()), Fold(axes(), base()), ExactFold(axes(), base())
    rows = {"out": [0, 2]}
    for number, (part, window, weight) in enumerate(updates(4, 2)):
        only = None if number else rows
        whole.add(number, part, window, weight, only)
        sums.add(number, part, window, weight, only)
        parts.count_in(number, window, weight, only)
    parts.add_sums(sums.totals())
    counts = {name: whole.count(name) for name in base()}
    wanted, found = whole.average(), parts.average()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
        bare = (counts[name] == 0).expand_as(tensor)
        assert torch.equal(found[name][bare], base()[name][bare])  # what nobody trained keeps its bits


def test_a_hull_is_a_clients_window_or_everything() -> None:
    fold, start = ExactFold(axes(), base()), Rolling()
    windows = [start.window(axes(), round=1, capacity=c, client=0) for c in ("1/4", "1/2")]
    for client, window in enumerate(windows):
        fold.add(client, axes().take(base(), window), window)
    assert fold.hull() == windows[1]
    apart = start.window(axes(), round=4, capacity="1/4", client=0)
    fold.add("apart", axes().take(base(), apart), apart)
    assert fold.hull() == WHOLE


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30), st.integers(1, 7))
def test_shards_have_every_job_once_and_are_even(costs: list[float], workers: int) -> None:
    jobs = [Job(client, Fraction(1), WHOLE) for client in range(len(costs))]
    shards = dealt(jobs, costs, workers)
    assert sorted(job.client for shard in shards for job in shard) == list(range(len(costs)))
    assert all(shards)
    loads = [sum(costs[job.client] for job in shard) for shard in shards]
    assert loads == sorted(loads, reverse=True)
    assert loads[0] <= sum(costs) / workers + max(costs) + 1e-9  # the bound of longest-first, and of any greedy deal
    assert all([job.client for job in shard] == sorted(job.client for job in shard) for shard in shards)


def test_pieces_keep_the_order_and_their_size() -> None:
    jobs = [Job(client, Fraction(1), WHOLE) for client in range(7)]
    pieces = in_order(jobs, [1, 1, 9, 1, 1, 1, 1], parts=3, most=5)
    assert [[job.client for job in piece] for piece in pieces] == [[0, 1], [2], [3, 4, 5], [6]]


def test_costs_are_those_that_were_measured() -> None:
    made = small('fleet.capacities=["1", "1/2", "1/4"]', "fleet.cohort=6")
    plan, costs = made.plan(made.method.jobs(made.server, 0)), Costs()
    by_size = {job.capacity: costs.of(plan, job) for job in plan.jobs}
    assert by_size[Fraction(1)] > by_size[Fraction(1, 2)] > by_size[Fraction(1, 4)]
    slow = next(job for job in plan.jobs if job.capacity == Fraction(1, 4))
    costs.measured(plan, slow, 10.0)
    assert costs.of(plan, slow) == 10.0
    costs.measured(plan, slow, 20.0)
    assert costs.of(plan, slow) == 13.0
    whole = next(job for job in plan.jobs if job.capacity == 1)
    assert costs.of(plan, whole) == pytest.approx(13.0 * by_size[Fraction(1)] / by_size[Fraction(1, 4)])


def test_tensors_arrive_as_they_were_and_equal_ones_travel_once() -> None:
    tensors: dict[str, Tensor] = {
        "half": torch.randn(2, 3).bfloat16(), "steps": torch.tensor(7), "none": torch.zeros(0, 3),
        "last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), "mask": torch.tensor([True, False]),
    }  # fmt: skip
    box = Box()
    first, again = box.put(tensors, "control"), box.put({n: t.clone() for n, t in tensors.items()}, "control")
    assert first == again
    changed = box.put({"steps": torch.tensor(8)}, "control")
    arrived = unpack(box.packed())
    for name, tensor in named(arrived, first).items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])
    assert int(named(arrived, changed)["steps"]) == 8
    view = torch.arange(6.0)
    assert torch.equal(unpack(pack({"a": view[:3], "b": view[3:]}))["b"], view[3:])


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("FEDROLEX_WORKERS", "two", "give a whole number above 0"),
        ("FEDROLEX_WORKER_CPUS", "0", "give a whole number above 0"),
        ("FEDROLEX_WORKER_DEVICE", "tensor", "use one of cpu, cuda"),
    ],
)
def test_wrong_settings_are_told(name: str, value: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert told(RayEngine) == f"{name} is {value!r}: {remedy}"


@pytest.mark.parametrize("address", ["nonsense", "10.0.0.1", "ray://127.0.0.1:10001", "127.0.0.1:99999", ":6379"])
def test_what_is_no_address_of_a_cluster_is_told(address: str) -> None:
    assert told(lambda: check_answers(address)) == (
        f"RAY_ADDRESS is {address!r}: give host:port of the cluster's first node, auto or local"
    )


def test_an_address_where_nobody_is_is_told_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        said = told(lambda: check_answers(f"127.0.0.1:{taken.getsockname()[1]}"))
    assert said.startswith("no Ray cluster answers at 127.0.0.1:")
    assert "start it there with: ray start --head" in said


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Any:
        return None

    monkeypatch.setattr("fedrolex.engines.ray.cluster.find_spec", nothing)
    assert told(lambda: small("engine=ray")) == (
        "engine ray needs Ray, which is not installed: pip install 'fedrolex[ray]'"
    )
