"""What a run's folder alone tells: curves, costs, faults, recipe. Neither its data nor its model is needed."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from sys import float_info
from typing import Any

import yaml

from fedrolex.core import FedrolexError
from fedrolex.runs import Run
from fedrolex.runs.standing import OF_A_ROUND, flat, standing

COSTS = ("bytes_down", "bytes_up", "macs", "seconds", "clients")
NAMED = 12  # clients of a fault, by number
REASONS = 40  # faults that are told apart


def told(run: Run) -> dict[str, Any]:
    """One run, as JSON data.

    ``curves`` are metrics of the model: pairs of the rounds done and the value. ``costs`` have a value a round.
    """
    rows, stands = run.rows(), standing(run)
    names = dict.fromkeys(key for row in rows for key, value in row.items() if key not in OF_A_ROUND and _number(value))
    return {
        **{key: value for key, value in stands.items() if key != "measured"},
        "name": run.folder.name or str(run.folder),
        "curves": {name: [[r["round"] + 1, r[name]] for r in rows if _number(r.get(name))] for name in names},
        "costs": {name: [row[name] if _number(row.get(name)) else None for row in rows] for name in COSTS},
        "faults": faults(rows),
        "recipe": yaml.safe_dump(run.recipe().encode(), sort_keys=False, allow_unicode=True),
        "settings": {key: json.dumps(value, ensure_ascii=False) for key, value in flat(run.recipe().encode())},
        "environment": _environment(run),
    }


def faults(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Answers that were not used, a round and by reason, and the rounds that did not count (numbered from 1)."""
    reasons: dict[str, dict[str, Any]] = {}
    for row in rows:
        for client, why in row["dropped"].items():
            known = str(why) in reasons or len(reasons) < REASONS
            found = reasons.setdefault(
                str(why) if known else "other reasons", {"answers": 0, "clients": [], "first": row["round"] + 1}
            )
            found["answers"] += 1
            found["last"] = row["round"] + 1
            if client not in found["clients"]:
                found["clients"].append(client)
    for found in reasons.values():
        found["more"] = max(0, len(found["clients"]) - NAMED)
        found["clients"] = found["clients"][:NAMED]
    return {
        "dropped": [len(row["dropped"]) for row in rows],
        "void": [row["round"] + 1 for row in rows if row["void"]],
        "reasons": [{"why": why, **found} for why, found in sorted(reasons.items(), key=_most)],
    }


def _most(item: tuple[str, Mapping[str, Any]]) -> int:
    return -int(item[1]["answers"])


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= float_info.max


def _environment(run: Run) -> dict[str, Any]:
    """The machine and the versions that trained the run; nothing where that file is gone."""
    with suppress(OSError, FedrolexError):
        return {str(key): str(value) for key, value in run.environment().items() if value is not None}
    return {}
