"""Every method on every engine that says it can: the same updates, the same metrics, the same failures.

An engine joins by being registered, a method by being listed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from methods_shared import asked, wordy
from ray_cluster import two_nodes
from torch import Tensor

from fedrolex import Classification, Examples, FedrolexError
from fedrolex.clients.messages import MODEL
from fedrolex.core.registry import ENGINES as REGISTERED
from fedrolex.core.registry import METHODS as REGISTERED_METHODS
from fedrolex.engines.gpu.precision import deterministic
from fedrolex.recipes.recipe import Recipe
from fedrolex.runs.prepare import prepare
from fedrolex.runs.training import Training
from fedrolex.tasks.pixels import Pixels

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
DEVICES = ["cpu", CUDA]
ENGINES = [
    name for name, origin in REGISTERED.origins().items() if origin == "fedrolex" and name not in ("auto", "loop")
]
FAMILIES = ["task.models={1/4: vgg11:4}", "task.norm=group"]
METHODS = {
    "fedrolex": ["method=fedrolex"],
    "fedrolex spread": ["method=fedrolex", "method.spread=true"],
    "heterofl": ["method=heterofl"],
    "fed_dropout": ["method=fed_dropout"],
    "submodels": ["method=submodels", "method.scheme=blocks"],
    "fedavg": ["method=fedavg", "method.width=1/2"],
    "norms apart": ["method=heterofl", "method.norms=per_capacity", "task.model=resnet8", "task.norm=group"],
    "adam": ["method=fedrolex", "client.optimizer=adam", "client.lr=0.002"],
    "fedprox": ["method=fedprox", "method.mu=0.5"],
    "scaffold": ["method=scaffold"],
    "scaffold I": ["method=scaffold", "method.option=I"],
    "fjord": ["method=fjord"],
    "fedbe": ["method=fedbe", "method.epochs=3"],
    "feddf": ["method=feddf", "method.steps=4", "method.judge_every=4"],
    "dsfl": ["method=dsfl", "method.epochs=1"],
    "fedet": ["method=fedet", "method.steps=4"],
    "fedgkt": ["method=fedgkt", "method.server_epochs=1"],
    "families": ["method=feddf", "task.models={1/4: vgg11:4}", "task.norm=group", "method.steps=2"],
    "families, dsfl": [
        "method=dsfl",
        "task.models={1/4: vgg11:4}",
        "task.norm=group",
        "method.epochs=1",
        "client.lr=0.02",
    ],
    "fedselect": ["method=fedselect", "client.lr=0.02"],
    "columns": ["method=columns"],
    "columns-one-by-one": ["method=columns", "method.one_by_one=true"],
    "private": ["method=private", "method.noise=0.5", "method.quantile=null", "method.clip=1.0"],
    "fedadam": ["method=fedrolex", "method.server_optimizer={name: adam, lr: 0.01}"],
    "published masks": ["method=fedrolex", "method.rows=true", "client.mask=zero"],
}
BASE = [
    "task.width=8", "task.limit=400", "fleet.clients=8", "fleet.cohort=8", "client.batch=16", "client.clip=1.0",
    "client.weight_decay=5e-4", "task.partition={name: dirichlet, alpha: 0.5}",
    'fleet.capacities=["1", "1/2", "1/4"]', "callbacks=[drift]",
]  # fmt: skip
ROUNDS = {"dsfl": 2, "families, dsfl": 2, "scaffold": 2}  # where the second round is another one than the first


def training(device: Any, engine: str, settings: Sequence[str], base: Sequence[str] = BASE) -> Training:
    """A run; skips the test where its engine is not one for the device."""
    if engine == "ray":
        two_nodes()
    try:
        return prepare(Recipe(device=device).with_settings([*base, *settings, f"engine={engine}"]))
    except FedrolexError as error:
        if not re.search(r"needs a CUDA device|trains on the cores of a CPU|fedrolex\[flower\]", str(error)):
            raise
        pytest.skip(str(error))


def willing(made: Training) -> Training:
    """The run; skips the test where its engine says that it cannot run the method's client work."""
    why = made.engine.supports(asked(made))
    if why is not None:
        pytest.skip(f"engine says: {why}")
    return made


def everything(made: Training) -> dict[str, Tensor]:
    """A copy of all real numbers that the server and its clients keep."""
    found = {f"{section}:{n}": t.clone() for section, own in made.server.state.items() for n, t in own.items()}
    states = made.server.clients
    for client in range(made.server.fleet.clients) if states is not None else ():
        assert states is not None
        found |= {f"client {client}:{name}": tensor for name, tensor in (states.get(client) or {}).items()}
    return {name: tensor for name, tensor in found.items() if tensor.is_floating_point()}


def changes(made: Training, rounds: int = 1) -> dict[str, Tensor]:
    """How far some rounds move every tensor."""
    before = everything(made)
    for _ in range(rounds):
        row = made.run_round()
        assert row["dropped"] == {}
        assert row["clients"] == len(made.server.fleet.members(made.server.round - 1))
    return {name: tensor - before.get(name, 0.0) for name, tensor in everything(made).items()}


def alike(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    """The *update* of every tensor agrees; an untrained tensor would pass a comparison of weights."""
    assert one.keys() == other.keys()
    for name, wanted in one.items():
        size = float(wanted.norm())
        assert size > 0 or not name.startswith(f"{MODEL}:"), name
        assert float((other[name] - wanted).norm()) <= tolerance * size, name


@cache
def by_loop(device: Any, method: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The reference: how far ``loop`` moves every tensor, and the metrics of its next round."""
    made = training(device, "loop", METHODS[method])
    return changes(made, ROUNDS.get(method, 1)), made.run_round()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_updates_and_metrics_are_the_same(method: str, engine: str, device: Any) -> None:
    """Metrics, too: they do not depend on whether answers are folded one by one or window by window."""
    made = willing(training(device, engine, METHODS[method]))
    wanted, row = by_loop(device, method)
    alike(wanted, changes(made, ROUNDS.get(method, 1)), 1e-3)
    now = made.run_round()
    assert now["train_loss"] == pytest.approx(row["train_loss"], rel=1e-3)
    assert now["drift"] == pytest.approx(row["drift"], rel=1e-2, abs=1e-3)
    assert {key: now[key] for key in ("bytes_down", "bytes_up", "clients")} == {
        key: row[key] for key in ("bytes_down", "bytes_up", "clients")
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_gives_what_a_cpu_gives(method: str) -> None:
    """Methods whose work no other engine runs are trained on a GPU, too."""
    (wanted, row), (found, now) = by_loop("cpu", method), by_loop("cuda", method)
    alike(wanted, {name: tensor.cpu() for name, tensor in found.items()}, 2e-2)
    assert now["train_loss"] == pytest.approx(row["train_loss"], rel=1e-2)


def test_every_method_is_here() -> None:
    own = {name for name, origin in REGISTERED_METHODS.origins().items() if origin == "fedrolex"}
    assert {settings[0].partition("=")[2] for settings in METHODS.values()} == own


@pytest.mark.parametrize(("engine", "device"), [("crew", "cpu"), pytest.param("lanes", *CUDA.values, marks=CUDA.marks)])
def test_only_steps_of_their_own_are_left_to_loop(engine: str, device: Any) -> None:
    """An engine refuses nothing else, says why, and the run gives the bits of ``loop``, as far as CUDA repeats them."""
    refused = {}
    for method in ("fedrolex", "scaffold", "scaffold I", "dsfl", "fjord", "fedgkt"):
        made = training(device, engine, METHODS[method])
        why = made.engine.supports(asked(made))
        if why is not None:
            refused[method] = why
    assert refused == {
        "scaffold I": "GradientControlledTraining has its own train",
        "fjord": "OrderedDropout has its own start, step",
        "fedgkt": "EdgeTraining has its own train",
    }
    heard: list[str] = []
    made = training(device, engine, METHODS["fjord"])
    made.say = heard.append
    found, (wanted, _) = changes(made), by_loop(device, "fjord")
    assert heard == [f"engine: loop ({refused['fjord']})"]
    alike(wanted, found, 0.0 if device == "cpu" else 1e-3)


def doubled(made: Training) -> Training:
    """The same run in double precision."""
    server, task = made.server, made.server.task
    assert isinstance(task, Classification)
    server.main.module.double()
    server.state = {section: {n: t.double() for n, t in own.items()} for section, own in server.state.items()}
    train, test = (Examples(task.inputs(part.x).double(), part.y) for part in (task.train, task.test))
    server.view = replace(task, train=train, test=test, pixels=None)
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
def test_in_double_precision_it_is_the_same_to_nine_digits(engine: str, device: Any) -> None:
    made = willing(doubled(training(device, engine, ["method=fedrolex"])))
    wanted = changes(doubled(training(device, "loop", ["method=fedrolex"])), 2)
    alike(wanted, changes(made, 2), 1e-9)


def alike_in_one_seed(device: Any, engine: str, settings: list[str], tolerance: float, most: float) -> None:
    """Every tensor's update agrees with that of ``loop`` in one of three seeds, and roughly in all; on a CPU, in one.

    For deep networks in float32 on a GPU, whose sums are other ones: a unit that just fires on one engine and just does
    not on the other moves a small tensor by a hundredth and more, as weights moved by a millionth do in ``loop``
    itself. That is rare; an error of a kernel shows in every seed.
    """
    apart: dict[str, list[float]] = {}
    for seed in (1, 2, 3) if device == "cuda" else (1,):
        made = willing(training(device, engine, [*settings, f"seed={seed}"]))
        wanted = changes(training(device, "loop", [*settings, f"seed={seed}"]), 2)
        found = changes(made, 2)
        for name, tensor in wanted.items():
            assert float(tensor.norm()) > 0, name
            apart.setdefault(name, []).append(float((found[name] - tensor).norm() / tensor.norm()))
    good = {n: any(a <= tolerance for a in each) and all(a <= most for a in each) for n, each in apart.items()}
    assert {name: apart[name] for name, fine in good.items() if not fine} == {}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
def test_two_epochs_momentum_and_a_falling_rate(engine: str, device: Any) -> None:
    settings = [
        "client.batch=20", "task.partition=iid", "client.epochs=2", "client.lr=0.02", "client.milestones=[1]",
        "task.model=preresnet18", "task.limit=300",
    ]  # fmt: skip
    alike_in_one_seed(device, engine, settings, 2e-2, 0.5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_again_gives_the_same_bits(engine: str, device: Any) -> None:
    """In the deterministic mode; cuDNN is otherwise free to add up in any order.

    Where memory runs out, cuDNN takes another algorithm, and waves get smaller: both give other bits.
    """
    before = times_out_of_memory()
    with deterministic(True):
        first, second = (changes(training(device, engine, ["method=fedrolex"]), 2) for _ in range(2))
    short = f"the GPU's memory ran out {times_out_of_memory() - before} times meanwhile"
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), f"{name}; {short}"


def times_out_of_memory() -> int:
    """How often PyTorch found no memory on the GPU in this process, whoever made do with less then."""
    return int(torch.cuda.memory_stats().get("num_ooms", 0)) if torch.cuda.is_available() else 0


class Broken(Pixels):
    """Images that are all white become values that are not finite."""

    def __call__(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        white = (x == 255).flatten(1).all(1)
        return torch.where(white.view(-1, 1, 1, 1), torch.nan, super().__call__(x, draws))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ["loop", *ENGINES])
def test_a_client_whose_update_is_not_finite_is_dropped(engine: str, device: Any) -> None:
    made = training(device, engine, ["method=heterofl"])
    task = made.server.task
    assert isinstance(task, Classification)
    assert task.pixels is not None
    task.train.x[task.parts[3].to(task.train.x.device)] = 255
    made.server.view = replace(task, pixels=Broken(**vars(task.pixels)))
    row = made.run_round()
    assert list(row["dropped"]) == ["3"]
    assert "not finite" in row["dropped"]["3"]
    assert all(bool(t.isfinite().all()) for own in made.server.state.values() for t in own.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
def test_words_too(engine: str, device: Any, tmp_path: Path) -> None:
    settings = ["task.dropout=0.0", "client.batch=4", "client.clip=1.0", "fleet.cohort=6"]
    made = willing(training(device, engine, settings, wordy(tmp_path)))
    wanted, found = changes(training(device, "loop", settings, wordy(tmp_path))), changes(made)
    for name, tensor in wanted.items():  # positions that nobody trains: averages of equal values are off by rounding
        assert float((found[name] - tensor).norm()) <= 1e-3 * float(tensor.norm()) + 2e-6, name
