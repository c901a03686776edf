"""The installed version, and in a checkout the commit that it is at."""

import shutil
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    VERSION = version("fedrolex")
except PackageNotFoundError:  # a checkout that was not installed
    VERSION = "0+unknown"


@cache
def code_version() -> str:
    """What stands beside numbers: the version and, of code in a checkout, its commit, as in ``0.1.0+g1a2b3c4``.

    It ends in ``.dirty`` where files of the checkout were changed since. Without git, or a commit, it is the version.
    """
    package, git = Path(__file__).parents[1], shutil.which("git")
    checkout = package.parents[1]
    if git is None or package.parent.name != "src" or not (checkout / ".git").exists():
        return VERSION
    asked = [git, "-C", str(checkout), "describe", "--always", "--dirty=.dirty", "--abbrev=7", "--exclude=*"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return VERSION
    return f"{VERSION}{'.' if '+' in VERSION else '+'}g{said.stdout.strip()}"
