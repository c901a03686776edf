"""Several runs at once in one process: one cohort seldom fills a GPU."""

import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from fedrolex.clients import has_dropout
from fedrolex.core import FedrolexError
from fedrolex.engines.gpu.sharing import GATE, own_stream
from fedrolex.runs.run import Progress, Run
from fedrolex.runs.training import Training, label, to_stderr

ReadyRun = tuple[Run, Training, Progress | None]
QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # to be in the environment before CUDA starts: runs then do not queue up


def fits(training: Training) -> bool:
    """Whether a run can go beside others of the same precision and still give the same bits.

    Not if its engine has threads of its own, nor if one of its models draws random numbers while it trains, which
    threads would share.
    """
    models = (network.module for network in training.server.networks.values())
    return training.engine.shares_process and not any(has_dropout(model) for model in models)


def already(run: ReadyRun) -> Callable[[], ReadyRun]:
    """A run that is ready, for :func:`side_by_side`."""
    return lambda: run


def side_by_side(
    runs: Sequence[Callable[[], ReadyRun]], at_once: int, names: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Train runs to their end, so many at once, each in a thread and on a stream of its own; their summaries.

    A run is got ready when there is a place for it, while the others wait between their rounds; the next one begins as
    soon as one is done. A run that captures steps waits until the others have finished the round they are in, and the
    others wait for the capture. What :func:`fits` does not take is trained while all others wait.

    A run that fails in one line (:class:`FedrolexError`) leaves the others alone, and is raised in the end. Ctrl-C, and
    whatever else goes wrong, stops the others after the round they are in, and no more begin; those that have begun can
    be resumed.

    Args:
        runs: make them ready. They may be of different recipes, of one precision.
        at_once: how many are trained at the same time.
        names: what they are called where they fail.
    """
    stop = threading.Event()
    futures: list[Future[dict[str, Any]]] = []
    with ThreadPoolExecutor(at_once) as pool:
        try:
            called = names or ["a run"] * len(runs)
            futures += [pool.submit(_go, ready, stop, name) for ready, name in zip(runs, called, strict=True)]
            wait(futures)
        except KeyboardInterrupt:
            stop.set()
            raise
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(
        errors, key=lambda error: (isinstance(error, KeyboardInterrupt), isinstance(error, FedrolexError))
    ):
        raise error
    return [future.result() for future in futures]


def _go(ready: Callable[[], ReadyRun], stop: threading.Event, name: str) -> dict[str, Any]:
    try:
        return _trained(ready, stop)
    except FedrolexError as error:
        to_stderr(f"{name} has failed, the others go on: {error}")
        raise
    except BaseException:
        stop.set()
        raise


def _trained(ready: Callable[[], ReadyRun], stop: threading.Event) -> dict[str, Any]:
    def step(row: dict[str, Any]) -> None:
        if progress is not None:
            progress(row)
        if stop.is_set():
            raise KeyboardInterrupt
        GATE.pause()

    with GATE.alone():
        if stop.is_set():
            raise KeyboardInterrupt
        gc.collect()  # what the run before in this place has left on the device
        run, training, progress = ready()
        if stop.is_set():
            raise KeyboardInterrupt
        if not fits(training):
            training.say(f"{run.folder} is trained while the others wait: {_why_alone(training)}")
            return run.go(training, step)
    with own_stream(training.server.device):
        return run.go(training, step)


def _why_alone(training: Training) -> str:
    """Why a run cannot go beside others."""
    if not training.engine.shares_process:
        alone = f"engine {label(training.engine)} has threads of its own"
        return f"{alone}; runs of engine loop, and of graph on a GPU, go side by side"
    return "its model has dropout, and all of a process draw from one source"
