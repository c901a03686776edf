"""Where runs stand, read from their folders without training or changing anything."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from fedrolex.runs.lock import in_use
from fedrolex.runs.run import Run

OF_A_ROUND = ("round", "clients", "dropped", "void", "bytes_down", "bytes_up", "macs", "seconds", "drift")
"""What the metrics of a round say beside how good the model is."""


def standing(run: Run, callbacks: Sequence[object] | None = None) -> dict[str, Any]:
    """Where a run stands.

    ``state`` is ``running`` (a process trains it), ``finished`` or ``stopped``, which it also is where it was stopped
    before the callback ``details`` had measured it; ``rounds`` are done, ``of`` so many;
    ``measured`` are the metrics of the last evaluation, after round ``evaluated``; ``bytes`` and ``seconds`` are those
    of all rounds.

    Args:
        callbacks: those that a finished run must have had; by default its own.
    """
    recipe, rows, summary = run.recipe(), run.rows(), _summary(run)
    last: dict[str, Any] = next((row for row in reversed(rows) if "loss" in row), {})
    finished = summary.get("rounds") == recipe.rounds <= len(rows)
    if "details" in (recipe.callbacks if callbacks is None else callbacks):
        finished = finished and _is_measured(run, recipe.rounds)
    task = recipe.encode()["task"]
    named = "/".join(str(task[key]) for key in ("name", "data") if task.get(key))
    return {
        "run": str(run.folder),
        "state": "running" if in_use(run.folder) else "finished" if finished else "stopped",
        "rounds": len(rows),
        "of": recipe.rounds,
        "method": recipe.method.name,
        "task": summary.get("task", "given in Python") if run.own_task() else named,
        "seed": recipe.seed,
        "evaluated": last.get("round"),
        "measured": {key: value for key, value in last.items() if key not in OF_A_ROUND},
        "bytes": sum(row.get("bytes_down", 0) + row.get("bytes_up", 0) for row in rows),
        "seconds": sum(row.get("seconds", 0.0) for row in rows),
    }


def flat(data: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Nested keys and values as ``outer.inner`` and value."""
    found = []
    for key, value in data.items():
        found += flat(value, f"{above}{key}.") if isinstance(value, Mapping) else [(f"{above}{key}", value)]
    return found


def _is_measured(run: Run, rounds: int) -> bool:
    """Whether the callback ``details`` has measured the run after so many rounds; a damaged file is told elsewhere."""
    path = run.folder / "details.json"
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        return path.is_file() and json.loads(path.read_text()).get("rounds", rounds) == rounds
    return True


def _summary(run: Run) -> dict[str, Any]:
    """What a finished run said in the end; nothing where there is no such file, or it is damaged."""
    path, found = run.folder / "summary.json", None
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text()) if path.is_file() else None  # a pipe would never end
    return found if isinstance(found, dict) else {}
