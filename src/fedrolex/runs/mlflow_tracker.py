"""MLflow, told of a run: its recipe as parameters, every number among its metrics by round.

Where to is MLflow's own to say: ``MLFLOW_TRACKING_URI`` and ``MLFLOW_EXPERIMENT_NAME``.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrolex.core.importing import extra
from fedrolex.runs.callbacks import Callback, numbers

if TYPE_CHECKING:
    from fedrolex.runs.training import Training

KEPT = "mlflow.txt"
"""The file in a run's folder with MLflow's name of the run, so that a resumed run goes on there."""

AT_ONCE = 100  # parameters that MLflow takes in one call


class MLflow(Callback):
    """Tells MLflow of a run."""

    _run: str | None = None

    def __init__(self) -> None:
        self._mlflow: Any = extra("mlflow", "callback mlflow")

    def begin(self, training: Training, folder: Path | None) -> None:
        """Begin a run there, or go on with the one that the folder names."""
        if folder is None:
            return
        from fedrolex.runs.run import Run
        from fedrolex.runs.standing import flat

        recipe = Run(folder).recipe()
        self._rounds, self._client = recipe.rounds, self._mlflow.MlflowClient()
        kept = folder / KEPT
        if kept.is_file():
            self._run = kept.read_text().strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedrolex")
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id
        param = self._mlflow.entities.Param
        params = [param(key, json.dumps(value)) for key, value in flat(recipe.encode())]
        for at in range(0, len(params), AT_ONCE):
            self._client.log_batch(self._run, params=params[at : at + AT_ONCE])
        kept.write_text(f"{self._run}\n")

    def row(self, training: Training, row: dict[str, Any]) -> None:
        """Tell the metrics of a round."""
        if self._run is not None:
            now, metric = int(time.time() * 1000), self._mlflow.entities.Metric
            told = [metric(name, float(value), now, row["round"]) for name, value in numbers(row).items()]
            self._client.log_batch(self._run, metrics=told)

    def end(self, training: Training) -> None:
        """The run is finished, or stopped."""
        if self._run is not None:
            done = training.server.round >= self._rounds
            self._client.set_terminated(self._run, "FINISHED" if done else "KILLED")
