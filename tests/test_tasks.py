"""Tasks: masks, label rows, augmentation, local accuracy, metrics; and one round on each real data set."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner
from word_tasks import WORDS, corpus

from fedrolex import (
    Classification,
    Examples,
    FedrolexError,
    Measure,
    NextWord,
    Recipe,
    Training,
    Upload,
    prepare,
    train,
)
from fedrolex.cli.app import app
from fedrolex.clients.messages import MODEL
from fedrolex.clients.visit import random_draws
from fedrolex.core.registry import METRICS
from fedrolex.methods.averaging import find_label_axis
from fedrolex.tasks.masking import masked
from fedrolex.tasks.metrics import top5, worst_class
from fedrolex.tasks.partition import Partition
from fedrolex.tasks.pixels import Pixels


def test_masks_put_zero_or_minus_infinity_where_a_class_is_absent() -> None:
    scores = torch.tensor([[-1.0, -2.0, 3.0]], requires_grad=True)
    held = torch.tensor([True, True, False])
    zero = masked(scores, held, "zero")
    assert zero.tolist() == [[-1.0, -2.0, 0.0]]
    assert int(zero.argmax()) == 2  # all present scores are negative: an absent class wins
    assert masked(scores, held, "neg_inf").tolist() == [[-1.0, -2.0, -torch.inf]]
    assert masked(scores, held, "none") is scores
    nn.functional.cross_entropy(zero, torch.tensor([0])).backward()
    assert scores.grad is not None
    assert float(scores.grad[0, 2]) == 0.0
    weight = np.exp(-1) / (np.exp(-1) + np.exp(-2) + 1)
    assert float(scores.grad[0, 0]) == pytest.approx(weight - 1)


def training(*settings: str) -> Training:
    recipe = Recipe(device="cpu", rounds=2).with_settings(
        ["task.width=8", "fleet.clients=5", "fleet.cohort=5", *settings]
    )
    return prepare(recipe)


def test_each_classifier_row_is_its_only_holders() -> None:
    """Five clients with two labels each, all different: with row masking, nobody else touches a row."""
    settings = ("task.partition={name: labels, labels: 2}", 'fleet.capacities=["1"]', "method=heterofl")
    made = training(*settings, "method.rows=true")
    uploads: dict[int, Tensor] = {}
    real = made.engine.run

    def run(plan: Any) -> Any:
        for answer in real(plan):
            assert isinstance(answer, Upload)
            uploads[answer.job.client] = answer.tensors["head.weight"].clone()
            yield answer

    made.engine.run = run  # type: ignore[method-assign]
    made.run_round()
    for client, sent in uploads.items():
        held = made.server.task.client(client).y.unique()
        assert len(held) == 2
        assert torch.equal(made.server.state[MODEL]["head.weight"][held], sent[held])
    plain = training(*settings)
    plain.run_round()
    assert not torch.equal(plain.server.state[MODEL]["head.weight"], made.server.state[MODEL]["head.weight"])


def test_rows_nobody_holds_keep_their_value() -> None:
    made = training("task.partition={name: labels, labels: 1}", "method.rows=true", "fleet.cohort=2")
    before = made.server.state[MODEL]["head.bias"].clone()
    cohort = [member.client for member in made.server.fleet.members(0)]
    made.run_round()
    held = torch.cat([made.server.task.client(client).y.unique() for client in cohort])
    absent = [label for label in range(10) if label not in held.tolist()]
    assert torch.equal(made.server.state[MODEL]["head.bias"][absent], before[absent])
    assert not torch.equal(made.server.state[MODEL]["head.bias"][held], before[held])


def test_masked_training_leaves_absent_rows_alone() -> None:
    made = training(
        "task.partition={name: labels, labels: 2}", "client.mask=zero", 'fleet.capacities=["1"]', "fleet.cohort=1"
    )
    before = made.server.state[MODEL]["head.weight"].clone()
    made.run_round()
    held = made.server.task.client(made.server.fleet.members(0)[0].client).y.unique()
    assert [
        i for i in range(10) if not torch.equal(made.server.state[MODEL]["head.weight"][i], before[i])
    ] == held.tolist()


def test_rows_need_one_axis_of_classes() -> None:
    server = training().server
    server.task = Classification(
        "odd", server.task.build, Examples(torch.zeros(2, 1), torch.tensor([0, 77])),
        Examples(torch.zeros(2, 1), torch.tensor([0, 77])), [torch.tensor([0])],
    )  # fmt: skip
    with pytest.raises(FedrolexError, match=r"method\.rows needs one axis for the 78 classes; the model has 0"):
        find_label_axis(server, "method.rows")


@given(st.integers(0, 2**63 - 1), st.integers(0, 4), st.booleans())
def test_a_word_decides_crop_and_flip_of_its_image(word: int, pad: int, flip: bool) -> None:
    image = torch.arange(1, 3 * 6 * 5 + 1, dtype=torch.uint8).view(1, 3, 6, 5)
    pixels = Pixels.of((0.0,) * 3, (1 / 255,) * 3, pad, flip)
    found = pixels(image, torch.tensor([word]))
    down, right = (word & 0xFFFF) * (2 * pad + 1) >> 16, (word >> 16 & 0xFFFF) * (2 * pad + 1) >> 16
    wanted = nn.functional.pad(image, [pad] * 4)[:, :, down : down + 6, right : right + 5].float()
    if flip and word >> 32 & 1:
        wanted = wanted.flip(3)
    torch.testing.assert_close(found, wanted)


def test_inputs_are_standardised_or_from_0_to_1() -> None:
    def inputs(how: str) -> Tensor:
        task = prepare(Recipe().with_settings([f"task.standardise={how}"])).server.task
        assert isinstance(task, Classification)
        return task.inputs(task.train.x)

    assert torch.equal(inputs("null"), inputs("false"))  # digits
    assert float(inputs("false").min()) == 0.0
    assert float(inputs("false").max()) == pytest.approx(1.0)
    assert float(inputs("true").mean()) == pytest.approx(0.0, abs=1e-4)
    assert float(inputs("true").std()) == pytest.approx(1.0, abs=1e-3)


def test_a_whole_cohort_at_once_is_every_image_by_itself() -> None:
    images = torch.randint(0, 256, (30, 3, 32, 32), dtype=torch.uint8)
    pixels = Pixels.of((0.49, 0.48, 0.45), (0.2, 0.2, 0.2), 4, True)
    draws = torch.cat([random_draws(10, 7, 3, client, 0) for client in range(3)])
    together = pixels(images, draws)
    for i in range(30):
        assert torch.equal(together[i], pixels(images[i : i + 1], draws[i : i + 1])[0])
    assert torch.equal(draws[10:20], random_draws(10, 7, 3, 1, 0))
    assert not torch.equal(draws[10:20], random_draws(10, 7, 4, 1, 0))
    assert int(draws.min()) >= 0
    crops = {(int(d & 0xFFFF) * 9 >> 16, int(d >> 16 & 0xFFFF) * 9 >> 16) for d in random_draws(4000, 0, 0, 0, 0)}
    assert len(crops) == 81


def test_normalised_as_the_published_constants_say() -> None:
    pixels = Pixels.of((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    black = pixels(torch.zeros(1, 3, 1, 1, dtype=torch.uint8)).flatten()
    torch.testing.assert_close(black, -torch.tensor([0.4914 / 0.2023, 0.4822 / 0.1994, 0.4465 / 0.2010]))
    assert not pixels.random


class Table(nn.Module):
    """Scores that are looked up: input i has row i."""

    def __init__(self, scores: Sequence[Sequence[float]]) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.tensor(scores))

    def forward(self, x: Tensor) -> Tensor:
        return self.scores[x[:, 0].long()]


def test_global_and_local_accuracy_by_hand() -> None:
    """Two clients: one holds classes 0 and 1, the other class 2."""
    y = torch.tensor([0, 1, 2, 2])
    scores = [[3.0, 1.0, 5.0], [0.0, 4.0, 2.0], [1.0, 0.0, 9.0], [7.0, 0.0, -1.0]]
    test = Examples(torch.arange(4.0)[:, None], y)
    parts = Partition.of([[0, 1], [2, 3]])
    task = Classification("table", lambda _: Table(scores), test, test, parts, mask="zero")
    found = task.evaluate(Table(scores))
    assert found["global_accuracy"] == 0.5  # 2, 1, 2, 0
    assert found["local_accuracy"] == 0.5
    # client 0 with class 2 at 0: 0, 1; client 1 with classes 0 and 1 at 0: 2, and 0 beats −1
    assert found["local_accuracy_masked"] == 0.75
    hard = Classification("table", lambda _: Table(scores), test, test, parts, mask="neg_inf")
    assert hard.evaluate(Table(scores))["local_accuracy_masked"] == 1.0
    own = Classification("table", lambda _: Table(scores), test, test, parts, Partition.of([[0], [2, 3]]), mask="zero")
    assert own.evaluate(Table(scores))["local_accuracy"] == pytest.approx(1 / 3)  # over examples, not over clients
    assert task.facts() == {
        "examples": 4, "unused_examples": 0, "test_examples": 4, "labels_per_client": 1.5,
        "public_examples": 0, "validation_examples": 0,
    }  # fmt: skip


def test_one_pass_over_the_test_set_is_enough() -> None:
    made = training("task.partition={name: labels, labels: 2}")
    calls: list[int] = []
    made.server.main.module.register_forward_hook(lambda _, inputs, __: calls.append(len(inputs[0])))
    made.evaluate()
    assert sum(calls) == 450 + 2  # two examples show what its norms do


def test_the_five_best_and_the_worst_class() -> None:
    scores = torch.eye(8)[[0, 1, 2, 3]] + torch.linspace(0.5, 0, 8)
    targets = torch.tensor([0, 1, 2, 6])
    assert top5(scores, targets) == 0.75
    assert top5(scores[:, :3], torch.tensor([0, 1, 2, 2])) == 1.0  # fewer than five classes
    assert worst_class(scores, targets) == 0.0
    assert worst_class(scores, torch.tensor([0, 1, 2, 3])) == 1.0
    assert worst_class(scores, torch.tensor([0, 0, 2, 3])) == 0.5


def test_metrics_are_measured_for_images_and_words_and_told_in_the_summary(tmp_path: Path) -> None:
    done = train(Recipe(device="cpu", rounds=1, evaluation=Measure(metrics=["top5", "worst_class"])))
    assert done.rows[0]["top5"] == done.summary["top5"]
    assert done.summary["worst_class"] <= done.summary["global_accuracy"] <= done.summary["top5"]
    file = corpus(tmp_path / "users.jsonl")
    made = prepare(Recipe(device="cpu").with_settings([*WORDS, f"task.data={file}", "evaluation.metrics=[top5]"]))
    task, model = made.server.task, made.server.main.module.eval()
    assert isinstance(task, NextWord)
    with torch.no_grad():
        scores, words = model(task.test.x), task.test.y != 0
    assert made.evaluate()["top5"] == pytest.approx(top5(scores[words], task.test.y[words]))


def test_a_metric_that_fails_is_one_line() -> None:
    @METRICS.register("broken, for a test")
    def broken(outputs: Tensor, targets: Tensor) -> float:
        raise KeyError("thing")

    made = training("evaluation.metrics=['broken, for a test']")
    with pytest.raises(FedrolexError, match="metric broken, for a test failed: KeyError: 'thing'"):
        made.evaluate()


REAL = {
    "cifar10": ["task.width=8", "task.limit=4000", "evaluation.submodels=true"],
    "cifar100": ["task.width=8", "task.limit=4000", "fleet.cohort=5"],
    "stackexchange": ["fleet.cohort=5", "task.test_sentences=300", "task.inner=256", "task.vocabulary=2000"],
    "blogs": ["fleet.cohort=5", "task.test_sentences=300", "task.inner=256"],
}
FILES = {
    "cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary", "stackexchange": "stackexchange/users.jsonl",
    "blogs": "blogs/blogs.npz",
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_one_round_on_real_data(name: str, tmp_path: Path) -> None:
    folder = os.environ.get("FEDROLEX_DATA")
    if folder is None or not Path(folder, FILES[name]).exists():
        pytest.skip(f"FEDROLEX_DATA does not point at a folder with {FILES[name]}")
    words = [word for setting in ("rounds=1", *REAL[name]) for word in ("--set", setting)]
    found = CliRunner().invoke(app, ["train", name, *words, "--out", str(tmp_path / "run"), "--json"])
    assert found.exit_code == 0, found.output
    (summary,) = json.loads(found.stdout)["runs"]
    assert summary["dropped"] == 0
    assert 0 <= summary["global_accuracy"] < 0.6
    if name.startswith("cifar"):
        assert summary["statistics"] == "recalibrated"
        assert summary["local_accuracy_masked"] >= summary["local_accuracy"]
