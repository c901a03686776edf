"""Shared by all tests: one thread and one trace a worker, and a profile for hypothesis that never times out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray_cluster
import torch
from hypothesis import HealthCheck, settings
from traced_once import traced_once

settings.register_profile(
    "here", deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a Ray cluster come first: one process has them all then, and needs one cluster."""
    items.sort(key=lambda item: not ray_cluster.needed_by(item))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The cluster ends with the last test that needs it."""
    if ray_cluster.needed_by(item) and not (nextitem is not None and ray_cluster.needed_by(nextitem)):
        ray_cluster.stop()


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _traced_once() -> Iterator[None]:
    """Runs take equal networks' axes from one trace; tests that trace by themselves do so every time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedrolex.methods.setup.trace", traced_once)
        yield
