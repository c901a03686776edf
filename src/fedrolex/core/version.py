"""The installed version, and in a checkout the commit that it is at."""

import os
import re
import shutil
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    VERSION = version("fedrolex")
except PackageNotFoundError:  # a checkout that was not installed
    VERSION = "0+unknown"

COMMIT = re.compile(r"[0-9a-f]{7,}(\.dirty)?")
PACKAGE = ("src", "pyproject.toml")  # what makes the code, in a checkout
MODULE = "src/fedrolex/core/version.py"  # this file, in a checkout


@cache
def code_version() -> str:
    """What stands beside numbers: the version and, of code in a checkout, its commit, as in ``0.1.0+g1a2b3c4``.

    It ends in ``.dirty`` where the package was changed since; results and pages do not count. Without git, without a
    commit, or where the code is a copy in somebody else's repository, it is the version.
    """
    path = Path(__file__).resolve()
    checkout = (path.parent / "../../..").resolve()
    if path != checkout / MODULE or Path(_git(checkout, "rev-parse", "--show-toplevel")).resolve() != checkout:
        return VERSION
    if _git(checkout, "ls-files", "--", MODULE) != MODULE:
        return VERSION
    commit = _git(checkout, "describe", "--always", "--abbrev=7", "--exclude=*")
    changed = _git(checkout, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no", "--", *PACKAGE)
    commit += ".dirty" if changed else ""
    return f"{VERSION}{'.' if '+' in VERSION else '+'}g{commit}" if COMMIT.fullmatch(commit) else VERSION


def _git(checkout: Path, *words: str) -> str:
    """What git says of a checkout; nothing where it is not there or refuses.

    Whoever calls may be called by git, in a hook: what git told them of their repository is not for this one.
    """
    git = shutil.which("git")
    if git is None:
        return ""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    asked = [git, "-C", str(checkout), *words]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True, env=plain)  # noqa: S603
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return said.stdout.strip()
