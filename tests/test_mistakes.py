"""Mistakes a user of the Python interface makes: one line each, and nothing changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small import Residual, residual_axes
from torch import nn

from fedrolex import Axes, FedrolexError, Fold, Hints, Rolling, Window, trace

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
    (lambda: fold().add(0, part(**{"a.bias": torch.zeros(3, device="meta")}), WINDOW), "a.bias is on the meta device"),
    (lambda: ended().add(0, part(), WINDOW), "this fold has ended"),
    (lambda: Rolling().window(AXES, round=0.5, capacity="1"), "round 0.5 is not a whole number"),  # type: ignore[arg-type]
    (lambda: Rolling().window(AXES, round="1", capacity="1"), "round '1' is not a whole number"),  # type: ignore[arg-type]
    (lambda: Rolling().window(MODEL, round=1, capacity="1"), "axes is a Residual"),  # type: ignore[arg-type]
    (lambda: Rolling(offset=3), "offset 3 is not a function"),  # type: ignore[arg-type]
    (lambda: trace(Residual, X), "model is the class Residual: give an instance"),  # type: ignore[arg-type]
    (lambda: trace(MODEL.state_dict(), X), "model is a OrderedDict"),  # type: ignore[arg-type]
    (lambda: trace(torch.compile(MODEL), X), "the model is compiled"),  # type: ignore[arg-type]
    (lambda: trace(MODEL, X, "keep"), "hints is a str"),  # type: ignore[arg-type]
    (lambda: trace(MODEL, (X, torch.zeros(2))), "a batch of (inputs, labels)? Give the inputs only"),
    (lambda: trace(nn.Sequential(nn.Linear(4, 8), Decides(), nn.Linear(8, 2)), torch.randn(2, 4)), "use torch.where"),
    (lambda: trace(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)), torch.randn(2, 4)), "does it take integers"),
    (lambda: trace(nn.Linear(4, 2), torch.randn(2, 4)), "nothing between its inputs and its outputs"),
    (lambda: trace(MODEL, X, Hints(freeze=["stem.weight:0", "a.weight:0"])), "frozen on request"),
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
