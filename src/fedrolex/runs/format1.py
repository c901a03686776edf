"""Checkpoints of format 1, as version 0.1.0 wrote them: tensors had no sections, only names.

A tensor of the model had its own name; what a capacity kept, or a method remembered, was ``tensor@what``; another
network's tensors were ``@capacity tensor``.
"""

from collections.abc import Mapping

from torch import Tensor

from fedrolex.clients import MODEL
from fedrolex.core import FedrolexError
from fedrolex.rounds import State

RENAMED = {"labels:ids": "@public ids", "labels:labels": "@public labels", "adam:steps": "@steps"}
COPIES = (" @public ids", " @public labels")  # every network had its own, all the same


def in_sections(tensors: Mapping[str, Tensor], state: State) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by their names of format 1, as ``section:name``.

    Sections that format 1 did not store stay as in ``state``, which is the run's before its first round.
    """
    left = {name: tensor for name, tensor in tensors.items() if not name.endswith(COPIES)}
    found: dict[str, Tensor] = {}
    for section, own in state.items():
        known = {name: next((old for old in _names(section, name) if old in left), None) for name in own}
        if section != MODEL and not any(known.values()):
            known = {}
            found |= {f"{section}:{name}": tensor for name, tensor in own.items()}
        for name, old in known.items():
            if old is None:
                raise FedrolexError(f"the checkpoint does not fit this run: it has no tensor {section}:{name}")
            found[f"{section}:{name}"] = left.pop(old)
    if left:
        raise FedrolexError(f"the checkpoint does not fit this run: tensor {min(left)!r}")
    return found


def _names(section: str, name: str) -> list[str]:
    """What a section's tensor may have been called."""
    if section == MODEL:
        return [name]
    _, at, capacity = section.partition("@")
    if at:
        return [f"{name}@{capacity}"]
    return [RENAMED.get(f"{section}:{name}", f"{name}@{section.rpartition('.')[2]}"), f"@{section} {name}"]
