"""Shared by all tests: one thread a worker, and a profile for hypothesis that never times out."""

from __future__ import annotations

import pytest
import ray_cluster
import torch
from hypothesis import HealthCheck, settings

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
