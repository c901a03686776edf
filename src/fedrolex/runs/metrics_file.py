"""The metrics of a run on disk: one JSON object a line and round."""

import json
import os
from pathlib import Path
from typing import Any, TextIO

from fedrolex.core import FedrolexError
from fedrolex.runs.callbacks import Callback
from fedrolex.runs.training import Training

NAME = "metrics.jsonl"


class MetricsFile(Callback):
    """Appends the metrics of every round to the run's file: a round that is there is finished."""

    _file: TextIO | None = None

    def begin(self, training: Training, folder: Path | None) -> None:
        """Open the file."""
        self._file = None if folder is None else open(folder / NAME, "a")  # noqa: SIM115 - closed in end()

    def row(self, training: Training, row: dict[str, Any]) -> None:
        """Append a round's metrics."""
        try:
            line = json.dumps(row, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise FedrolexError(f"the metrics of round {row['round']} cannot be written as JSON: {error}") from error
        if self._file is not None:
            self._file.write(line + "\n")
            self._file.flush()

    def sync(self) -> None:
        """See to it that the lines so far outlast a crash of the machine."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def end(self, training: Training) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The metrics in a file, up to the first line that was not written whole."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if not (isinstance(row, dict) and isinstance(row.get("round"), int)):
            break
        rows.append(row)
    return rows
