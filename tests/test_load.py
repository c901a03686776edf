"""What ``train`` returns, writes into a run's folder and ``load`` reads predicts as it was measured, image by image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from told import told
from torch import Tensor, nn

from fedrolex import Classification, FedAvg, Recipe, Run, Setup, Trained, load, prepare, train
from fedrolex.clients import MODEL, Job, Network
from fedrolex.methods.fedgkt import MAPS
from fedrolex.rounds import Server
from fedrolex.runs import checkpoint
from fedrolex.slicing import Static

FEW = ["fleet.clients=6", "fleet.cohort=4", 'fleet.capacities=["1", "1/2"]', "rounds=2", "evaluation.submodels=true",
       "client.batch=32", "engine=loop"]  # fmt: skip
DIGITS = ["task.limit=90", "task.width=4"]


class Blocks(nn.Module):
    """A model of one's own, cut as its traced graph: a norm with scales and shifts, and one without."""

    def __init__(self, width: int, keep: bool) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width, track_running_stats=keep)
        self.conv = nn.Conv2d(width, 2 * width, 3, 2, padding=1)
        self.plain = nn.BatchNorm2d(2 * width, affine=False, track_running_stats=keep)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.plain(self.conv(torch.relu(self.norm(self.stem(x))))))
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


class Called(nn.Module):
    """A norm that is called as a function and keeps nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.batch_norm(self.first(x.flatten(1)), None, None, training=True)
        scores: Tensor = self.last(torch.relu(inner))
        return scores


class Sum(nn.Module):
    """An ensemble."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts]).sum(0)


@dataclass(frozen=True, kw_only=True)
class Twice(FedAvg):
    """Every client trains two networks, whose scores are added."""

    def networks(self, setup: Setup) -> dict[str, Network]:
        return {name: setup.network(lambda: setup.task.build(setup.scale), "weights", name) for name in (MODEL, "2nd")}

    def jobs(self, server: Server, round: int) -> list[Job]:
        first = super().jobs(server, round)
        second = [Job(j.client, j.capacity, j.window, "2nd", ("2nd",), name="2nd") for j in first]
        return [job for pair in zip(first, second, strict=True) for job in pair]

    def judged(self, server: Server) -> nn.Module:
        (width,) = self.sizes(server)
        window = server.window(0, width)
        return Sum([server.networks[n].axes.cut(server.loaded(network=n), window) for n in (MODEL, "2nd")])


@cache
def digits() -> Classification:
    """The images of a small run."""
    task = prepare(Recipe(device="cpu").with_settings([*FEW, *DIGITS])).server.task
    assert isinstance(task, Classification)
    return task


def own(build: Callable[[], nn.Module]) -> Classification:
    """The digits, for a model of one's own."""
    return replace(digits(), build=lambda scale: build())


def scores(model: nn.Module, task: Classification, batch: int) -> Tensor:
    """Of the test images, batch by batch."""
    with torch.no_grad():
        return torch.cat([model(task.inputs(part)) for part in task.test.x.split(batch)])


def accuracy(said: Tensor, task: Classification) -> float:
    return float((said.argmax(1) == task.test.y).double().mean())


def check(model: nn.Module, loaded: nn.Module, task: Classification, measured: float) -> None:
    """A model gives the accuracy that was measured, with all images at once and one by one; so does the loaded one."""
    assert not model.training
    assert not loaded.training
    together, alone = scores(model, task, 90), scores(model, task, 1)
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5)
    assert accuracy(together, task) == accuracy(alone, task) == measured
    assert torch.equal(scores(loaded, task, 90), together)


RUNS: dict[str, tuple[list[str], Callable[[], nn.Module] | None, str | None]] = {
    "modules": (["task.model=preresnet18", "method.norms=per_capacity"], None, "recalibrated"),
    "graphs": ([], lambda: Blocks(8, False), "recalibrated"),
    "one width of modules": (["method=fedavg", "method.width=1/2", "task.model=preresnet18"], None, "recalibrated"),
    "one width of a graph": (["method=fedavg", "method.width=1/2"], lambda: Blocks(8, False), "recalibrated"),
    "networks of their own": (
        ["method=feddf", "method.steps=2", 'task.models={"1": "vgg11:2", "1/2": "resnet8:4"}'], None, "recalibrated"
    ),
    "running statistics": (["task.model=resnet8", "task.norm=batch"], None, "running"),
    "running statistics of a graph": ([], lambda: Blocks(8, True), "running"),
    "statistics by width": (["method=fjord", "task.model=resnet8", "task.norm=batch"], None, "running"),
    "no norms": ([], None, None),
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_one_image_and_all_of_them_give_what_was_measured(case: str, tmp_path: Path) -> None:
    settings, build, statistics = RUNS[case]
    task = None if build is None else own(build)
    recipe = Recipe(device="cpu").with_settings([*FEW, *([] if task else DIGITS), *settings])
    done = train(recipe, task, out=tmp_path / "run")
    data, summary = done.models.server.task, done.summary
    assert isinstance(data, Classification)
    assert summary["statistics"] == statistics
    check(done.model, load(tmp_path / "run", task=task), data, summary["global_accuracy"])
    for level, measured in summary.get("submodels", {}).items():
        part, written = done.submodel(level), tmp_path / "run" / f"submodel-{level.replace('/', '-')}.safetensors"
        assert summary["submodel_statistics"][level] == statistics
        assert load_file(written).keys() == part.state_dict().keys()
        loaded = load(tmp_path / "run", level, task=task) if level == "1/2" else part
        check(part, loaded, data, measured)
    assert ("submodels" in summary) == ("one width" not in case)
    assert accuracy(scores(done.model, data, 1), data) == summary["global_accuracy"]  # still, after sub-models were cut


@pytest.mark.parametrize("keep", [False, True])
def test_an_ensemble_predicts_as_it_was_measured(keep: bool, tmp_path: Path) -> None:
    task = own(lambda: Blocks(8, keep))
    recipe = replace(Recipe(device="cpu").with_settings(FEW), method=Twice(width="1/2"))
    done = train(recipe, task, out=tmp_path / "run")
    assert done.summary["statistics"] == ("running" if keep else "recalibrated")
    assert isinstance(done.model, Sum)
    made = prepare(recipe, task)
    made.restore(checkpoint.read(tmp_path / "run" / "checkpoint.safetensors")[0], 2)
    check(done.model, load(tmp_path / "run", task=task), task, done.summary["global_accuracy"])
    assert made.evaluate()["global_accuracy"] == done.summary["global_accuracy"]


def unlike_itself(model: nn.Module, task: Classification) -> bool:
    return not torch.allclose(scores(model, task, 2), scores(model, task, 90), atol=1e-2)


def test_test_batches_stay_what_was_asked_for(tmp_path: Path) -> None:
    """A model that was measured batch by batch has no statistics: its scores depend on the batch, as they did."""
    task = own(lambda: Blocks(8, False))
    recipe = Recipe(device="cpu").with_settings([*FEW, "evaluation.statistics=test-batch", "evaluation.batch=90"])
    done = train(recipe, task, out=tmp_path / "run")
    loaded = load(tmp_path / "run", task=task)
    assert done.summary["statistics"] == "test-batch"
    assert done.summary["submodel_statistics"] == {"1": "test-batch", "1/2": "test-batch"}
    for model in (done.model, loaded):
        assert accuracy(scores(model, task, 90), task) == done.summary["global_accuracy"]
        assert unlike_itself(model, task)


def test_a_norm_that_is_called_as_a_function_is_told_apart() -> None:
    """There is nothing in the module that could hold statistics, but there is in a graph."""
    task = own(lambda: Called(16))
    done = train(Recipe(device="cpu").with_settings(FEW), task)
    assert done.summary["statistics"] == "test-batch"
    assert unlike_itself(done.model, task)
    assert done.summary["submodel_statistics"] == {"1": "recalibrated", "1/2": "recalibrated"}
    assert accuracy(scores(done.submodel("1/2"), task, 1), task) == done.summary["submodels"]["1/2"]


def test_fedgkts_network_for_feature_maps_takes_one(tmp_path: Path) -> None:
    settings = [*FEW, "method=fedgkt", "task.limit=90", "task.model=preresnet18", "task.width=4"]
    done = train(Recipe(device="cpu").with_settings(settings), out=tmp_path / "run")
    maps = torch.rand(8, MAPS, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together, alone = done.model(maps), torch.cat([done.model(each[None]) for each in maps])
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5)
    assert torch.equal(load(tmp_path / "run")(maps), together)
    assert done.summary["statistics"] == "recalibrated"
    assert "fedgkt has no sub-models to give" in told(lambda: done.submodel("1"))


# --- what else there is to load ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained, Classification]:
    """A run that measured no sub-models."""
    folder, task = tmp_path_factory.mktemp("runs") / "run", own(lambda: Blocks(8, False))
    recipe = Recipe(device="cpu").with_settings([*FEW, "evaluation.submodels=false"])
    return folder, train(recipe, task, out=folder), task


Finished = tuple[Path, Trained, Classification]


def test_what_was_not_written_is_made_from_the_checkpoint(finished: Finished) -> None:
    folder, done, task = finished
    assert [file.name for file in folder.glob("*model*.safetensors")] == ["model.safetensors"]
    half = load(folder, "1/2", task=task)
    assert torch.equal(scores(half, task, 90), scores(done.submodel("1/2"), task, 90))
    (folder / "model.safetensors").rename(folder / "aside")
    again = load(folder, task=task)
    (folder / "aside").rename(folder / "model.safetensors")
    assert torch.equal(scores(again, task, 90), scores(done.model, task, 90))


def test_a_model_of_another_round_is_not_taken(finished: Finished) -> None:
    folder, done, task = finished
    written = (folder / "model.safetensors").read_bytes()
    tensors, _ = checkpoint.read(folder / "model.safetensors")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    checkpoint.write(folder / "model.safetensors", zeros, {"round": "1"})
    assert torch.equal(scores(load(folder, task=task), task, 90), scores(done.model, task, 90))
    (folder / "model.safetensors").write_bytes(written)


def test_a_model_that_the_run_did_not_write_is_refused(finished: Finished) -> None:
    """Though whole, of the right round and shapes; a run from before checkpoints said what was written takes it."""
    folder, _, task = finished
    path, last = folder / "model.safetensors", folder / "checkpoint.safetensors"
    kept = path.read_bytes(), last.read_bytes()
    tensors, about = checkpoint.read(path)
    checkpoint.write(path, {name: 2 * tensor for name, tensor in tensors.items()}, about)
    assert f"{path} is not the model that this run wrote: put it back, or" in told(lambda: load(folder, task=task))
    state, about = checkpoint.read(last)
    del about[path.name]
    checkpoint.write(last, state, about)
    assert torch.equal(load(folder, task=task).state_dict()["head.bias"], 2 * tensors["head.bias"])
    checkpoint.write(path, {"other": torch.zeros(1)}, {"round": "2"})
    assert "does not fit the run's model" in told(lambda: load(folder, task=task))
    path.write_bytes(kept[0])
    last.write_bytes(kept[1])


def test_the_whole_model_is_there_to_cut_from() -> None:
    """Of a one-width method, too, whose model is a part."""
    done = train(Recipe(device="cpu").with_settings([*FEW, *DIGITS, "method=fedavg", "method.width=1/2"]))
    part = done.axes.cut(done.whole, Static().window(done.axes, round=1, capacity="1/2"))
    mine, cut = (model.state_dict() for model in (done.model, part))
    assert mine.keys() == cut.keys()
    assert all(torch.equal(mine[name], cut[name]) for name in cut)
    assert sum(p.numel() for p in done.whole.parameters()) == done.axes.parameters()


def test_mistakes(finished: Finished, tmp_path: Path) -> None:
    folder, done, task = finished
    assert "no client trains capacity 1/3: give one of 1, 1/2" in told(lambda: done.submodel("1/3"))
    assert "no client trains capacity 1/3" in told(lambda: load(folder, "1/3", task=task))
    assert "trains a task given in Python" in told(lambda: load(folder))
    assert "is not a run" in told(lambda: load(tmp_path))
    fewer = replace(task, parts=[part[1:] for part in task.parts])
    assert "data" in told(lambda: load(folder, "1/2", task=fewer))
    recipe = Recipe(device="cpu").with_settings([*FEW, *DIGITS])
    Run.create(tmp_path / "new", recipe)
    assert "there is no file" in told(lambda: load(tmp_path / "new"))


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_training_and_loading_do_not_mind_where_gradients_are_off(
    around: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    with around():
        done = train(Recipe().with_settings([*FEW, *DIGITS, "rounds=1"]), out=tmp_path / "run")
        model = load(tmp_path / "run")
    x = torch.zeros(1, 1, 8, 8)
    assert torch.equal(model(x), done.model(x))
