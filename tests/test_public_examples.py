"""The public examples that a distilling server looks at: how many, in which batches, drawn anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from methods_shared import group, small, states
from torch import Tensor, nn

from fedrolex import FedrolexError, models
from fedrolex.methods import FedDF, distillation, dsfl
from fedrolex.methods.distillation import Public, pieces

TEACH = {
    "fedbe": ["method=fedbe", "method.samples=1", "method.epochs=1"],
    "feddf": ["method=feddf", "method.steps=3", "method.judge_every=3"],
    "fedet": ["method=fedet", "method.steps=3"],
}


@pytest.mark.parametrize("method", TEACH)
def test_a_round_looks_at_so_many_public_examples(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn anew in every round; all of them where that is as many as there are."""
    seen: list[Tensor] = []
    plain = Public.batches

    def batches(self: Public, size: int, steps: int, purpose: str) -> Iterator[Tensor]:
        seen.append(self.inputs)
        return plain(self, size, steps, purpose)

    monkeypatch.setattr(Public, "batches", batches)
    made = small(*TEACH[method], "method.examples=20")
    states(made, 2)
    public = made.server.classification.public
    assert public is not None
    drawn = {tuple(x.flatten(1).sum(1).tolist()) for x in seen}
    assert {len(x) for x in seen} == {20}
    assert len(drawn) == 2  # two rounds
    every, null = (states(small(*TEACH[method], f"method.examples={n}"), 1) for n in (len(public), "null"))
    assert all(torch.equal(tensor, null[name]) for name, tensor in every.items())


@pytest.mark.parametrize(("count", "size"), [(64, 64), (65, 64), (129, 64), (128, 64), (1, 64), (7, 3), (2, 2)])
def test_as_many_batches_as_steps_and_none_of_one_example(count: int, size: int) -> None:
    """Every epoch has each example once, whatever is left over: a look at ``step == steps`` must come."""
    batches = list(Public(torch.randn(count, 4)).batches(size, 10, "test"))
    assert len(batches) == 10
    assert min(map(len, batches)) > 1 or count == 1
    epoch = len(pieces(torch.arange(count), size))
    assert torch.equal(torch.cat(batches[:epoch]).sort().values, torch.arange(count))


@pytest.mark.parametrize("count", [64, 65])
def test_one_example_left_over_does_not_undo_what_was_taught(count: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x, own, teacher = (torch.randn(*shape, generator=draw) for shape in ((count, 4), (3, 4), (3, 4)))
    y, how = (x @ teacher.T).argmax(1), FedDF(steps=20, lr=0.1)
    found = how.taught(group(own), (x @ teacher.T).softmax(1), Public(x), x, y)
    assert not torch.equal(found["weight"], own)


@pytest.mark.parametrize("method", ["fedbe", "feddf"])
def test_static_norms_are_not_given_a_lonely_example(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps of one pixel and one image left over: nothing to take a variance of."""
    monkeypatch.setattr(distillation, "AT_ONCE", 20)
    norms = ["task.model=preresnet18", "task.norm=static", "task.width=4", "method.examples=21"]
    states(small(*TEACH[method], *norms), 1)


@pytest.mark.parametrize("method", TEACH)
@pytest.mark.parametrize("examples", ["1", "2.5", "true"])
def test_one_public_example_is_refused(method: str, examples: str) -> None:
    with pytest.raises(FedrolexError, match=r"method\.examples"):
        small(f"method={method}", f"method.examples={examples}")


def test_norms_of_clients_that_label_are_described_by_some_public_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by all, of which there may be 50,000, nor by the first, which may be of one class."""
    seen: list[Tensor] = []
    plain = models.collect

    def collect(module: nn.Module, inputs: list[Tensor]) -> Any:
        seen.append(torch.cat(inputs))
        return plain(module, inputs)

    monkeypatch.setattr(distillation, "collect", collect)
    monkeypatch.setattr(dsfl, "DESCRIBED", 12)
    made = small("method=dsfl", "method.examples=6", "task.model=preresnet18", "task.norm=static", "task.width=4")
    states(made, 1)
    public = made.server.classification.public
    assert public is not None
    x = made.server.classification.inputs(public.x)
    assert {len(inputs) for inputs in seen} == {12}
    assert all(torch.equal(inputs, seen[0]) for inputs in seen)
    assert not torch.equal(seen[0], x[:12])
    assert all(any(torch.equal(one, other) for other in x) for one in seen[0])
