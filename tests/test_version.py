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


def version_of(checkout: Path, below: str = "src") -> str:
    """What a copy of the package's first files says of itself."""
    core = checkout / below / "fedrolex" / "core"
    if not core.exists():
        core.mkdir(parents=True)
        (core / "__init__.py").touch()
        (core.parent / "__init__.py").touch()
        shutil.copy(SOURCE / "core" / "version.py", core)
    done = subprocess.run(
        [sys.executable, "-c", ASK], env={"PYTHONPATH": str(core.parents[1]), "PATH": "/usr/bin:/bin"},
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
    (tmp_path / "src" / "fedrolex" / "__init__.py").write_text("# changed\n")
    assert version_of(tmp_path) == f"{VERSION}{sign}g{commit}.dirty"


def test_what_is_installed_into_somebody_elses_repository_is_not_named_by_it(tmp_path: Path) -> None:
    version_of(tmp_path, "site-packages")
    git(tmp_path, "init")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-m", "one")
    assert version_of(tmp_path, "site-packages") == VERSION
