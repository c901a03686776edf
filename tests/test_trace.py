"""Deriving axes: one small model a mechanism, each cut compared with the same class built smaller."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import Residual, residual_axes, same_as_built
from torch import Tensor, nn

from fedrolex import Axes, FedrolexError, Hints, Random, Rolling, Static, Window, trace
from fedrolex.slicing import WHOLE, Arc, Cat, Fixed, Prod, Ref, pick


def kinds(axes: Axes) -> dict[str, tuple[int, str]]:
    return {name: (axis.size, axis.kind) for name, axis in axes.axes.items()}


# --- what is tied to what ---


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


class Attention(nn.Module):
    """Attention in several spellings; ``style`` says which."""

    def __init__(self, stream: int = 12, qk: int = 6, v: int = 4, style: str = "sdpa") -> None:
        super().__init__()
        self.style, self.qk = style, qk
        self.embed = nn.Linear(5, stream)
        self.q, self.k = nn.Linear(stream, 3 * qk), nn.Linear(stream, 3 * qk)
        self.v, self.o = nn.Linear(stream, 3 * v), nn.Linear(3 * v, stream)
        self.norm = nn.LayerNorm(stream)
        self.head = nn.Linear(stream, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = (part(x).unflatten(-1, (3, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.style == "sdpa":
            mixed = F.scaled_dot_product_attention(q, k, v)
        elif self.style == "divide":
            mixed = (q @ k.transpose(-2, -1) / math.sqrt(self.qk)).softmax(-1) @ v
        elif self.style == "multiply":
            mixed = ((q * self.qk**-0.5) @ k.mT).softmax(-1) @ v
        else:
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / torch.full([], q.shape[-1] ** 0.5)
            mixed = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)
        y: Tensor = self.head(self.norm(x + self.o(mixed.transpose(1, 2).flatten(2))).mean(1))
        return y


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


# --- what cannot be cut is frozen or refused, never cut wrongly ---


class Order(nn.Module):
    """Channels whose order matters to ``name``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        match self.name:
            case "cumsum":
                x = x.cumsum(-1)
            case "flip":
                x = x.flip(-1)
            case "arange":
                x = x + torch.arange(8)
            case "argmax":
                x = x * x.argmax(-1, keepdim=True)
            case "sort":
                x = x.sort(-1).values
            case "unknown":
                x = torch.special.bessel_j0(x) + torch.trapezoid(x, dim=-1)[..., None]
            case "strided":
                x = x + torch.cat([x[..., ::3], x[..., 1::3], x[..., 2::3]], -1)
        y: Tensor = self.c(torch.relu(self.b(x)))
        return y


@pytest.mark.parametrize("name", ["cumsum", "flip", "arange", "argmax", "sort", "unknown", "strided"])
def test_channels_whose_order_matters_stay_whole(name: str) -> None:
    model = Order(name)
    axes = trace(model, torch.randn(3, 4))
    assert [axis.name for axis in axes.cut_axes] == ["b"]
    assert any(note.about == "a.weight:0" for note in axes.frozen), axes.frozen
    x = torch.randn(3, 4)
    torch.testing.assert_close(axes.cut(model, WHOLE)(x), model(x))


class Hidden(nn.Module):
    """A permutation nobody can see in the graph's shapes: an index buffer reorders the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("order", torch.randperm(8))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.order, Tensor)
        y: Tensor = self.b(self.a(x)[:, self.order])
        return y


def test_a_model_of_which_nothing_can_be_cut_is_refused_with_the_reason() -> None:
    with pytest.raises(FedrolexError, match=r"no axis of this model can be cut: .*picked from it"):
        trace(Hidden(), torch.randn(2, 4))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x) if x.sum() > 0 else x
        return y


@pytest.mark.parametrize(
    ("model", "example", "says"),
    [
        (Branching(), torch.randn(2, 4), "cannot be traced by torch.export"),
        (nn.Linear(4, 4), torch.randn(2, 5), "does not accept the example"),
        (nn.Linear(4, 4), "x", "example is a str"),
        (nn.Linear(4, 4), (), "holds no tensor"),
        (nn.Linear(4, 4), torch.randn(2, 4), "no axis of this model can be cut"),
        (nn.ReLU(), torch.randn(2, 4), "no parameters"),
    ],
)
def test_what_cannot_be_traced_is_refused_in_one_line(model: nn.Module, example: Any, says: str) -> None:
    with pytest.raises(FedrolexError, match=says) as caught:
        trace(model, example)
    assert "\n" not in str(caught.value)


def test_a_wrong_rule_would_be_caught_by_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a residual add did not tie its operands, permuting them apart must fail and the axes be frozen."""
    from fedrolex.slicing.rules import RULES
    from fedrolex.slicing.rules.call import Call

    def untied(call: Call) -> Any:
        return list(call.tensors()[0].dims)

    monkeypatch.setitem(RULES, "add", untied)
    _, axes = residual_axes()
    assert [axis.name for axis in axes.cut_axes] == ["a"]
    assert any("failed its proof" in note.what for note in axes.frozen)


# --- the sub-model is an ordinary module ---


class Switching(nn.Module):
    """Behaves differently in training beyond dropout and norms; returns more than one thing."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3)
        self.extra = nn.Linear(width, 2)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> dict[str, Tensor]:
        x = torch.relu(self.norm(self.a(x if shift is None else x + shift)))
        out = {"scores": self.b(self.dropout(x))}
        if self.training:
            out["extra"] = self.extra(x)
        return out


def test_train_and_eval_are_both_traced() -> None:
    model = Switching()
    axes = trace(model, torch.randn(4, 4))
    assert model.training
    assert int(model.norm.num_batches_tracked) == 0, "tracing does not touch the model"  # type: ignore[arg-type]
    cut = axes.cut(model, Rolling().window(axes, round=5, capacity="1/2"))
    x = torch.randn(6, 4)
    assert set(cut(x)) == {"scores", "extra"}
    assert not torch.equal(cut(x)["scores"], cut(x)["scores"]), "dropout is on"
    assert int(cut.get_buffer("norm.num_batches_tracked")) == 3
    cut.eval()
    assert set(cut(x)) == {"scores"}
    assert torch.equal(cut(x)["scores"], cut(x)["scores"])
    assert int(cut.get_buffer("norm.num_batches_tracked")) == 3


def test_a_cut_behaves_like_any_module() -> None:
    model, axes = residual_axes()
    cut = axes.cut(model, Rolling().window(axes, round=2, capacity="1/2")).eval()
    for batch in (1, 2, 5):
        assert cut(torch.randn(batch, 3, 8, 8)).shape == (batch, 5)
    assert [n for n, _ in cut.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert list(cut.state_dict()) == list(model.state_dict())
    twin = copy.deepcopy(cut)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(twin(x), cut(x))
    twin.get_parameter("a.weight").data.zero_()
    assert not torch.equal(twin(x), cut(x)), "a copy has weights of its own"
    assert cut.double()(x.double()).dtype is torch.float64
    assert next(cut.to("meta").parameters()).is_meta
    again = axes.cut(model, Rolling().window(axes, round=2, capacity="1/2"))
    stepped = torch.optim.SGD(again.parameters(), lr=0.1)
    again(x).sum().backward()
    stepped.step()
    torch.func.functional_call(again, dict(again.named_parameters()), (x,))


def test_tensors_a_sub_model_makes_follow_its_device() -> None:
    class Mask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(self.a(x) + torch.zeros(8, device=x.device))
            return y

    model = Mask()
    axes = trace(model, torch.randn(2, 4))
    cut = axes.cut(model, Static().window(axes, round=0, capacity="1/2")).to("meta")
    assert cut(torch.randn(2, 4, device="meta")).device.type == "meta"


def test_frozen_parameters_stay_frozen_and_arguments_keep_their_names() -> None:
    model = Switching().eval()
    model.a.weight.requires_grad_(False)
    axes = trace(model, {"x": torch.randn(4, 4), "shift": torch.randn(4, 4)})
    cut = axes.cut(model, Static().window(axes, round=0, capacity="1/2")).eval()
    assert not cut.get_parameter("a.weight").requires_grad
    x, shift = torch.randn(2, 4), torch.randn(2, 4)
    torch.testing.assert_close(cut(x, shift)["scores"], cut(shift=shift, x=x)["scores"])
    with pytest.raises(TypeError, match="shift is missing"):
        cut(x)
    with pytest.raises(TypeError, match="not part of the trace"):
        cut(x, shift, mask=x)


def test_gradients_do_not_cross_no_grad_regions() -> None:
    class Stopped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.t, self.b = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.t(x)
            y: Tensor = self.b(self.a(x) * target)
            return y

    model = Stopped()
    axes = trace(model, torch.randn(2, 4))
    cut = axes.cut(model, Rolling().window(axes, round=6, capacity="1/2"))
    cut(torch.randn(2, 4)).sum().backward()
    assert {n for n, p in cut.named_parameters() if p.grad is None} == {"t.weight", "t.bias"}


# --- what a model or its user can say ---


def test_hints_name_freeze_and_tie() -> None:
    model = Residual()
    x = torch.randn(2, 3, 8, 8)
    named = trace(model, x, Hints(name={"stem.weight:0": "stream", "a": "inner"}))
    assert [axis.name for axis in named.cut_axes] == ["stream", "inner"]
    frozen = trace(model, x, Hints(freeze=["a.weight:0"]))
    assert [axis.name for axis in frozen.cut_axes] == ["stem"]
    assert [note.what for note in frozen.frozen if note.about == "a.weight:0"] == ["frozen on request"]
    tied = trace(Residual(8, 8), x, Hints(tie=[["stem.weight:0", "a.weight:0"]]))
    assert len(tied.cut_axes) == 1
    assert tied.freeze("stem").cut_axes == ()


def test_a_kind_can_be_overridden_to_cut_heads() -> None:
    model = Attention()
    axes = trace(model, torch.randn(2, 7, 5), Hints(kind={"q.heads": "width", "q.qk": "factor", "v.v": "factor"}))
    cut = axes.cut(model, Rolling().window(axes, round=1, capacity="1/3"))
    assert cut.get_parameter("q.weight").shape == (6, 4)


@pytest.mark.parametrize(
    ("hints", "says"),
    [
        (Hints(freeze=["nothing*"]), "nothing matches"),
        (Hints(name={"nothing:0": "x"}), "no axis matches"),
        (Hints(tie=[["stem.weight:0", "z:1"]]), "'z:1'"),
        (Hints(kind={"z": "width"}), "no axis 'z'"),
    ],
)
def test_hints_that_match_nothing_are_refused(hints: Hints, says: str) -> None:
    with pytest.raises(FedrolexError, match=says):
        trace(Residual(), torch.randn(2, 3, 8, 8), hints)


# --- layouts travel without the model ---


def test_layouts_survive_json_and_cut_without_the_graph() -> None:
    model, axes = residual_axes()
    copied = Axes.from_json(axes.to_json())
    assert copied.encode() == axes.encode()
    window = Rolling().window(copied, round=5, capacity="1/2")
    assert window == Rolling().window(axes, round=5, capacity="1/2")
    state = axes.state(model)
    assert all(
        torch.equal(a, b)
        for a, b in zip(copied.take(state, window).values(), axes.take(state, window).values(), strict=True)
    )
    with pytest.raises(FedrolexError, match="loaded without a model"):
        copied.cut(model, window)


def nested(depth: int) -> str:
    """Axes with a layout of so many parts inside parts."""
    dims = '{"prod": [' * depth + "1" + "]}" * depth
    tensor = f'{{"dims": [{dims}], "role": "parameter", "reads": [], "floating": true}}'
    return f'{{"format": 1, "axes": {{}}, "tensors": {{"t": {tensor}}}, "aliases": {{}}, "frozen": [], "notes": []}}'


def test_a_layout_of_a_hundred_parts_inside_parts_can_be_used() -> None:
    axes = Axes.from_json(nested(100))
    assert axes.shape("t") == (1,)
    assert axes.take({"t": torch.ones(1)}, WHOLE)["t"].tolist() == [1.0]
    assert Axes.from_json(axes.to_json()).encode() == axes.encode()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ('{"format": 2}', "format 2, this version reads 1"),
        ('{"format": 1}', "damaged"),
        ("[" * 100_000 + "]" * 100_000, "not JSON: maximum recursion depth"),
        ('{"format": ' + "1" * 5000 + "}", "not JSON: Exceeds the limit"),
        ('{"layouts": [1]}', "format None, this version reads 1"),
        (nested(100_000), "not JSON: maximum recursion depth"),
        (nested(101), "parts are nested more than 100 deep"),
    ],
    ids=range(9),
)
def test_damaged_layouts_are_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(FedrolexError, match=says):
        Axes.from_json(text)


def test_a_different_model_is_refused() -> None:
    _, axes = residual_axes()
    with pytest.raises(FedrolexError, match="not the one that was traced"):
        axes.cut(nn.Linear(2, 2), WHOLE)
    with pytest.raises(FedrolexError, match=r"stem.weight has shape \(4, 3, 3, 3\)"):
        axes.cut(Residual(4), WHOLE)


# --- rows that go to numbered places ---


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


class Hardly(nn.Module):
    """A wide part whose order matters, and a narrow one that can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(4, 8), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x).cumsum(-1)) + self.d(self.c(x))
        return y


def test_where_little_can_be_cut_the_notes_say_so() -> None:
    axes = trace(Hardly(), torch.randn(2, 4))
    assert [axis.size for axis in axes.cut_axes] == [8]
    what = "sub-models of capacity 1/4 keep 86% of them: little can be cut, see what is frozen and why"
    assert [(n.about, n.what) for n in axes.notes] == [("parameters", what)]
