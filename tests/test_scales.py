"""Numbers and widths: 1/√d follows a sub-model's own width, and 0.5 stays 0.5 although it is 1/∜16."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from small import same_as_built
from torch import Tensor, nn

from fedrolex import Axes, Hints, Rolling, trace

X = torch.randn(3, 10)
WORDS = torch.randint(0, 30, (3, 5))


def follow(axes: Axes) -> list[bool]:
    """For every number that was reported, whether sub-models use their own width."""
    return ["own width" in note.what for note in axes.notes if " = " in note.what]


class Scaled(nn.Module):
    """h · number, in several spellings, before the last layer."""

    def __init__(self, spelling: str, width: int = 16) -> None:
        super().__init__()
        self.spelling = spelling
        self.a, self.b, self.o = nn.Linear(10, width), nn.Linear(10, width), nn.Linear(width, 4)
        self.factor = torch.tensor(width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        h, g = self.a(x), self.b(x)
        width = h.shape[-1]
        match self.spelling:
            case "sum over len":
                h = h - h.sum(-1, keepdim=True) / width
            case "rms":
                h = h * torch.rsqrt(h.square().sum(-1, keepdim=True) / width + 1e-3)
            case "normalise":
                h = F.normalize(h, dim=-1) * width**0.5
            case "scores":
                h = h * (h.unsqueeze(-2) @ g.unsqueeze(-1)).squeeze(-1).contiguous().neg() / width**0.5
            case "tensor":
                h = h * (h @ g.mT / torch.sqrt(torch.tensor(float(width)))).mean(-1, keepdim=True)
            case "attribute":
                h = h * ((h @ g.mT) * self.factor).mean(-1, keepdim=True)
            case "quarter":
                h = h * ((h * width**-0.25) @ (g * width**-0.25).mT).mean(-1, keepdim=True)
            case "before":
                h = h * width**-0.5
        y: Tensor = self.o(h)
        return y


PLAIN = ("normalise", "before")  # of 16 features: times 4, times 0.25
SPELLINGS = ("sum over len", "rms", "scores", "tensor", "attribute", "quarter", *PLAIN)


@pytest.mark.parametrize(
    ("spelling", "width"), [(s, w) for w in (12, 16) for s in SPELLINGS if w == 12 or s not in PLAIN]
)
def test_every_spelling_of_a_width_follows_it(spelling: str, width: int) -> None:
    axes = trace(Scaled(spelling, width), X)
    assert set(follow(axes)) == {True}, axes.notes
    window = Rolling().window(axes, round=5, capacity="1/2")
    args = {"spelling": spelling}
    same_as_built(Scaled, {**args, "width": width}, {**args, "width": width // 2}, window, axes, X)


@pytest.mark.parametrize("spelling", PLAIN)
def test_a_plain_number_that_may_be_a_root_is_kept_unless_told_otherwise(spelling: str) -> None:
    assert follow(trace(Scaled(spelling), X)) == [False]
    axes = trace(Scaled(spelling), X, Hints(scaling="all"))
    assert follow(axes) == [True]
    window = Rolling().window(axes, round=5, capacity="1/2")
    same_as_built(Scaled, {"spelling": spelling}, {"spelling": spelling, "width": 8}, window, axes, X)


class Plain(nn.Module):
    """A network with a plain number in it, which happens to be a power of the width."""

    def __init__(self, kind: str, width: int = 16) -> None:
        super().__init__()
        self.kind = kind
        self.e, self.a, self.b = nn.Embedding(30, width), nn.Linear(10, width), nn.Linear(10, width)
        self.w, self.o = nn.Parameter(torch.randn(4, width)), nn.Linear(width, 4)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        h, g, v = self.a(x), self.b(x), self.e(words)
        match self.kind:
            case "factorisation machine":
                pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(-1, keepdim=True)
                y: Tensor = pairs + self.o(v.sum(1))
            case "factorisation machine, features":
                y = self.o(0.5 * (v.sum(1).square() - v.square().sum(1)))
            case "divergence":
                y = 0.5 * (h.square() + g.exp() - g - 1).sum(1, keepdim=True)
            case "deviation":
                y = self.o(h + g.mul(0.5).exp())
            case "cosine":
                y = 16 * F.linear(F.normalize(h, dim=-1), F.normalize(self.w, dim=-1))
            case "cosine, product":
                y = F.normalize(h, dim=-1) @ F.normalize(self.w, dim=-1).mT * 16
            case "twice":
                y = self.o(2 * h)
            case "divided":
                y = self.o(h / 8)
            case "multiplied":
                y = self.o(h * 0.125)
            case "one of two":
                y = self.o(((0.5 * h) @ g.mT) @ h)
            case "pairs":
                y = self.o(0.5 * (h @ g.mT) @ h)
        everything: Tensor = self.o(h + g + v.sum(1)) + F.linear(h, self.w)
        return y + everything


@pytest.mark.parametrize(
    ("kind", "width"),
    [
        ("factorisation machine", 16),
        ("factorisation machine, features", 16),
        ("divergence", 2),
        ("divergence", 16),
        ("deviation", 16),
        ("cosine", 256),
        ("cosine, product", 256),
        ("twice", 16),
        ("divided", 8),
        ("divided", 64),
        ("multiplied", 8),
        ("multiplied", 64),
        ("one of two", 16),
        ("pairs", 4),
        ("pairs", 16),
    ],
)
def test_a_number_that_only_happens_to_fit_is_kept_and_reported(kind: str, width: int) -> None:
    axes = trace(Plain(kind, width), (X, WORDS))
    assert follow(axes) == [False], axes.notes
    window = Rolling().window(axes, round=3, capacity="1/2")
    same_as_built(Plain, {"kind": kind, "width": width}, {"kind": kind, "width": width // 2}, window, axes, X, WORDS)


class Heads(nn.Module):
    """Attention whose scale is that of all heads together, as MaxViT has it."""

    def __init__(self, inner: int = 8, *, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.scale = heads, (heads * inner) ** -0.5
        self.q, self.k, self.v = (nn.Linear(10, heads * inner) for _ in range(3))
        self.o = nn.Linear(heads * inner, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        k = k * self.scale
        scores = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
        y: Tensor = self.o((scores @ v).transpose(1, 2).flatten(2))
        return y


def test_a_scale_of_all_heads_together_follows_them() -> None:
    x = torch.randn(2, 5, 10)
    axes = trace(Heads(), x)
    assert [n.what for n in axes.notes if " = " in n.what] == [
        "0.25 = 1/√size of q.heads×q.qk: sub-models use their own width"
    ]
    window = Rolling().window(axes, round=3, capacity="1/2")
    same_as_built(Heads, {}, {"inner": 4}, window, axes, x)


class Embedded(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.e, self.o = nn.Embedding(30, width), nn.Linear(width, 4)
        self.root = math.sqrt(width)

    def forward(self, words: Tensor) -> Tensor:
        y: Tensor = self.o(self.e(words) * self.root)
        return y


def test_an_embedding_times_the_root_of_its_width_follows_it() -> None:
    axes = trace(Embedded(), WORDS)
    assert follow(axes) == [True]
    window = Rolling().window(axes, round=3, capacity="1/2")
    same_as_built(Embedded, {}, {"width": 8}, window, axes, WORDS)


class Coincidence(nn.Module):
    def __init__(self, number: float, width: int) -> None:
        super().__init__()
        self.number = number
        self.e, self.m, self.o = nn.Embedding(30, width), nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, words: Tensor) -> Tensor:
        h = self.e(words)
        y: Tensor = self.o(h + self.number * torch.relu(self.m(h)))
        return y


@pytest.mark.parametrize(("number", "width"), [(0.1, 100), (0.125, 64), (0.25, 16), (2**-0.5, 2), (2**-0.5, 4)])
def test_numbers_around_linear_layers_are_kept(number: float, width: int) -> None:
    axes = trace(Coincidence(number, width), WORDS)
    assert follow(axes) == [False]
