"""Callbacks: what is told of a run while it goes on. The project's own are callbacks like anyone's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrolex.clients import MODEL, Upload
from fedrolex.core import FedrolexError
from fedrolex.rounds import Round, State, out_of_memory
from fedrolex.rounds.drift import Drift
from fedrolex.slicing import one_line

if TYPE_CHECKING:
    from fedrolex.runs.training import Training


class Callback:
    """Told of everything that happens in a run; each hook does nothing unless it is overridden.

    :meth:`round_ends` may add to ``row``, the metrics of a round: what JSON can hold. A callback changes nothing else.
    """

    drift: bool = False
    """Whether an engine that averages answers itself should measure how far clients drift apart."""

    def begin(self, training: Training, folder: Path | None) -> None:
        """Before the first round, or the first after a resume; ``folder`` is the run's, None without one."""

    def round_begins(self, round: Round) -> None:
        """The clients have been asked; none has answered."""

    def folded(self, round: Round, uploads: Sequence[Upload]) -> None:
        """Answers of one window are being averaged; their tensors are good only now.

        Not called for answers that an engine averages itself.
        """

    def round_ends(self, round: Round, new: State, row: dict[str, Any]) -> None:
        """The round counts; ``new`` are the sections of the server's state that it changed."""

    def row(self, training: Training, row: dict[str, Any]) -> None:
        """The metrics of a round are complete, evaluation included, and cannot be changed any more."""

    def end(self, training: Training) -> None:
        """The run is over, finished or not."""


class CallbackError(FedrolexError):
    """A callback failed: the run stops after its last finished round."""


def tell(callbacks: Sequence[Callback], hook: str, *about: Any) -> None:
    """Call a hook of every callback; a callback that fails raises in one line that names it."""
    for callback in callbacks:
        try:
            getattr(callback, hook)(*about)
        except (Exception, SystemExit) as error:
            if out_of_memory(error):
                raise
            why = str(error) if isinstance(error, FedrolexError) else f"{type(error).__name__}: {one_line(error)}"
            raise CallbackError(f"callback {type(callback).__name__} failed in {hook}(): {why}") from error


def tell_row(callbacks: Sequence[Callback], training: Training, row: dict[str, Any]) -> None:
    """Tell every callback the metrics of a round; a callback that changes them, which is too late, raises in one line.

    Args:
        row: the metrics as they are on disk; every callback is given a copy.
    """
    for callback in callbacks:
        given = deepcopy(row)
        tell([callback], "row", training, given)
        if repr(given) != repr(row):  # which, unlike ==, takes whatever was put in
            what = f"callback {type(callback).__name__} changed the metrics of a round in row(), when they are complete"
            raise CallbackError(f"{what}: add to them in round_ends()")


def hashed(before: str, row: dict[str, Any]) -> str:
    """A hash of the metrics up to a round, but for seconds: of ``before``, that of the rounds before, and its own."""
    timeless = {key: value for key, value in row.items() if key != "seconds"}
    return blake2b(f"{before}{json.dumps(timeless)}".encode(), digest_size=16).hexdigest()


class MetricsFile(Callback):
    """Appends the metrics of every round to a file, one JSON object a line: a round that is there is finished.

    Args:
        path: the file.
        rows: what it holds already.

    Attributes:
        hashes: of the metrics of the first rounds, by how many they are.
    """

    def __init__(self, path: Path, rows: Sequence[dict[str, Any]] = ()) -> None:
        self._path = path
        self.hashes = list(accumulate(rows, hashed, initial=""))

    def begin(self, training: Training, folder: Path | None) -> None:
        """Open the file."""
        self._file = open(self._path, "a")  # noqa: SIM115 - closed in end()

    def row(self, training: Training, row: dict[str, Any]) -> None:
        """Append a round's metrics."""
        try:
            line = json.dumps(row, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise FedrolexError(f"the metrics of round {row['round']} cannot be written as JSON: {error}") from error
        self._file.write(line + "\n")
        self._file.flush()
        self.hashes.append(hashed(self.hashes[-1], json.loads(line)))

    def sync(self) -> None:
        """See to it that the lines so far outlast a crash of the machine."""
        os.fsync(self._file.fileno())

    def end(self, training: Training) -> None:
        """Close the file."""
        self._file.close()


class DriftByCapacity(Callback):
    """How far the clients of each capacity drift apart: ``drift`` in the metrics, see :mod:`fedrolex.rounds.drift`."""

    drift = True

    def round_begins(self, round: Round) -> None:
        """Begin to measure the round."""
        self._drift = Drift(round.server.main.axes, round.state[MODEL])

    def folded(self, round: Round, uploads: Sequence[Upload]) -> None:
        """Measure answers for the server's model; models of their own do not drift from each other."""
        job = uploads[0].job
        if job.sections[0] != MODEL:
            return
        if len(uploads) == 1 and not round.average.engine.together:
            self._drift.add(job.client, job.capacity, uploads[0].tensors, job.window)
        else:
            self._drift.add_all(job.capacity, [upload.tensors for upload in uploads], job.window)

    def round_ends(self, round: Round, new: State, row: dict[str, Any]) -> None:
        """Tell the drift, as the engine measured it or as it was measured here."""
        found, averaged = round.average.drift(), round.average.new.get(MODEL)
        if found is None:
            found = {} if averaged is None else self._drift.by_capacity(averaged)
        row["drift"] = found


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Every number among the metrics of a round but the round's own; of nested ones, each under both names."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        found |= {f"{name}/{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "round"
    }


class TensorBoard(Callback):
    """Writes every number among the metrics for TensorBoard, into the run's folder."""

    _board: Any = None

    def begin(self, training: Training, folder: Path | None) -> None:
        """Open the board; what it says of rounds that are done again is dropped."""
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            try:
                self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=training.server.round)
            except UnicodeEncodeError:
                remedy = "rename it, or set callbacks to a list without tensorboard"
                raise FedrolexError(f"TensorBoard writes into no folder whose name is not UTF-8: {remedy}") from None

    def row(self, training: Training, row: dict[str, Any]) -> None:
        """Write the metrics of a round; of nested ones, each under both names."""
        if self._board is None:
            return
        for name, number in numbers(row).items():
            self._board.add_scalar(name, number, row["round"])

    def end(self, training: Training) -> None:
        """Close the board."""
        if self._board is not None:
            self._board.close()
