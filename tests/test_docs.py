"""The Python of the documentation runs as it stands, page by page, in a folder of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from doc_blocks import PAGES, ROOT, blocks

from fedrolex.data.users import open_users
from fedrolex.data.vocabulary import Vocabulary

ELSEWHERE = {"docs/your-own-method.md": "test_own_method.py runs and tests it"}

GIVEN = {
    "docs/slicing.md": """
import torch
from fedrolex import *
from fedrolex.models import preresnet18

model, example = preresnet18(width=8), torch.randn(2, 3, 32, 32)
client, client_ids, labels_of_this_client = 3, [3], [1, 2]
window = Rolling().window(trace(model, example), round=0, capacity="1/2", client=client)
tensors = {name: tensor.detach() for name, tensor in preresnet18(width=4).state_dict().items()}
""",
    "docs/report.md": """
import torch
from torch import nn
from fedrolex import Examples, FleetRecipe, Recipe, Task, train

some = Examples(torch.randn(60, 4), torch.randint(0, 2, (60,)))
task = Task.split(lambda scale: nn.Sequential(nn.Linear(4, 8 * scale), nn.Linear(8 * scale, 2)), some, some, clients=3)
train(Recipe(rounds=1, fleet=FleetRecipe(clients=3, cohort=2)), task, out="runs/mine")
""",
}
"""What a page speaks of and does not make itself."""

AFTER = {
    ("docs/tutorial.md", 0): """
from fedrolex import FleetRecipe, ImagesRecipe, Recipe, export, train

photos = ImagesRecipe(data="photos", size=32, model="resnet8", width=4, limit=60)
train(Recipe(task=photos, rounds=1, fleet=FleetRecipe(clients=5, cohort=2)), out="runs/resnet")
export("runs/resnet", "1/4", "quarter")
""",
}
"""What commands of a page do after a block of it."""

SLOW = {"docs/export.md": "exports to ONNX", "docs/tutorial.md": "trains and exports"}
TOGETHER = [page for page in PAGES if blocks(page, "python") and page.name not in ("README.md",)]
READY = [str(page.relative_to(ROOT)) for page in TOGETHER if str(page.relative_to(ROOT)) not in ELSEWHERE]


def run(code: str, page: str, names: dict[str, Any]) -> None:
    exec(compile(code, page, "exec"), names)


def namespace(page: str) -> dict[str, Any]:
    """Names of a page's own module: dataclasses ask for it."""
    name = f"page_{Path(page).stem}".replace("-", "_")
    sys.modules[name] = ModuleType(name)
    return vars(sys.modules[name])


@pytest.mark.parametrize("place", range(len(blocks(ROOT / "README.md", "python"))))
def test_the_python_of_the_readme_runs_block_by_block(place: int) -> None:
    run(blocks(ROOT / "README.md", "python")[place], "README.md", namespace("README.md"))


@pytest.mark.parametrize("page", [pytest.param(p, marks=[pytest.mark.slow] * (p in SLOW)) for p in READY])
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = namespace(page)
    run(GIVEN.get(page, ""), page, names)
    for place, code in enumerate(blocks(ROOT / page, "python")):
        run(code, page, names)
        run(AFTER.get((page, place), ""), page, names)
    if page in CHECKS:
        CHECKS[page](names)


def same_text(_: dict[str, Any]) -> None:
    """Every layout of the page on data is read as the same text."""
    files = sorted(Path().iterdir())
    assert [file.suffix for file in files] == [".h5", ".jsonl", ".npz", ".sqlite"]
    words = Vocabulary(("cat", "the", "sat", "."))
    for users in map(open_users, files):
        assert [users.name(user) for user in range(len(users))] == ["ann", "bob"]
        found = [[sentence.tolist() for sentence in users.sentences(user, words)] for user in range(len(users))]
        assert found == [[[2, 1, 3, 4], [5, 5]], [[1, 1]]]


def learned(names: dict[str, Any]) -> None:
    """The regression of the page on tasks."""
    assert names["done"].summary["r2"] > 0.7


def same_scores(names: dict[str, Any]) -> None:
    """What the page on export compares."""
    assert torch.allclose(names["model"](names["x"]), names["program"](names["x"]), atol=1e-5)


CHECKS = {"docs/data.md": same_text, "docs/tasks.md": learned, "docs/export.md": same_scores}
"""What must hold after a page's Python has run."""


def test_pages_that_run_elsewhere_are_there() -> None:
    assert {*ELSEWHERE, *GIVEN, *SLOW, *CHECKS} <= {str(page.relative_to(ROOT)) for page in TOGETHER}
