"""Small models with width arguments, so that a cut can be compared with the same class built smaller; axes by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedrolex import Axes, Axis, Window, trace
from fedrolex.slicing import TensorLayout
from fedrolex.slicing.axis import members_of
from fedrolex.slicing.layout import Fixed, Ref


def hand_made(sizes: Mapping[str, int], tensors: Mapping[str, Sequence[str | int]]) -> Axes:
    """Axes without a model: tensor name to its dimensions, an axis name or a fixed size each.

    The first dimension of a tensor writes, the second reads.
    """
    layouts = {
        name: TensorLayout(
            tuple(Ref(d) if isinstance(d, str) else Fixed(d) for d in dims), "parameter", (1,) if len(dims) > 1 else ()
        )
        for name, dims in tensors.items()
    }
    members = members_of(layouts)
    return Axes({n: Axis(n, size, "width", members.get(n, ())) for n, size in sizes.items()}, layouts)


MATRIX = hand_made(
    {"out": 6, "in": 5, "classes": 4},
    {"w": ["out", "in"], "b": ["out"], "head": ["classes", "out"], "k": ["out", "in", 3]},
)


def vector(size: int) -> Axes:
    """Axes of one tensor ``v`` along one axis ``k``."""
    return hand_made({"k": size}, {"v": ["k"]})


def base_of(axes: Axes, fill: float | None = None) -> dict[str, Tensor]:
    """Whole tensors for these axes, random or all of one value."""
    return {n: torch.randn(axes.shape(n)) if fill is None else torch.full(axes.shape(n), fill) for n in axes.tensors}


def same_as_built(
    build: Callable[..., nn.Module],
    full: Mapping[str, Any],
    small: Mapping[str, Any],
    window: Window,
    axes: Axes,
    *inputs: Any,
) -> None:
    """The cut computes, bit for bit, what the class built at the smaller size does with the same weights."""
    model = build(**full)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    cut = axes.cut(model, window).eval()
    native = build(**small).eval()
    native.load_state_dict(cut.state_dict(), strict=True)
    torch.testing.assert_close(cut(*inputs), native(*inputs), rtol=1e-5, atol=1e-6)


class Residual(nn.Module):
    """Convolutions with an identity shortcut, batch norm, and a flattened head."""

    def __init__(self, stream: int = 8, inner: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, stream, 3, padding=1)
        self.norm = nn.BatchNorm2d(stream)
        self.a = nn.Conv2d(stream, inner, 3, padding=1)
        self.b = nn.Conv2d(inner, stream, 3, padding=1, bias=False)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(stream * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = x + self.b(torch.relu(self.a(x)))
        scores: Tensor = self.head(self.pool(x).flatten(1))
        return scores


def residual_axes() -> tuple[Residual, Axes]:
    model = Residual()
    return model, trace(model, torch.randn(2, 3, 8, 8))
