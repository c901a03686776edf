"""Products in bf16: what a client trains, what a server teaches, what teachers say; all else is float32."""

from __future__ import annotations

import torch
from methods_shared import SMALL
from torch import nn

from fedrolex import Recipe, prepare, train
from fedrolex.clients import in_precision


def test_weights_that_change_count_inside_another_autocast() -> None:
    """PyTorch keeps what weights were cast to until the outermost autocast ends."""
    module, x = nn.Linear(4, 3, bias=False), torch.ones(2, 4)
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        before = in_precision(module, x, "bf16")
        module.weight.add_(1.0)
        after = in_precision(module, x, "bf16")
    torch.testing.assert_close(after - before, torch.full((2, 3), 4.0), atol=0.1, rtol=0)


def test_a_training_in_python_is_the_one_of_its_rounds() -> None:
    recipe = Recipe(device="cpu").with_settings([*SMALL, "engine=loop", "precision=bf16", "rounds=2"])
    made = prepare(recipe)
    rows = [made.run_round() for _ in range(2)]
    assert [row["train_loss"] for row in train(recipe).rows] == [row["train_loss"] for row in rows]
