"""Runs that differ by their seed alone: means, and how far results are from them."""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from fedrolex.core import FedrolexError

SETTINGS = ("seed", "rounds")  # numbers of a summary that are no results


def over_seeds(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every method's results over its seeds, a method an entry: ``{"mean": ..., "std": ...}`` for every number.

    ``std`` is the standard deviation of the seeds' results, with n - 1 in the denominator; None for a single seed.
    """
    found = []
    for method in dict.fromkeys(result["method"] for result in results):
        runs = [result for result in results if result["method"] == method]
        numbers = {key: spread([run.get(key) for run in runs]) for key in runs[0] if key not in SETTINGS}
        seeds = [run["seed"] for run in runs]
        found.append({"method": method, "seeds": seeds} | {key: each for key, each in numbers.items() if each})
    return found


def spread(values: Sequence[Any]) -> dict[str, Any] | None:
    """Mean and standard deviation of numbers, or of numbers by key; None for anything else."""
    if all(isinstance(value, Mapping) for value in values):
        inner = {key: spread([value.get(key) for value in values]) for key in values[0]}
        return {key: each for key, each in inner.items() if each} or None
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return None
    return {"mean": mean(values), "std": stdev(values) if len(values) > 1 else None}


def number(value: Any, form: str, unit: float = 1) -> str:
    """A number, or mean ± standard deviation, in a format and a unit; nothing for None."""
    both = value.values() if isinstance(value, Mapping) else [value]
    return " ± ".join(format(each / unit, form) for each in both if each is not None)


def read_seeds(text: str) -> list[int]:
    """Seeds as ``--seeds`` takes them, each once."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise FedrolexError(f"--seeds {text!r} is not a list of numbers: give e.g. 1,2,3") from None
    if len(set(found)) != len(found):
        raise FedrolexError(f"--seeds {text!r} names a seed twice")
    return found
