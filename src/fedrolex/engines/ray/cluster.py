"""The Ray cluster of a process: an existing one, or one of this machine alone."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from fedrolex.core import FedrolexError
from fedrolex.slicing import one_line

ADDRESS = "RAY_ADDRESS"
LOCAL = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Settings of a cluster of one's own, unless they are given: nothing is reported to anyone, workers are not niced."""
EXISTING = {"RAY_NUM_REDIS_GET_RETRIES": "1"}
"""Settings for an existing cluster, unless they are given: Ray itself asks twenty times, for a quarter of an hour."""
ANSWERED = 10.0  # seconds in which whoever listens at an address takes a connection


def check_installed() -> None:
    """Raise, in one line, where Ray is not installed."""
    if find_spec("ray") is None:
        raise FedrolexError("engine ray needs Ray, which is not installed: pip install 'fedrolex[ray]'")


def connected() -> Any:
    """The module ``ray``, connected to the cluster at RAY_ADDRESS, or to one that is started on this machine."""
    address = os.environ.get(ADDRESS) or "local"
    for name, value in (LOCAL if address == "local" else LOCAL | EXISTING).items():
        os.environ.setdefault(name, value)  # read when ray is imported, and by what it starts
    import ray

    if not ray.is_initialized():
        check_answers(address)
        own: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        try:
            with own_signals():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
        except Exception as error:
            what = "a local Ray cluster" if address == "local" else f"the Ray cluster at {address} ({ADDRESS})"
            raise FedrolexError(f"{what} cannot be reached: {type(error).__name__}: {one_line(error)}") from error
    return ray


def check_answers(address: str) -> None:
    """Raise, in one line, where an address is none, or nobody is there: Ray would wait for minutes."""
    if address in ("local", "auto"):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise FedrolexError(f"{ADDRESS} is {address!r}: give host:port of the cluster's first node, auto or local")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWERED).close()
    except OSError as error:
        remedy = "start it there with: ray start --head --port=6379"
        raise FedrolexError(f"no Ray cluster answers at {address} ({ADDRESS}): {one_line(error)}: {remedy}") from error


@contextmanager
def own_signals() -> Iterator[None]:
    """After it, this process does at SIGTERM what it did before it.

    Ray puts handlers of its own there. They would end a run without a word, and a child that this process forks and
    ends would take the cluster with it.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def session(ray: Any) -> str | None:
    """What tells this connection to a cluster from others; None without one."""
    return str(ray.get_runtime_context().get_job_id()) if ray.is_initialized() else None
