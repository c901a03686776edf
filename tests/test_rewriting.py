"""Rewritten training code: the same numbers, without the copies and without the stored gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fedrolex import Classification, Examples, Recipe, trace
from fedrolex.clients.dropout import OwnDropout
from fedrolex.clients.work import LocalTraining, Slot
from fedrolex.engines import Crew, Loop
from fedrolex.engines import rewriting as own
from fedrolex.runs import prepare
from fedrolex.slicing import Static
from fedrolex.tasks.partition import Partition


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "LARGE", 1)
    monkeypatch.setattr(own, "BLOCK", 100)  # one and two of eight rows


def pooled(scale: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6 * scale, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * scale * 9, 8 * scale),
        nn.ReLU(),
        nn.Linear(8 * scale, 4),
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.first, self.second, self.last = (nn.Linear(*n) for n in ((5, 6), (6, 6), (6, 6), (6, 4)))
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.second(self.first(self.lift(x))))
        return found


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.inner, self.last = (nn.Linear(*n) for n in ((5, 6), (6, 6), (6, 4)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.inner(self.inner(self.lift(x))))
        return found


class Spare(nn.Module):
    """A weight with a second name, that of a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.lift, self.last = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 4)
        self.spare.weight = self.lift.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.lift(x).tanh())
        return found


class Constant(nn.Module):
    """A layer whose weight is not trained at all."""

    fixed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fixed", torch.randn(5, 5))
        self.bias, self.lift, self.last = nn.Parameter(torch.zeros(5)), nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.lift(nn.functional.linear(x, self.fixed, self.bias)).tanh())
        return found


class Detached(nn.Module):
    """A layer that the loss does not reach: weight decay does."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.lift, self.last = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.lift(x).tanh() + self.teacher(x).detach())
        return found


class OneBias(nn.Module):
    """A bias that all nodes share."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.last = nn.Linear(5, 6), nn.Linear(6, 4)
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6) / 3), nn.Parameter(torch.zeros(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(nn.functional.linear(self.lift(x).tanh(), self.weight, self.bias).tanh())
        return found


class Squared(nn.Module):
    """A weight that is its own layer's input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6) / 3), nn.Parameter(torch.zeros(6))
        self.lift, self.last = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.lift(x) @ nn.functional.linear(self.weight, self.weight, self.bias))
        return found


def slots(model: nn.Module, x: Tensor) -> tuple[Slot, Slot, own.Descent | None]:
    """A plain one and a rewritten one, with the model's weights, in double precision."""
    model = model.double()
    axes = trace(model, x)
    found = []
    for _ in range(2):
        module = axes.cut(model, Static().window(axes, round=0, capacity="1")).to(memory_format=torch.channels_last)
        module.load_state_dict(model.state_dict())
        found.append(module)
    descent = own.rewrite(found[1])
    return Slot(found[0]), Slot(found[1], "fp32", descent), descent


def apart_after(work: LocalTraining, plain: Slot, rewritten: Slot, x: Tensor, y: Tensor) -> float:
    before = [p.detach().clone() for p in plain.parameters]
    for slot in (plain, rewritten):
        work.start(slot)
        for part, target in zip(x.split(4), y.split(4), strict=True):
            work.step(slot, part, target, nn.functional.cross_entropy, 0.3)
    assert all(not torch.equal(p, b) for p, b in zip(plain.parameters, before, strict=True))
    pairs = zip(plain.parameters, rewritten.parameters, before, strict=True)
    return max(float(((a - b).norm() / (a - start).norm()).detach()) for a, b, start in pairs)


WORK: dict[str, Callable[[], LocalTraining]] = {
    "plain": lambda: LocalTraining(lr=0.3),
    "weight decay": lambda: LocalTraining(lr=0.3, weight_decay=0.1),
    "momentum": lambda: LocalTraining(lr=0.3, momentum=0.9),
    "clip": lambda: LocalTraining(lr=0.3, clip=0.1),
    "proximal": lambda: LocalTraining(lr=0.3, proximal=0.5),
    "adam": lambda: LocalTraining(lr=0.3, optimizer="adam"),
}


@pytest.mark.parametrize("what", WORK)
def test_steps_are_the_same(what: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 3, 8, 8, dtype=torch.float64), torch.arange(12) % 4
    plain, rewritten, descent = slots(pooled(), x)
    assert descent is not None
    assert set(descent.weights) == {"4.weight", "6.weight"}
    gradients: list[Tensor | None] = []
    back = descent.back

    def seen(*arguments: Any) -> tuple[Tensor | None, Tensor | None]:
        found = back(*arguments)
        gradients.append(found[1])
        return found

    descent.back = seen  # type: ignore[method-assign,assignment]
    channels_last = x.contiguous(memory_format=torch.channels_last)
    assert apart_after(WORK[what](), plain, rewritten, channels_last, y) <= 1e-9
    assert [each is None for each in gradients] == [what in ("plain", "weight decay")] * 6


def test_a_correction_reaches_every_tensor() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.arange(4)
    plain, rewritten, _ = slots(pooled(), x)
    correction = {name: torch.ones_like(p) for name, p in plain.module.named_parameters()}
    for slot in (plain, rewritten):
        work = LocalTraining(lr=0.3)
        work.start(slot, correction)
        work.step(slot, x, y, nn.functional.cross_entropy, 0.3)
    for one, other in zip(plain.parameters, rewritten.parameters, strict=True):
        torch.testing.assert_close(one, other)


def test_sequences() -> None:
    """Inputs of more than two dimensions, and a first layer whose input has no gradient."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 7, 5, dtype=torch.float64), torch.arange(12) % 4
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3), nn.Flatten(), nn.Linear(21, 4))
    plain, rewritten, descent = slots(model, x)
    assert descent is not None
    assert len(descent.weights) == 3
    assert apart_after(LocalTraining(lr=0.3), plain, rewritten, x, y) <= 1e-9


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        (Tied(), {"lift.weight", "last.weight"}),
        (Twice(), {"lift.weight", "last.weight"}),
        (Spare(), {"last.weight"}),
        (Constant(), {"lift.weight", "last.weight"}),
        (Detached(), {"teacher.weight", "lift.weight", "last.weight"}),
        (OneBias(), {"lift.weight", "last.weight"}),
        (Squared(), {"lift.weight", "last.weight"}),
        (nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 4)), {"1.weight"}),
        (nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 4, bias=False)), None),
    ],
)
def test_what_does_not_move_by_itself(model: nn.Module, weights: set[str] | None) -> None:
    """Weights that are used or named twice, fixed, or without a bias, whose gradient makes the way back pass by."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 5, dtype=torch.float64), torch.arange(12) % 4
    plain, rewritten, descent = slots(model, x)
    assert (None if descent is None else set(descent.weights)) == weights
    assert apart_after(LocalTraining(lr=0.3, weight_decay=0.1), plain, rewritten, x, y) <= 1e-9
    copied = copy.deepcopy(rewritten.module)
    torch.testing.assert_close(copied(x), plain.module(x))


def test_a_slot_may_train_otherwise_later() -> None:
    """What takes its own steps in one round does not in the next, where there is momentum."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 3, 8, 8, dtype=torch.float64), torch.arange(12) % 4
    plain, rewritten, _ = slots(pooled(), x)
    for what in ("plain", "momentum", "clip", "plain"):
        assert apart_after(WORK[what](), plain, rewritten, x, y) <= 1e-9


def test_a_copy_made_before_stays_as_it_was() -> None:
    model = pooled().double()
    axes = trace(model, torch.randn(2, 3, 8, 8, dtype=torch.float64))
    module = axes.cut(model, Static().window(axes, round=0, capacity="1"))
    copied = copy.deepcopy(module)
    own.rewrite(module)
    assert copied(torch.randn(2, 3, 8, 8, dtype=torch.float64)).shape == (2, 4)


def test_a_sub_model_that_was_never_called_can_be_exported() -> None:
    """Its Python code is there from the start; made at the first call, tracing would fall over the making."""
    model = pooled()
    axes = trace(model, torch.randn(2, 3, 8, 8))
    module = axes.cut(model, Static().window(axes, round=0, capacity="1/2"))
    found = torch.compile(module, fullgraph=True, backend="eager")(torch.randn(2, 3, 8, 8))
    assert found.shape == (2, 4)


def calls(slot: Slot) -> list[str]:
    module: Any = slot.module
    return [
        node.name.partition("_default")[0]
        for node in module.slicing_code[True].graph.nodes
        if node.op == "call_function"
    ]


def test_relu_comes_after_pooling_and_dropout_after_flattening() -> None:
    """With the very same numbers: what pooling takes is what it would, or nothing comes through; masks are the same."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1), nn.Dropout(0.3), nn.Flatten(),
        nn.Dropout(0.5), nn.Linear(54, 4, bias=False)
    )  # fmt: skip
    x = torch.randn(12, 3, 8, 8, dtype=torch.float64).round()  # ties, zeros
    broken = x.clone()
    broken[3] = torch.nan
    plain, rewritten, _ = slots(model, x)
    assert calls(plain) == ["conv2d", "relu", "max_pool2d", "dropout", "flatten", "dropout_1", "linear"]
    assert calls(rewritten) == ["conv2d", "max_pool2d", "relu", "laid_out", "flatten", "dropout", "dropout_1", "linear"]
    found = []
    for slot in (plain, rewritten):
        slot.module.train()
        with OwnDropout(7):
            out = slot.module(x)
            gradients = torch.autograd.grad(out.square().sum(), slot.parameters)
            found.append([out, *gradients, slot.module(broken)])
    assert bool(found[0][-1][3].isnan().all())
    assert not any(bool(each.isnan().any()) for each in found[0][:-1])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.isnan(), other.isnan())
        torch.testing.assert_close(one.nan_to_num(), other.nan_to_num(), rtol=0, atol=0)


class Images(nn.Module):
    """Two convolutions, what a function makes of both, and a layer after it."""

    def __init__(self, inner: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(3, 6, 3), nn.LazyLinear(4)
        self.inner = inner
        self(torch.randn(2, 3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.inner(self.one(x), self.two(x)).flatten(1))
        return found


def used_twice(one: Tensor, two: Tensor) -> Tensor:
    active = (one + two).relu()
    return nn.functional.max_pool2d(active, 2) + active[..., ::2, ::2]


def changed_between(one: Tensor, two: Tensor) -> Tensor:
    active = one.relu()
    one += two
    return nn.functional.max_pool2d(active, 2) + one[..., ::2, ::2]


def changed_after(one: Tensor, two: Tensor) -> Tensor:
    found = nn.functional.max_pool2d(one.relu(), 2)
    found += two[..., ::2, ::2]
    return found


def without_gradient(one: Tensor, two: Tensor) -> Tensor:
    with torch.no_grad():
        active = one.relu()
    return nn.functional.max_pool2d(active, 2) + two[..., ::2, ::2] + one[..., ::2, ::2]


def only_padding(one: Tensor, two: Tensor) -> Tensor:
    pooled = nn.functional.max_pool2d((one + two)[..., :2, :2].relu(), 2, 1, 1, dilation=3)
    return pooled.clamp(-1, 1)


def dropped_in_another_order(one: Tensor, two: Tensor) -> Tensor:
    a, b = nn.functional.dropout(one, 0.5), nn.functional.dropout(two, 0.2)
    return a.flatten(1) + b.flatten(1)


@pytest.mark.parametrize(
    "inner",
    [used_twice, changed_between, changed_after, without_gradient, only_padding, dropped_in_another_order],
)
def test_what_must_keep_its_order_does(inner: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 3, 8, 8, dtype=torch.float64), torch.arange(12) % 4
    plain, rewritten, _ = slots(Images(inner), x)
    kinds = ("relu", "max_pool2d", "dropout", "flatten")
    order = [[name for name in calls(slot) if name.rstrip("_0123456789") in kinds] for slot in (plain, rewritten)]
    assert order[0] == order[1] != []
    for slot in (plain, rewritten):
        with OwnDropout(3):
            work = LocalTraining(lr=0.3)
            work.start(slot)
            work.step(slot, x, y, nn.functional.cross_entropy, 0.3)
    for one, other in zip(plain.parameters, rewritten.parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_images_that_are_channels_first_stay_so() -> None:
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    seen: list[Tensor] = []
    found = own.laid_out(x * 1)
    found.register_hook(seen.append)
    found.sum().backward()
    assert len(seen) == len(found._backward_hooks or ()) == 1  # no other hook than this one


def test_frozen_layers_do_not_move_by_themselves() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 4)).double()
    axes = trace(model, torch.randn(2, 5, dtype=torch.float64))
    module = axes.cut(model, Static().window(axes, round=0, capacity="1"))
    module.get_parameter("0.weight").requires_grad_(False)
    module.get_parameter("1.bias").requires_grad_(False)
    assert own.rewrite(module) is None


def test_complex_layers_are_left_alone() -> None:
    complex_ = nn.Linear(4, 3, dtype=torch.complex64)
    assert not own._plain(complex_.weight, complex_.bias)


def test_small_layers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "LARGE", 2**18)
    assert slots(pooled(), torch.randn(2, 3, 8, 8, dtype=torch.float64))[2] is None


def test_pooled_images_are_not_copied_on_the_way_back() -> None:
    x = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)

    def copies(slot: Slot) -> int:
        slot.module.float().train()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            slot.module(x).sum().backward()
        inner = [4, 6, 6, 6]
        return sum(
            event.count
            for event in seen.key_averages(group_by_input_shape=True)
            if event.key == "aten::copy_" and event.input_shapes[0] == inner
        )

    plain, rewritten, _ = slots(pooled(), x.double())
    assert copies(plain) > 0
    assert copies(rewritten) == 0


def test_rounds_of_crew_are_those_of_loop() -> None:
    torch.manual_seed(0)
    data = Examples(torch.randn(24, 3, 8, 8, dtype=torch.float64), torch.arange(24) % 4)
    parts = Partition.of(range(i * 6, i * 6 + 6) for i in range(4))
    task = Classification("tiny", lambda scale: pooled(scale).double(), data, data, parts, classes=4)
    settings = ["fleet.clients=4", "fleet.cohort=4", 'fleet.capacities=["1", "1/2"]', "client.batch=4", "client.lr=0.1"]
    found = []
    for engine in (Loop, Crew):
        made = prepare(Recipe(device="cpu").with_settings(settings), task)
        build: Any = engine
        made.engine = build(made.model) if engine is Loop else build(made.model, workers=2, stacked=())
        for _ in range(3):
            assert not made.run_round()["dropped"]
        if isinstance(made.engine, Crew):
            slot = next(iter(made.engine._members[0].loop._slots.values()))
            assert slot.descent is not None
            assert slot.descent.weights
        found.append(made.state)
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-9, atol=1e-9)
