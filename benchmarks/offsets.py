"""What offsets of classes are worth after training, by method, and a linear layer in their place.

scikit-learn's digits and the splits of ``columns.py``, 40 clients of five capacities, five of them a round, 80 rounds.
Every trained model is measured as it is; with an offset for each class, fitted on up to 2000 training examples that
clients hold (``evaluation.offsets``); and with a linear layer on its scores, fitted on the same examples. Rows of
columns are also measured with offsets of every column by itself, fitted on what the clients hold that can hold the
column, which needs no device that can hold the row.

    python benchmarks/offsets.py [--seeds 12] [--splits two rare even] [--only NAME ...] [--out results/offsets.json]

Ends with one flat JSON object: mean test accuracy (per cent) by split, variant and measure.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import sqrt
from statistics import mean, stdev

import torch
from columns import Row, compare
from torch import Tensor, nn

from fedrolex import Classification, Training, prepare
from fedrolex.methods import Columns
from fedrolex.models import ColumnModel, WithOffsets, class_offsets, evaluating
from fedrolex.recipes import find_recipe

ROUNDS = 80
CHOSEN = (
    "everyone trains 1/4 (a bound)", "everyone trains 1/16", "only who can trains 1/4", "heterofl", "fedrolex",
    "columns in turns", "one by one", "one by one, two each",
)  # fmt: skip


def linear(scores: Tensor, targets: Tensor) -> nn.Linear:
    """A layer on scores, begun as the identity and kept near it, that explains targets best."""
    layer = nn.Linear(scores.shape[1], scores.shape[1])
    start = torch.eye(len(layer.weight))
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    search = torch.optim.LBFGS(layer.parameters(), max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        found = nn.functional.cross_entropy(layer(scores), targets)
        found = found + 0.05 * (layer.weight - start).square().sum() + 0.001 * layer.bias.square().sum()
        found.backward()
        return found

    search.step(loss)
    return layer


def by_column(training: Training, row: ColumnModel) -> ColumnModel:
    """The row with offsets of every column, fitted on what clients hold that can hold the column."""
    task, fleet, found = training.server.task, training.server.fleet, []
    assert isinstance(task, Classification)
    assert isinstance(training.method, Columns)
    for column, width in zip(row.columns, training.method.widths(fleet, 1), strict=True):
        able = [part for client, part in enumerate(task.parts) if fleet.capacity(client) >= width]
        held = task.train.rows(torch.cat(able))
        with evaluating(column):
            found.append(WithOffsets(column, class_offsets(task.outputs(column, held.x, 500), held.y)))
    return ColumnModel(found, row.seen)


def trained(settings: list[str], seed: int) -> dict[str, float]:
    """Test accuracy of a run, per cent, by measure."""
    training = prepare(find_recipe("digits").with_settings([*settings, "task.validation=0.0", f"seed={seed}"]))
    for _ in range(ROUNDS):
        training.run_round()
    training.measure = replace(training.measure, offsets=True)
    found = training.evaluate()
    task = training.server.task
    assert isinstance(task, Classification)
    plainly = replace(training.measure, offsets=False)
    model, held = plainly.ready(task, training.method.judged(training.judged)), task.held_out(2000)
    assert isinstance(held, Classification)
    with evaluating(model):
        scores, test = (task.outputs(model, each.x, 500) for each in (held.test, task.test))
    layer = linear(scores, held.test.y)
    right = (layer(test).argmax(-1) == task.test.y).double().mean()
    plain = {"as trained": found["accuracy_as_trained"], "offsets": found["global_accuracy"], "linear": float(right)}
    rare = {"offsets, rare": found["rare_accuracy"]} if "rare_accuracy" in found else {}
    if isinstance(model, ColumnModel) and len(model.columns) > 1:
        with evaluating(repaired := by_column(training, model)):
            scores = task.outputs(repaired, task.test.x, 500)
        rare["offsets, by column"] = float((scores.argmax(-1) == task.test.y).double().mean())
    return {name: 100 * share for name, share in {**plain, **rare}.items()}


def over_seeds(settings: list[str], seeds: int) -> Row:
    """Means over seeds, and the mean gain of offsets with its standard error."""
    every = [trained(settings, seed) for seed in range(1, seeds + 1)]
    means = {name: round(mean(each[name] for each in every), 2) for name in every[0]}
    gains = [each["offsets"] - each["as trained"] for each in every]
    error = stdev(gains) / sqrt(seeds) if seeds > 1 else None
    return {
        **means,
        "gain": round(mean(gains), 2),
        "error": error and round(error, 2),
        "gains": [round(g, 1) for g in gains],
    }


def main() -> None:
    def said(row: Row) -> str:
        gain = f"{row['gain']:+.1f} ± {row['error'] or 0:.1f}"
        return (
            f"as trained {row['as trained']:5.1f}  offsets {row['offsets']:5.1f} ({gain})  linear {row['linear']:5.1f}"
        )

    found, measures = compare(__doc__, CHOSEN, over_seeds, said, "test accuracy"), ("as trained", "offsets", "linear")
    flat = {f"{s}: {n}: {m}": row[m] for s, rows in found.items() for n, row in rows.items() for m in measures}
    print(json.dumps(flat))


if __name__ == "__main__":
    main()
