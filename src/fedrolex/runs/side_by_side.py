"""Several runs at once in one process: one cohort seldom fills a GPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import Any

import torch

from fedrolex.clients.dropout import has_dropout
from fedrolex.engines import Graph, Loop
from fedrolex.runs.run import Progress, Run
from fedrolex.runs.training import Training

Job = tuple[Run, Training, Progress | None]
QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # to be in the environment before CUDA starts: runs then do not queue up


def fits(training: Training) -> bool:
    """Whether a run can go beside others and still give the same bits.

    Not if its model draws random numbers while it trains, which threads would share, nor if its engine has threads of
    its own.
    """
    return all(not has_dropout(each.model) and isinstance(each.engine, Loop | Graph) for each in training.kinds())


def side_by_side(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Train runs to their end, each in a thread and on a stream of its own; their summaries.

    The first that fails, and Ctrl-C, stop the others after the round they are in; all can be resumed.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(_go, *job, stop) for job in jobs]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            if not all(future.done() and future.exception() is None for future in futures):
                stop.set()
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, KeyboardInterrupt)):
        raise error
    return [future.result() for future in futures]


def _go(run: Run, training: Training, progress: Progress | None, stop: threading.Event) -> dict[str, Any]:
    def step(row: dict[str, Any]) -> None:
        if progress is not None:
            progress(row)
        if stop.is_set():
            raise KeyboardInterrupt

    device = next(training.model.parameters()).device
    with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
        return run.go(training, step)
