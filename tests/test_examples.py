"""The examples run, and learn."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_digits() -> None:
    assert example("digits").main(rounds=12) > 0.8


def test_a_torchvision_model_on_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    found = example("torchvision_folder")
    photos = found.draw_shapes(tmp_path / "shapes", each=20)
    told = found.main(photos, tmp_path, rounds=1, size=8)
    assert set(told) == {"whole", "1", "1/2", "1/4", "1/8", "1/16"}
    assert (tmp_path / "quarter" / "model.pt2").is_file()


def test_a_language_model_with_a_server_larger_than_every_client(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers are not installed")
    assert example("language_model").main(tmp_path, rounds=8) > 0.5


def test_a_network_of_ones_own_on_arrays_and_what_a_small_device_runs_of_it(tmp_path: Path) -> None:
    whole, quarter = example("own_model").main(tmp_path, rounds=8)
    assert whole > 0.7
    assert quarter > 0.6
