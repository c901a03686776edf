"""On a GPU: cuts and folds agree with the CPU, and a sub-model's step can be captured and compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedrolex import Axes, Fold, Random, Rolling, Scheme, trace
from fedrolex.models import PreResNet, preresnet18

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def traced() -> tuple[PreResNet, Axes]:
    torch.manual_seed(0)
    model = preresnet18()
    return model, trace(model, torch.randn(2, 3, 32, 32), replace(model.slicing_hints(), factory=None))


@pytest.mark.parametrize("scheme", [Rolling(), Random()])
def test_cut_and_fold_agree_with_the_cpu(scheme: Scheme) -> None:
    model, axes = traced()
    fleet = ["1", "1/2", "1/4", "1/16"]
    results = []
    for device in ("cpu", "cuda"):
        state = axes.state(model.to(device))
        fold = Fold(axes, state)
        for client, beta in enumerate(fleet[1:]):
            window = scheme.window(axes, round=70, capacity=beta, client=client)
            part = axes.take(state, window)
            fold.add(client, {n: t * 1.5 if t.is_floating_point() else t for n, t in part.items()}, window)
        results.append({n: t.cpu() for n, t in fold.average().items()})
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name


def test_a_sub_model_moves_to_the_gpu_and_computes_the_same() -> None:
    model, axes = traced()
    cut = axes.cut(model, Rolling().window(axes, round=9, capacity="1/4")).eval()
    x = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        wanted = cut(x)
        torch.testing.assert_close(cut.cuda()(x.cuda()).cpu(), wanted, rtol=1e-3, atol=1e-4)


def step(module: nn.Module, x: torch.Tensor, y: torch.Tensor, lr: float = 0.05) -> torch.Tensor:
    loss = nn.functional.cross_entropy(module(x), y)
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.sub_(gradient, alpha=lr)
    return loss.detach()


def test_one_captured_step_serves_every_round_of_a_capacity() -> None:
    """Shapes depend on the width alone: capture once, load another window, replay."""
    model, axes = traced()
    model.cuda()
    state = axes.state(model)
    windows = [Rolling().window(axes, round=j, capacity="1/8") for j in (0, 40, 300)]
    slot = axes.cut(model, windows[0]).train()
    x, y = torch.randn(10, 3, 32, 32, device="cuda"), torch.randint(0, 10, (10,), device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(slot, x, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step(slot, x, y)
    for window in windows:
        axes.load(slot, state, window)
        graph.replay()
        torch.cuda.synchronize()
        eager = axes.cut(model, window).train()
        step(eager, x, y)
        for (name, a), (_, b), (_, start) in zip(
            slot.named_parameters(), eager.named_parameters(), axes.cut(model, window).named_parameters(), strict=True
        ):
            change = float((b - start).norm())
            assert float((a - b).norm()) <= 1e-3 * change + 1e-7, name


def test_a_sub_model_compiles() -> None:
    model, axes = traced()
    cut = axes.cut(model.cuda(), Rolling().window(axes, round=3, capacity="1/4")).eval()
    x = torch.randn(4, 3, 32, 32, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(cut, fullgraph=True)(x), cut(x), rtol=1e-2, atol=1e-3)
