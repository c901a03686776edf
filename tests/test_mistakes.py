"""Mistakes a user of the Python interface makes: one line each, and nothing changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small import Residual, residual_axes
from torch import nn

from fedrolex import (
    Axes,
    FedrolexError,
    Fold,
    Hints,
    Ordered,
    RandomMiswired,
    Rolling,
    Select,
    Window,
    coverage,
    pick,
    spread,
    trace,
)
from fedrolex.slicing import Arc

MODEL, AXES = residual_axes()
X = torch.randn(2, 3, 8, 8)
WINDOW = Rolling().window(AXES, round=3, capacity="1/2")
SMALL = AXES.cut(MODEL, WINDOW)


def fold() -> Fold:
    return Fold(AXES, AXES.state(MODEL))


def ended() -> Fold:
    done = fold()
    done.average()
    return done


def part(**changed: Any) -> dict[str, Any]:
    return {**AXES.state(SMALL, WINDOW), **changed}


class Decides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


def damaged(key: str, value: Any) -> dict[str, Any]:
    data = AXES.encode()
    data["tensors"]["a.bias"][key] = value
    return data


def made_by(factory: Any) -> nn.Module:
    axes = trace(MODEL, X, Hints(factory=factory))
    return axes.cut(MODEL, Rolling().window(axes, round=0, capacity="1/2"))


def rolled(offset: Any) -> Window:
    return Rolling(offset=offset).window(AXES, round=0, capacity="1/2")


MISTAKES: list[tuple[Any, str]] = [
    (lambda: AXES.cut(MODEL, "1/2"), "window is a str: make one with a scheme, e.g."),  # type: ignore[arg-type]
    (lambda: AXES.cut(MODEL, {"stem": [0]}), "window is a dict"),  # type: ignore[arg-type]
    (lambda: Window({"stem": [0, 1]}), "axis stem: give Arc"),  # type: ignore[dict-item]
    (lambda: AXES.cut(MODEL.state_dict(), WINDOW), "got a OrderedDict: tensors are cut with axes.take"),  # type: ignore[arg-type]
    (lambda: AXES.state(SMALL), "a part? give its window"),
    (lambda: AXES.load(MODEL, part()), "a part? give its window"),
    (lambda: AXES.load(SMALL, part(), WINDOW), "a part? give its window"),
    (lambda: AXES.load(MODEL, {}), "nothing to load"),
    (lambda: AXES.load(MODEL, {"z": X}), "no tensor 'z'"),
    (lambda: AXES["stam"], "did you mean 'stem'"),
    (lambda: AXES["zzz"], "the axes are: stem, a, head"),
    (lambda: Fold(AXES, part()), "a part? give its window"),
    (lambda: Fold(AXES, MODEL), "give tensors by name"),  # type: ignore[arg-type]
    (lambda: fold().add(0, SMALL, WINDOW), "client 0: the update is a SubModel: give tensors by name, e.g. axes.state"),  # type: ignore[arg-type]
    (lambda: fold().add(0, part(), 0), "client 0: the window is a int"),  # type: ignore[arg-type]
    (
        lambda: fold().add(0, part(**{"a.bias": np.zeros(3)}), WINDOW),
        "client 0: a.bias is a ndarray, not a tensor (torch.from_numpy?)",
    ),
    (lambda: fold().add(0, part(), WINDOW, weight="3"), "client 0: weight '3'"),  # type: ignore[arg-type]
    (
        lambda: fold().add(0, part(**{"a.bias": torch.zeros(3, device="meta")}), WINDOW),
        "a.bias has no values of its own",
    ),
    (lambda: ended().add(0, part(), WINDOW), "this fold has ended"),
    (lambda: Rolling().window(AXES, round=0.5, capacity="1"), "round 0.5 is not a whole number"),  # type: ignore[arg-type]
    (lambda: Rolling().window(AXES, round="1", capacity="1"), "round '1' is not a whole number"),  # type: ignore[arg-type]
    (lambda: Rolling().window(MODEL, round=1, capacity="1"), "axes is a Residual"),  # type: ignore[arg-type]
    (lambda: RandomMiswired().window(MODEL, round=1, capacity="1"), "axes is a Residual"),  # type: ignore[arg-type]
    (lambda: RandomMiswired().window(AXES, round=0.5, capacity="1"), "round 0.5 is not a whole number"),  # type: ignore[arg-type]
    (lambda: Rolling(offset=3), "offset 3 is not a function"),  # type: ignore[arg-type]
    (lambda: AXES[None], "no axis None"),  # type: ignore[index]
    (lambda: AXES.freeze(["stem"]), "no axis ['stem']"),  # type: ignore[arg-type]
    (lambda: AXES.widths("1/2", "up"), "rounding is 'up': use one of floor, ceil"),  # type: ignore[arg-type]
    (lambda: AXES.shape("z"), "the model has no tensor 'z'"),
    (lambda: AXES.region("z", WINDOW), "the model has no tensor 'z'"),
    (lambda: AXES.load(MODEL, {"a.bias": torch.zeros(6, dtype=torch.int64)}), "a.bias holds torch.int64, not real"),
    (lambda: AXES.load(MODEL, {"a.bias": torch.zeros(6, dtype=torch.complex64)}), "not real numbers"),
    (lambda: AXES.load(MODEL, {"a.bias": torch.zeros(6, device="meta")}), "a.bias has no values of its own"),
    (lambda: AXES.put(dict(AXES.state(MODEL)), {"a.bias": torch.zeros(3).bool()}, WINDOW), "not real numbers"),
    (
        lambda: AXES.put(dict(AXES.state(MODEL)), {"a.bias": torch.zeros(3).to_sparse()}, WINDOW),
        "a.bias has no values of its own",
    ),
    (lambda: AXES.put({}, part(), WINDOW), "is a NoneType, not a tensor"),
    (lambda: AXES.put(dict(AXES.state(MODEL)), None, WINDOW), "state is a NoneType"),  # type: ignore[arg-type]
    (lambda: AXES.take(AXES.state(MODEL), WINDOW, out={}), "is a NoneType, not a tensor"),
    (lambda: AXES.take(AXES.state(MODEL), WINDOW, out=AXES.state(MODEL)), "this window's part has"),
    (lambda: Axes.decode([1]), "axes have format None"),  # type: ignore[arg-type]
    (lambda: Axes.from_json(None), "not JSON"),  # type: ignore[arg-type]
    (lambda: Axes.decode(damaged("role", "state")), "lacks its role, or what it reads"),
    (lambda: Axes.decode(damaged("reads", [9])), "lacks its role, or what it reads"),
    (lambda: Hints(kind=None), "hints.kind is None"),  # type: ignore[arg-type]
    (lambda: Hints(kind={"a": "wide"}), "hints.kind is {'a': 'wide'}"),  # type: ignore[dict-item]
    (lambda: Hints(factory="Net"), "hints.factory is a str: give a function"),  # type: ignore[arg-type]
    (lambda: made_by(lambda sizes: None), "the factory of the hints gives a NoneType"),
    (lambda: made_by(lambda sizes: sizes["no"]), "the factory of the hints failed: KeyError"),
    (lambda: made_by(lambda sizes: nn.ReLU()), "the sub-model has no parameters"),
    (lambda: Arc(0.5, 1, 8), "a window of 0.5: give whole numbers"),  # type: ignore[arg-type]
    (lambda: pick([0.5, 1.7], 8), "a window of [0.5, 1.7]: give indices, whole numbers"),  # type: ignore[list-item]
    (lambda: pick("12", 8), "a window of '12': give indices"),  # type: ignore[arg-type]
    (lambda: pick(np.array([True, False]), 8), "those of a mask are mask.nonzero()"),
    (lambda: pick([1, 2, 1], 8), "a window names index 1 twice"),
    (lambda: pick(None, 8), "a window of None"),  # type: ignore[arg-type]
    (lambda: pick([1], "8"), "an axis of '8'"),  # type: ignore[arg-type]
    (lambda: Window(None), "a window of a NoneType"),  # type: ignore[arg-type]
    (lambda: rolled(offset=lambda *a: None), "the scheme Rolling failed: TypeError"),
    (lambda: rolled(offset=lambda *a: 0.5), "a window of 0.5"),
    (lambda: Rolling().window(AXES, round=np.array([1, 2]), capacity="1"), "is not a whole number"),  # type: ignore[arg-type]
    (lambda: spread(1.5), "spread over 1.5 clients"),  # type: ignore[arg-type]
    (lambda: Ordered(widths=[]), "a scheme of no widths"),
    (lambda: Select(keys=lambda r, c: {"stem": [0.5]}).window(AXES, round=0, capacity="1"), "give indices"),  # type: ignore[list-item]
    (lambda: coverage(None, Rolling(), ["1"], 1), "coverage of NoneType and Rolling"),  # type: ignore[arg-type]
    (lambda: Fold(MODEL, {}), "axes is a Residual"),  # type: ignore[arg-type]
    (lambda: Fold(AXES, {}, order=3), "the ids of clients"),  # type: ignore[arg-type]
    (lambda: fold().add([1], part(), WINDOW), "the ids of clients"),  # type: ignore[arg-type]
    (lambda: fold().add(0, part(), Window({"stem": Arc(0, 3, 99)})), "takes axis 'stem' for one of 99 indices"),
    (lambda: fold().add(0, part(), WINDOW, rows={"head": b"1"}), "rows of head are b'1'"),
    (lambda: Axes.decode(damaged("floating", "no")), "lacks its role, or what it reads"),
    (
        lambda: Fold(AXES, AXES.state(MODEL), order=[1, 2]).average(),
        "client 1 has not reported: add its update, or skip",
    ),
    (lambda: fold().sum("z"), "the fold has no tensor 'z'"),
    (lambda: ended().sum("a.bias"), "this fold has ended"),
    (lambda: fold().add_all([0, 1], [part()], WINDOW, [1.0]), "give every client, at least one, its part"),
    (lambda: fold().add_all([0, 0], [part(), part()], WINDOW, [1.0, 1.0]), "names client 0 twice"),
    (lambda: trace(Residual, X), "model is the class Residual: give an instance"),  # type: ignore[arg-type]
    (lambda: trace(MODEL.state_dict(), X), "model is a OrderedDict"),  # type: ignore[arg-type]
    (lambda: trace(torch.compile(MODEL), X), "the model is compiled"),  # type: ignore[arg-type]
    (lambda: trace(MODEL, X, "keep"), "hints is a str"),  # type: ignore[arg-type]
    (lambda: trace(MODEL, (X, torch.zeros(2))), "a batch of (inputs, labels)? Give the inputs only"),
    (lambda: trace(nn.Sequential(nn.Linear(4, 8), Decides(), nn.Linear(8, 2)), torch.randn(2, 4)), "use torch.where"),
    (lambda: trace(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)), torch.randn(2, 4)), "does it take integers"),
    (lambda: trace(nn.Linear(4, 2), torch.randn(2, 4)), "nothing between its inputs and its outputs"),
    (lambda: trace(MODEL, X, Hints(freeze=["stem.weight:0", "a.weight:0"])), "frozen on request"),
    (lambda: trace(MODEL, X[:0]), "example x is empty (0, 3, 8, 8): give a batch of at least one"),
    (lambda: Arc(0, 1, 10**400), "give whole numbers up to 2**62, Arc(start, width, size)"),
    (lambda: pick([0], 10**400), "give its size, a whole number up to 2**62"),
    (lambda: fold().add_all([0], [part()], WINDOW, None), "give every client, at least one, its part, its weight"),  # type: ignore[arg-type]
    (lambda: fold().add_all([0], [part()], WINDOW, [dict.fromkeys(part(), 1.0)]), "weights by tensor are for add()"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("mistake", "says"), MISTAKES)
def test_a_mistake_gets_one_clear_line(mistake: Any, says: str) -> None:
    with pytest.raises(FedrolexError) as caught:
        mistake()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_refused_update_leaves_no_trace_and_its_client_may_try_again() -> None:
    one = fold()
    with pytest.raises(FedrolexError):
        one.add(
            0,
            part(
                **{"stem.weight": torch.full_like(part()["stem.weight"], 77.0), "a.bias": torch.zeros(3, device="meta")}
            ),
            WINDOW,
        )
    one.add(0, part(), WINDOW)
    for name, tensor in one.average().items():
        torch.testing.assert_close(tensor, AXES.state(MODEL)[name])


def test_a_fold_can_be_asked_twice() -> None:
    one = fold()
    one.add(0, part(), WINDOW)
    assert one.average() is one.average()
    assert set(one.change()) == set(one.base)


def test_axes_have_a_short_face_and_read_what_the_command_line_printed() -> None:
    assert repr(AXES) == "<Axes: 2 cut of 3, 1,275 parameters>"
    import json

    document = json.dumps({"model": "x", "layouts": AXES.encode()})
    assert Axes.from_json(document).encode() == AXES.encode()
