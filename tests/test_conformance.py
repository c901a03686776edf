"""Every method on every engine: the same updates, the same failures. An engine or a method joins by being listed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedrolex import Recipe
from fedrolex.engines import Crew, Engine, Graph, Loop, Stack
from fedrolex.engines.gpu.precision import deterministic
from fedrolex.runs import Training, prepare

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
ENGINES: dict[str, Callable[[nn.Module], Engine]] = {
    "graph": Graph,
    "graph in waves": lambda model: Graph(model, most=2),
    "stack": Stack,
    "crew": lambda model: Crew(model, workers=2),
    "crew in waves": lambda model: Crew(model, workers=3, room=200_000),
}
METHODS = {
    "fedrolex": ["method=fedrolex"],
    "fedrolex spread": ["method=fedrolex", "method.spread=true"],
    "heterofl": ["method=heterofl"],
    "fed_dropout": ["method=fed_dropout"],
    "fedavg": ["method=fedavg", "method.width=1/2"],
    "norms apart": ["method=heterofl", "method.norms=per_capacity"],
    "adam": ["method=fedrolex", "client.optimizer=adam", "client.lr=0.002"],
    "fedprox": ["method=fedprox", "method.mu=0.5"],
    "scaffold": ["method=scaffold", "method.denominator=momentum"],
    "fedbe": ["method=fedbe", "method.ensemble={epochs: 3}"],
    "feddf": ["method=feddf", "method.distillation={steps: 4, judge_every: 4}"],
    "dsfl": ["method=dsfl", "method.labels={epochs: 1}"],
    "fedet": ["method=fedet", "method.transfer={steps: 4}"],
    "families": ["method=feddf", "task.models={1/4: vgg11:4}", "task.norm=group", "method.distillation={steps: 2}"],
    "fedselect": ["method=fedselect", "client.lr=0.02"],
    "fedadam": ["method=fedrolex", "method.server={name: adam, lr: 0.01}"],
    "published masks": ["method=fedrolex", "method.rows=true", "client.mask=zero"],
}
BASE = [
    "task.width=8", "fleet.clients=8", "fleet.cohort=8", "client.batch=16", "client.clip=1.0",
    "client.weight_decay=5e-4", "task.partition={name: dirichlet, alpha: 0.5}",
    'fleet.capacities=["1", "1/2", "1/4"]',
]  # fmt: skip


def training(device: str, engine: str, settings: list[str]) -> Training:
    made = prepare(Recipe(device=device).with_settings([*BASE, *settings]))
    for each in made.kinds():
        each.engine = Loop(each.model) if engine == "loop" else ENGINES[engine](each.model)
    return made


def doubled(made: Training) -> Training:
    made.model.double()
    made.state = {name: tensor.double() for name, tensor in made.state.items()}
    task: Any = made.task
    from dataclasses import replace

    from fedrolex import Examples

    made.task = replace(task, train=Examples(task.inputs(task.train.x).double(), task.train.y), pixels=None)
    return made


def changes(made: Training, rounds: int = 1) -> dict[str, Tensor]:
    before = {name: tensor.clone() for name, tensor in made.state.items()}
    for _ in range(rounds):
        row = made.run_round()
        assert row["dropped"] == {}
        assert row["clients"] == len(made.fleet.members(made.round - 1))
    return {name: made.state[name] - before[name] for name in before if before[name].is_floating_point()}


def alike(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    """The *update* of every tensor agrees; an untrained tensor would pass a comparison of weights."""
    for name, wanted in one.items():
        assert float(wanted.norm()) > 0, name
        assert float((other[name] - wanted).norm() / wanted.norm()) <= tolerance, name


def alike_in_one_seed(
    device: str, engine: str, settings: list[str], tolerance: float, most: float, rounds: int = 1
) -> list[Training]:
    """Every tensor's update agrees with that of ``loop`` in one of three seeds, and roughly in all; on a CPU, in one.

    For deep networks in float32 on a GPU, whose sums are other ones: a unit that just fires on one engine and just does
    not on the other moves a small tensor by a hundredth and more, as weights moved by a millionth do in ``loop``
    itself. That is rare; an error of a kernel shows in every seed. Returns what trained on the engine.
    """
    apart: dict[str, list[float]] = {}
    trained = []
    for seed in (1, 2, 3) if device == "cuda" else (1,):
        wanted = changes(training(device, "loop", [*settings, f"seed={seed}"]), rounds)
        trained.append(training(device, engine, [*settings, f"seed={seed}"]))
        found = changes(trained[-1], rounds)
        for name, tensor in wanted.items():
            assert float(tensor.norm()) > 0, name
            apart.setdefault(name, []).append(float((found[name] - tensor).norm() / tensor.norm()))
    good = {n: any(a <= tolerance for a in each) and all(a <= most for a in each) for n, each in apart.items()}
    assert {name: apart[name] for name, fine in good.items() if not fine} == {}
    return trained


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_the_update_of_a_round_is_the_same(method: str, engine: str, device: str) -> None:
    wanted = changes(training(device, "loop", METHODS[method]))
    alike(wanted, changes(training(device, engine, METHODS[method])), 1e-3)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "fedselect"])  # there everyone differs
def test_clients_of_one_size_are_really_stacked(method: str) -> None:
    """With as many examples each, nothing is left to the loop, and the updates are the same."""
    settings = [*METHODS[method], "task.partition=iid", "task.limit=400", "client.batch=16"]
    made = training("cpu", "stack", settings)
    for each in made.kinds():
        assert isinstance(each.engine, Stack)
        each.engine.loop.run = lambda plan: iter(())  # type: ignore[method-assign]
    alike(changes(training("cpu", "loop", settings)), changes(made), 1e-3)
    assert made.round == 1


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("engine", ENGINES)
def test_in_double_precision_it_is_the_same_to_nine_digits(engine: str, device: str) -> None:
    wanted = changes(doubled(training(device, "loop", ["method=fedrolex"])), 2)
    alike(wanted, changes(doubled(training(device, engine, ["method=fedrolex"])), 2), 1e-9)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("engine", ENGINES)
def test_two_epochs_momentum_and_a_falling_rate(engine: str, device: str) -> None:
    settings = [
        "client.batch=20",
        "task.partition=iid",
        "client.epochs=2",
        "client.lr=0.02",
        "client.milestones=[1]",
        "task.model=preresnet18",
        "task.limit=300",
    ]
    alike_in_one_seed(device, engine, settings, 2e-2, 0.5, rounds=2)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_again_gives_the_same_bits(engine: str, device: str) -> None:
    """In the deterministic mode; cuDNN is otherwise free to add up in any order."""
    with deterministic(True):
        first, second = (changes(training(device, engine, ["method=fedrolex"]), 2) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_steps_do_the_same_in_double_precision() -> None:
    settings = ["method=fedrolex", "client.mask=zero", "method.rows=true"]
    wanted = changes(doubled(training("cuda", "loop", settings)), 2)
    made = doubled(training("cuda", "loop", settings))
    made.engine = Graph(made.model, compiled=True)
    alike(wanted, changes(made, 2), 1e-9)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("engine", ["loop", *ENGINES])
def test_a_client_whose_update_is_not_finite_is_dropped(engine: str, device: str) -> None:
    made = training(device, engine, ["method=heterofl"])
    task: Any = made.task
    task.train.x[task.parts[3]] = 255
    pixels = task.pixels
    from dataclasses import replace

    class Broken:
        random = False

        def __call__(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
            found = pixels(x, draws)
            white = (x == 255).flatten(1).all(1)
            return torch.where(white.view(-1, 1, 1, 1), torch.nan, found)

    made.task = replace(task, pixels=Broken())
    row = made.run_round()
    assert list(row["dropped"]) == ["3"]
    assert "not finite" in row["dropped"]["3"]
    assert all(bool(tensor.isfinite().all()) for tensor in made.state.values())


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("engine", ENGINES)
def test_words_too(engine: str, device: str, tmp_path: Any) -> None:
    from test_tasks import WORDS, corpus

    file = corpus(tmp_path / "users.jsonl")
    settings = [*WORDS, f"task.data={file}", "task.dropout=0.0", "client.batch=10"]

    def made(name: str) -> Training:
        found = prepare(Recipe(device=device).with_settings(settings))
        found.engine = Loop(found.model) if name == "loop" else ENGINES[name](found.model)
        return found

    wanted, found = changes(made("loop")), changes(made(engine))
    for name, tensor in wanted.items():
        assert float((found[name] - tensor).norm()) <= 1e-3 * float(tensor.norm()) + 1e-6, name


@pytest.mark.parametrize("method", METHODS)
def test_folded_together_the_metrics_of_a_round_are_the_same(method: str) -> None:
    """Drift, loss and bytes do not depend on whether updates are folded one by one or window by window."""
    one, other = (training("cpu", engine, METHODS[method]).run_round() for engine in ("loop", "graph"))
    assert other["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)
    assert {key: one[key] for key in ("bytes_down", "bytes_up", "clients")} == {
        key: other[key] for key in ("bytes_down", "bytes_up", "clients")
    }
    assert other["drift"] == pytest.approx(one["drift"], rel=1e-3, abs=1e-4)
