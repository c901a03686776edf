"""What the rounds of a run have trained so far: how often every node and every weight."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
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
    known = [section for section in training.server.state if section in counts]
    return [_section(training, section, counts[section]) for section in known if counts[section].nodes]


@dataclass(frozen=True)
class Updates:
    """How often the positions of an axis or of a tensor were trained.

    Attributes:
        count: updates by position.
        own: whether a position belongs to the model, of the same shape.
        times: how many positions one of these stands for.
    """

    count: Tensor
    own: Tensor
    times: float = 1.0

    @property
    def held(self) -> float:
        """Positions of the model."""
        return float(self.own.sum()) * self.times

    @property
    def hit(self) -> float:
        """Positions of the model that were ever trained."""
        return float((self.own & (self.count > 0)).sum()) * self.times

    @property
    def range(self) -> tuple[int, int]:
        """Updates of the least and of the most trained position of the model."""
        among = self.count[self.own]
        return (int(among.min()), int(among.max())) if len(among) else (0, 0)


def _section(training: Training, section: str, counts: Counts) -> dict[str, Any]:
    """Shares reached of what a section has, and its pictures."""
    axes, inside = counts.axes, Counts(counts.axes)
    inside.add({training.method.extent(training.server, section): 1})
    nodes = {name: Updates(count, inside.nodes[name] > 0) for name, count in counts.nodes.items()}
    weights = {
        first: Updates(count, inside.weights[first] > 0, prod(axes.shape(first)) / count.numel())
        for first, count in counts.weights.items()
    }
    alike = {first: len(names) for first, names in counts.groups.items()}
    held = sum(each.held * alike[first] for first, each in weights.items())
    hit = sum(each.hit * alike[first] for first, each in weights.items())
    matrices = {first: each for first, each in weights.items() if sum(n > 1 for n in each.count.shape) > 1}
    return {
        "section": section,
        "nodes": sum(each.hit for each in nodes.values()) / sum(each.held for each in nodes.values()),
        "weights": hit / held,
        "never": round(held - hit),
        "by_node": [{"axis": name, "range": each.range, **_picture(each)} for name, each in nodes.items()],
        "by_weight": [
            {"tensor": first, "others": counts.groups[first][1:], "share": each.hit / each.held, **_picture(each)}
            for first, each in list(matrices.items())[:PICTURES]
        ],
        "left_out": max(0, len(matrices) - PICTURES),
    }


def _picture(trained: Updates) -> dict[str, Any]:
    """Counts as at most 64 × 64 cells of a byte each: their mean, in 253 steps; a list is one row of up to 256."""
    count, own = (part.reshape(part.shape[0] if part.dim() > 1 else 1, -1) for part in (trained.count, trained.own))
    shape = [min(CELLS, count.shape[0]), min(CELLS if count.shape[0] > 1 else 4 * CELLS, count.shape[1])]
    sums, held = (_pooled(part, shape) for part in (torch.where(own, count, 0.0), own))
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
