"""A run on disk: recipe, environment, metrics, checkpoints, the trained model.

A run that is killed at any moment goes on from its last checkpoint to the same bits: rounds depend on the
recipe and the checkpoint alone, and metrics of rounds after the checkpoint are written again.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from fedrolex.core.errors import FedrolexError
from fedrolex.engines import Auto, Choice, Graph, Loop
from fedrolex.recipes.recipe import Recipe
from fedrolex.rounds.client_states import ClientStates
from fedrolex.runs import checkpoint
from fedrolex.runs.training import Training

Progress = Callable[[dict[str, Any]], None]


def _ahead(training: Training) -> bool:
    """Whether clients' states are of a round that was not finished: the last checkpoint stands, the rest is redone."""
    return training.states is not None and training.states.newer(training.round)


def engine_name(recipe: Recipe, training: Training) -> str:
    """What ran: the recipe's word, or what it was chosen to be; bits depend on it."""
    return ", ".join(dict.fromkeys(_engine_name(recipe, each) for each in training.kinds()))


def _engine_name(recipe: Recipe, training: Training) -> str:
    engine = training.engine
    if isinstance(engine, Auto) and engine.choice is not None:
        return str(engine.choice)
    if training.only_loop is not None:
        return "loop"
    return "graph" if isinstance(engine, Graph) else recipe.engine


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
        taken = f"{folder} exists already: give another --out, or go on with: fedrolex resume {folder}"
        if folder.exists():
            raise FedrolexError(taken)
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
        if self.metrics.is_file():
            for line in self.metrics.read_text(errors="replace").splitlines():
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
        data = training.task.fingerprint()
        if training.method.needs.client_state:
            training.keep_states(ClientStates(self.folder / "clients"))
        self._restore(recipe, training, data)
        self._choose(training)
        board = _board(self.folder, training.round)
        done = training.state, training.round
        try:
            with open(self.metrics, "a") as log:
                while training.round < recipe.rounds:
                    try:
                        row = self._round(recipe, training)
                    except FedrolexError:  # a model that is no longer finite: what came before is good
                        training.state, training.round = done
                        if training.round and not _ahead(training):
                            self.save(recipe, data, training)
                        raise
                    log.write(json.dumps(row, allow_nan=False) + "\n")
                    log.flush()
                    done = training.state, training.round
                    _write_board(board, row)
                    if training.round % recipe.checkpoint_every == 0 or training.round == recipe.rounds:
                        os.fsync(log.fileno())
                        self.save(recipe, data, training)
                    if progress is not None:
                        progress(row)
        except KeyboardInterrupt:
            training.state, training.round = done
            if not _ahead(training):
                self.save(recipe, data, training)
            raise
        except OSError as error:
            raise FedrolexError(f"cannot write to {self.folder}: {error.strerror}") from error
        finally:
            board.close()
        return self._finish(recipe, training)

    def _restore(self, recipe: Recipe, training: Training, data: str) -> None:
        """Put a training where its checkpoint stands, and the metrics with it."""
        if self.checkpoint.is_file():
            tensors, about = checkpoint.read(self.checkpoint)
            changed = recipe.differs_from(Recipe.decode(json.loads(about["recipe"]))) if "recipe" in about else None
            if changed is not None:
                raise FedrolexError(
                    f"{changed} in {self.folder}/recipe.yaml was changed since the checkpoint: start a new run"
                )
            if about.get("data", data) != data:
                raise FedrolexError(f"the data of {self.folder} has changed since its checkpoint: start a new run")
            if not about.get("round", "").isdigit():
                raise FedrolexError(f"checkpoint {self.checkpoint} does not say its round: start a new run")
            training.restore(tensors, int(about["round"]))
        if training.states is not None:
            training.states.restore(training.round)
        rows = self.rows()[: training.round]
        if [row["round"] for row in rows] != list(range(training.round)):
            raise FedrolexError(
                f"{self.metrics} does not hold rounds 0 to {training.round - 1} any more: "
                "remove the checkpoint to start the run again, or put the file back"
            )
        _replace(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))

    def _choose(self, training: Training) -> None:
        """Where the engine is chosen by measurement: now, once and for all; a resumed run keeps what it had."""
        first = training.engine
        if training.only_loop is not None and not isinstance(first, Auto | Loop):
            print(f"engine: loop ({training.only_loop})", file=sys.stderr)
        for each in training.kinds():
            of = f"-{each.sizes[0]}".replace("/", "-") if each.whole else ""
            self._choose_for(each, self.folder / f"engine{of}.json")

    @staticmethod
    def _choose_for(training: Training, path: Path) -> None:
        engine = training.engine
        if not isinstance(engine, Auto):
            return
        if path.is_file():
            try:
                engine.use(Choice.decode(json.loads(path.read_text())))
            except ValueError:
                raise FedrolexError(f"{path} is damaged: it does not say which engine this run chose") from None
        else:
            if training.only_loop is not None:
                engine.use(Choice("loop", why=training.only_loop))
            choice = engine.choice or engine.choose(training._plan())
            _replace(path, json.dumps(choice.encode(), indent=1) + "\n")
            print(f"engine: {choice} ({choice.why})", file=sys.stderr)

    @staticmethod
    def _round(recipe: Recipe, training: Training) -> dict[str, Any]:
        row = training.run_round()
        if training.round % recipe.evaluate_every == 0 or training.round == recipe.rounds:
            row.update(training.evaluate())
        return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in row.items()}

    def save(self, recipe: Recipe, data: str, training: Training) -> None:
        """Write a checkpoint of the rounds done so far; clients' states first, which go back to any round before."""
        if training.states is not None:
            training.states.save(training.round)
        about = {"round": str(training.round), "recipe": json.dumps(recipe.encode()), "data": data}
        checkpoint.write(self.checkpoint, training.state, about)

    def _finish(self, recipe: Recipe, training: Training) -> dict[str, Any]:
        rows = self.rows()
        if rows and all(row["void"] for row in rows):
            reasons = [why for row in rows for why in row["dropped"].values()]
            few = f"fewer than {recipe.quorum} clients were there in each"
            raise FedrolexError(f"no round counted: {reasons[0] if reasons else few}")
        last = rows[-1] if rows and "global_accuracy" in rows[-1] else training.evaluate()
        sent = sum(row["bytes_down"] + row["bytes_up"] for row in rows)
        members = sum(len(training.fleet.members(r)) for r in range(recipe.rounds))
        whole = 2 * training.whole_bytes() * members
        summary = {
            "method": training.method.name,
            "rounds": recipe.rounds,
            "seed": recipe.seed,
            "task": training.task.name,
            **{key: last[key] for key in last if key.endswith("accuracy") or "accuracy_" in key},
            "statistics": last.get("statistics"),
            **({"submodels": last["submodels"]} if "submodels" in last else {}),
            "best_global_accuracy": max(row["global_accuracy"] for row in (*rows, last) if "global_accuracy" in row),
            **training.task.facts(),
            "bytes": sent,
            "bytes_of_full_model": whole,
            "dropped": sum(len(row["dropped"]) for row in rows),
            "void_rounds": sum(row["void"] for row in rows),
            "seconds": sum(row["seconds"] for row in rows),
            "engine": engine_name(recipe, training),
            "capacities": "redrawn" if recipe.fleet.redrawn else "fixed",
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
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise FedrolexError(f"cannot write {path}: {error.strerror}") from error


def environment() -> dict[str, Any]:
    """What a number needs beside it: code, libraries, machine."""
    return {
        "fedrolex": fedrolex_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def fedrolex_version() -> str:
    """The installed version."""
    try:
        return version("fedrolex")
    except PackageNotFoundError:
        return "0+unknown"


def _board(folder: Path, round: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=round)


def _write_board(board: Any, row: dict[str, Any]) -> None:
    for name in ("train_loss", "global_accuracy", "local_accuracy", "local_accuracy_masked", "clients"):
        if row.get(name) is not None:
            board.add_scalar(name, row[name], row["round"])
    for capacity, drift in row.get("drift", {}).items():
        board.add_scalar(f"drift/{capacity}", drift, row["round"])
