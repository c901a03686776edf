"""Shared by all tests: one thread and one trace a worker, and a profile for hypothesis that never times out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from traced_once import traced_once

settings.register_profile(
    "here", deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("here")


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
