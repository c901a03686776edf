"""A run on disk: recipe, environment, metrics, checkpoints, the trained model.

A run that is killed at any moment goes on from its last checkpoint to the same bits: rounds depend on the
recipe and the checkpoint alone, and metrics of rounds after the checkpoint are written again.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from fedrolex.core import FedrolexError
from fedrolex.core.version import VERSION
from fedrolex.methods.method import size
from fedrolex.recipes import Recipe
from fedrolex.rounds import ClientStates
from fedrolex.runs import checkpoint, format1
from fedrolex.runs.callbacks import MetricsFile, tell
from fedrolex.runs.training import Training
from fedrolex.tasks.metrics import short

Progress = Callable[[dict[str, Any]], None]


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
    def create(folder: Path, recipe: Recipe, *, own_task: bool = False) -> Run:
        """A new folder with the recipe in it; an existing one is refused."""
        Run.refuse(folder)
        new = folder.with_name(f".{folder.name}.new-{os.getpid()}")
        try:
            new.mkdir(parents=True)
            recipe.write(new / "recipe.yaml")
            about = {**environment(), "own_task": own_task}
            (new / "environment.json").write_text(json.dumps(about, indent=1) + "\n")
            new.rename(folder)
        except OSError as error:
            shutil.rmtree(new, ignore_errors=True)
            raise FedrolexError(f"cannot make {folder}: {error.strerror}") from error
        return Run(folder)

    @staticmethod
    def refuse(folder: Path) -> None:
        """Raise, in one line, where a folder cannot be a new run's because it is there already."""
        if folder.exists():
            raise FedrolexError(f"{folder} exists already: give another --out, or go on with: fedrolex resume {folder}")

    @staticmethod
    def open(folder: Path) -> Run:
        """An existing run."""
        if not (folder / "recipe.yaml").is_file():
            runs = sorted(str(each.parent) for each in folder.glob("*/recipe.yaml"))
            inside = f"; those in it are {', '.join(runs[:3])}{' …' if len(runs) > 3 else ''}" if runs else ""
            raise FedrolexError(f"{folder} is not a run: it has no recipe.yaml{inside}")
        return Run(folder)

    def recipe(self) -> Recipe:
        """What the run was started with."""
        return Recipe.read(self.folder / "recipe.yaml")

    def rows(self) -> list[dict[str, Any]]:
        """The metrics so far, up to the first line that was not written whole."""
        rows: list[dict[str, Any]] = []
        for line in self.metrics.read_text(errors="replace").splitlines() if self.metrics.is_file() else ():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                break
            if not (isinstance(row, dict) and isinstance(row.get("round"), int)):
                break
            rows.append(row)
        return rows

    def own_task(self) -> bool:
        """Whether the run trains a task given in Python, which a recipe does not describe."""
        path = self.folder / "environment.json"
        try:
            return path.is_file() and bool(json.loads(path.read_text()).get("own_task"))
        except (ValueError, AttributeError):
            raise FedrolexError(f"{path} is damaged: it must be a JSON object") from None

    def go(self, training: Training, progress: Progress | None = None) -> dict[str, Any]:
        """Train from where the run stands to its last round; returns the summary."""
        recipe = self.recipe()
        data = training.server.task.fingerprint()
        if training.method.needs.client_state:
            training.server.clients = ClientStates(self.folder / "clients")
        self._restore(recipe, training, data)
        log = MetricsFile(self.metrics)
        everyone = [log, *training.callbacks]
        try:
            tell(everyone, "begin", training, self.folder)
            self._train(recipe, training, data, log, progress)
            summary = self._finish(recipe, training)
        except BaseException:
            for callback in everyone:
                with suppress(Exception):  # what went wrong before is what the user must hear of
                    callback.end(training)
            raise
        tell(everyone, "end", training)
        return summary

    def _train(
        self, recipe: Recipe, training: Training, data: str, log: MetricsFile, progress: Progress | None
    ) -> None:
        server = training.server
        done = server.state, server.round
        try:
            while server.round < recipe.rounds:
                try:
                    row = self._round(recipe, training)
                    log.row(training, row)
                    done = server.state, server.round
                    tell(training.callbacks, "row", training, row)
                except FedrolexError:  # a model that is no longer finite, a callback that failed
                    server.state, server.round = done
                    if server.round and not self._ahead(training):
                        self.save(recipe, data, training)
                    raise
                if server.round % recipe.checkpoint_every == 0 or server.round == recipe.rounds:
                    log.sync()
                    self.save(recipe, data, training)
                if progress is not None:
                    progress(row)
        except KeyboardInterrupt:
            server.state, server.round = done
            if not self._ahead(training):
                self.save(recipe, data, training)
            raise
        except OSError as error:
            raise FedrolexError(f"cannot write to {self.folder}: {error.strerror}") from error

    @staticmethod
    def _ahead(training: Training) -> bool:
        """Whether clients keep something of a round that was not finished: then the last checkpoint must do."""
        clients = training.server.clients
        return clients is not None and clients.newer(training.server.round)

    def _restore(self, recipe: Recipe, training: Training, data: str) -> None:
        """Put a training where its checkpoint stands, and the metrics with it."""
        server = training.server
        if self.checkpoint.is_file():
            tensors, about = checkpoint.read(self.checkpoint)
            changed = recipe.differs_from(Recipe.decode(json.loads(about["recipe"]))) if "recipe" in about else None
            if changed is not None:
                where = f"{changed} in {self.folder}/recipe.yaml"
                raise FedrolexError(f"{where} was changed since the checkpoint: start a new run")
            if about.get("data", data) != data:
                raise FedrolexError(f"the data of {self.folder} has changed since its checkpoint: start a new run")
            if not about.get("round", "").isdigit():
                raise FedrolexError(f"checkpoint {self.checkpoint} does not say its round: start a new run")
            if about["format"] == "1":
                tensors = format1.in_sections(tensors, server.state)
            training.restore(tensors, int(about["round"]))
        if server.clients is not None:
            server.clients.restore(server.round)
        rows = self.rows()[: server.round]
        if [row["round"] for row in rows] != list(range(server.round)):
            remedy = "remove the checkpoint to start the run again, or put the file back"
            raise FedrolexError(f"{self.metrics} does not hold rounds 0 to {server.round - 1} any more: {remedy}")
        checkpoint.write_whole(self.metrics, "".join(json.dumps(row) + "\n" for row in rows).encode())

    @staticmethod
    def _round(recipe: Recipe, training: Training) -> dict[str, Any]:
        """One round with its evaluation; numbers that are not finite are None, for JSON."""
        row = training.run_round()
        if training.server.round % recipe.evaluate_every == 0 or training.server.round == recipe.rounds:
            row.update(training.evaluate())
        return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in row.items()}

    def save(self, recipe: Recipe, data: str, training: Training) -> None:
        """Write a checkpoint of the rounds done so far; clients' states first, which go back to any round before."""
        server = training.server
        if server.clients is not None:
            server.clients.save(server.round)
        about = {"round": str(server.round), "recipe": json.dumps(recipe.encode()), "data": data}
        checkpoint.write(self.checkpoint, training.tensors(), about)

    def _finish(self, recipe: Recipe, training: Training) -> dict[str, Any]:
        rows = self.rows()
        if rows and all(row["void"] for row in rows):
            reasons = [why for row in rows for why in row["dropped"].values()]
            few = f"fewer than {recipe.quorum} clients were there in each"
            raise FedrolexError(f"no round counted: {reasons[0] if reasons else few}")
        last = rows[-1] if rows and "global_accuracy" in rows[-1] else training.evaluate()
        sent = sum(row["bytes_down"] + row["bytes_up"] for row in rows)
        server, method = training.server, training.method
        members = sum(len(server.fleet.members(round)) for round in range(recipe.rounds))
        own = ["submodels", *(short(name) for name in recipe.evaluation.metrics)]
        summary = {
            "method": method.name,
            "rounds": recipe.rounds,
            "seed": recipe.seed,
            "task": server.task.name,
            **{key: last[key] for key in last if key.endswith("accuracy") or "accuracy_" in key or key in own},
            "statistics": last.get("statistics"),
            "best_global_accuracy": max(row["global_accuracy"] for row in (*rows, last) if "global_accuracy" in row),
            **server.task.facts(),
            "bytes": sent,
            "bytes_of_full_model": 2 * size(server.state[method.leading(server)]) * members,
            "dropped": sum(len(row["dropped"]) for row in rows),
            "void_rounds": sum(row["void"] for row in rows),
            "seconds": sum(row["seconds"] for row in rows),
            "engine": training.ran,
            "capacities": "redrawn" if recipe.fleet.redrawn else "fixed",
            "run": str(self.folder),
        }
        checkpoint.write_whole(self.folder / "summary.json", f"{json.dumps(summary, indent=1)}\n".encode())
        return summary


def environment() -> dict[str, Any]:
    """What a number needs beside it: code, libraries, machine."""
    return {
        "fedrolex": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }
