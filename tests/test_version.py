"""The version that stands beside numbers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedrolex
from fedrolex.core.version import VERSION

SOURCE = Path(fedrolex.__file__).parent
ASK = "from fedrolex.core.version import code_version; print(code_version())"
WHO = ["-c", "user.name=someone", "-c", "user.email=someone@example.org", "-c", "commit.gpgsign=false"]
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(at: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(at), *WHO, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def version_of(checkout: Path, below: str = "src", **more: str) -> str:
    """What a copy of the package's first files says of itself; with ``more`` in the environment."""
    core = checkout / below / "fedrolex" / "core"
    if not core.exists():
        core.mkdir(parents=True)
        (core / "__init__.py").touch()
        (core.parent / "__init__.py").touch()
        shutil.copy(SOURCE / "core" / "version.py", core)
    done = subprocess.run(
        [sys.executable, "-c", ASK], env={"PYTHONPATH": str(core.parents[1]), "PATH": "/usr/bin:/bin", **more},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.strip()


def test_a_checkout_names_its_commit_and_whether_it_was_changed(tmp_path: Path) -> None:
    assert version_of(tmp_path) == VERSION
    git(tmp_path, "init")
    assert version_of(tmp_path) == VERSION  # no commit yet
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-m", "one")
    git(tmp_path, "tag", "-a", "-m", "a tag", "v9")
    commit = git(tmp_path, "rev-parse", "--short=7", "HEAD")
    sign = "." if "+" in VERSION else "+"
    assert version_of(tmp_path) == f"{VERSION}{sign}g{commit}"
    (tmp_path / "results.json").write_text("{}")
    git(tmp_path, "add", "-A")
    assert version_of(tmp_path) == f"{VERSION}{sign}g{commit}"  # tables that it writes change no code
    (tmp_path / "src" / "fedrolex" / "__init__.py").write_text("# changed\n")
    assert version_of(tmp_path) == f"{VERSION}{sign}g{commit}.dirty"


def test_what_is_installed_into_somebody_elses_repository_is_not_named_by_it(tmp_path: Path) -> None:
    version_of(tmp_path, "site-packages")
    git(tmp_path, "init")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-m", "one")
    assert version_of(tmp_path, "site-packages") == VERSION


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Somebody else's repository, with a commit."""
    found = tmp_path / "other"
    found.mkdir()
    (found / "theirs.py").touch()
    git(found, "init")
    git(found, "add", "-A")
    git(found, "commit", "-m", "theirs")
    return found


def test_a_copy_in_somebody_elses_sources_is_not_named_by_them(other: Path) -> None:
    assert version_of(other) == VERSION


def test_a_broken_repository_is_not_the_one_around_it(other: Path) -> None:
    (other / "vendor" / "fedrolex" / ".git").mkdir(parents=True)
    assert version_of(other / "vendor" / "fedrolex") == VERSION


def test_inside_a_hook_of_another_repository_the_code_has_its_own_commit(tmp_path: Path, other: Path) -> None:
    version_of(tmp_path / "own")
    git(tmp_path / "own", "init")
    git(tmp_path / "own", "add", "-A")
    git(tmp_path / "own", "commit", "-m", "ours")
    said = version_of(tmp_path / "own", GIT_DIR=str(other / ".git"), GIT_WORK_TREE=str(other))
    assert said.endswith(f"g{git(tmp_path / 'own', 'rev-parse', '--short=7', 'HEAD')}")


def test_a_git_that_says_nothing_names_nothing(tmp_path: Path) -> None:
    silent = tmp_path / "bin" / "git"
    silent.parent.mkdir()
    silent.write_text("#!/bin/sh\n")
    silent.chmod(0o755)
    assert version_of(tmp_path / "own", PATH=f"{silent.parent}:/usr/bin:/bin") == VERSION
