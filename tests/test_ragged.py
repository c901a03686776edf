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
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedrolex import Recipe, Training, prepare
from fedrolex.clients.messages import MODEL
from fedrolex.engines.cpu.loop import Loop
from fedrolex.engines.gpu.graph import Graph
from fedrolex.engines.gpu.precision import use_tf32
from fedrolex.engines.gpu.ragged import Ragged
from fedrolex.engines.gpu.ragged.engine import INTERPRETED

triton = pytest.importorskip("triton")
OLD = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BASE = [
    "fleet.clients=8", "fleet.cohort=8", "client.clip=1.0", "client.weight_decay=5e-4", "callbacks=[drift]",
    'fleet.capacities=["1", "1/2", "1/4"]', "task.partition=iid",
]  # fmt: skip
NETWORK = [*BASE, "task.model=preresnet18", "task.width=16", "client.batch=20"]
THREE_STEPS = [*NETWORK, "task.limit=400", "client.lr=0.1"]  # three steps a client, the last of ten images
ONE_STEP = [*NETWORK, "task.limit=160", "client.lr=1.0"]  # so that changes are large beside the weights' last digit


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tested on this machine")
@pytest.mark.skipif(OLD, reason="this Triton's interpreter does not take today's NumPy")
@pytest.mark.parametrize(
    "what",
    [
        "steps_are_those_of_plain_torch",
        "whole_sums_are_those_of_plain_torch",
        pytest.param("adam_remembers_as_in_plain_torch", marks=pytest.mark.slow),
        "averages_are_those_of_the_fold",
        "averages_of_published_dropout_are_those_of_the_fold",
        pytest.param("several_networks_and_jobs_of_one_client", marks=pytest.mark.slow),
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


RAGGED = {
    "fedrolex": ["method=fedrolex"],
    "fedrolex spread": ["method=fedrolex", "method.spread=true"],
    "heterofl": ["method=heterofl"],
    "fed_dropout": ["method=fed_dropout"],
    "published dropout": ["method=submodels", "method.scheme=fedrolex.slicing.published:RandomMiswired"],
    "fedavg": ["method=fedavg", "method.width=1/2"],
    "adam": ["method=fedrolex", "client.optimizer=adam", "client.lr=0.002"],
    "fedadam": ["method=fedrolex", "method.server_optimizer={name: adam, lr: 0.01}"],
    "published masks": ["method=fedrolex", "method.rows=true", "client.mask=zero"],
    "columns": ["method=columns", "method.rows=true", "client.mask=zero"],
    "columns one by one": ["method=columns", "method.one_by_one=true", "method.rows=true", "client.mask=zero"],
}
ELSEWHERE = {  # own tensors, other steps
    "norms apart": ["method=heterofl", "method.norms=per_capacity"],
    "fedprox": ["method=fedprox", "method.mu=0.5"],
    "scaffold": ["method=scaffold", "method.denominator=momentum"],
}


def training(engine: str, settings: list[str], **options: Any) -> Training:
    made = prepare(Recipe(device="cuda", engine="loop").with_settings(settings))
    if engine != "loop":
        made.engine = Graph(device=made.server.device, **options)
    return made


def tensors_of(made: Training) -> dict[str, Tensor]:
    """What clients train: the model, or every column."""
    state = made.server.state
    return {
        f"{part}:{name}": t for part in state if part.startswith((MODEL, "column")) for name, t in state[part].items()
    }


def changes(made: Training, rounds: int = 1) -> dict[str, Tensor]:
    before = {name: tensor.clone() for name, tensor in tensors_of(made).items()}
    for _ in range(rounds):
        row = made.run_round()
        assert row["dropped"] == {}
        assert row["clients"] == len(made.server.fleet.members(row["round"]))
    new = tensors_of(made)
    return {name: new[name] - before[name] for name in before if before[name].is_floating_point()}


def alike(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    """The *update* of every tensor agrees; an untrained tensor would pass a comparison of weights."""
    for name, wanted in one.items():
        assert float(wanted.norm()) > 0, name
        assert float((other[name] - wanted).norm() / wanted.norm()) <= tolerance, name


def alike_in_one_seed(settings: list[str], tolerance: float, worst: float, **options: Any) -> list[Training]:
    """Every tensor's update agrees with that of ``loop`` in one of three seeds, and roughly in all.

    Sums are other ones: a unit that just fires on one engine and just does not on the other moves a small tensor by a
    hundredth and more, as weights moved by a millionth do in ``loop`` itself. That is rare; an error of a kernel shows
    in every seed. Returns what trained on the engine.
    """
    apart: dict[str, list[float]] = {}
    trained = []
    for seed in (1, 2, 3):
        wanted = changes(training("loop", [*settings, f"seed={seed}"]))
        trained.append(training("graph", [*settings, f"seed={seed}"], **options))
        found = changes(trained[-1])
        for name, tensor in wanted.items():
            assert float(tensor.norm()) > 0, name
            apart.setdefault(name, []).append(float((found[name] - tensor).norm() / tensor.norm()))
    good = {n: any(a <= tolerance for a in each) and all(a <= worst for a in each) for n, each in apart.items()}
    assert {name: apart[name] for name, fine in good.items() if not fine} == {}
    return trained


def ragged(made: Training) -> bool:
    return isinstance(made.engine, Graph) and isinstance(made.engine.way, Ragged) and made.engine.together


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("seed=1", None if INTERPRETED else "need a GPU"),
        ("task.model=convnet", "PreResNets"),
        ("task.norm=group", "static norms"),
        ("method=fedprox", "has its own before, pull"),
        ("method.norms=per_capacity", "tensors of several sections"),
        ("method=fjord", "has its own"),
        ("deadline=5", "deadline"),
    ],
)
def test_what_the_kernels_cannot_run_they_say(change: str, reason: str | None) -> None:
    made = prepare(Recipe(device="cpu", engine="loop").with_settings([*ONE_STEP, change]))
    engine = Ragged(device=torch.device("cpu"), rehearsed=True)
    found = engine.supports(made.plan(made.method.jobs(made.server, 0)))
    assert found is None if reason is None else reason in (found or "")


@needs_gpu
@pytest.mark.parametrize("method", RAGGED)
def test_the_update_of_a_round_is_the_same(method: str) -> None:
    # Adam divides by the size of a gradient: where that is next to nothing, rounding decides on the direction
    tolerance, worst = (1e-1, 0.5) if method == "adam" else (1e-3, 0.1)
    for made in alike_in_one_seed([*ONE_STEP, *RAGGED[method]], tolerance, worst):
        assert ragged(made)


@needs_gpu
@pytest.mark.parametrize("method", ELSEWHERE)
def test_what_is_not_plain_training_goes_elsewhere(method: str) -> None:
    for made in alike_in_one_seed([*ONE_STEP, *ELSEWHERE[method]], 1e-3, 0.1):
        assert not ragged(made)
        assert made.engine.together


@needs_gpu
def test_cohorts_of_changing_composition() -> None:
    settings = [*ONE_STEP, "fleet.cohort=3", "task.width=9", 'fleet.capacities=["1", "2/3", "1/3"]']
    made, plain = (training(engine, settings) for engine in ("graph", "loop"))
    begin = made.server.state[MODEL]
    for _ in range(12):  # from the same weights every round: rounding is not to grow from one to the next
        for each in (made, plain):
            each.server.state = {MODEL: {name: tensor.clone() for name, tensor in begin.items()}}
        found = changes(made)
        assert ragged(made)
        alike(changes(plain), found, 1e-3)


@needs_gpu
def test_a_second_epoch() -> None:
    alike_in_one_seed([*ONE_STEP, "client.epochs=2", "client.lr=0.1"], 1e-3, 0.1)


@needs_gpu
def test_a_client_whose_update_is_not_finite_is_dropped() -> None:
    made = training("graph", THREE_STEPS)
    task: Any = made.server.task

    class Broken:
        random = False

        def __call__(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
            found = task.pixels(x, draws)
            return torch.where((x == 255).flatten(1).all(1).view(-1, 1, 1, 1), torch.nan, found)

    task.train.x[task.parts[3]] = 255
    made.server.view = replace(task, pixels=Broken())
    row = made.run_round()
    assert ragged(made)
    assert list(row["dropped"]) == ["3"]
    assert "not finite" in row["dropped"]["3"]
    assert all(bool(tensor.isfinite().all()) for tensor in made.server.state[MODEL].values())


@needs_gpu
def test_waves_do_the_same() -> None:
    alike_in_one_seed(ONE_STEP, 1e-3, 0.1, most=2)


@needs_gpu
@pytest.mark.parametrize("method", ["fedrolex", "fedprox"])  # ragged cohorts, and lanes
@pytest.mark.parametrize("share", [0.7, 0.5])
def test_a_cohort_larger_than_the_memory_runs_in_waves(method: str, share: float) -> None:
    settings = [*ONE_STEP, *{**RAGGED, **ELSEWHERE}[method], "task.width=64", 'fleet.capacities=["1"]']
    wanted = changes(training("loop", settings))
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    made = training("graph", settings)
    changes(made)
    needed = torch.cuda.memory_reserved() - before
    del made
    gc.collect()
    torch.cuda.empty_cache()
    made = training("graph", settings)
    allowed = torch.cuda.memory_reserved() + share * needed
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
    try:
        found = changes(made)
        made.evaluate()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert isinstance(made.engine, Graph)
    assert made.engine.way is not None
    assert made.engine.way.most < 8
    assert not made.engine.together
    alike(wanted, found, 1e-2)


@needs_gpu
def test_metrics_are_the_same() -> None:
    settings = [*ONE_STEP, *RAGGED["published masks"]]
    one, other = (training(engine, settings).run_round() for engine in ("loop", "graph"))
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


class InTF32(TorchFunctionMode):
    """Inside, convolutions are taken in TF32 by hand."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.conv2d:
            x, weight, bias, stride, padding, *_ = args
            assert bias is None
            return TF32.apply(x, weight, stride[0], padding[0])
        return func(*args, **(kwargs or {}))


@needs_gpu
def test_lower_precision_is_as_far_from_float32_as_it_must_be() -> None:
    """cuDNN takes layers as narrow as these partly in float32: for TF32, what is right is computed by hand."""
    exact = changes(training("loop", ONE_STEP))

    def apart(found: dict[str, Tensor]) -> float:
        each = [float((found[name] - wanted).norm() / wanted.norm()) for name, wanted in exact.items()]
        return sum(each) / len(each)

    def distance(engine: type[Graph] | type[Loop], precision: Any) -> float:
        made = training("loop", ONE_STEP)
        made.engine = engine(device=made.server.device, precision=precision)
        use_tf32(precision == "tf32")
        try:
            return apart(changes(made))
        finally:
            use_tf32(False)

    assert distance(Graph, "bf16") <= 2 * distance(Loop, "bf16")
    made = training("loop", ONE_STEP)
    with InTF32():
        by_hand = changes(made)
    assert 0 < distance(Graph, "tf32") <= 1.5 * apart(by_hand)


@needs_gpu
def test_every_time_the_same_bits() -> None:
    first, second = (changes(training("graph", THREE_STEPS), 2) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@needs_gpu
@pytest.mark.parametrize("method", ["fedrolex", "columns one by one"])
def test_an_engine_that_begins_later_gives_the_same_bits(method: str) -> None:
    """As in a run that goes on from a checkpoint: places are for all rounds, whichever was the first."""
    settings = [*THREE_STEPS, *RAGGED[method], "fleet.cohort=3"]
    whole, stopped = training("graph", settings), training("graph", settings)
    wanted = changes(whole, 5)
    before = {name: tensor.clone() for name, tensor in tensors_of(stopped).items()}
    changes(stopped, 3)
    stopped.engine = Graph(device=stopped.server.device)
    changes(stopped, 2)
    found = tensors_of(stopped)
    for name, tensor in wanted.items():
        assert torch.equal(found[name] - before[name], tensor), name


@needs_gpu
def test_a_run_goes_on_from_given_weights() -> None:
    """The server's tensors may change between rounds: they are read anew."""
    made = training("graph", THREE_STEPS)
    made.run_round()

    def zero(training: Training) -> None:
        tensors = {name: torch.zeros_like(tensor) for name, tensor in training.server.state[MODEL].items()}
        training.server.state = {MODEL: tensors}

    zero(made)
    found = changes(made)
    other = training("loop", THREE_STEPS)
    other.server.round = 1
    zero(other)
    wanted = changes(other)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-6)
