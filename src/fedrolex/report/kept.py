"""What a report found out about a run, kept in the run's folder: the next report of the run takes no time.

Tracing the model and measuring it for every client takes minutes for large models; a run that has not changed gives the
same again. Where somebody's own code decides what comes of a run, nothing is kept: the code may have changed.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from fedrolex.core import METHODS, MODELS, SCHEMES, TASKS, FedrolexError
from fedrolex.core.version import VERSION
from fedrolex.runs import Run
from fedrolex.runs.checkpoint import write_whole

NAME = "report.json"


def key_of(run: Run) -> str | None:
    """A hash of what a report depends on: version, recipe, metrics, checkpoint, models; None where it is own code."""
    if run.own_task() or not _of_this_package(run.recipe().encode()):
        return None
    found = blake2b(VERSION.encode(), digest_size=16)
    for path in (run.folder / "recipe.yaml", run.metrics, *sorted(run.folder.glob("*.safetensors"))):
        if path.is_file():
            found.update(path.name.encode(errors="replace") + b"\0")
            found.update(blake2b(path.read_bytes()).digest())
    return found.hexdigest()


def _of_this_package(recipe: Mapping[str, Any]) -> bool:
    """Whether all that a recipe names is this package's; data may also be paths."""
    method, task = recipe["method"], recipe["task"]
    models = {task.get("model"), *(name.partition(":")[0] for name in task.get("models", {}).values())}
    named = [(METHODS, method["name"]), (TASKS, task["name"]), (SCHEMES, method.get("scheme"))]
    named += [(MODELS, name) for name in models - {"auto"}]
    return ":" not in str(task.get("data")) and all(name is None or name in known.own() for known, name in named)


def kept(run: Run, key: str) -> dict[str, Any]:
    """The parts that were kept under a key; none where the file is not there, damaged, or of another key."""
    found: Any = None
    with suppress(OSError, ValueError, RecursionError):
        path = run.folder / NAME
        found = json.loads(path.read_bytes()) if path.is_file() else None
    if not isinstance(found, dict) or found.get("key") != key or not isinstance(found.get("parts"), dict):
        return {}
    parts: dict[str, Any] = found["parts"]
    return parts if found.get("checksum") == _checksum(parts) else {}


def keep(run: Run, key: str, parts: dict[str, Any]) -> None:
    """Keep parts under a key, where the folder can be written to."""
    text = json.dumps({"key": key, "checksum": _checksum(parts), "parts": parts})
    with suppress(FedrolexError):
        write_whole(run.folder / NAME, text.encode())


def _checksum(parts: dict[str, Any]) -> str:
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
