"""What the rounds of a run have trained so far: how often every node and every weight."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedrolex.report.windows import asked
from fedrolex.runs import Training
from fedrolex.slicing import Window
from fedrolex.theory.coverage import CHUNK, Counts

CELLS = 64  # of a picture, along each side
PICTURES = 36  # of matrices, in each section
OUTSIDE, NEVER = 0, 1  # cells that no model has, and that nobody trained; from 2 on, how often


def reached(training: Training, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was trained of every section of the server's state, as JSON data; nothing of models that are never cut."""
    axes = training.server.main.axes
    pending: dict[str, dict[Window, int]] = {}
    counts: dict[str, Counts] = {}
    for _, jobs in asked(training, rows):
        for each in jobs:
            section = each.job.sections[0]
            windows = pending.setdefault(section, {})
            counts.setdefault(section, Counts(axes))
            if each.taken:
                windows[each.job.window] = windows.get(each.job.window, 0) + 1
            if len(windows) >= CHUNK:
                counts[section].add(windows)
                windows.clear()
    for section, windows in pending.items():
        if windows:
            counts[section].add(windows)
    return [_section(training, section, found) for section, found in counts.items() if found.nodes]


def _section(training: Training, section: str, counts: Counts) -> dict[str, Any]:
    """Shares reached of what a section has, and its pictures."""
    inside = Counts(counts.axes)
    inside.add({training.method.extent(training.server, section): 1})
    nodes = {name: (count, inside.nodes[name] > 0) for name, count in counts.nodes.items()}
    weights = {first: (count, inside.weights[first] > 0) for first, count in counts.weights.items()}
    matrices = {first: each for first, each in weights.items() if sum(n > 1 for n in each[0].shape) > 1}
    repeats = {first: _positions(counts, first) / weights[first][0].numel() for first in weights}
    names = {first: len(counts.groups[first]) for first in weights}
    hit, held = (
        sum(float(part(*each).sum()) * repeats[first] * names[first] for first, each in weights.items())
        for part in (lambda count, own: own & (count > 0), lambda count, own: own)
    )
    return {
        "section": section,
        "nodes": _share(nodes.values()),
        "weights": hit / held,
        "never": round(held - hit),
        "by_node": [
            {"axis": name, "least": _least(*each), "most": int(each[0].max()), **_picture(each[0][None], each[1][None])}
            for name, each in nodes.items()
        ],
        "by_weight": [
            {
                "tensor": first,
                "others": counts.groups[first][1:],
                "share": _share([each]),
                "most": int(each[0].max()),
                **_picture(*(part.reshape(part.shape[0], -1) for part in each)),
            }
            for first, each in list(matrices.items())[:PICTURES]
        ],
        "left_out": max(0, len(matrices) - PICTURES),
    }


def _positions(counts: Counts, tensor: str) -> int:
    found = 1
    for length in counts.axes.shape(tensor):
        found *= length
    return found


def _share(counted: Any) -> float:
    """The share of what is inside that was ever trained."""
    every = list(counted)
    held = sum(int(own.sum()) for _, own in every)
    return sum(int((own & (count > 0)).sum()) for count, own in every) / max(1, held)


def _least(count: Tensor, own: Tensor) -> int:
    return int(count[own].min()) if bool(own.any()) else 0


def _picture(count: Tensor, own: Tensor) -> dict[str, Any]:
    """Counts, ``(rows, columns)``, as at most 64 × 64 cells of a byte each: how often, of 253 steps, the mean cell was.

    Args:
        count: updates by position.
        own: positions that belong to the model.
    """
    shape = [min(CELLS if side > 1 else 1, side) for side in count.shape]
    if count.shape[0] == 1:
        shape[1] = min(4 * CELLS, count.shape[1])
    sums, held = (_pooled(part, shape) for part in (torch.where(own, count, 0.0), own.float()))
    mean = sums / held.clamp(min=1)
    steps = 2 + (mean / mean.max().clamp(min=1e-9) * 253).round()
    cells = torch.where(held == 0, OUTSIDE, torch.where(sums == 0, NEVER, steps)).to(torch.uint8)
    return {"rows": shape[0], "columns": shape[1], "cells": b64encode(cells.numpy().tobytes()).decode()}


def _pooled(part: Tensor, shape: Sequence[int]) -> Tensor:
    """Sums over blocks of (almost) equal size."""
    for dim, cells in enumerate(shape):
        place = torch.arange(part.shape[dim]) * cells // part.shape[dim]
        sizes = [cells if each == dim else length for each, length in enumerate(part.shape)]
        part = torch.zeros(sizes, dtype=torch.float64).index_add_(dim, place, part.double())
    return part
