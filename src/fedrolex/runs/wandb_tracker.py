"""Weights & Biases, told of a run: its recipe as configuration, every number among its metrics by round.

Where to is its own to say: ``WANDB_PROJECT``, ``WANDB_ENTITY``, and ``WANDB_MODE=offline`` to send nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrolex.core.importing import extra
from fedrolex.runs.callbacks import Callback, numbers

if TYPE_CHECKING:
    from fedrolex.runs.training import Training

KEPT = "wandb.txt"
"""The file in a run's folder with the run's name over there, so that a resumed run goes on under it."""


class WandB(Callback):
    """Tells Weights & Biases of a run."""

    _run: Any = None

    def __init__(self) -> None:
        self._wandb: Any = extra("wandb", "callback wandb")

    def begin(self, training: Training, folder: Path | None) -> None:
        """Begin a run there, or go on with the one that the folder names."""
        if folder is None:
            return
        from fedrolex.runs.run import Run

        recipe, kept = Run(folder).recipe(), folder / KEPT
        self._rounds = recipe.rounds
        known = kept.read_text().strip() if kept.is_file() else None
        self._run = self._wandb.init(
            id=known, resume="allow", name=folder.name, dir=str(folder), config=recipe.encode(), reinit="create_new"
        )
        kept.write_text(f"{self._run.id}\n")

    def row(self, training: Training, row: dict[str, Any]) -> None:
        """Tell the metrics of a round; those of a round that it knows already are left as they are."""
        if self._run is not None:
            self._run.log(numbers(row), step=row["round"])

    def end(self, training: Training) -> None:
        """The run is finished, or stopped."""
        if self._run is not None:
            self._run.finish(exit_code=0 if training.server.round >= self._rounds else 1)
