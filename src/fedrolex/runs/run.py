"""A run on disk: recipe, environment, metrics, checkpoints, the trained model.

A run that is killed at any moment goes on from its last checkpoint to the same bits: rounds depend on the
recipe and the checkpoint alone, and metrics of rounds after the checkpoint are written again.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedrolex.engines import Loop
from fedrolex.errors import FedrolexError
from fedrolex.runs import checkpoint
from fedrolex.runs.recipe import Recipe
from fedrolex.runs.training import Training, full_bytes, pick_device
from fedrolex.slicing.trace import trace
from fedrolex.streams import words
from fedrolex.tasks import Examples, Task

Progress = Callable[[dict[str, Any]], None]


def prepare(recipe: Recipe, task: Task | None = None) -> Training:
    """Everything a recipe describes, ready for its first round.

    Args:
        recipe: the run.
        task: data and model of one's own instead of the recipe's.
    """
    device = pick_device(recipe.device)
    fleet = recipe.fleet.build(recipe.seed)
    task = recipe.task.build(fleet.clients, recipe.seed) if task is None else task
    if len(task.parts) != fleet.clients:
        raise FedrolexError(f"the task has data for {len(task.parts)} clients, the fleet has {fleet.clients}")
    task = _on(task, device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(words(1, recipe.seed, "weights")[0] >> 1))
        model = task.build(recipe.fleet.server)
    axes = trace(model, task.train.x[:2].cpu())
    model.to(device)
    if recipe.weights is not None:
        axes.load(model, checkpoint.read_weights(Path(recipe.weights)))
    method = recipe.method.build(recipe.client.build(), fleet.cohort, recipe.fleet.server, recipe.seed)
    return Training(
        task, fleet, method, Loop(model), model, axes, seed=recipe.seed, quorum=recipe.quorum, deadline=recipe.deadline
    )


def _on(task: Task, device: torch.device) -> Task:
    from dataclasses import replace

    def moved(examples: Examples) -> Examples:
        return examples.to(device)

    return replace(
        task,
        train=moved(task.train),
        test=moved(task.test),
        parts=[part.to(device) for part in task.parts],
        test_parts=[part.to(device) for part in task.test_parts],
    )


@dataclass(frozen=True)
class Run:
    """A run's folder."""

    folder: Path

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint."""
        return self.folder / "checkpoint.safetensors"

    @property
    def metrics(self) -> Path:
        """One JSON object a line and round."""
        return self.folder / "metrics.jsonl"

    @staticmethod
    def create(folder: Path, recipe: Recipe) -> Run:
        """A new folder with the recipe in it; an existing one is refused."""
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise FedrolexError(f"{folder} exists already: give another --out, or go on with: fedrolex resume {folder}") from None
        except OSError as error:
            raise FedrolexError(f"cannot make {folder}: {error.strerror}") from error
        recipe.write(folder / "recipe.yaml")
        environment = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
        (folder / "environment.json").write_text(json.dumps(environment) + "\n")
        return Run(folder)

    @staticmethod
    def open(folder: Path) -> Run:
        """An existing run."""
        if not (folder / "recipe.yaml").is_file():
            raise FedrolexError(f"{folder} is not a run: it has no recipe.yaml")
        return Run(folder)

    def recipe(self) -> Recipe:
        """What the run was started with."""
        return Recipe.read(self.folder / "recipe.yaml")

    def rows(self) -> list[dict[str, Any]]:
        """The metrics so far, up to the first line that was not written whole."""
        rows = []
        if self.metrics.is_file():
            for line in self.metrics.read_text().splitlines():
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError:
                    break
        return rows

    def go(self, training: Training, progress: Progress | None = None) -> dict[str, Any]:
        """Train from where the run stands to its last round; returns the summary."""
        recipe = self.recipe()
        if self.checkpoint.is_file():
            tensors, about = checkpoint.read(self.checkpoint)
            training.restore(tensors, int(about["round"]))
        kept = [row for row in self.rows() if row["round"] < training.round]
        _replace(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))
        board = _board(self.folder, training.round)
        try:
            with open(self.metrics, "a") as log:
                while training.round < recipe.rounds:
                    row = self._round(recipe, training)
                    log.write(json.dumps(row) + "\n")
                    log.flush()
                    _write_board(board, row)
                    if training.round % recipe.checkpoint_every == 0 or training.round == recipe.rounds:
                        os.fsync(log.fileno())
                        self.save(training)
                    if progress is not None:
                        progress(row)
        except KeyboardInterrupt:
            self.save(training)
            raise
        finally:
            board.close()
        return self._finish(recipe, training)

    @staticmethod
    def _round(recipe: Recipe, training: Training) -> dict[str, Any]:
        row = training.run_round()
        if training.round % recipe.evaluate_every == 0 or training.round == recipe.rounds:
            row.update(training.evaluate())
        return row

    def save(self, training: Training) -> None:
        """Write a checkpoint of the rounds done so far."""
        checkpoint.write(self.checkpoint, training.state, {"round": str(training.round)})

    def _finish(self, recipe: Recipe, training: Training) -> dict[str, Any]:
        rows = self.rows()
        last = rows[-1] if rows else training.evaluate()
        sent = sum(row["bytes_down"] + row["bytes_up"] for row in rows)
        whole = sum(2 * full_bytes(training.axes, len(training.fleet.members(r))) for r in range(recipe.rounds))
        summary = {
            "method": training.method.name,
            "rounds": recipe.rounds,
            "seed": recipe.seed,
            "global_accuracy": last["global_accuracy"],
            "local_accuracy": last["local_accuracy"],
            "bytes": sent,
            "bytes_of_full_model": whole,
            "dropped": sum(len(row["dropped"]) for row in rows),
            "void_rounds": sum(row["void"] for row in rows),
            "seconds": sum(row["seconds"] for row in rows),
            "run": str(self.folder),
        }
        _replace(self.folder / "summary.json", json.dumps(summary, indent=1) + "\n")
        return summary


def _replace(path: Path, text: str) -> None:
    """Write a small file all or nothing."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(text)
        os.replace(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise FedrolexError(f"cannot write {path}: {error.strerror}") from error


def _board(folder: Path, round: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=round)


def _write_board(board: Any, row: dict[str, Any]) -> None:
    for name in ("train_loss", "global_accuracy", "local_accuracy", "clients"):
        if row.get(name) is not None:
            board.add_scalar(name, row[name], row["round"])
    for capacity, drift in row.get("drift", {}).items():
        board.add_scalar(f"drift/{capacity}", drift, row["round"])
