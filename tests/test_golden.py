"""Every method still computes what version 0.1.0 did: the same bits where the machine computes the same bits.

``golden/states.json`` holds, for each case, hashes of all tensors after three rounds of 0.1.0 on ``loop`` with one
thread, and the metrics of the rounds. The cases are run from their recipes, killed after the second round and resumed.
Bits depend on PyTorch and on the processor: elsewhere, losses and accuracies are compared with tolerances.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bits import same_bits, together
from torch import Tensor

from fedrolex import Recipe, Run, Training, prepare
from fedrolex.slicing.windows import WHOLE

GOLDEN = json.loads((Path(__file__).parent / "golden" / "states.json").read_text())
CASES: dict[str, Any] = GOLDEN["cases"]
CORRECTED = {
    "fjord-batch": {
        "bytes_down": "statistics of narrower widths travel, too",
        "bytes_up": "statistics of narrower widths travel, too",
    },
    "dsfl": {"bytes_up": "clients send probabilities, not the numbers of examples"},
    "dsfl-families": {"bytes_up": "clients send probabilities, not the numbers of examples"},
}
"""Metrics that 0.1.0 got wrong, by case, and why."""


def hashes(training: Training) -> dict[str, str]:
    """Hashes of the leading model, of every capacity's part, of what the method remembers and of what clients keep."""
    server, method = training.server, training.method
    parts: list[Tensor] = []
    for level in method.sizes(server) if method.name not in ("dsfl", "fedgkt") else ():  # whose models stay at clients
        name = method.network(server, level)
        window = server.window(server.round, level) if name == "model" else WHOLE
        parts += server.networks[name].axes.take(server.tensors(*method.sections(server, level)), window).values()
    weights = {*server.networks, "first", *(section for section in server.state if "@" in section)}
    states = [] if server.clients is None else [server.clients.get(client) or {} for client in range(6)]
    return {
        "model": together(server.state[method.leading(server)].values()),
        "levels": together(parts),
        "memory": together(t for s, own in server.state.items() if s not in weights for t in own.values()),
        "clients": together(tensor for own in states for tensor in own.values()),
    }


@pytest.mark.parametrize("case", CASES)
def test_the_same_as_version_0_1_0(case: str, tmp_path: Path) -> None:
    recipe = Recipe(device="cpu", callbacks=["drift"]).with_settings([*GOLDEN["base"], *CASES[case]["settings"]])
    run = Run.create(tmp_path / "run", replace(recipe, rounds=2))
    run.go(prepare(run.recipe()))
    recipe.write(run.folder / "recipe.yaml")
    training = prepare(recipe)
    run.go(training)
    rows = run.rows()
    assert len(rows) == 3
    for row, wanted in zip(rows, CASES[case]["rows"], strict=True):
        keys = wanted.keys() - CORRECTED.get(case, {}).keys()
        if same_bits(GOLDEN["about"]):
            assert {key: row[key] for key in keys} == {key: wanted[key] for key in keys}
        else:
            exact = keys & {"round", "clients", "dropped", "void", "bytes_down", "bytes_up", "statistics"}
            assert {key: row[key] for key in exact} == {key: wanted[key] for key in exact}
            for key in keys & {"train_loss", "loss"}:
                assert row[key] == pytest.approx(wanted[key], rel=0.05), key
            for key in (key for key in keys if "accuracy" in key):
                assert row[key] == pytest.approx(wanted[key], abs=0.1), key
    if same_bits(GOLDEN["about"]):
        assert hashes(training) == CASES[case]["hashes"]


def test_every_method_of_0_1_0_is_here() -> None:
    methods = {settings.partition("=")[2] for each in CASES.values() for settings in each["settings"][:1]}
    assert len(methods) == 13
    assert set(CORRECTED) < set(CASES)
