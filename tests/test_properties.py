"""Random small networks of the supported layers, random windows: what must hold for every one of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedrolex import Axes, FedrolexError, Fold, Window, trace
from fedrolex.slicing import Arc, pick

BLOCKS = (
    "conv",
    "residual",
    "depthwise",
    "grouped",
    "squeeze",
    "dense",
    "group_norm",
    "gated",
    "attention",
    "shuffle",
    "split",
)


class Piece(nn.Module):
    """One block of a random network; ``width`` channels in and out of it."""

    def __init__(self, kind: str, inputs: int, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "dense":
            self.a = nn.Conv2d(inputs, width, 1)
        elif kind == "residual":
            self.a, self.b = nn.Conv2d(inputs, width, 3, padding=1), nn.Conv2d(width, inputs, 1, bias=False)
            self.norm = nn.BatchNorm2d(inputs)
        elif kind == "depthwise":
            self.a, self.b = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs), nn.Conv2d(inputs, width, 1)
        elif kind == "grouped":
            self.a, self.b = nn.Conv2d(inputs, 2 * width, 1), nn.Conv2d(2 * width, width * 2, 1, groups=2)
        elif kind == "squeeze":
            self.a, self.b = nn.Conv2d(inputs, width, 1), nn.Conv2d(width, inputs, 1)
        elif kind == "group_norm":
            self.a, self.groups = nn.Conv2d(inputs, 2 * width, 1), nn.GroupNorm(2, 2 * width)
        elif kind in ("gated", "split"):
            self.a = nn.Conv2d(inputs, 2 * width, 1)
            self.b = nn.Conv2d(width, width, 1)
        elif kind == "attention":
            self.q, self.k, self.v = (nn.Linear(inputs, 2 * width, bias=False) for _ in range(3))
            self.o = nn.Linear(2 * width, inputs)
        elif kind == "shuffle":
            self.a = nn.Conv2d(inputs, 4 * width, 1)
        else:
            self.a, self.norm = nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "dense":
                y = torch.cat([x, torch.relu(self.a(x))], 1)
            case "residual":
                y = torch.relu(self.norm(x + self.b(torch.relu(self.a(x)))))
            case "depthwise" | "grouped":
                y = self.b(F.gelu(self.a(x)))
            case "squeeze":
                y = x * torch.sigmoid(self.b(torch.relu(self.a(x.mean((2, 3), keepdim=True)))))
            case "group_norm":
                y = F.silu(self.groups(self.a(x)))
            case "gated":
                y = self.b(F.glu(self.a(x), 1))
            case "split":
                left, right = self.a(x).chunk(2, 1)
                y = torch.cat([self.b(left), right], 1)
            case "attention":
                flat = x.flatten(2).mT
                q, k, v = (p(flat).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
                mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
                y = x + self.o(mixed).mT.reshape(x.shape)
            case "shuffle":
                y = F.pixel_shuffle(self.a(x), 2)[..., ::2, ::2]
            case _:
                y = torch.relu(self.norm(self.a(x)))
        return y


class Net(nn.Module):
    """A stem, some blocks, a flattened head."""

    def __init__(self, kinds: list[str], widths: list[int]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, widths[0], 1)
        self.blocks = nn.Sequential()
        x = torch.zeros(2, 2, 4, 4)
        channels = widths[0]
        for kind, width in zip(kinds, widths[1:], strict=True):
            self.blocks.append(Piece(kind, channels, width))
            channels = self.blocks.eval()(self.stem(x)).shape[1]
        self.head = nn.Linear(channels * 4, 3)
        self.train()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 2).flatten(1))
        return y


NETS = st.integers(1, 3).flatmap(
    lambda depth: st.tuples(
        st.lists(st.sampled_from(BLOCKS), min_size=depth, max_size=depth),
        st.lists(st.integers(2, 5), min_size=depth + 1, max_size=depth + 1),
    )
)


def draw_window(data: st.DataObject, axes: Axes, *, full: bool = False) -> Window:
    """Any window of the axes that are cut (or, full, any order of every axis but the outputs)."""
    spans: dict[str, Any] = {}
    for axis in axes.axes.values():
        if axis.kind == "outputs" or (axis.kind != "width" and not full):
            continue
        order = data.draw(st.permutations(range(axis.size)), label=axis.name)
        count = axis.size if full else data.draw(st.integers(1, axis.size))
        spans[axis.name] = (
            pick(order[:count], axis.size) if data.draw(st.booleans()) else Arc(order[0], count, axis.size)
        )
    return Window(spans)


@settings(max_examples=30)
@given(NETS, st.data())
def test_every_network(net: tuple[list[str], list[int]], data: st.DataObject) -> None:
    torch.manual_seed(0)
    model = Net(*net).double()
    try:
        axes = trace(model, torch.randn(2, 2, 4, 4, dtype=torch.float64))
    except FedrolexError as error:
        assert "no axis of this model can be cut" in str(error)
        return
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    model.eval()
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)

    permuted = axes.cut(model, draw_window(data, axes, full=True)).eval()
    torch.testing.assert_close(permuted(x), model(x), rtol=1e-9, atol=1e-9)

    window = draw_window(data, axes)
    small = axes.cut(model, window).train()
    assert sum(p.numel() for p in small.parameters()) == axes.parameters(window)
    small(x).square().sum().backward()
    assert all(p.grad is not None for p in small.parameters())

    before = {name: tensor.clone() for name, tensor in axes.state(model).items()}
    axes.paste(model, axes.cut(model, window), window)
    assert all(torch.equal(tensor, before[name]) for name, tensor in axes.state(model).items())

    fold = Fold(axes, before)
    for client in range(3):
        fold.add(client, axes.take(before, window), window)
    after = fold.average()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-12, atol=1e-12)
