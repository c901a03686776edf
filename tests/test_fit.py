"""What a training step takes: exact where it can be counted, and near what a process really takes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from told import told
from torch import Tensor, nn
from typer.testing import CliRunner

from fedrolex.cli.app import app
from fedrolex.slicing.inputs import Inputs
from fedrolex.theory.memory import in_bytes, training_memory


def linear(optimizer: str = "sgd", batch: int = 4) -> tuple[int, ...]:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    inputs = Inputs.of(model, torch.randn(2, 10))
    found = training_memory(model, inputs, batch, optimizer)
    return found.parameters, found.weights, found.gradients, found.optimizer, found.activations


def test_of_two_linear_layers_every_byte_is_known() -> None:
    count = 10 * 20 + 20 + 20 * 5 + 5
    # Saved for backward: the input, what ReLU gave (once: the second layer reads the same), and log_softmax's result.
    saved = 4 * 4 * (10 + 20 + 5)
    assert linear() == (count, 4 * count, 4 * count, 0, saved)
    assert linear("momentum")[3] == 4 * count
    assert linear("adam")[3] == 8 * count


@given(st.integers(1, 40))
def test_activations_grow_with_the_batch(batch: int) -> None:
    assert linear(batch=batch)[4] == batch * linear(batch=1)[4]


class Branches(nn.Module):
    """Tied weights, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8, bias=False)
        self.two = nn.Linear(8, 8, bias=False)
        self.two.weight = self.one.weight
        self.still = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.one(x)) + self.still
        return y


def test_tied_weights_count_once_and_what_is_not_trained_has_no_gradient() -> None:
    found = training_memory(Branches(), Inputs.of(Branches(), torch.randn(2, 8)), 2, "adam")
    assert (found.weights, found.gradients, found.optimizer) == (4 * 72, 4 * 64, 8 * 64)
    assert found.total >= found.weights + found.gradients + found.optimizer + found.activations


REAL = """
import re, sys, torch
from torch import nn
torch.set_num_threads(1)
width, batch = int(sys.argv[1]), int(sys.argv[2])

def build(width):
    blocks = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    for _ in range(3):
        blocks += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))

def peak():  # in KiB; a new process's ru_maxrss is its parent's
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

def step(model, x):
    trained = list(model.parameters())
    optimizer = torch.optim.SGD(trained, lr=1e-3, momentum=0.9)
    nn.functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.int64)).backward()
    optimizer.step()

if len(sys.argv) > 3:
    from fedrolex.slicing.inputs import Inputs
    from fedrolex.theory.memory import training_memory
    model = build(width)
    print(training_memory(model, Inputs.of(model, torch.randn(2, 3, 32, 32)), batch, "momentum").total)
else:
    step(build(2), torch.randn(2, 3, 32, 32))  # libraries make themselves ready
    before = peak()
    step(build(width), torch.randn(batch, 3, 32, 32))
    print((peak() - before) * 1024)
"""


def said(*words: object) -> int:
    command = [sys.executable, "-c", REAL, *map(str, words)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("width", "batch"), [(32, 64), pytest.param(64, 32, marks=pytest.mark.slow)])
def test_the_estimate_is_near_what_a_process_takes(width: int, batch: int) -> None:
    estimate, real = said(width, batch, "estimate"), said(width, batch)
    assert real > 50e6  # enough for what libraries keep to be small beside it
    assert 1 / 2 < estimate / real < 2


# --- the command line ---


def test_the_largest_capacity_that_fits_is_named() -> None:
    few = ["fit", "digits", "--json", "--batch", "8"]
    whole = json.loads(CliRunner().invoke(app, [*few, "--memory", "1GB"]).stdout)
    assert whole["largest"] == "1"
    totals = {row["capacity"]: row["total"] for row in whole["capacities"]}
    assert list(totals.values()) == sorted(totals.values(), reverse=True)
    room = totals["1/4"]
    for memory, largest in ((room, "1/4"), (room - 1, "1/8")):
        found = json.loads(CliRunner().invoke(app, [*few, "--memory", str(memory)]).stdout)
        assert found["largest"] == largest
        assert [row["fits"] for row in found["capacities"]] == [t <= memory for t in totals.values()]


def test_a_model_of_ones_own_and_a_device_too_small() -> None:
    words = ["fit", "fedrolex.models:preresnet18", "--arg", "width=4", "--batch", "2", "--capacity", "1/2"]
    done = CliRunner().invoke(app, [*words, "--memory", "10MB"])
    assert done.exit_code == 0, done.output
    assert "largest that fits: 1/2" in done.output
    done = CliRunner().invoke(app, [*words, "--memory", "2kB"])
    assert "no capacity fits into 2kB: the smallest takes" in str(done.exception)
    done = CliRunner().invoke(app, [*words, "--memory", "10MB", "--batch", "0"])
    assert "batch is 0: give a whole number of at least 1" in str(done.exception)


@pytest.mark.parametrize(("text", "size"), [("512MB", 512_000_000), ("1.5 GiB", 3 * 2**29), ("7", 7), ("2kb", 2000)])
def test_sizes_in_words(text: str, size: int) -> None:
    assert in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "12 parsecs", "-5MB", "0", "1e9", "NaN"])
def test_what_is_no_size_is_one_line(text: str) -> None:
    assert "is no size of a memory" in told(lambda: in_bytes(text))


def test_wrong_settings_are_one_line() -> None:
    model = nn.Linear(3, 2)
    inputs = Inputs.of(model, torch.randn(2, 3))
    assert "batch is 0" in told(lambda: training_memory(model, inputs, 0))
    assert "did you mean 'adam'" in told(lambda: training_memory(model, inputs, 1, "adamw"))
    assert "a training step of the model failed" in told(lambda: training_memory(nn.Linear(4, 2), inputs, 1))
