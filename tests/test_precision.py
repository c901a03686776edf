"""Products in bf16: what a client trains, what a server teaches, what teachers say; all else is float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from methods_shared import SMALL, copied, small
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedrolex import Recipe, prepare, train
from fedrolex.clients import in_precision, products_in
from fedrolex.methods.distillation import scores
from fedrolex.models.norms import collect

ASIDE = ["engine=loop", "task.model=preresnet18", "task.norm=static", "task.width=4", "task.limit=90"]
TEACH = {
    "fedbe": ["method=fedbe", "method.samples=1", "method.epochs=1"],
    "feddf": ["method=feddf", "method.steps=3", "method.judge_every=3"],
    "fedet": ["method=fedet", "method.steps=3"],
    "dsfl": ["method=dsfl", "method.examples=20", "method.epochs=1"],
    "fedgkt": ["method=fedgkt", "method.server_epochs=1"],
}


class Products(TorchDispatchMode):
    """While the mode is entered, notes of the types of what convolutions take, and of what batch norms compute with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.taken: set[torch.dtype] = set()
        self.parameters: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function as it is, and note what it takes."""
        if func is torch.ops.aten.convolution.default:
            self.taken |= {args[0].dtype, args[1].dtype}
        if "batch_norm" in func.__name__ and "backward" not in func.__name__:
            self.parameters |= {tensor.dtype for tensor in args[1:5] if isinstance(tensor, Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", TEACH)
@pytest.mark.parametrize(("precision", "wanted"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_round_takes_all_products_in_the_precision_of_the_run(
    method: str, precision: str, wanted: torch.dtype
) -> None:
    """Of clients, of teachers, of the server's learning; in the second round also of labels of the first."""
    made = small(*TEACH[method], *ASIDE, f"precision={precision}")
    made.run_round()  # in which multiplications are counted, too
    with Products() as products:
        made.run_round()
    assert products.taken == {wanted}
    assert products.parameters == {torch.float32}
    assert {tensor.dtype for tensor in made.server.state["model"].values()} == {torch.float32}


@pytest.mark.parametrize("method", TEACH)
def test_a_server_that_teaches_in_bf16_is_another_by_rounding_only(method: str) -> None:
    made = {each: small(*TEACH[method], "engine=loop", f"precision={each}") for each in ("fp32", "bf16")}
    before = copied(made["fp32"])["model"]
    for training in made.values():
        training.run_round()
    high, low = (training.server.state["model"] for training in made.values())
    apart = sum(float((low[name] - tensor).square().sum()) for name, tensor in high.items())
    moved = sum(float((before[name] - tensor).square().sum()) for name, tensor in high.items())
    assert 0 < apart < 0.1 * moved


def test_statistics_of_products_in_bf16_are_float32() -> None:
    conv = nn.Conv2d(1, 1, 1, bias=False)
    x = 100 + torch.randn(50, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with products_in("bf16", x.device), torch.no_grad():
        nn.init.ones_(conv.weight)
        (seen,) = collect(nn.Sequential(conv, nn.BatchNorm2d(1, track_running_stats=False)), [x]).values()
        said = conv(x)
    assert said.dtype == torch.bfloat16
    variance, mean = torch.var_mean(said.double(), correction=0)
    torch.testing.assert_close((seen.mean[0], seen.variance[0]), (mean, variance), rtol=1e-5, atol=0)


def test_scores_in_bf16_are_float32_and_near() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten())
    x = torch.randn(20, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    high, low = scores(model, x), scores(model, x, precision="bf16")
    assert low.dtype == torch.float32
    assert not torch.equal(high, low)
    torch.testing.assert_close(high, low, rtol=0, atol=0.05)


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
