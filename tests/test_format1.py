"""What version 0.1.0 wrote is still read: recipes of format 1, and runs that stopped after two of three rounds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits, together
from told import told

from fedrolex import FedrolexError, Recipe, Run, Training, prepare
from fedrolex.clients import MODEL
from fedrolex.runs import checkpoint
from fedrolex.runs.format1 import in_sections

GOLDEN = Path(__file__).parent / "golden"
RESUMED = json.loads((GOLDEN / "resumed.json").read_text())


def hashes(training: Training) -> dict[str, str]:
    """Hashes of the main network, of what the method remembers, and of what clients keep."""
    server = training.server
    own = [s for s in server.state if s not in server.networks and "@" not in s and s != "first"]
    kept = [] if server.clients is None else [server.clients.get(c) or {} for c in range(server.fleet.clients)]
    return {
        "model": together(server.state[MODEL].values()),
        "memory": together(tensor for section in own for tensor in server.state[section].values()),
        "clients": together(tensor for tensors in kept for tensor in tensors.values()),
    }


@pytest.mark.parametrize("case", RESUMED["cases"])
def test_a_run_of_0_1_0_goes_on(case: str, tmp_path: Path) -> None:
    folder = tmp_path / case
    shutil.copytree(GOLDEN / "runs" / case, folder)
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(text.replace("rounds: 2\n", "rounds: 3\n"))
    run = Run.open(folder)
    recipe = run.recipe().with_settings(["callbacks=[drift]"])
    training = prepare(recipe)
    run.go(training)
    wanted = RESUMED["cases"][case]
    row = {key: run.rows()[2][key] for key in wanted["row"]}
    if same_bits(RESUMED["about"]):
        assert hashes(training) == wanted["resumed"]
        assert row == wanted["row"]
    else:
        assert flat(row) == pytest.approx(flat(wanted["row"]), rel=1e-2, abs=0.02)
    assert checkpoint.read(run.checkpoint)[1]["format"] == "2"
    assert Run.open(folder).go(prepare(recipe))["rounds"] == 3  # and can be opened again


def flat(row: Any, name: str = "") -> dict[str, Any]:
    """Numbers of nested metrics by one name each."""
    if not isinstance(row, dict):
        return {name: row}
    return {key: value for each, inner in row.items() for key, value in flat(inner, f"{name}/{each}").items()}


def test_names_become_sections_and_nothing_is_left_over() -> None:
    one = torch.ones(1)
    state = {
        MODEL: {"w": one, "norm": one}, "norms@1/2": {"norm": one}, "server_optimizer.first": {"w": one},
        "control": {"w": one}, "1/4": {"v": one}, "labels": {"ids": one, "labels": one}, "first": {"w": 7 * one},
    }  # fmt: skip
    old = {
        "w": 1, "norm": 2, "norm@1/2": 3, "w@control": 5, "@1/4 v": 6, "@public ids": 8, "@public labels": 9,
        "@1/4 @public ids": 8, "@1/4 @public labels": 9,
    }  # fmt: skip
    found = in_sections({name: value * one for name, value in old.items()}, {**state, "server_optimizer.first": {}})
    assert {name: int(tensor) for name, tensor in found.items()} == {
        "model:w": 1, "model:norm": 2, "norms@1/2:norm": 3, "control:w": 5, "1/4:v": 6, "labels:ids": 8,
        "labels:labels": 9, "first:w": 7,
    }  # fmt: skip
    assert "tensor 'w@control'" in told(lambda: in_sections({"w": one, "w@control": one}, {MODEL: {"w": one}}))
    assert "no tensor model:w" in told(lambda: in_sections({}, {MODEL: {"w": one}}))


# --- recipes ---


def upgraded(**method: Any) -> dict[str, Any]:
    found: dict[str, Any] = Recipe.decode({"format": 1, "method": method}).encode()["method"]
    return found


def test_of_a_bag_of_settings_those_of_the_method_are_taken() -> None:
    bag = {
        "mu": 5.0,
        "keys": 3,
        "alpha": 0.25,
        "temperature": 4.0,
        "rounding": "ceil",
        "width": "1/2",
        "weighting": None,
    }
    nested = {"knowledge": {"alpha": 0.5, "server_epochs": 2}, "ensemble": {"samples": 3}, "server": {"name": "none"}}
    assert upgraded(name="heterofl", **bag, **nested)["rounding"] == "ceil"
    prox = upgraded(name="fedprox", **bag, **nested)
    assert (prox["mu"], prox["width"], prox["weighting"]) == (5.0, "1/2", "uniform")
    assert upgraded(name="fedbe", **bag, **nested)["samples"] == 3
    assert upgraded(name="fedbe", **bag, **nested)["weighting"] == "samples"
    knowledge = upgraded(name="fedgkt", **bag, **nested)
    assert (knowledge["alpha"], knowledge["server_epochs"], knowledge["temperature"]) == (0.5, 2, 3.0)
    assert (upgraded(name="fjord", **bag, **nested)["alpha"], upgraded(name="fedselect", **bag)["keys"]) == (0.25, 3)


def test_renamed_keys_are_found() -> None:
    old = {
        "format": 1, "fleet": {"server": 2}, "engine": "stack", "compiled": True,
        "method": {"name": "fedavg", "server": {"name": "adam", "lr": 0.1}},
    }  # fmt: skip
    new = Recipe.decode(old)
    assert (new.format, new.fleet.server_scale, new.engine) == (2, 2, "crew")
    assert Recipe.decode({"format": 1}).engine == "loop"
    assert new.encode()["method"]["server_optimizer"]["name"] == "adam"
    assert upgraded(name="scaffold", denominator=None)["denominator"] == "momentum"
    assert upgraded(name="scaffold", denominator="steps")["denominator"] == "steps"


def test_what_0_1_0_refused_is_refused() -> None:
    assert "scaffold has no norms" in told(lambda: upgraded(name="scaffold", norms="per_capacity"))
    assert "feddf has no server_optimizer" in told(lambda: upgraded(name="feddf", server={"name": "adam"}))
    assert "unknown key 'method.speed'" in told(lambda: upgraded(name="fedavg", speed=3))
    assert "method.name is 'fedavgg'" in told(lambda: upgraded(name="fedavgg"))
    with pytest.raises(FedrolexError, match="expected keys and values"):
        Recipe.decode({"format": 1, "fleet": 3})


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"engine": ["loop"]}, "recipe key engine is ['loop'] (list)"),
        ({"method": {"name": ["fedbe"]}}, "recipe key method.name is ['fedbe']"),
        ({"method": {"name": "fedbe", "ensemble": [1]}}, "recipe method.ensemble is [1]: expected keys and values"),
        ({"fleet": {"server": 1, "server_scale": 2}}, "has an unknown key 'server_scale': it was 'server' then"),
    ],
)
def test_mistakes_in_a_recipe_of_format_1_are_one_line(wrong: dict[str, Any], says: str) -> None:
    assert says in told(lambda: Recipe.decode({"format": 1, **wrong}))
