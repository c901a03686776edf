"""Which nodes clients trained in every round of a run: computed again, since jobs are pure functions of the round."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fedrolex.clients import MODEL, Job
from fedrolex.runs import Training
from fedrolex.runs.hooks import jobs_of
from fedrolex.slicing import Arc, Axis, Span, Window

NUMBERS = 400_000  # in the spans of a page's pictures of one run; of longer runs some rounds are shown


@dataclass(frozen=True)
class PastJob:
    """A job of a round that is over, and whether its answer was averaged."""

    job: Job
    taken: bool


def asked(training: Training, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, list[PastJob]]]:
    """Every round with its jobs on the main network; answers of dropped clients and of void rounds were not taken."""
    for row in rows:
        jobs = [job for job in jobs_of(training.method, training.server, row["round"]) if job.network == MODEL]
        yield row["round"], [PastJob(job, not row["void"] and str(job.client) not in row["dropped"]) for job in jobs]


def pictures(training: Training, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the page draws of windows, as JSON data.

    ``spans`` are lists of (start, length, start, length …), which may wrap; ``windows`` name one for every axis of
    ``axes``; ``rounds`` are [round from 1, [[section, level, window, taken] …]] with ``sections`` and ``levels``, from
    the largest, by place. ``every`` says that one of so many rounds is shown.
    """
    axes = training.server.main.axes.cut_axes
    state = list(training.server.state)
    levels = sorted({*training.server.fleet.levels, *training.method.sizes(training.server)}, reverse=True)
    spans: dict[tuple[int, ...], int] = {}
    windows: dict[Window, int] = {}
    picked: dict[int, list[list[int]]] = {}
    every = _every(training, rows)
    for round, jobs in asked(training, rows[::every]):
        for each in jobs:
            section = state.index(each.job.sections[0])
            window = windows.setdefault(each.job.window, len(windows))
            if each.job.capacity not in levels:
                levels.append(each.job.capacity)
            picked.setdefault(round + 1, []).append([section, levels.index(each.job.capacity), window, int(each.taken)])
    used = sorted({job[0] for jobs in picked.values() for job in jobs})
    held = [[spans.setdefault(_pairs(window, axis), len(spans)) for axis in axes] for window in windows]
    return {
        "axes": [{"name": axis.name, "size": axis.size} for axis in axes],
        "sections": [state[place] for place in used],
        "levels": [str(level) for level in levels],
        "spans": [list(span) for span in spans],
        "windows": held,
        "rounds": [[round, [[used.index(job[0]), *job[1:]] for job in jobs]] for round, jobs in picked.items()],
        "every": every,
    }


def _every(training: Training, rows: Sequence[Mapping[str, Any]]) -> int:
    """One of how many rounds is shown: all, unless windows are so ragged that the page would become too large."""
    axes = training.server.main.axes.cut_axes
    some = [jobs for _, jobs in asked(training, rows[:: max(1, len(rows) // 8)])]
    distinct = {_pairs(each.job.window, axis) for jobs in some for each in jobs for axis in axes}
    a_round = sum(map(len, distinct)) / max(1, len(some)) + 4 * max(map(len, some), default=0)
    return max(1, round(a_round * len(rows) / NUMBERS))


def _pairs(window: Window, axis: Axis) -> tuple[int, ...]:
    """The indices of an axis as (start, length, start, length …)."""
    span: Span = window.get(axis.name, Arc(0, axis.size, axis.size))
    if isinstance(span, Arc):
        return span.start, span.width
    runs = groupby(enumerate(sorted(span.chosen)), key=lambda each: each[1] - each[0])
    pieces = [[index for _, index in run] for _, run in runs]
    return tuple(number for piece in pieces for number in (piece[0], len(piece)))
