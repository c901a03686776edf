"""Offsets of classes: what they are, what they are found by, and that a model has them wherever it goes."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from told import told
from torch import Tensor, nn

from fedrolex import Classification, Examples, Measure, Recipe, Run, Task, Training, export, load, prepare, train
from fedrolex.core import FedrolexError
from fedrolex.models import OffsetSums, WithOffsets, class_offsets, find_offsets
from fedrolex.runs import checkpoint
from fedrolex.runs.model import filled

LABELS = [
    "fleet.clients=10", "fleet.cohort=4", "rounds=12", "task.width=8", "task.partition={name: labels, labels: 2}",
    "client.mask=zero", "engine=loop", "device=cpu", "evaluation.offsets=true", "evaluate_every=12",
]  # fmt: skip
RECIPE = Recipe().with_settings(LABELS)


class Given(nn.Module):
    """Inputs are the scores."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Infinite(nn.Module):
    """Of no use."""

    def forward(self, x: Tensor) -> Tensor:
        return 1 / torch.zeros_like(x)


def task(scores: Tensor, y: Tensor, test_y: Tensor | None = None) -> Task:
    """Whose model gives these scores, for training examples and, from the last to the first, test examples."""
    test = Examples(scores.flip(0), (y if test_y is None else test_y).flip(0))
    return Classification("scores", lambda scale: Given(), Examples(scores, y), test, [torch.arange(len(y))])


def trained(recipe: Recipe, rounds: int = 12) -> Training:
    made = prepare(recipe)
    for _ in range(rounds):
        made.run_round()
    return made


# --- what they are ---


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 8), st.integers(0, 1000), st.sampled_from([0.1, 3.0, 40.0]))
def test_devices_that_add_up_their_sums_find_what_one_with_all_examples_finds(
    classes: int, seed: int, size: float
) -> None:
    """In a dozen steps or so, each of which is a sum of a few numbers, of devices that hold two classes each."""
    draw = torch.Generator().manual_seed(seed)
    scores, y = size * torch.randn(200, classes, generator=draw), torch.randint(classes, (200,), generator=draw)
    devices = [(scores[mine], y[mine]) for pair in range((classes + 1) // 2) if (mine := y // 2 == pair).any()]
    asked = 0

    def ask(offsets: Tensor) -> OffsetSums:
        nonlocal asked
        asked += 1
        first, *others = (OffsetSums.of(*device, offsets) for device in devices)
        for other in others:
            first = first + other
        return first

    found = find_offsets(ask, classes)
    torch.testing.assert_close(found.float(), class_offsets(scores, y), atol=1e-6, rtol=0)
    assert asked < 40


def test_a_class_of_which_no_device_has_an_example_is_left_out() -> None:
    """A server that asks its fleet does not know beforehand which classes these are."""
    scores = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 3] * 20)
    found = find_offsets(lambda offsets: OffsetSums.of(scores, y, offsets), 4)
    torch.testing.assert_close(found.float(), class_offsets(scores, y), atol=1e-6, rtol=0)
    assert found[2] == 0


@pytest.mark.parametrize("size", [0.5, 5.0, 50.0])
def test_nothing_near_them_is_better(size: float) -> None:
    """What is least is the mean loss and a thousandth of the offsets' mean square, offsets without their mean."""
    draw = torch.Generator().manual_seed(0)
    scores, y = size * torch.randn(300, 5, generator=draw), torch.randint(5, (300,), generator=draw)

    def cost(offsets: Tensor) -> float:
        return float(nn.functional.cross_entropy(scores + offsets, y) + 1e-3 * offsets.square().mean())

    found = class_offsets(scores.double(), y)
    scores = scores.double()
    for way in range(5):
        for far in (0.03, -0.03):
            assert cost(found) < cost(found + far * torch.eye(5)[way])


def test_without_scores_they_are_the_logarithms_of_how_frequent_classes_are() -> None:
    found = class_offsets(torch.zeros(40, 2), torch.tensor([0] * 30 + [1] * 10))
    torch.testing.assert_close(found, torch.tensor([1.0, -1.0]) * log(3) / 2, atol=0.01, rtol=0)


def test_a_class_without_examples_has_none() -> None:
    scores = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 3] * 20)
    found = class_offsets(scores, y)
    assert found[2] == 0
    torch.testing.assert_close(found[[0, 1, 3]], class_offsets(scores[:, [0, 1, 3]], torch.tensor([0, 1, 2] * 20)))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(-3, 3), min_size=3, max_size=3), st.integers(0, 1000))
def test_they_undo_what_was_added_to_a_class(added: list[float], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    true = 2 * torch.randn(600, 3, generator=draw)
    y = torch.multinomial(true.softmax(1), 1, generator=draw).flatten()
    shift = torch.tensor(added)
    found, plain = class_offsets(true - shift, y), class_offsets(true, y)
    torch.testing.assert_close(found, plain + shift - shift.mean(), atol=0.1, rtol=0)
    assert abs(float(found.sum())) < 1e-4


@pytest.mark.parametrize("large", [50.0, 6e4, 1e30])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_whatever_the_scores_they_are_finite_and_explain_them_no_worse(kind: torch.dtype, large: float) -> None:
    draw = torch.Generator().manual_seed(0)
    scores = (torch.randn(200, 4, generator=draw) * large).clamp(-6e4 if kind is torch.float16 else -1e30).to(kind)
    scores = scores.clamp(max=6e4) if kind is torch.float16 else scores
    y = torch.randint(0, 4, (200,), generator=draw)
    found = class_offsets(scores, y)
    before, after = (nn.functional.cross_entropy((scores + each).double(), y) for each in (0 * found, found))
    assert bool(found.isfinite().all())
    assert float(after) <= float(before) * 1.0001 + 1e-6


def test_scores_that_are_always_right_leave_them_finite() -> None:
    y = torch.arange(10).repeat(5)
    found = class_offsets(50.0 * nn.functional.one_hot(y, 10), y)
    assert bool(found.isfinite().all())
    assert float(found.abs().max()) < 1


# --- what a model is measured with ---


def test_a_measured_model_has_them_and_the_accuracy_without_them_stands_beside() -> None:
    """Client 0 has classes 0 and 1, client 1 has 2 and 3; the scores of the second are all too high."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(4).repeat(100)
    scores = 4.0 * nn.functional.one_hot(y, 4) + torch.randn(400, 4, generator=draw) + torch.tensor([0, 0, 9.0, 9.0])
    found = Measure(offsets=True)(task(scores, y), Given())
    assert found["accuracy_as_trained"] == Measure()(task(scores, y), Given())["global_accuracy"] < 0.6
    assert found["global_accuracy"] > 0.95
    assert "accuracy_as_trained" not in Measure()(task(scores, y), Given())


def test_no_test_example_is_looked_at() -> None:
    draw = torch.Generator().manual_seed(0)
    scores, y = torch.randn(90, 3, generator=draw), torch.arange(3).repeat(30)
    one, other = (
        Measure(offsets=True).ready(task(scores, y, test_y), Given()) for test_y in (y, torch.zeros(90).long())
    )
    assert isinstance(one, WithOffsets)
    assert isinstance(other, WithOffsets)
    assert torch.equal(one.class_offsets, other.class_offsets)


def test_examples_that_were_put_aside_come_first() -> None:
    draw = torch.Generator().manual_seed(0)
    scores, y = torch.randn(90, 3, generator=draw), torch.arange(3).repeat(30)
    made = task(scores, y)
    assert isinstance(made, Classification)
    aside = Examples(scores[:50], torch.zeros(50).long().index_fill(0, torch.arange(20), 1))
    ready = Measure(offsets=True).ready(replace(made, validation=aside), Given())
    assert isinstance(ready, WithOffsets)
    assert torch.equal(ready.class_offsets, class_offsets(aside.x, aside.y))


@pytest.mark.parametrize("method", ["fedrolex", "heterofl", "columns"])
def test_where_clients_hold_two_labels_they_help(method: str) -> None:
    found = trained(RECIPE.with_settings([f"method={method}", "rounds=30"]), 30).evaluate()
    assert found["global_accuracy"] > found["accuracy_as_trained"] + 0.01


def test_validation_accuracy_is_of_scores_as_trained_since_offsets_are_fitted_on_these_examples() -> None:
    recipe = RECIPE.with_settings(["method=heterofl", "rounds=6", "task.validation=0.2"])
    found, plain = (
        trained(recipe.with_settings([f"evaluation.offsets={offsets}"]), 6).evaluate() for offsets in ("true", "false")
    )
    assert found["validation_accuracy"] == plain["validation_accuracy"]
    assert found["accuracy_as_trained"] == plain["global_accuracy"] != found["global_accuracy"]


def test_training_does_not_see_them() -> None:
    with_them, without = trained(RECIPE, 3), trained(RECIPE.with_settings(["evaluation.offsets=false"]), 3)
    with_them.evaluate()
    assert all(torch.equal(t, without.server.state["model"][n]) for n, t in with_them.server.state["model"].items())


# --- wherever it goes ---


@pytest.mark.parametrize("method", ["fedrolex", "columns"])
def test_they_are_in_what_a_run_returns_and_in_its_folder(method: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = RECIPE.with_settings([f"method={method}", "rounds=3", "evaluation.submodels=true"])
    done = train(recipe, out=folder)
    x = prepare(recipe).server.task.example()
    for mine, theirs in ((done.model, load(folder)), (done.submodel("1/4"), load(folder, "1/4"))):
        assert isinstance(mine, WithOffsets)
        assert isinstance(theirs, WithOffsets)
        assert bool(mine.class_offsets.any())
        assert torch.equal(mine(x), theirs(x))
    (folder / "submodel-1-4.safetensors").unlink()
    assert torch.equal(load(folder, "1/4")(x), done.submodel("1/4")(x))


@pytest.mark.parametrize("method", ["heterofl", "columns"])
def test_an_exported_model_has_its_own(method: str, tmp_path: Path) -> None:
    recipe = RECIPE.with_settings([f"method={method}", "rounds=3"])
    train(recipe, out=tmp_path / "run")
    done = export(tmp_path / "run", "1/4", tmp_path / "quarter", formats=["pt2"], windows=1)
    x = prepare(recipe).server.task.example()
    back = load(tmp_path / "quarter")
    assert isinstance(done.model, WithOffsets)
    assert isinstance(back, WithOffsets)
    assert torch.equal(back(x), done.model(x))
    program = torch.export.load(tmp_path / "quarter" / "model.pt2").module()
    torch.testing.assert_close(program(x), done.model(x))


class Running(nn.Module):
    """A norm with statistics of its own; and tensors that are called as offsets are."""

    def __init__(self, width: int, named: bool) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))
        if named:
            self.class_offsets = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.model(x)
        return scores + self.class_offsets if "class_offsets" in self._parameters else scores


@pytest.mark.parametrize("named", [False, True])
def test_models_of_ones_own_come_back_as_they_were_measured(named: bool, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(3).repeat(60)
    x = nn.functional.one_hot(y, 4).float() + torch.randn(180, 4, generator=draw)
    train_part, test_part = Examples(x[:120], y[:120]), Examples(x[120:], y[120:])
    made = Task.split(lambda scale: Running(16 * scale, named), train_part, test_part, clients=6)
    few = ["fleet.clients=6", "fleet.cohort=3", "rounds=3", "method=heterofl", "engine=loop", "device=cpu"]
    recipe = Recipe().with_settings([*few, "evaluation.offsets=true", "callbacks=[]", "fleet.capacities=[1, 1/4]"])
    done = train(recipe, made, out=tmp_path / "run")
    assert torch.equal(load(tmp_path / "run", task=made)(x), done.model(x))
    for capacity in ("1", "1/4"):
        folder = tmp_path / capacity.replace("/", "-")
        out = export(tmp_path / "run", capacity, folder, task=made, formats=[], windows=1)
        back = load(folder, task=made)
        assert not any(module.training for module in out.model.modules())
        assert torch.equal(back(x), out.model(x))
        right = (back(test_part.x).argmax(1) == test_part.y).double().mean()
        assert float(right) == pytest.approx(out.report["test"]["after"])


def test_a_task_in_double_precision_has_them_in_double(tmp_path: Path) -> None:
    y = torch.arange(3).repeat(40)
    x = nn.functional.one_hot(y, 4).double()
    made = Task.split(
        lambda scale: nn.Linear(4, 3).double(), Examples(x[:90], y[:90]), Examples(x[90:], y[90:]), clients=3
    )
    few = ["fleet.clients=3", "fleet.cohort=3", "rounds=1", "method=fedavg", "engine=loop", "device=cpu"]
    recipe = Recipe().with_settings([*few, "evaluation.offsets=true", "callbacks=[]", "fleet.capacities=[1]"])
    done = train(recipe, made, out=tmp_path / "run")
    assert done.model(x).dtype == torch.float64
    assert torch.equal(load(tmp_path / "run", task=made)(x), done.model(x))


def test_they_are_read_to_where_the_model_is() -> None:
    tensors = {**{f"model.{name}": tensor for name, tensor in nn.Linear(4, 3).state_dict().items()}}
    tensors["class_offsets"] = torch.ones(3)
    with torch.device("meta"):
        bare = nn.Linear(4, 3)
    found = filled(bare, tensors, lambda module: module.state_dict(), 3, "it does not fit")
    assert {tensor.device.type for tensor in found.state_dict().values()} == {"meta"}


@pytest.mark.parametrize("wrong", [torch.zeros(9), torch.zeros(1), torch.zeros(()), torch.zeros(10).long()])
def test_offsets_that_fit_no_model_are_refused(wrong: Tensor, tmp_path: Path) -> None:
    train(RECIPE.with_settings(["rounds=1"]), out=tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    tensors, about = checkpoint.read(path)
    about.pop(checkpoint.CHECKSUM, None)
    checkpoint.write(path, {**tensors, "class_offsets": wrong}, about)
    kept, said = checkpoint.read(tmp_path / "run" / "checkpoint.safetensors")
    said.pop(path.name, None)
    said.pop(checkpoint.CHECKSUM, None)
    checkpoint.write(tmp_path / "run" / "checkpoint.safetensors", kept, said)
    assert told(lambda: load(tmp_path / "run")) == (
        f"{path} does not fit the run's model: look at tensor 'class_offsets'"
    )


def test_a_run_that_was_measured_without_is_exported_with_them(tmp_path: Path) -> None:
    train(RECIPE.with_settings(["method=heterofl", "rounds=3", "evaluation.offsets=false"]), out=tmp_path / "run")
    plain, offset = (
        export(tmp_path / "run", "1/4", tmp_path / str(offsets), formats=[], windows=1, offsets=offsets)
        for offsets in (False, True)
    )
    assert not isinstance(plain.model, WithOffsets)
    assert isinstance(offset.model, WithOffsets)
    assert bool(offset.model.class_offsets.any())


def test_details_of_a_run_say_what_they_would_be_worth(tmp_path: Path) -> None:
    recipe = RECIPE.with_settings(["rounds=3", "evaluation.offsets=false", "callbacks=[details]"])
    done = train(recipe, out=tmp_path / "run")
    found = json.loads((tmp_path / "run" / "details.json").read_text())["offsets"]
    run = Run(tmp_path / "run")
    again = run.evaluate(prepare(recipe.with_settings(["evaluation.offsets=true", "callbacks=[]"])))
    assert found["global_accuracy"] == again["global_accuracy"]
    assert again["accuracy_as_trained"] == done.summary["global_accuracy"]
    assert found["submodels"].keys() == {"1", "1/2", "1/4", "1/8", "1/16"}


# --- where there can be none ---


def test_tasks_without_classes_are_refused_before_anything_is_trained() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 3, generator=draw), torch.randn(40, generator=draw)
    made = Task.split(lambda scale: nn.Linear(3, 1), Examples(x, y), Examples(x, y), clients=4)
    recipe = Recipe().with_settings(["fleet.clients=4", "fleet.cohort=2", "evaluation.offsets=true", "device=cpu"])
    assert told(lambda: prepare(recipe, made)) == (
        "evaluation.offsets is for tasks of classes, not for task: leave it out"
    )


def test_a_server_that_has_nothing_but_test_examples_is_refused_until_it_has_others() -> None:
    pytest.importorskip("flwr")
    from fedrolex.flower import own_data

    draw = torch.Generator().manual_seed(0)
    some, others = (Examples(torch.randn(30, 3, generator=draw), torch.arange(3).repeat(10)) for _ in range(2))
    measure, build = Measure(offsets=True), lambda scale: Given()
    assert told(lambda: measure.check(own_data(build, some, clients=4, classes=3))) == (
        "evaluation.offsets would be fitted on the test examples: give validation examples, too"
    )
    ready = measure.ready(own_data(build, some, clients=4, classes=3, validation=others), Given())
    assert isinstance(ready, WithOffsets)
    assert torch.equal(ready.class_offsets, class_offsets(others.x, others.y))


def test_scores_that_are_not_finite_are_one_line() -> None:
    made = task(torch.randn(12, 3), torch.arange(3).repeat(4))
    assert told(lambda: Measure(offsets=True)(made, Infinite())) == (
        "evaluation.offsets needs a finite score for every class, the model's are not all finite: leave it out"
    )


def test_fedgkt_has_no_one_model() -> None:
    why = "evaluation.offsets is for one model, and fedgkt is measured with several: leave it out"
    recipe = RECIPE.with_settings(["method=fedgkt", "task.limit=200"])
    assert told(lambda: prepare(recipe)) == why
    made = trained(recipe.with_settings(["evaluation.offsets=false"]), 1)
    made.measure = replace(made.measure, offsets=True)
    assert why in told(made.evaluate), "details of a run ask so"


def test_details_say_why_offsets_were_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(scores: Tensor, targets: Tensor) -> Tensor:
        raise FedrolexError("a score is not finite")

    monkeypatch.setattr("fedrolex.tasks.measure.class_offsets", refused)
    train(RECIPE.with_settings(["rounds=1", "evaluation.offsets=false", "callbacks=[details]"]), out=tmp_path / "run")
    found = json.loads((tmp_path / "run" / "details.json").read_text())
    assert "offsets" not in found
    assert "not finite" in found["not_measured"]["offsets"]
    assert found["submodels"]
