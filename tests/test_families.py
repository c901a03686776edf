"""Models of different families side by side: equal to parts of one where they are, and apart where they are not."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from methods_shared import copied, only, small
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from fedrolex import Classification, Examples, FedrolexError, Task
from fedrolex.cli.app import app
from fedrolex.clients.messages import MODEL
from fedrolex.models import VGG, Represented, ResNet
from fedrolex.recipes.recipe import Recipe
from fedrolex.runs.checkpoint import write
from fedrolex.runs.prepare import train
from fedrolex.runs.training import Training
from fedrolex.tasks.partition import even

HALF = Fraction(1, 2)
METHODS = {
    "feddf": ["method=feddf", "method.steps=6", "method.judge_every=3"],
    "fedet": ["method=fedet", "method.steps=6"],
    "dsfl": ["method=dsfl", "method.epochs=2"],
}
FLEET = ["fleet.clients=6", "fleet.cohort=6", 'fleet.capacities=["1", "1/2"]']


def half(made: Training) -> dict[str, torch.Tensor]:
    """The tensors that clients of the smaller capacity receive, where that is a part of the server's model."""
    server = made.server
    return server.main.axes.take(server.tensors(*made.method.sections(server, HALF)), server.window(0, HALF))


@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_is_a_part_of_the_other_trains_as_that_part(method: str) -> None:
    """The 1/2 of an eight channels wide network, and the same network made four wide, from the same weights."""
    plain, families = small(*METHODS[method]), small(*METHODS[method], "task.models={1/2: convnet:4}")
    assert list(families.server.networks) == [MODEL, "1/2"]
    for name, tensor in half(plain).items():
        families.server.state["1/2"][name].copy_(tensor)
    rows = [[made.run_round() for _ in range(3)] for made in (plain, families)]
    for one, other in zip(*rows, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)
        assert one["bytes_down"] == other["bytes_down"]
    if method != "dsfl":  # there, what is kept by size is not trained
        torch.testing.assert_close(families.server.state["1/2"], half(plain), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(families.server.state[MODEL], plain.server.state[MODEL], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_models_of_two_families_learn_from_each_other(method: str) -> None:
    made = small(*METHODS[method], "task.models={1/2: resnet8:4}", "evaluation.submodels=true", "client.lr=0.05")
    before, server = copied(made), made.server
    for _ in range(3):
        assert made.run_round()["clients"] == 4
    found = made.evaluate()
    assert set(found["submodels"]) == ({"1"} if method == "dsfl" else {"1", "1/2"}), "networks of clients stay there"
    stem = "trunk.stem.weight" if method == "fedet" else "stem.weight"
    moved = not torch.equal(before["1/2"][stem], server.state["1/2"][stem])
    assert moved == (method != "dsfl")  # whose clients keep their models to themselves
    if method == "dsfl":
        assert server.clients is not None
        kept = {client: server.clients.get(client) for client in range(6)}
        seen = {client: own for client, own in kept.items() if own is not None}
        assert len(seen) >= 4
        assert all(("stem.weight" in own) == (server.fleet.capacity(client) == HALF) for client, own in seen.items())


@pytest.mark.parametrize("method", METHODS)
def test_every_capacity_may_have_a_model_of_its_own(method: str) -> None:
    """FedDF then has no use for the task's model, Fed-ET and DS-FL teach it at the server."""
    made = small(*METHODS[method], "task.models={1: resnet8:4, 1/2: vgg11:2}", "task.model=convnet")
    before, server = copied(made)[MODEL], made.server
    made.run_round()
    assert all(torch.equal(before[name], t) for name, t in server.state[MODEL].items()) == (method == "feddf")
    leading = server.networks["1" if method == "feddf" else MODEL].module
    assert made.method.judged(server) is leading
    assert made.evaluate()["loss"] == pytest.approx(made.measure(server.task, leading)["loss"])


def test_what_one_kind_says_teaches_the_other() -> None:
    """Only clients of the resnet take part: the other kind still learns, from them."""
    learn = ["method=feddf", "method.steps=60", "method.judge_every=10", "method.lr=0.01", "client.epochs=8"]
    made = only(small(*learn, "task.models={1/2: resnet8:4}", "fleet.cohort=1"), [1, 3, 5])
    before = copied(made)["model@1"]["conv1.weight"]
    made.run_round()
    assert not torch.equal(before, made.server.state["model@1"]["conv1.weight"])


def test_families_of_ones_own_in_python() -> None:
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(120) % 3
    x = torch.randn(120, 1, 8, 8, generator=generator) + y[:, None, None, None]
    data = Examples(x, y)
    task = Classification(
        "mine",
        lambda scale: nn.Sequential(nn.Conv2d(1, 8 * scale, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288 * scale, 3)),
        data,
        data,
        even(y, 6, 1),
        public=data,
        validation=data,
        models={"1/2": lambda: ResNet(8, 3, 1, 8, 4)},
    )
    made = small(*FLEET, *METHODS["feddf"], task=task)
    for _ in range(3):
        assert made.run_round()["clients"] == 6
    assert made.evaluate()["global_accuracy"] > 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["method=fedavg", "task.models={1/2: resnet8}"], "fedavg brings clients together by their weights"),
        (["method=fedrolex", "task.models={1/2: resnet8}"], "(dsfl, feddf, fedet)"),
        (["method=feddf", "task.models={1/4: resnet8}"], "for capacity 1/4, which nobody in the fleet has"),
        (["method=feddf", "task.models={1/2: resnet9}"], "did you mean 'resnet8'"),
        (["method=feddf", "task.models={1/2: 'vgg11:wide'}"], "vgg11:16"),
        (["method=feddf", "task.models={half: vgg11}"], "half"),
        (["method=feddf", "task.models={0.5: vgg11, 1/2: resnet8}"], "two models for one capacity: 0.5, 1/2"),
        (["method=feddf", "task.models={1/2: 'resnet8:2'}", "task.norm=group"], "2 channels do not divide evenly"),
        (["method=fedet", "task.models={1/3: resnet8}", "fleet.server_scale=2"], "for capacity 1/3, which nobody"),
        (["method=feddf", "task.models={1/2:vgg11}"], "with a space after the colon"),
        (["method=feddf", "task.models=vgg11"], "recipe key task.models is 'vgg11'"),
        (["method=feddf", "task.models={1/2: 8}"], "use one of"),
    ],
)
def test_mistakes(settings: list[str], message: str) -> None:
    with pytest.raises(FedrolexError) as error:
        small(*settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_task_of_ones_own_puts_data_aside() -> None:
    y = torch.arange(200) % 4
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(1)) + y[:, None]
    task = Task.split(
        lambda scale: nn.Sequential(nn.Linear(6, 8 * scale), nn.ReLU(), nn.Linear(8 * scale, 4)),
        Examples(x, y),
        Examples(x, y),
        clients=6,
        public=0.1,
        validation=0.2,
    )
    assert isinstance(task, Classification)
    assert task.public is not None
    assert task.validation is not None
    assert (len(task.train), len(task.public), len(task.validation)) == (140, 20, 40)
    made = small(*FLEET, *METHODS["feddf"], task=task)
    assert made.run_round()["clients"] == 6
    with pytest.raises(FedrolexError, match="Represented"):
        small(*FLEET, *METHODS["fedet"], task=task)


def test_a_network_of_ones_own_for_fedet() -> None:
    y = torch.arange(200) % 4
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(1)) + y[:, None]
    data = Examples(x, y)

    def build(scale: int) -> nn.Module:
        trunk = nn.Sequential(nn.Linear(6, 8 * scale), nn.ReLU(), nn.Linear(8 * scale, 5))
        return Represented(trunk, 5, 4)

    task = Task.split(build, data, data, clients=6, public=0.2)
    made = small(*FLEET, *METHODS["fedet"], task=task)
    assert made.run_round()["clients"] == 6


def test_weights_of_all_networks_can_be_given(tmp_path: Path) -> None:
    settings = [*METHODS["feddf"], "task.models={1/2: resnet8:4}"]
    first = small(*settings, "seed=3")
    first.run_round()
    write(tmp_path / "weights.safetensors", first.tensors(), {})
    second = small(*settings, f"weights={tmp_path / 'weights.safetensors'}")
    assert set(second.server.state) == {MODEL, "1/2", "model@1"}
    for section, tensors in first.server.state.items():
        assert all(torch.equal(second.server.state[section][name], tensor) for name, tensor in tensors.items())
    plain = {name: torch.full_like(tensor, 0.5) for name, tensor in first.server.state[MODEL].items()}
    save_file(plain, tmp_path / "plain.safetensors")
    third = small(*settings, f"weights={tmp_path / 'plain.safetensors'}").server.state
    assert all(float(tensor.max()) == 0.5 for section in (MODEL, "model@1") for tensor in third[section].values())
    assert len({float(tensor.max()) for tensor in third["1/2"].values()}) > 3


def test_costs_are_those_of_the_networks_that_are_trained() -> None:
    words = ["--set", "method=feddf", "--set", "task.models={1: vgg11:4, 1/4: resnet8:4}", "--json"]
    done = CliRunner().invoke(app, ["costs", "digits", *words])
    found = {row["capacity"]: row["parameters"] for row in json.loads(done.stdout)["capacities"]}
    vgg, resnet = VGG(10, 1, 8, 4), ResNet(8, 10, 1, 8, 4)
    assert found["1"] == sum(p.numel() for p in vgg.parameters())
    assert found["1/4"] == sum(p.numel() for p in resnet.parameters())
    assert found["1/2"] == 6_186


def test_the_full_model_is_the_largest_one_that_is_trained() -> None:
    words = [*METHODS["feddf"], "task.models={1: resnet8:4, 1/2: vgg11:2}", "rounds=1", "task.limit=60"]
    done = train(Recipe(device="cpu").with_settings([*FLEET, *words]))
    largest = sum(p.numel() for p in ResNet(8, 10, 1, 8, 4).parameters())
    assert done.summary["bytes_of_full_model"] == 2 * 4 * largest * 6
    assert sum(p.numel() for p in done.model.parameters()) == largest


def test_targets_without_a_class_are_refused() -> None:
    data = Examples(torch.zeros(4, 2), torch.tensor([0, 1, 2, 9]))
    with pytest.raises(FedrolexError, match="a target 9, but 3 classes"):
        Classification("mine", lambda scale: nn.Linear(2, 3), data, data, even(data.y, 2, 1), classes=3)
