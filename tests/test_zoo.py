"""Models nobody here wrote, unmodified: every one is traced, proved, cut, pasted back and trained."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fedrolex import Axes, Rolling, Window, trace
from fedrolex.slicing import WHOLE, exact, pick

pytest.importorskip("torchvision", reason="torchvision is not installed")
pytest.importorskip("timm", reason="timm is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import zoo

# (cut axes, parameters left at 1/2): what an independent study of the same models found.
EXPECTED = {
    "resnet18": (12, 0.261), "resnet50": (37, 0.271), "mobilenet_v3_small": (27, 0.358), "densenet121": (120, 0.285),
    "convnext_tiny": (22, 0.260), "efficientnet_b0": (40, 0.322), "squeezenet1_1": (25, 0.355),
    "regnet_y_400mf": (53, 0.277), "resnext50_32x4d": (37, 0.271), "vit_b_16": (25, 0.254), "swin_t": (28, 0.258),
    "gpt2": (7, None), "llama": (6, None), "t5": (17, None),
}  # fmt: skip


def call(model: nn.Module, example: Any) -> list[Tensor]:
    out = model(**example) if isinstance(example, Mapping) else model(example)
    return [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]


def check(name: str, entry: zoo.Entry) -> Axes:
    """Everything the library promises of a traced model, through its public face only."""
    torch.manual_seed(0)
    model, example = entry()
    model = model.double()
    example = pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, example)
    axes = trace(model, example)
    for parameter in model.parameters():
        if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.eval()
    with torch.no_grad():
        wanted = call(model, example)[0]
        order = Window(
            {
                a.name: pick(torch.randperm(a.size).tolist(), a.size)
                for a in axes.axes.values()
                if a.kind not in ("rows", "outputs")
            }
        )
        permuted = call(axes.cut(model, order).eval(), example)[0]
    assert float((permuted - wanted).norm() / wanted.norm()) < 1e-6

    trained = gradients(model.train(), example)
    for beta, round in (("1/2", 11), ("1/4", 3)):
        window = Rolling().window(axes, round=round, capacity=beta)
        small = axes.cut(model, window)
        assert sum(p.numel() for p in small.parameters()) == axes.parameters(window) == axes.parameters(beta)
        assert gradients(small, example) == trained
        before = {n: t.clone() for n, t in axes.state(model).items()}
        axes.paste(model, axes.cut(model, window), window)
        assert all(torch.equal(t, before[n]) for n, t in axes.state(model).items())
    assert 0 < axes.parameters("1/4") < axes.parameters("1/2") < axes.parameters("1")
    rolling = Rolling()
    for axis in {axis.size: axis for axis in axes.cut_axes}.values():  # spans know nothing of an axis but its size
        spans = [rolling.span(axis, 0, j, exact("1/4"), 0).indices() for j in range(axis.size)]
        assert set(np.concatenate(spans).tolist()) == set(range(axis.size))
    return axes


def gradients(model: nn.Module, example: Any) -> set[str]:
    model.zero_grad()
    outputs = [out for out in call(model, example) if out.requires_grad]
    torch.stack([out.square().sum() for out in outputs]).sum().backward()
    return {n for n, p in model.named_parameters() if p.grad is not None}


LARGE = ("vgg11_bn", "convmixer_768_32", "vit_b_16")  # a minute or two each
RELATED = (  # much like others that are tested in every run
    "res2net50_26w_4s", "resnext50_32x4d", "cspresnet50", "resnetv2_50", "resnet50", "googlenet", "dla34",
    "nf_regnet_b0", "repvgg_a0", "hrnet_w18_small",
)  # fmt: skip
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name in (*LARGE, *RELATED) else name
    for name in (*zoo.TORCHVISION, *zoo.TIMM, *zoo.HUGGING)
]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_nobody_here_wrote(name: str) -> None:
    axes = check(name, {**zoo.TORCHVISION, **zoo.TIMM, **zoo.HUGGING}[name])
    if name in EXPECTED:
        count, share = EXPECTED[name]
        assert len(axes.cut_axes) == count
        assert share is None or axes.parameters("1/2") / axes.parameters("1") == pytest.approx(share, abs=6e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(zoo.MORE))
def test_many_more(name: str) -> None:
    check(name, zoo.MORE[name])


@pytest.mark.slow
def test_attention_biases_kept_in_evaluation_are_no_constants() -> None:
    """LeViT computes them once in evaluation, from weights, and forgets them when it trains."""
    model, example = zoo.timm("levit_128s", size=224, drop_path_rate=0.1)
    axes = trace(model, example)
    assert not any(module.attention_bias_cache for module in model.modules() if hasattr(module, "attention_bias_cache"))
    cut = axes.cut(model, WHOLE).eval()
    with torch.no_grad():
        for name, parameter in model.train().named_parameters():
            if "attention_biases" in name:
                parameter.normal_()
                cut.get_parameter(name).copy_(parameter)
        found, wanted = call(cut, example)[0], call(model.eval(), example)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_segmentation_network_takes_the_size_it_was_traced_for() -> None:
    model = import_module("torchvision.models.segmentation").fcn_resnet50(weights=None, weights_backbone=None)
    axes = trace(model, zoo.image(64))
    cut = axes.cut(model, Rolling().window(axes, round=0, capacity="1/4"))
    assert cut(zoo.image(64))["out"].shape == (3, 21, 64, 64)
    with pytest.raises(ValueError, match="dimension 2 of x is 96; this sub-model was traced for 64"):
        cut(zoo.image(96))


def test_experts_are_cut() -> None:
    """In float32: the grouped product of this model takes no float64."""
    model, example = zoo.hugging("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **zoo.GROUPED)
    axes = trace(model, example)
    assert axes.parameters("1/4") < 0.1 * axes.parameters()
    assert not [note for note in axes.notes if "no rule" in note.what]
    small = axes.cut(model, Rolling().window(axes, round=3, capacity="1/4"))
    assert gradients(small, example) == gradients(model, example)
    whole = axes.cut(model, WHOLE).eval()
    torch.testing.assert_close(call(whole, example)[0], call(model.eval(), example)[0], rtol=1e-4, atol=1e-4)
