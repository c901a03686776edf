"""The bundled models: the paper's sizes, and two ways to the same sub-model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from fedrolex import (
    Axes,
    FedrolexError,
    Hints,
    Random,
    RandomMiswired,
    Rolling,
    Scheme,
    Static,
    coverage,
    spread,
    trace,
)
from fedrolex.models import VGG, LeNet, PreResNet, ResNet, WordTransformer, preresnet18, preresnet34
from fedrolex.slicing import WHOLE

CAPACITIES = ("1", "1/2", "1/4", "1/8", "1/16")


@cache
def resnet() -> tuple[PreResNet, Axes]:
    torch.manual_seed(1)
    model = preresnet18()
    return model, trace(model, torch.randn(2, 3, 32, 32))


@cache
def words() -> tuple[WordTransformer, Axes]:
    torch.manual_seed(1)
    model = WordTransformer(vocabulary=60, length=10, inner=32)
    return model, trace(model, torch.randint(0, 60, (2, 10)))


def test_parameters_of_the_papers_image_model_to_the_unit() -> None:
    model, axes = resnet()
    assert [axes.parameters(c) for c in CAPACITIES] == [11_172_170, 2_796_714, 701_018, 176_178, 44_510]
    hundred = trace(preresnet18(classes=100), torch.randn(2, 3, 32, 32))
    assert [hundred.parameters(c) for c in CAPACITIES] == [11_218_340, 2_819_844, 712_628, 182_028, 47_480]
    assert sum(p.numel() for p in preresnet34().parameters()) > sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("model", "whole", "half"),
    [
        (ResNet(8), 78_042, 19_954),
        (ResNet(20), 272_474, 68_786),
        (VGG(), 9_228_362, 2_310_186),
        (ResNet(8, channels=1, size=8, norm="group"), 77_754, 19_810),
        (VGG(channels=1, size=8, width=8, norm="batch"), 145_410, 36_710),
    ],
)
def test_other_families_are_cut_like_any_module(model: ResNet | VGG, whole: int, half: int) -> None:
    example = model.slicing_example()
    axes = trace(model, example)
    assert (axes.parameters("1"), axes.parameters("1/2")) == (whole, half)
    part = axes.cut(model, Rolling().window(axes, round=3, capacity="1/2"))
    assert part(example).shape == model(example).shape


def test_a_resnet_has_a_depth_of_its_kind() -> None:
    with pytest.raises(FedrolexError, match="6n"):
        ResNet(18)


def test_axes_of_the_papers_image_model() -> None:
    """One residual stream a stage, one inner axis a block, inputs and classes whole."""
    _, axes = resnet()
    assert {a.name: a.size for a in axes.cut_axes} == {
        **{f"stream{s}": k for s, k in enumerate((64, 128, 256, 512))},
        **{f"inner{s}.{b}": k for s, k in enumerate((64, 128, 256, 512)) for b in range(2)},
    }
    stream = {t for t, d in axes.axes["stream1"].members}
    assert stream == {
        *(f"stages.1.{b}.conv2.weight" for b in (0, 1)), "stages.1.0.shortcut.weight", "stages.1.1.conv1.weight",
        "stages.2.0.conv1.weight", "stages.2.0.shortcut.weight",
        *(f"stages.{at}.norm1.{n}" for at in ("1.1", "2.0") for n in ("weight", "bias")),
    }  # fmt: skip


def test_axes_of_the_papers_word_model_are_derived() -> None:
    _, axes = words()
    found = {a.name: (a.size, a.kind) for a in axes.axes.values()}
    assert found == {
        "stream": (128, "width"), "vocabulary": (60, "rows"),
        **{f"heads{i}": (8, "heads") for i in range(3)}, **{f"qk{i}": (12, "width") for i in range(3)},
        **{f"v{i}": (12, "width") for i in range(3)}, **{f"inner{i}": (32, "width") for i in range(3)},
    }  # fmt: skip
    assert [axes.widths(c, "ceil")["qk0"] for c in CAPACITIES] == [12, 6, 3, 2, 1]


def test_parameters_of_the_papers_word_model_to_the_unit() -> None:
    """The embedding counts once, though it is also the output layer; 10,004 are the output's bias."""
    model = WordTransformer()
    assert sum(p.numel() for p in model.parameters()) == 3_010_144 + 10_004
    axes = trace(model, torch.randint(0, 10_004, (2, 20)))
    sizes = [axes.parameters(c, "ceil") - 10_004 for c in ("1", "1/2", "1/4", "1/16")]
    assert sizes == [3_010_144, 1_074_992, 429_976, 87_544]
    inside = axes.freeze("stream")
    assert [inside.parameters(c, "ceil") - 10_004 for c in ("1/2", "1/4", "1/16")] == [2_146_480, 1_714_648, 1_393_864]
    heads = inside.freeze("inner0", "inner1", "inner2")
    assert [heads.parameters(c, "ceil") - 10_004 for c in ("1/2", "1/4", "1/16")] == [2_935_984, 2_898_904, 2_874_184]


@pytest.mark.parametrize("which", [resnet, words])
@pytest.mark.parametrize("scheme", [Rolling(rounding="ceil"), Static(rounding="ceil"), Random(rounding="ceil")])
def test_the_graph_and_the_models_own_factory_agree_bit_for_bit(which: object, scheme: Scheme) -> None:
    model, native = which()  # type: ignore[operator]
    example = torch.randn(2, 3, 32, 32) if isinstance(model, PreResNet) else torch.randint(0, 60, (2, 10))
    traced = trace(model, example, replace(model.slicing_hints(), factory=None))
    for beta, round in (("1/2", 70), ("1/16", 5)):
        window = scheme.window(native, round=round, capacity=beta)
        by_factory, by_graph = native.cut(model, window), traced.cut(model, window)
        assert type(by_factory) is type(model)
        for mode in (True, False):
            grads = []
            for module in (by_factory, by_graph):
                module.train(mode)
                module.zero_grad()
                torch.manual_seed(3)
                out = module(example)
                out.square().mean().backward()
                grads.append((out, {n: p.grad for n, p in module.named_parameters()}))
            assert torch.equal(grads[0][0], grads[1][0])
            for name, gradient in grads[0][1].items():
                assert gradient is not None
                assert torch.equal(gradient, grads[1][1][name]), name  # type: ignore[arg-type]
        assert all(
            torch.equal(a, b)
            for a, b in zip(by_factory.state_dict().values(), by_graph.state_dict().values(), strict=True)
        )


def test_a_full_word_model_computes_the_same_at_every_round_of_the_roll() -> None:
    """The published one rolls q, k and v across heads, so a full client computes something else."""
    model, axes = words()
    model.eval()
    x = torch.randint(0, 60, (2, 10))
    for round in range(0, 128, 17):
        cut = axes.cut(model, Rolling().window(axes, round=round, capacity="1")).eval()
        torch.testing.assert_close(cut(x), model(x), rtol=1e-4, atol=1e-5)


def test_the_word_model_is_causal() -> None:
    model, _ = words()
    model.eval()
    x = torch.randint(0, 60, (1, 10))
    y = x.clone()
    y[:, 6:] = (y[:, 6:] + 1) % 60
    torch.testing.assert_close(model(x)[:, :6], model(y)[:, :6])


def logits(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.train()(x)
    return out


def test_the_published_random_baseline_is_miswired_and_ours_is_not() -> None:
    """Independent draws a convolution break identity shortcuts, even for a full-size client."""
    model, axes = resnet()
    x = torch.randn(8, 3, 32, 32)
    whole = logits(axes.cut(model, WHOLE), x)

    def error(scheme: Scheme) -> float:
        return float((logits(axes.cut(model, scheme.window(axes, round=3, capacity="1")), x) - whole).abs().max())

    assert error(Rolling()) < 1e-4
    assert error(Static()) == 0.0
    assert error(Random()) == 0.0
    assert error(RandomMiswired()) > 0.05


def test_half_of_the_published_shortcut_channels_do_not_belong_together() -> None:
    """The overlap of what an identity shortcut adds is about one half at capacity 1/2; aligned it is all."""
    _, axes = resnet()
    names = ("stem.weight", "stages.0.0.conv2.weight")
    published = RandomMiswired().window(axes, round=0, capacity="1/2")
    held = [set(published.wiring[name, 0].indices().tolist()) for name in names]
    assert 0.3 < len(held[0] & held[1]) / 32 < 0.7
    aligned = Random().window(axes, round=0, capacity="1/2")
    assert not aligned.wiring
    readers = [published.wiring["stages.0.1.conv1.weight", 1], published.wiring["stages.0.1.norm1.weight", 0]]
    assert {tuple(r.indices()) for r in readers} == {tuple(published.wiring[names[1], 0].indices())}, "layers still fit"


@pytest.mark.parametrize(("beta", "share"), [("1/4", 53.5), ("1/8", 26.6), ("1/16", 13.2)])
def test_lockstep_rolling_never_trains_most_weights_of_a_small_client(beta: str, share: float) -> None:
    """Share of convolution weights ever touched over a full cycle of 512 rounds."""
    _, axes = resnet()
    reached = coverage(axes, Rolling(), [beta], rounds=512)
    assert reached.nodes == 1.0
    sizes = {n: torch.Size(axes.shape(n)).numel() for n in reached.by_tensor if len(axes.shape(n)) == 4}
    touched = sum(reached.by_tensor[n] * size for n, size in sizes.items()) / sum(sizes.values())
    assert round(100 * touched, 1) == pytest.approx(share, abs=0.05)


def test_spread_offsets_train_nearly_all_of_them() -> None:
    _, axes = resnet()
    assert coverage(axes, Rolling(offset=spread(10)), ["1/16"] * 10, rounds=100).matrices > 0.99


def test_without_hints_the_derived_names_are_those_of_the_tensors() -> None:
    axes = trace(preresnet18(), torch.randn(2, 3, 32, 32), Hints())
    assert [a.name for a in axes.cut_axes][:3] == ["stem", "stages.0.0.conv1", "stages.0.1.conv1"]


def test_lenet_has_its_published_size_and_can_be_cut() -> None:
    model = LeNet()
    assert sum(p.numel() for p in model.parameters()) == 62_006
    axes = trace(model, model.slicing_example())
    half = axes.cut(model, Static().window(axes, round=0, capacity="1/2"))
    assert half(model.slicing_example()).shape == (2, 10)
    assert {axis.size for axis in axes.cut_axes} == {6, 16, 120, 84}
