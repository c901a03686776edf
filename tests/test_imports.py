"""What is imported when: nothing heavy for ``--help``, and nothing but PyTorch for the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import typer

import fedrolex
from fedrolex import api
from fedrolex.cli.app import COMMANDS
from fedrolex.core.importing import resolve

TORCH = "torch"
HEAVY = ["flwr", "h5py", "matplotlib", "mlflow", "onnx", "pandas", "ray", "scipy", "sklearn", "sqlite3", "tensorboard"]
HEAVY += ["timm", "torchvision", "transformers", "wandb"]


def imported(code: str) -> set[str]:
    """The packages that are imported after some code, in a process of its own."""
    told = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("words", [["--help"], ["--version"], []])
def test_help_needs_no_pytorch(words: list[str]) -> None:
    code = f"""
import sys
from fedrolex.cli.app import main
sys.argv = ["fedrolex", *{words}]
try:
    main()
except SystemExit as done:
    assert not done.code or not {words}, done.code"""
    assert imported(code) & {TORCH, *HEAVY} == set()


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_threads_that_wait_sleep_unless_the_user_says_otherwise(given: dict[str, str], found: str | None) -> None:
    """Set before PyTorch is imported: OpenMP reads it once."""
    code = "import os, sys\nfrom fedrolex.cli.app import main\nsys.argv = ['fedrolex', '--version']\ntry:\n    main()\n"
    code += "finally:\n    print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    bare = {name: value for name, value in os.environ.items() if "OMP" not in name}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=bare | given, check=True)
    assert done.stdout.splitlines()[-1] == f"{found} False"


def test_the_package_needs_no_heavy_library_but_pytorch() -> None:
    assert imported("import fedrolex") & {TORCH, *HEAVY} == set()
    found = imported("from fedrolex import *\ntrain, trace, export, load, coverage")
    assert TORCH in found  # the test would see it
    assert found & set(HEAVY) == set()


def test_the_package_has_the_names_of_its_api_and_no_other() -> None:
    assert fedrolex.train is api.train
    assert set(api.__all__) <= set(dir(fedrolex))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        fedrolex.trian  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'import_all'"):
        from fedrolex import import_all  # noqa: F401


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_their_own_help_says(name: str) -> None:
    place, said = COMMANDS[name]
    found = resolve(f"fedrolex.cli.{place}", here=False)
    own = found.info.help if isinstance(found, typer.Typer) else found.__doc__
    assert own is not None
    assert own.partition("\n")[0] == said
