"""Ragged cohorts: the kernels under Triton's interpreter, and on a GPU whole rounds beside ``loop``."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_conformance import METHODS, alike, alike_in_one_seed, changes, training
from torch import Tensor

from fedrolex.engines import Graph, Loop
from fedrolex.engines.gpu.precision import use_tf32

triton = pytest.importorskip("triton")
OLD = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NETWORK = ["task.model=preresnet18", "task.width=16", "task.partition=iid", "client.batch=20"]
BASE = [*NETWORK, "task.limit=400", "client.lr=0.1"]  # three steps a client, the last of ten images
ONE_STEP = [*NETWORK, "task.limit=160", "client.lr=1.0"]  # so that changes are large beside the weights' last digit


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tested on this machine")
@pytest.mark.skipif(OLD, reason="this Triton's interpreter does not take today's NumPy")
@pytest.mark.parametrize(
    "what",
    [
        "steps_are_those_of_plain_torch",
        "whole_sums_are_those_of_plain_torch",
        "adam_remembers_as_in_plain_torch",
        "averages_are_those_of_the_fold",
        "rounds_are_those_of_loop",
    ],
)
def test_interpreted(what: str) -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, here / "ragged_interpreted.py", what],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def ragged(made: Any) -> bool:
    return isinstance(made.engine, Graph) and made.engine._at_rest is not None


ELSEWHERE = ("norms apart", "fedprox", "scaffold", "feddf", "dsfl", "fedet", "fedselect", "families")
# own tensors, other steps, other networks


ON = ("feddf", "dsfl", "fedet", "families")  # the server trains too: rounding alone can make another model of it


@needs_gpu
@pytest.mark.parametrize("method", METHODS)
def test_the_update_of_a_round_is_the_same(method: str) -> None:
    settings = [*ONE_STEP, *METHODS[method]]
    # Adam divides by the size of a gradient: where that is next to nothing, rounding decides on the direction
    tolerance, most = (1e-1, 0.5) if method == "adam" else (1e-3, 1.0 if method in ON else 0.1)
    for made in alike_in_one_seed("cuda", "graph", settings, tolerance, most):
        assert ragged(made) == (method not in ELSEWHERE)


@needs_gpu
def test_cohorts_of_changing_composition() -> None:
    settings = [*ONE_STEP, "fleet.cohort=3", "task.width=9", 'fleet.capacities=["1", "2/3", "1/3"]']
    made, plain = (training("cuda", engine, settings) for engine in ("graph", "loop"))
    begin = made.state
    for _ in range(12):  # from the same weights every round: rounding is not to grow from one to the next
        made.state, plain.state = ({name: tensor.clone() for name, tensor in begin.items()} for _ in range(2))
        found = changes(made)
        assert ragged(made)
        alike(changes(plain), found, 1e-3)


@needs_gpu
def test_a_second_epoch() -> None:
    alike_in_one_seed("cuda", "graph", [*ONE_STEP, "client.epochs=2", "client.lr=0.1"], 1e-3, 0.1)


@needs_gpu
def test_a_client_whose_update_is_not_finite_is_dropped() -> None:
    made = training("cuda", "graph", BASE)
    task: Any = made.task

    class Broken:
        random = False

        def __call__(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
            found = task.pixels(x, draws)
            return torch.where((x == 255).flatten(1).all(1).view(-1, 1, 1, 1), torch.nan, found)

    task.train.x[task.parts[3]] = 255
    made.task = replace(task, pixels=Broken())
    row = made.run_round()
    assert ragged(made)
    assert list(row["dropped"]) == ["3"]
    assert "not finite" in row["dropped"]["3"]
    assert all(bool(tensor.isfinite().all()) for tensor in made.state.values())


@needs_gpu
def test_waves_do_the_same() -> None:
    alike_in_one_seed("cuda", "graph in waves", ONE_STEP, 1e-3, 0.1)


@needs_gpu
@pytest.mark.parametrize("method", ["fedrolex", "fedprox"])  # ragged cohorts, and lanes
@pytest.mark.parametrize("share", [0.7, 0.5])
def test_a_cohort_larger_than_the_memory_runs_in_waves(method: str, share: float) -> None:
    settings = [*ONE_STEP, *METHODS[method], "task.width=64", 'fleet.capacities=["1"]']
    wanted = changes(training("cuda", "loop", settings))
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    made = training("cuda", "graph", settings)
    changes(made)
    needed = torch.cuda.memory_reserved() - before
    del made
    gc.collect()
    torch.cuda.empty_cache()
    made = training("cuda", "graph", settings)
    engine: Any = made.engine
    allowed = torch.cuda.memory_reserved() + share * needed
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
    try:
        found = changes(made)
        made.evaluate()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert engine.most < 8
    assert not engine.together
    alike(wanted, found, 1e-2)


@needs_gpu
def test_metrics_are_the_same() -> None:
    settings = [*ONE_STEP, *METHODS["published masks"]]
    one, other = (training("cuda", engine, settings).run_round() for engine in ("loop", "graph"))
    assert other["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)
    assert other["drift"] == pytest.approx(one["drift"], rel=1e-3, abs=1e-4)
    assert [other[key] for key in ("bytes_down", "bytes_up")] == [one[key] for key in ("bytes_down", "bytes_up")]


class TF32(torch.autograd.Function):
    """A convolution whose factors lose all but ten bits after the point, and whose sums are float32, both ways."""

    @staticmethod
    def short(tensor: Tensor) -> Tensor:
        return (tensor.contiguous().view(torch.int32) >> 13 << 13).view(torch.float32)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = [stride] * 2, [padding] * 2
        return torch.nn.functional.conv2d(TF32.short(x), TF32.short(weight), None, stride, padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        factors = [TF32.short(each) for each in (gradients[0], *ctx.saved_tensors)]
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], False]
        found = torch.ops.aten.convolution_backward(*factors, None, *ctx.sizes, [1, 1], False, [0, 0], 1, wanted)
        return *found[:2], None, None


@needs_gpu
def test_lower_precision_is_as_far_from_float32_as_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN takes layers as narrow as these partly in float32: for TF32, what is right is computed by hand."""
    exact = changes(training("cuda", "loop", ONE_STEP))

    def distance(engine: type[Graph] | type[Loop], precision: Any) -> float:
        made = training("cuda", "loop", ONE_STEP)
        made.engine = engine(made.model, precision=precision)
        use_tf32(precision == "tf32")
        try:
            found = changes(made)
        finally:
            use_tf32(False)
        apart = [float((found[name] - wanted).norm() / wanted.norm()) for name, wanted in exact.items()]
        return sum(apart) / len(apart)

    assert distance(Graph, "bf16") <= 2 * distance(Loop, "bf16")
    found = distance(Graph, "tf32")

    def convolve(self: torch.nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        assert bias is None
        return TF32.apply(x, weight, self.stride[0], self.padding[0])

    made = training("cuda", "loop", ONE_STEP)
    monkeypatch.setattr(torch.nn.Conv2d, "_conv_forward", convolve)
    by_hand = changes(made)
    apart = [float((by_hand[name] - wanted).norm() / wanted.norm()) for name, wanted in exact.items()]
    assert found <= 1.5 * sum(apart) / len(apart)


@needs_gpu
def test_every_time_the_same_bits() -> None:
    first, second = (changes(training("cuda", "graph", BASE), 2) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@needs_gpu
def test_a_run_goes_on_from_given_weights() -> None:
    """The server's tensors may change between rounds: they are read anew."""
    made = training("cuda", "graph", BASE)
    made.run_round()
    made.state = {name: torch.zeros_like(tensor) for name, tensor in made.state.items()}
    found = changes(made)
    other = training("cuda", "loop", BASE)
    other.round = 1
    other.state = {name: torch.zeros_like(tensor) for name, tensor in other.state.items()}
    wanted = changes(other)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-6)
