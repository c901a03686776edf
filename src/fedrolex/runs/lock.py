"""A run's folder belongs to one process at a time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fedrolex.core import FedrolexError

try:
    import fcntl
except ImportError:  # not on this system: nothing is locked
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
PATIENCE = 1.0  # seconds for a process that is just ending, or only asks


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside, nobody else can train the run in ``folder``; where a process dies, the kernel frees its lock.

    Nothing is locked where the system, or the file system, has no such locks.
    """
    if (folder / NAME).is_fifo():  # to open it is to wait for its other end
        raise FedrolexError(f"{folder / NAME} is a pipe and no file: delete it")
    try:
        file = open(folder / NAME, "a")  # noqa: SIM115 - closed below
    except OSError as error:
        raise FedrolexError(f"cannot write to {folder}: {error.strerror}") from error
    with file:
        until = time.monotonic() + PATIENCE
        while not _take(file):
            if time.monotonic() > until:
                raise FedrolexError(f"{folder} is being trained by another process: wait for it, or stop it first")
            time.sleep(0.05)
        yield


def in_use(folder: Path) -> bool:
    """Whether somebody holds the lock of a run's folder."""
    try:
        if (folder / NAME).is_file():
            with open(folder / NAME) as file:
                return not _take(file)
    except OSError:
        pass
    return False


def _take(file: IO[str]) -> bool:
    """Take the lock until the file is closed; False where somebody else has it."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # all others: a file system without locks
        return not isinstance(error, BlockingIOError)
    return True
