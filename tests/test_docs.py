"""The Python of the documentation runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fedrolex.data.users import open_users
from fedrolex.data.vocabulary import Vocabulary

ROOT = Path(__file__).parent.parent


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("place", range(len(blocks("README.md"))))
def test_the_python_of_the_readme_runs_block_by_block(place: int) -> None:
    exec(compile(blocks("README.md")[place], "README.md", "exec"), {})


def test_every_layout_of_the_page_on_data_is_read_as_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("h5py", reason="HDF5 files need h5py")
    monkeypatch.chdir(tmp_path)
    for code in blocks("docs/data.md"):
        exec(compile(code, "data.md", "exec"), {})
    files = sorted(tmp_path.iterdir())
    assert [file.suffix for file in files] == [".h5", ".jsonl", ".npz", ".sqlite"]
    words = Vocabulary(("cat", "the", "sat", "."))
    for users in map(open_users, files):
        assert [users.name(user) for user in range(len(users))] == ["ann", "bob"]
        found = [[sentence.tolist() for sentence in users.sentences(user, words)] for user in range(len(users))]
        assert found == [[[2, 1, 3, 4], [5, 5]], [[1, 1]]]


def test_the_python_of_the_page_on_tasks_learns() -> None:
    torch.manual_seed(0)
    (block,) = blocks("docs/tasks.md")
    names: dict[str, Any] = {}
    exec(compile(block, "tasks.md", "exec"), names)
    assert names["done"].summary["r2"] > 0.7
