"""Where data sets lie on this machine."""

import os
from pathlib import Path


def data_folder(given: str | None) -> Path:
    """The folder of all data sets: ``given``, else the variable FEDROLEX_DATA, else ``~/.cache/fedrolex``."""
    chosen = given or os.environ.get("FEDROLEX_DATA")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "fedrolex"
