"""Data of one's own in Python: what is taken, and one clear line for what is not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_data import RECIPE, X, Y, network, split
from safetensors.torch import save_file
from told import told
from torch import Tensor, nn
from typer.testing import CliRunner

from fedrolex import (
    Callback,
    Classification,
    ClientRecipe,
    Examples,
    FedAvg,
    FedRolex,
    FleetRecipe,
    ImagesRecipe,
    Measure,
    PartitionRecipe,
    Recipe,
    Regression,
    ServerOptimizer,
    Task,
    prepare,
    train,
)
from fedrolex.cli.app import app
from fedrolex.recipes import alternatives, find_recipe
from fedrolex.tasks.partition import Partition, by_label, dirichlet, even


def classes(**changed: Any) -> Task:
    given: dict[str, Any] = {"name": "own", "build": network(), "train": Examples(X, Y), "test": Examples(X, Y)}
    return Classification(**given | {"parts": even(Y, 4, 0)} | changed)


class Frame:
    """What a table of another library is: something that gives an array."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self.values

    def __getitem__(self, rows: slice) -> Frame:
        return Frame(self.values[rows])


def read_only(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values.flags.writeable = False
    return values


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (X.numpy(), Y.numpy()),
        (X.double().numpy(), Y.int().numpy()),
        (read_only(X.numpy().copy()), Y.numpy().astype(np.uint16)),
        (X.numpy().astype(">f4"), Y.numpy()[:, None]),
        (X.numpy()[::-1][::-1], Y.bool()),
        (Frame(X.numpy()), Frame(Y.numpy())),
        (X.clone().requires_grad_(), Y.to(torch.uint8)),
    ],
)
def test_arrays_and_any_whole_numbers_are_taken(x: Any, y: Any) -> None:
    done, plain = train(RECIPE, split(x, y)), train(RECIPE, split())
    assert done.rows[0]["loss"] == plain.rows[0]["loss"]
    assert done.summary["global_accuracy"] == plain.summary["global_accuracy"]


def test_half_precision_has_a_fingerprint() -> None:
    assert split(X.bfloat16()).fingerprint() != split(X.half()).fingerprint()


def test_rows_of_clients_may_be_lists_or_arrays() -> None:
    parts: list[Any] = [[0, 2], np.array([1, 3]), torch.tensor([4, 5]), []]
    made = classes(parts=parts)
    assert [made.client(number).y.tolist() for number in range(4)] == [Y[part].tolist() for part in parts]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        said = self.net(x)
        return said, said


class Adds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1.0)


def hooked(scale: int) -> nn.Module:
    model = network()(scale)
    next(model.parameters()).register_hook(lambda gradient: gradient * 0)
    return model


def leave(scale: int) -> nn.Module:
    sys.exit("goodbye")


def nan_at(row: int) -> Tensor:
    x = X.clone()
    x[row, 1] = torch.nan
    return x


def with_target(value: int) -> Tensor:
    y = Y.clone()
    y[7] = value
    return y


ROWS = [torch.arange(15) * 4 + i for i in range(4)]
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "fewer targets": (lambda: Examples(torch.zeros(1400, 2), torch.zeros(1000)), "1,400 inputs and 1,000 targets"),
    "lists": (lambda: Examples([[1.0]], [0]), "inputs of examples are a list: give a tensor or a numpy array"),
    "words": (lambda: Examples(X, np.array(["a"] * 60)), "targets of examples are an array of <U1: give numbers"),
    "objects": (lambda: Examples(np.array([None] * 60), Y), "inputs of examples are an array of object: give numbers"),
    "a number": (lambda: Examples(torch.tensor(1.0), Y), "inputs of examples are float32 ()"),
    "sparse": (lambda: Examples(X.to_sparse(), Y), "give plain numbers"),
    "complex": (lambda: Examples(X.to(torch.complex64), Y), "inputs of examples are complex64 (60, 4)"),
    "float labels": (lambda: split(y=Y.float()), "examples are (2, 2), but the targets are 1 real numbers each"),
    "float labels of classes": (lambda: classes(train=Examples(X, Y.float())), "targets of train are float32"),
    "a negative label": (lambda: split(y=with_target(-1)), "targets of train have a -1: classes are numbers from 0"),
    "a label too many": (lambda: split(y=with_target(2)), "are (2, 2), but the targets are 3 classes"),
    "a label for training only": (lambda: split(y=with_target(99)), "but the targets are 100 classes"),
    "fewer classes than targets": (lambda: split(classes=1), "the task has a target 1, but 1 classes"),
    "one column": (lambda: split(build=network(1)), "outputs for 2 examples are (2, 1), but the targets are 2 classes"),
    "a pair": (lambda: split(build=lambda scale: Pair()), "the model gives a tuple: let its forward return one tensor"),
    "an empty test set": (lambda: split(test=Examples(X[:0], Y[:0])), "test of the task has no examples"),
    "no examples": (lambda: split(train=Examples(X[:0], Y[:0])), "train of the task has no examples"),
    "a test set that is none": (lambda: split(test=(X, Y)), "test of the task is a tuple: give Examples(x, y)"),
    "examples that are none": (lambda: split(train=X), "train of the task is a Tensor: give Examples(x, y)"),
    "other features": (lambda: split(test=Examples(X[:, :3], Y)), "inputs of test are float32 (3,) a row, those"),
    "other numbers": (lambda: split(test=Examples(X.double(), Y)), "inputs of test are float64 (4,) a row, those"),
    "a model for others": (lambda: split(x=torch.randn(60, 5)), "the model"),
    "nan": (lambda: split(x=nan_at(7)), "inputs of train are not all finite: look at row 7"),
    "nan to test on": (lambda: split(x=nan_at(45)), "inputs of test are not all finite: look at row 5"),
    "0 clients": (lambda: split(clients=0), "0 clients: give a whole number of 1 or more"),
    "half a client": (lambda: split(clients=2.5), "2.5 clients: give a whole number of 1 or more"),
    "words for clients": (lambda: split(clients="4"), "'4' clients: give a whole number of 1 or more"),
    "too many clients": (lambda: split(clients=41), "40 examples for 41 clients"),
    "other clients": (lambda: split(clients=5), "has data for 5 clients, the fleet has 4: set fleet.clients to 5"),
    "a share of words": (lambda: split(public="0.1"), "held out"),
    "nothing public": (lambda: split(public=0.001), "public of the task has no examples"),
    "no parts": (lambda: classes(parts=[]), "parts of the task are empty"),
    "no rows": (lambda: classes(parts=[[], [], [], []]), "parts of the task are empty"),
    "parts none": (lambda: classes(parts=None), "parts of the task is a NoneType: give a list"),
    "parts by name": (lambda: classes(parts={"a": [1]}), "parts of the task is a dict"),
    "real rows": (lambda: classes(parts=[[0.5], [1], [2], [3]]), "parts[0] of the task is not a list of row numbers"),
    "a mask for rows": (lambda: classes(parts=[Y > 0] * 4), "parts[0] of the task is not a list of row numbers"),
    "one row": (lambda: classes(parts=[1, 2, 3, 4]), "parts[0] of the task is not a list of row numbers"),
    "rows beyond": (lambda: classes(parts=[[60], [1], [2], [3]]), "parts[0] of the task names a row outside 0..59"),
    "test rows": (lambda: classes(parts=ROWS, test_parts=ROWS[:3]), "a task of 4 parts, 3 test parts"),
    "build takes nothing": (lambda: split(build=lambda: network()(1)), "build cannot be called with one argument"),
    "a module to build": (lambda: split(build=network()(1)), "build is a model (Sequential): give a function"),
    "a word to build": (lambda: split(build="net"), "build is a str, not what makes a model"),
    "build gives none": (lambda: split(build=lambda scale: None), "model is a NoneType, not an nn.Module"),
    "build fails": (lambda: split(build=lambda scale: [][scale]), "the model cannot be made: IndexError"),
    "build leaves": (lambda: split(build=leave), "the model cannot be made: SystemExit: goodbye"),
    "a failing loss": (lambda: classes(loss=lambda s, y: s.no), "the loss of outputs (2, 2) and targets (2,) failed"),
    "a loss by example": (lambda: classes(loss=nn.CrossEntropyLoss(reduction="none")), "the loss gives values (2,)"),
    "a loss of nothing": (lambda: classes(loss=lambda s, y: torch.zeros(())), "nothing can be trained"),
    "at rest": (lambda: split(build=lambda scale: network()(scale).requires_grad_(False)), "nothing can be trained"),
    "a rare class": (lambda: classes(rare=[2]), "rare of the task is [2]: there are classes 0 to 1"),
    "a mask": (lambda: classes(mask="zeros"), "mask of the task is 'zeros' (did you mean 'zero'?): use one"),
    "classes in words": (lambda: classes(classes="2"), "the task has a target 1, but '2' classes"),
    "public inputs": (lambda: classes(public=X), "public of the task is a Tensor: give Examples(x, y)"),
    "no clients": (lambda: classes(parts=dirichlet(Y, 0, 1.0, 0)), "0 clients: give a whole number of 1 or more"),
    "a loss of words": (lambda: classes(loss=lambda s, y: "much"), "the loss gives a str"),
    "a task for a recipe": (lambda: train(split()), "given a Classification where it takes a Recipe"),  # type: ignore[arg-type]
    "a recipe by name": (lambda: train("digits"), "train() was given a str where it takes a Recipe or None"),  # type: ignore[arg-type]
    "examples for a task": (lambda: train(RECIPE, Examples(X, Y)), "given a Examples where it takes a Task"),  # type: ignore[arg-type]
    "out": (lambda: train(RECIPE, split(), out=3), "train() was given a int where it takes a path or None"),  # type: ignore[arg-type]
    "rare words": (lambda: classes(rare=["a"]), "rare of the task is ['a']: there are classes 0 to 1"),
    "a rare number": (lambda: classes(rare=3), "rare of the task is 3: there are classes 0 to 1"),
    "half rows": (lambda: Partition.of([[0.5]]), "parts must be a list with every client's rows"),  # type: ignore[list-item]
    "no parts at all": (lambda: Partition.of(None), "parts must be a list with every client's rows"),  # type: ignore[arg-type]
    "a word for alpha": (lambda: dirichlet(Y, 4, "a", 0), "alpha is a: give a number above 0"),  # type: ignore[arg-type]
    "half a label": (lambda: by_label(Y, 2, 4, 1.5, 0), "1.5 labels a client of 2 classes"),  # type: ignore[arg-type]
    "prepared": (lambda: prepare("digits"), "prepare() was given a str where it takes a Recipe"),  # type: ignore[arg-type]
    "prepared task": (lambda: prepare(RECIPE, "x"), "prepare() was given a str where it takes a Task or None"),  # type: ignore[arg-type]
    "progress": (lambda: train(RECIPE, split(), progress=3), "progress is a int: give a function"),  # type: ignore[arg-type]
    "callbacks": (lambda: train(RECIPE, split(), callbacks=["drift"]), "give a list of Callback objects"),  # type: ignore[list-item]
    "a callback": (lambda: train(RECIPE, split(), callbacks=Callback()), "give a list of Callback objects"),  # type: ignore[arg-type]
    "rounds in words": (lambda: Recipe(rounds="3"), "rounds is '3': give at least 1, a whole number"),  # type: ignore[arg-type]
    "half a round": (lambda: Recipe(rounds=1.5), "rounds is 1.5: give at least 1, a whole number"),  # type: ignore[arg-type]
    "clients in words": (lambda: FleetRecipe(clients="4"), "fleet.clients is '4': give a whole number"),  # type: ignore[arg-type]
    "a capacity": (lambda: FleetRecipe(capacities=1), "fleet.capacities is 1: give a list"),  # type: ignore[arg-type]
    "a rate in words": (lambda: ClientRecipe(lr="0.1"), "client.lr is '0.1': give a number above 0"),  # type: ignore[arg-type]
    "a deadline": (lambda: Recipe(deadline="soon"), "deadline is 'soon': give seconds above 0"),  # type: ignore[arg-type]
    "an engine": (lambda: Recipe(engine=3), "engine is 3: give a name"),  # type: ignore[arg-type]
    "nothing to resume": (lambda: train(RECIPE, split(), resume=True), "resume=True goes on with a run that is there"),
    "two tasks": (lambda: train(RECIPE.with_settings(["task.width=4"]), split()), "a task of its own (images) beside"),
    "milestones": (lambda: ClientRecipe(milestones=3), "client.milestones is 3: give a list, each a whole number"),  # type: ignore[arg-type]
    "epochs": (lambda: ClientRecipe(epochs=1.5), "client.epochs is 1.5: give a whole number"),  # type: ignore[arg-type]
    "a huge rate": (lambda: ClientRecipe(lr=10**400), "give a number above 0"),
    "no callbacks": (lambda: Recipe(callbacks=None), "callbacks is None: give a list, each text"),  # type: ignore[arg-type]
    "a folder": (lambda: Recipe(data=Path("x")), "give text or None"),  # type: ignore[arg-type]
    "compared": (lambda: Recipe(compare="no"), "compare is 'no': give True or False"),  # type: ignore[arg-type]
    "there or not": (lambda: FleetRecipe(availability="1"), "fleet.availability is '1': give a number"),  # type: ignore[arg-type]
    "a trace": (lambda: FleetRecipe(trace=[0]), "fleet.trace is [0]: give a list"),  # type: ignore[list-item]
    "a width in words": (lambda: ImagesRecipe(width="4"), "task.width is '4': give a whole number or None"),  # type: ignore[arg-type]
    "alpha in words": (lambda: PartitionRecipe(alpha="x"), "task.partition.alpha is 'x': give a number"),  # type: ignore[arg-type]
    "metrics": (lambda: Measure(metrics=3), "evaluation.metrics is 3: give a list, each text"),  # type: ignore[arg-type]
    "no values": (lambda: Examples(X.to("meta"), Y), "inputs of examples are on the meta device: give values"),
    "masked": (lambda: Examples(np.ma.masked_greater(X.numpy(), 0), Y), "inputs of examples are a MaskedArray"),
    "complex rows": (lambda: classes(parts=[[1j], [1], [2], [3]]), "parts[0] of the task is not a list of row"),
    "data changed": (lambda: split(build=lambda scale: nn.Sequential(Adds(), network()(1))), "changes its inputs"),
    "a backward hook": (lambda: split(build=hooked), "0.weight has a backward hook, which sub-models would not call"),
    "numbers and classes": (
        lambda: split(y=X[:, :1], build=network(1), public=0.1),
        "public, validation and classes are for targets that are classes",
    ),
    "whole numbers to predict": (
        lambda: Regression("own", network(1), Examples(X, Y), Examples(X, Y), ROWS),
        "targets of train are int64: give y.float(); classes are a Classification",
    ),
    "nan to predict": (lambda: split(y=nan_at(7)[:, 1:2], build=network(1)), "targets of train are not all finite"),
    "other targets": (
        lambda: split(y=X[:, :2], test=Examples(X, X[:, :1])),
        "targets of test are (1,) a row, those of train (2,)",
    ),
    "two for one": (lambda: split(y=X[:, 0]), "are (2, 2), but the targets are 1 real numbers each"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake: str) -> None:
    make, says = MISTAKES[mistake]

    def tried() -> object:
        made = make()
        return train(RECIPE, made) if isinstance(made, Task) else made

    assert says in told(tried)


def test_words_for_every_example_cannot_be_judged_by_accuracy() -> None:
    x, y = torch.randint(0, 5, (60, 3)), torch.randint(0, 2, (60, 3))

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner, self.out = nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, words: Tensor) -> Tensor:
            scores: Tensor = self.out(torch.relu(self.inner(self.embed(words))))
            return scores.transpose(1, 2)

    assert "accuracy is measured of one class an example" in told(
        lambda: train(RECIPE, split(x, y, build=lambda _: Tagger()))
    )


def test_a_factory_that_leaves_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving.py").write_text("import sys\n\ndef model(spec=None):\n    sys.exit(3)\n")
    (tmp_path / "left.py").write_text("import sys\nsys.exit()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for words, says in (
        (["slice", "leaving:model"], "leaving:model: calling it failed: SystemExit: 3"),
        (["slice", "left:model"], "importing 'left' failed: SystemExit"),
        (
            ["train", "--set", "task.model=leaving:model"],
            "task.model leaving:model: the model cannot be made: SystemExit: 3",
        ),
    ):
        assert says in str(CliRunner().invoke(app, words).exception)


@pytest.mark.parametrize("name", ["global_accuracy", "loss", "clients"])
def test_a_metric_does_not_take_the_name_of_another(name: str) -> None:
    recipe = replace(RECIPE, evaluation=Measure(metrics=[f"test_own_data:{name}"]))
    assert "already: use another name" in told(lambda: train(recipe, split()))


def loss(outputs: Tensor, targets: Tensor) -> float:
    return 0.0


global_accuracy = clients = loss


def test_a_metric_cannot_change_the_targets() -> None:
    task = split()
    train(replace(RECIPE, evaluation=Measure(metrics=["test_own_data:wiped"])), task)
    assert isinstance(task, Classification)
    assert torch.equal(task.test.y, Y[40:])


def wiped(outputs: Tensor, targets: Tensor) -> float:
    return float(targets.zero_().sum())


def test_static_norms_are_recalibrated_whatever_the_batch() -> None:
    def build(scale: int) -> nn.Module:
        norm = nn.BatchNorm1d(8, track_running_stats=False)
        return nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Linear(8, 2))

    task = split(build=build)
    done = train(replace(RECIPE, evaluation=Measure(batch=1)), task)
    assert isinstance(task, Classification)
    with torch.no_grad():
        said = torch.cat([done.model(x[None]) for x in task.test.x]).argmax(-1)
    assert float((said == task.test.y).double().mean()) == done.summary["global_accuracy"]


WEIGHTS = dict(network()(1).named_parameters())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"0.bias": torch.zeros(8, dtype=torch.complex64)}, "is torch.complex64; this model's is torch.float32"),
        ({"0.bias": torch.zeros(8, dtype=torch.bool)}, "tensor '0.bias' is torch.bool"),
        ({"0.bias": torch.zeros(8, dtype=torch.int64)}, "tensor '0.bias' is torch.int64"),
        ({"0.bias": torch.full((8,), torch.nan)}, "tensor '0.bias' is not finite"),
        ({"4.bias": torch.zeros(8)}, "there is a tensor '4.bias', which this model has not"),
        ({"model:4.bias": torch.zeros(8)}, "there is a tensor 'model:4.bias', which this model has not"),
    ],
)  # fmt: skip
def test_weights_of_another_kind_are_refused(changed: dict[str, Tensor], says: str, tmp_path: Path) -> None:
    save_file({name: tensor.detach() for name, tensor in (WEIGHTS | changed).items()}, tmp_path / "w.safetensors")
    recipe = replace(RECIPE, weights=str(tmp_path / "w.safetensors"))
    assert says in told(lambda: prepare(recipe, split()))


def test_weights_of_another_precision_are_taken(tmp_path: Path) -> None:
    save_file({name: tensor.detach().double() for name, tensor in WEIGHTS.items()}, tmp_path / "w.safetensors")
    made = prepare(replace(RECIPE, weights=str(tmp_path / "w.safetensors")), split())
    assert all(torch.equal(made.tensors()[f"model:{name}"], tensor) for name, tensor in WEIGHTS.items())


def test_a_comparison_is_made_in_python_too(tmp_path: Path) -> None:
    recipe = replace(RECIPE, compare=True)
    done = train(recipe, split(), out=tmp_path / "run")
    assert list(done.compared) == list(alternatives(recipe))
    for number, (what, other) in enumerate(alternatives(recipe).items(), 1):
        assert done.compared[what]["run"] == str(tmp_path / f"run-alone-{number}")
        assert done.compared[what]["global_accuracy"] == train(other, split()).summary["global_accuracy"]
    again = train(replace(recipe, rounds=2), split(), out=tmp_path / "run", resume=True)
    assert [each["rounds"] for each in (again.summary, *again.compared.values())] == [2, 2, 2, 2, 2]
    assert train(recipe, split()).compared["everyone trains 1/2"]["run"] is None
    assert train(RECIPE, split()).compared == {}
    assert "exists already" in told(lambda: train(recipe, split(), out=tmp_path / "run"))


def test_a_comparison_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "run-alone-2").mkdir()
    (tmp_path / "run-alone-2" / "mine").touch()
    assert "run-alone-2 exists already" in told(
        lambda: train(replace(RECIPE, compare=True), split(), out=tmp_path / "run")
    )
    assert not (tmp_path / "run").exists()


def test_settings_of_no_optimiser_are_refused() -> None:
    says = "method.server_optimizer.lr is 0.5, but there is no optimiser: set method.server_optimizer.name"
    assert says in told(lambda: ServerOptimizer(lr=0.5))
    assert says in told(lambda: Recipe().with_settings(["method.server_optimizer.lr=0.5"]))
    assert "server_optimizer.momentum is 0.9" in told(lambda: ServerOptimizer(momentum=0.9))
    kept = Recipe().with_settings(["method.server_optimizer.lr=0.5", "method.server_optimizer=sgd"]).method
    assert kept == FedRolex(server_optimizer=ServerOptimizer(name="sgd", lr=0.5))
    old = Recipe.decode({"format": 1, "method": {"name": "fedavg", "server": {"name": "none", "lr": 0.5}}})
    assert old.method == FedAvg()


def test_a_recipe_beside_resume_counts_or_is_refused(tmp_path: Path) -> None:
    train(RECIPE, split(), out=tmp_path / "run")
    done = train(replace(RECIPE, rounds=3), split(), out=tmp_path / "run", resume=True)
    assert [len(done.rows), done.summary["rounds"]] == [3, 3]
    assert done.rows[2]["loss"] == train(replace(RECIPE, rounds=3), split()).rows[2]["loss"]
    for changed, what in (
        (replace(RECIPE, rounds=3, seed=2), "seed"),
        (replace(RECIPE, rounds=2), "rounds"),
        (replace(RECIPE, rounds=3, client=ClientRecipe(lr=0.5)), "client.lr"),
    ):
        says = f"{what} cannot be changed in {tmp_path / 'run'}"
        assert says in told(lambda changed=changed: train(changed, split(), out=tmp_path / "run", resume=True))  # type: ignore[misc]
    assert train(None, split(), out=tmp_path / "run", resume=True).summary["rounds"] == 3


def test_a_run_of_a_task_given_in_python_says_so(tmp_path: Path) -> None:
    train(RECIPE, split(), out=tmp_path / "run")
    file = str(tmp_path / "run" / "recipe.yaml")
    said = CliRunner().invoke(app, ["train", file, "--out", str(tmp_path / "again")]).exception
    assert "the recipe's task was given in Python: train it there" in str(said)
    assert not (tmp_path / "again").exists()
    recipe = find_recipe(file)
    assert train(recipe, split()).rows[0]["loss"] == train(RECIPE, split()).rows[0]["loss"]
    assert "trains a task given in Python: give it" in told(lambda: train(None, out=tmp_path / "run", resume=True))
    train(RECIPE.with_settings(["task.limit=100", "task.width=4"]), out=tmp_path / "digits")
    assert "leave the task out" in told(lambda: train(None, split(), out=tmp_path / "digits", resume=True))
