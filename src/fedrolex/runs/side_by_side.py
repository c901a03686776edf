"""Several runs at once in one process: one cohort seldom fills a GPU."""

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from fedrolex.clients import has_dropout
from fedrolex.engines.gpu.sharing import GATE, own_stream
from fedrolex.runs.run import Progress, Run
from fedrolex.runs.training import Training

ReadyRun = tuple[Run, Training, Progress | None]
QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # to be in the environment before CUDA starts: runs then do not queue up


def fits(training: Training) -> bool:
    """Whether a run can go beside others of the same precision and still give the same bits.

    Not if its engine has threads of its own, nor if one of its models draws random numbers while it trains, which
    threads would share.
    """
    models = (network.module for network in training.server.networks.values())
    return training.engine.shares_process and not any(has_dropout(model) for model in models)


def side_by_side(ready: Sequence[ReadyRun]) -> list[dict[str, Any]]:
    """Train runs to their end, each in a thread and on a stream of its own; their summaries.

    Runs may be of different recipes, as far as :func:`fits` takes them. A run that captures steps waits until the
    others have finished the round they are in, and the others wait for the capture.

    The first run that fails, and Ctrl-C, stop the others after the round they are in; all can be resumed.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(len(ready)) as pool:
        futures = [pool.submit(_go, *each, stop) for each in ready]
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
        GATE.pause()

    with own_stream(training.server.device):
        return run.go(training, step)
