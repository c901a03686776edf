"""What the details of finished runs add to the paper's tables: every capacity's sub-model, and single clients."""

import json
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from fedrolex.cli.seeds import number, spread
from fedrolex.core import FedrolexError
from fedrolex.runs import Run
from fedrolex.slicing import exact

Row = dict[str, Any]
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def read_details(run: Run) -> Row:
    """``submodels`` by capacity, ``local_by_client`` and ``offsets``, accuracies in per cent.

    What was not measured is left out.
    """
    path = run.folder / "details.json"
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
        submodels = _submodels(found["submodels"])
        local = _local(found["local"]) if "local" in found else {}
        offsets = _offsets(found["offsets"]) if "offsets" in found else {}
    except (FedrolexError, *DAMAGED) as error:
        raise FedrolexError(f"{path} is damaged: delete it, and the same command measures it again") from error
    read = {"submodels": submodels, "local_by_client": local, "offsets": offsets}
    return {name: each for name, each in read.items() if each}


def _submodels(shares: Mapping[str, float]) -> Row:
    return {str(exact(capacity)): _percent(share) for capacity, share in shares.items()}


def _offsets(found: Mapping[str, Any]) -> Row:
    """With offsets of classes: ``global``, ``rare`` where some are, ``submodels``."""
    rare = {"rare": _percent(found["rare_accuracy"])} if "rare_accuracy" in found else {}
    submodels = _submodels(found.get("submodels", {}))
    return {"global": _percent(found["global_accuracy"]), **rare, **({"submodels": submodels} if submodels else {})}


def _local(found: Mapping[str, Any]) -> Row:
    """Clients with their accuracies, and with their capacities where they have some of their own."""
    clients, capacities = [int(client) for client in found["clients"]], [str(exact(c)) for c in found["capacities"]]
    plain, masked = ([_percent(share) for share in found[key]] for key in ("plain", "masked"))
    if not len(clients) == len(plain) == len(masked) or len(capacities) not in (0, len(clients)):
        raise ValueError("not one accuracy a client")
    return {"clients": clients, "capacities": capacities, "plain": plain, "masked": masked} if clients else {}


def _percent(share: float) -> float:
    if isinstance(share, bool) or not 0 <= share <= 1:
        raise ValueError("no part of one")
    return round(100 * share, 2)


def with_offsets(runs: Sequence[Row]) -> Row:
    """Mean and deviation with offsets of classes, where all runs were measured so: ``global``, ``rare``, ``submodels``.

    Means over other seeds than those of the rest of a table would mislead.
    """
    measured = [run["offsets"] for run in runs if "offsets" in run]
    if not measured or len(measured) < len(runs):
        return {}
    shares = {name: spread([each[name] for each in measured]) for name in ("global", "rare") if name in measured[0]}
    submodels = submodels_over_seeds(measured)
    return {**shares, **({"submodels": submodels} if submodels else {})}


def submodels_over_seeds(runs: Sequence[Row]) -> Row:
    """Mean and deviation of every capacity's sub-model over the runs that have it, the largest capacity first."""
    measured = [run.get("submodels", {}) for run in runs]
    return {
        capacity: spread([each[capacity] for each in measured if capacity in each])
        for capacity in _capacities(measured)
    }


def submodel_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A table's heading, with a column for each capacity, and a line for each row that has sub-models."""
    measured: dict[str, Row] = {}
    for row in rows:
        measured[row["row"]] = row.get("submodels", {})
        measured[f"{row['row']}, with offsets"] = row.get("offsets", {}).get("submodels", {})
    capacities = _capacities(measured.values())
    lines = [(name, *(number(each.get(c), ".2f") for c in capacities)) for name, each in measured.items() if each]
    return [("", *capacities), *lines]


def _capacities(measured: Iterable[Row]) -> list[str]:
    """Those that are there, the largest first."""
    return sorted({capacity for each in measured for capacity in each}, key=Fraction, reverse=True)
