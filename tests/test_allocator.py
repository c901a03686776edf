"""Memory that threads free stays with the process: a step does not begin with page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from torch import nn
from fedrolex import Classification, ClientRecipe, Examples, FleetRecipe, MethodRecipe, Recipe
from fedrolex.runs import prepare

if sys.argv[1] == "without":
    prepare.__globals__["keep_memory"] = lambda: False
torch.set_num_threads(2)
x, y = torch.randn(160, 3, 24, 24), torch.randint(0, 10, (160,))
layers = lambda: (nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12800, 96))
parts = list(torch.arange(160).view(8, 20))
recipe = Recipe(
    method=MethodRecipe(name="fedavg"),
    fleet=FleetRecipe(clients=8, cohort=8, capacities=["1"]),
    client=ClientRecipe(batch=10),
    engine="crew",
    device="cpu",
)
build = lambda scale: nn.Sequential(*layers(), nn.Linear(96, 10))
made = prepare(recipe, Classification("images", build, Examples(x, y), Examples(x, y), parts))
made.engine.stacked = ()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    made.run_round()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 16)  # a step
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left as they are")
def test_a_step_does_not_begin_with_page_faults() -> None:
    def faults(how: str) -> float:
        done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
        return float(done.stdout)

    assert faults("with") < faults("without") / 2
