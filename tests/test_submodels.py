"""A sub-model is an ordinary module."""

from __future__ import annotations

import copy

import pytest
import torch
from small import residual_axes
from torch import Tensor, nn

from fedrolex import Rolling, Static, trace


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
