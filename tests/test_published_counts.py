"""The weights of the published code: small sums by hand, and a round beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from methods_shared import SMALL, answered, small
from told import told
from torch import Tensor

from fedrolex.clients.messages import MODEL, Upload
from fedrolex.core import shuffle
from fedrolex.methods.published_counts import COUNTS, PublishedCounts, counted
from fedrolex.recipes import find_recipe
from fedrolex.recipes.recipe import Recipe
from fedrolex.runs import Run, checkpoint
from fedrolex.runs.prepare import prepare
from fedrolex.runs.training import Training

METHOD = "method=fedrolex.methods.published_counts:PublishedCounts"
ONE = torch.ones(1)


def test_three_clients_count_one_two_three() -> None:
    answers = [(torch.tensor([float(value)]), ONE) for value in (0, 1, 2)]
    new, counts = counted(-ONE, ONE, answers, by_count=True, aliased=True)
    assert float(new) == pytest.approx(4 / 3)
    assert float(counts) == 4
    later, _ = counted(-ONE, 1000 * ONE, answers, by_count=True, aliased=True)
    assert float(later) == pytest.approx((1001 + 2 * 1002) / 3003), "it fades"
    for more in ({"by_count": True, "aliased": False}, {"by_count": False, "aliased": True}):
        plain, counts = counted(-ONE, ONE, answers, **more)
        assert (float(plain), float(counts)) == (1, 4)


def test_positions_count_apart_and_untrained_ones_stay() -> None:
    """Clients of two, one and no positions of three; a width of 2 counts twice."""
    answers = [
        (torch.tensor([6.0, 6.0, 0.0]), torch.tensor([2.0, 2.0, 0.0])),
        (torch.tensor([0.0, 3.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])),
    ]
    old, before = torch.tensor([1.0, 1.0, 7.0]), torch.tensor([1.0, 5.0, 9.0])
    by_size, counts = counted(old, before, answers, by_count=False, aliased=True)
    assert by_size.tolist() == [6, 5, 7]
    assert counts.tolist() == [2, 7, 9], "one more a client, whatever it weighs"
    both, _ = counted(old, before, answers, by_count=True, aliased=True)
    assert both.tolist() == pytest.approx([6, (2 * 5 * 6 + 6 * 3) / 16, 7])


def made(weighting: str) -> Training:
    return small(METHOD, f"method.weighting={weighting}", "task.model=resnet8", "task.width=4",
                 "task.partition.name=labels")  # fmt: skip


def in_order(training: Training) -> list[Upload]:
    answers = answered(training)
    return [answers[place] for place in shuffle(len(answers), training.server.seed, "order", 0).tolist()]


def by_hand(training: Training, name: str, answers: list[Upload], weight: Any) -> Tensor:
    """Position by position, with loops; ``weight(count, width)`` of a client."""
    axes, new = training.server.main.axes, training.server.state[MODEL][name].clone().flatten()
    places = torch.arange(float(new.numel())).view(axes.shape(name))
    held = [axes.take({name: places}, each.job.window)[name] for each in answers]
    for place in range(len(new)):
        count, sums, total = 1, 0.0, 0.0
        for answer, mine in zip(answers, held, strict=True):
            if place in mine:
                given = weight(count, mine.shape[0])
                sums += given * float(answer.tensors[name][mine == place])
                total, count = total + given, count + 1
        new[place] = sums / total if total else new[place]
    return new.view(axes.shape(name))


@pytest.mark.parametrize(
    ("weighting", "weight"),
    [
        ("uniform", lambda count, width: 1),
        ("size", lambda count, width: width),
        ("updates", lambda count, width: count),
        ("hybrid", lambda count, width: count * width),
    ],
)
def test_a_round_is_averaged_as_published(weighting: str, weight: Any) -> None:
    training = made(weighting)
    names = list(training.server.state[MODEL])
    answers = in_order(training)
    first = names[0]
    inner = next(name for name in names[1:] if training.server.state[MODEL][name].dim() == 4)
    norm = next(name for name in names if training.server.state[MODEL][name].dim() == 1)
    wanted = {
        inner: by_hand(training, inner, answers, weight),
        norm: by_hand(training, norm, answers, lambda count, width: count),
        first: by_hand(training, first, answers, lambda count, width: width if weighting in ("size", "hybrid") else 1),
    }
    training.run_round()
    for name, expected in wanted.items():
        torch.testing.assert_close(training.server.state[MODEL][name], expected, rtol=1e-5, atol=1e-6)
    assert training.server.state[COUNTS][first].max() > 2


def test_a_class_is_averaged_over_those_who_hold_it() -> None:
    training = made("uniform")
    name = next(name for name, tensor in training.server.state[MODEL].items() if tensor.shape == (10,))
    answers, old = in_order(training), training.server.state[MODEL][name].clone()
    held = [set(answer.labels or ()) for answer in answers]
    training.run_round()
    for label in range(10):
        who = [answer for answer, own in zip(answers, held, strict=True) if label in own]
        sums = sum((place + 1) * float(answer.tensors[name][label]) for place, answer in enumerate(who))
        expected = sums / (len(who) * (len(who) + 1) / 2) if who else float(old[label])
        assert float(training.server.state[MODEL][name][label]) == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert float(training.server.state[COUNTS][name][label]) == 1 + len(who)
    assert {len([own for own in held if label in own]) for label in range(10)} > {0}


def test_the_released_cells_of_the_weighting_table_are_these() -> None:
    for row in ("uniform", "size", "updates", "hybrid"):
        method = find_recipe(f"weighting/cifar10-high/{row}@released").method
        assert isinstance(method, PublishedCounts)
        assert (method.weighting, method.rounding, method.rows) == (row, "ceil", True)
        assert type(find_recipe(f"weighting/cifar10-high/{row}@printed").method).__name__ == "FedRolex"


def test_what_the_published_code_has_not_is_refused() -> None:
    for more in ({"weighting": "samples"}, {"norms": "per_capacity"}, {"rows": False}):
        assert "the published averages" in told(lambda more=more: PublishedCounts(**more))  # type: ignore[misc]


def test_a_run_that_was_stopped_goes_on_with_its_counts(tmp_path: Path) -> None:
    recipe = Recipe(device="cpu", rounds=3, checkpoint_every=1).with_settings([*SMALL, METHOD, "callbacks=[]"])
    whole, stopped = Run.create(tmp_path / "whole", recipe), Run.create(tmp_path / "stopped", replace(recipe, rounds=1))
    whole.go(prepare(recipe))
    stopped.go(prepare(replace(recipe, rounds=1)))
    stopped.change(recipe)
    stopped.go(prepare(recipe))
    (tensors, _), (others, _) = (checkpoint.read_any(run.checkpoint) for run in (whole, stopped))
    assert tensors.keys() == others.keys()
    assert any(name.startswith(f"{COUNTS}:") for name in tensors)
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
