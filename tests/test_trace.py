"""What tracing ties together: small models whose cut is the same class built smaller."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import Residual, residual_axes, same_as_built
from torch import Tensor, nn
from traced_models import Attention

from fedrolex import Axes, Hints, Random, Rolling, Static, Window, trace
from fedrolex.slicing import Arc, Cat, Fixed, Prod, Ref, pick


def kinds(axes: Axes) -> dict[str, tuple[int, str]]:
    return {name: (axis.size, axis.kind) for name, axis in axes.axes.items()}


def test_a_residual_stream_is_one_axis_and_a_channel_becomes_four_inputs() -> None:
    _, axes = residual_axes()
    assert kinds(axes) == {"stem": (8, "width"), "a": (6, "width"), "head": (5, "outputs")}
    assert axes.tensors["head.weight"].dims == (Ref("head"), Prod((Ref("stem"), Fixed(4))))
    assert axes.tensors["b.weight"].dims[:2] == (Ref("stem"), Ref("a"))
    assert axes.tensors["norm.running_var"].dims == (Ref("stem"),)
    assert axes.tensors["b.weight"].reads == (1,)
    assert {note.about: note.what for note in axes.frozen}["stem.weight:1"] == "tied to an input of the model"


@pytest.mark.parametrize("scheme", [Rolling(), Random(), Static()])
@pytest.mark.parametrize("round", [0, 3, 7])
def test_a_cut_is_the_class_built_smaller(scheme: Any, round: int) -> None:
    _, axes = residual_axes()
    window = scheme.window(axes, round=round, capacity="1/2")
    same_as_built(Residual, {}, {"stream": 4, "inner": 3}, window, axes, torch.randn(3, 3, 8, 8))


class Grouped(nn.Module):
    def __init__(self, inner: int = 4, wide: int = 6) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 3 * inner, 1)
        self.b = nn.Conv2d(3 * inner, 3 * wide, 3, padding=1, groups=3)
        self.norm = nn.GroupNorm(3, 3 * wide)
        self.up = nn.ConvTranspose2d(3 * wide, 2, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.norm(self.b(torch.relu(self.a(x)))))
        return y


def test_groups_stay_and_the_channels_inside_are_cut() -> None:
    axes = trace(Grouped(), torch.randn(2, 3, 6, 6))
    assert sorted(kinds(axes).values()) == [(2, "outputs"), (3, "groups"), (4, "width"), (6, "width")]
    window = Rolling().window(axes, round=3, capacity="1/2")
    same_as_built(Grouped, {}, {"inner": 2, "wide": 3}, window, axes, torch.randn(2, 3, 6, 6))


class Separable(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, width, 1)
        self.depth = nn.Conv2d(width, 2 * width, 3, padding=1, groups=width)
        self.b = nn.Conv2d(2 * width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(torch.relu(self.depth(self.a(x))))
        return y


def test_a_depthwise_convolution_with_a_multiplier() -> None:
    axes = trace(Separable(), torch.randn(2, 3, 6, 6))
    assert kinds(axes)["a"] == (8, "width")
    assert axes.tensors["depth.weight"].dims[0] == Prod((Ref("a"), Ref("depth.part")))
    assert axes.axes["depth.part"].kind == "factor", "a dimension is cut once, not by β twice"
    window = Rolling().window(axes, round=6, capacity="1/2")
    same_as_built(Separable, {}, {"width": 4}, window, axes, torch.randn(2, 3, 6, 6))


@pytest.mark.parametrize("style", ["sdpa", "divide", "multiply", "einsum"])
def test_queries_and_keys_share_their_indices_inside_a_head(style: str) -> None:
    model = Attention(style=style)
    axes = trace(model, torch.randn(2, 7, 5))
    assert axes.tensors["q.weight"].dims[0] == axes.tensors["k.weight"].dims[0] == Prod((Ref("q.heads"), Ref("q.qk")))
    assert axes.axes["q.heads"].kind == "heads"
    assert axes.tensors["o.weight"].dims == (
        Ref("embed"),
        Prod((Ref("q.heads"), Ref("v.v" if style == "sdpa" else "v.part"))),
    )
    window = Rolling().window(axes, round=4, capacity="1/2")
    same_as_built(
        Attention, {"style": style}, {"stream": 6, "qk": 3, "v": 2, "style": style}, window, axes, torch.randn(2, 7, 5)
    )


def test_numbers_derived_from_a_width_are_reported_and_follow_it_unless_told_not_to() -> None:
    model = Attention(style="divide")
    axes = trace(model, torch.randn(2, 7, 5))
    assert [note.what for note in axes.notes] == ["2.44949 = √size of q.qk: sub-models use their own width"]
    kept = trace(model, torch.randn(2, 7, 5), Hints(scaling="keep"))
    assert "kept as it is" in kept.notes[0].what
    window = Rolling().window(axes, round=0, capacity="1/2")
    x = torch.randn(2, 7, 5)
    assert not torch.allclose(axes.cut(model, window)(x), kept.cut(model, window)(x))


class Packed(nn.Module):
    """q, k and v in one matrix, and rotary positions."""

    def __init__(self, half: int = 4, inner: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.qkv = nn.Linear(12, 2 * (4 * half + inner))
        self.sizes = (4 * half, 4 * half, 2 * inner)
        self.out = nn.Linear(2 * inner, 12)
        self.register_buffer("rates", torch.rand(half), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2])[:, None] * self.get_buffer("rates")
        cos, sin = (torch.cat([part, part], -1) for part in (angle.cos(), angle.sin()))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        q, k, v = (p.unflatten(-1, (2, -1)).transpose(1, 2) for p in self.qkv(x).split(self.sizes, -1))
        x = x + self.out(F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v).transpose(1, 2).flatten(2))
        return F.linear(x, self.embed.weight)


def test_packed_projections_rotary_pairs_and_tied_rows() -> None:
    axes = trace(Packed(), torch.randint(0, 11, (2, 5)))
    pairs = Cat((Ref("qkv"), Ref("qkv")))
    assert axes.tensors["qkv.weight"].dims[0] == Cat(
        (Prod((Ref("qkv.heads"), pairs)), Prod((Ref("qkv.heads"), pairs)), Prod((Ref("qkv.heads"), Ref("qkv.v"))))
    )
    assert axes.tensors["rates"].dims == (Ref("qkv"),), "the rates of the rotation belong to the axis"
    assert axes.axes["embed.rows"].kind == "rows"
    window = Window({"qkv": Arc(3, 2, 4), "qkv.v": Arc(4, 3, 6)})
    model = Packed()
    cut = axes.cut(model, window)
    native = Packed(half=2, inner=3)
    native.load_state_dict(cut.state_dict())
    assert isinstance(native.rates, Tensor)
    native.rates.copy_(cut.rates)  # type: ignore[arg-type]
    words = torch.randint(0, 11, (2, 5))
    torch.testing.assert_close(cut(words), native(words))
    assert [tuple(native.rates.shape), "rates" in cut.state_dict()] == [(2,), False]


def test_rows_are_whole_until_a_window_selects_from_them() -> None:
    model = Packed()
    axes = trace(model, torch.randint(0, 11, (2, 5)))
    assert axes.widths("1/4")["embed.rows"] == 11
    few = axes.cut(model, Window({"embed.rows": pick([7, 2, 3], 11)}))
    mine, theirs = torch.tensor([[0, 2, 1]]), torch.tensor([[7, 3, 2]])
    torch.testing.assert_close(few(mine), model(theirs)[..., [7, 2, 3]])


class Recurrent(nn.Module):
    def __init__(self, cell: str = "LSTM", hidden: int = 8, both: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.rnn = getattr(nn, cell)(6, hidden, num_layers=2, batch_first=True, bidirectional=both)
        self.head = nn.Linear(hidden * (1 + both), 3)

    def forward(self, words: Tensor) -> Tensor:
        y: Tensor = self.head(self.rnn(self.embed(words))[0][:, -1])
        return y


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("both", [False, True])
def test_recurrent_gates_share_the_hidden_axis(cell: str, both: bool) -> None:
    axes = trace(Recurrent(cell, both=both), torch.randint(0, 13, (2, 5)))
    hidden = next(axis for axis in axes.cut_axes if axis.size == 8)
    window = Window({hidden.name: Arc(6, 4, 8)})
    args = {"cell": cell, "both": both}
    same_as_built(Recurrent, args, {**args, "hidden": 4}, window, axes, torch.randint(0, 13, (2, 5)))


class Joined(nn.Module):
    """Concatenation, gating by halves, chunks, padding of channels, pixel shuffle."""

    def __init__(self, a: int = 4, b: int = 6, gate: int = 6) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, a, 1), nn.Conv2d(3, b, 1)
        self.mix = nn.Conv2d(a + b, 2 * gate, 1)
        self.more = nn.Conv2d(gate, 4 * gate, 1)
        self.last = nn.Conv2d(gate, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.left(x), F.silu(self.right(x))], 1)
        x = F.glu(self.mix(x), 1)
        up: Tensor = self.last(F.pixel_shuffle(self.more(x), 2))
        return up


def test_concatenation_gating_and_pixel_shuffle() -> None:
    axes = trace(Joined(), torch.randn(2, 3, 4, 4))
    assert axes.tensors["mix.weight"].dims[1] == Cat((Ref("left"), Ref("right")))
    assert axes.tensors["mix.weight"].dims[0] == Cat((Ref("mix"), Ref("mix")))
    window = Window({"left": Arc(3, 2, 4), "right": Arc(1, 3, 6), "mix": Arc(4, 3, 6), "more": Arc(5, 3, 6)})
    assert set(window) <= set(axes.axes), axes.axes
    same_as_built(Joined, {}, {"a": 2, "b": 3, "gate": 3}, window, axes, torch.randn(2, 3, 4, 4))


class Placed(nn.Module):
    """Rows of one tensor changed by those of another, then mixed."""

    def __init__(self, how: str, width: int = 8) -> None:
        super().__init__()
        self.how = how
        self.a, self.b, self.o = nn.Linear(6, width), nn.Linear(6, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, g = self.a(x), self.b(x)
        places = torch.tensor([2, 0, 2])
        match self.how:
            case "index_add":
                h = h.index_add(1, places, g[:, :3])
            case "index_copy":
                h = h.index_copy(1, places[:2], g[:, :2])
            case "index_put":
                h = h.clone()
                h[:, places[:2]] = g[:, :2]
            case "accumulate":
                h = h.clone().index_put_((torch.tensor([0, 1, 1]), places), g[:, 0].mean(0), accumulate=True)
            case "mask":
                h = g + h.index_put((x[..., 0] > 0,), torch.tensor(0.5))
        y: Tensor = self.o(h)
        return y


@pytest.mark.parametrize("how", ["index_add", "index_copy", "index_put", "accumulate", "mask"])
def test_rows_that_go_to_numbered_places_share_what_is_inside_them(how: str) -> None:
    x = torch.randn(2, 4, 6)
    axes = trace(Placed(how), x)
    assert [axis.size for axis in axes.cut_axes] == [8]
    assert not [note for note in axes.notes if "no rule" in note.what]
    window = Rolling().window(axes, round=3, capacity="1/2")
    same_as_built(Placed, {"how": how}, {"how": how, "width": 4}, window, axes, x)


class Experts(nn.Module):
    """Tokens that go to one of three experts each, whose matrices are one tensor."""

    def __init__(self, stream: int = 8, inner: int = 12) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(6, stream), nn.Linear(stream, 2)
        self.up = nn.Parameter(torch.randn(3, stream, inner) * 0.3)
        self.down = nn.Parameter(torch.randn(3, inner, stream) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        ends = torch.tensor([2, 3, 5], dtype=torch.int32)
        grouped = torch.ops.transformers.grouped_mm_fallback
        mixed = grouped(torch.relu(grouped(h, self.up, ends)), self.down, ends)
        y: Tensor = self.out(h + mixed)
        return y


def test_matrices_of_experts_are_cut_inside() -> None:
    pytest.importorskip("transformers.integrations.moe", reason="this version of transformers has no grouped product")
    x = torch.randn(5, 6)
    axes = trace(Experts(), x)
    assert kinds(axes) == {"down": (8, "width"), "up": (12, "width"), "out": (2, "outputs")}
    assert axes.tensors["up"].reads == axes.tensors["down"].reads == (1,)
    window = Rolling().window(axes, round=3, capacity="1/2")
    same_as_built(Experts, {}, {"stream": 4, "inner": 6}, window, axes, x)
