"""A run on disk: recipe, environment, metrics, checkpoints, the trained model.

A run that is killed at any moment goes on from its last checkpoint to the same bits: rounds depend on the
recipe and the checkpoint alone, and metrics of rounds after the checkpoint are written again. One process at a time
may change a run.
"""

from __future__ import annotations

import json
import os
import reprlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from sys import float_info
from typing import Any

from fedrolex.core import FedrolexError, in_one_line
from fedrolex.recipes import Recipe
from fedrolex.recipes.recipe import FREE
from fedrolex.rounds import ClientStates
from fedrolex.runs import checkpoint, format1
from fedrolex.runs.advice import unmasked_rows
from fedrolex.runs.callbacks import MetricsFile, tell, tell_row
from fedrolex.runs.environment import environment
from fedrolex.runs.lock import locked
from fedrolex.runs.model import Models
from fedrolex.runs.training import Training
from fedrolex.tasks.metrics import SCORES, score, short

Progress = Callable[[dict[str, Any]], None]
ROW = {"round": int, "void": bool, "dropped": dict, "bytes_down": int, "bytes_up": int, "seconds": float}
"""What the metrics of a round say at least, beside what callbacks and evaluation add."""

JUDGED = (*SCORES, "validation_accuracy", "loss")
"""What the metrics of a round may say of the model."""

UNNAMED = ("", "..")
"""What paths that do not end in a name (``.``, ``/``, ``..``) have in its place."""


@dataclass(frozen=True)
class Run:
    """A run's folder."""

    folder: Path

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint."""
        return self.folder / "checkpoint.safetensors"

    @property
    def best(self) -> Path:
        """The checkpoint of the round with the best validation accuracy, where the task has validation examples.

        It holds the server's tensors; there is none where clients keep something between rounds.
        """
        return self.folder / "best.safetensors"

    @property
    def metrics(self) -> Path:
        """One JSON object a line and round."""
        return self.folder / "metrics.jsonl"

    @staticmethod
    def create(folder: Path, recipe: Recipe, *, own_task: bool = False) -> Run:
        """A new folder with the recipe in it; one that is there must be empty."""
        Run.refuse(folder)
        new = folder.with_name(f".{folder.name}.new-{os.getpid()}")
        try:
            new.mkdir(parents=True)
            recipe.write(new / "recipe.yaml")
            about = {**environment(), "own_task": own_task}
            (new / "environment.json").write_text(json.dumps(about, indent=1) + "\n")
            if folder.exists():
                folder.rmdir()
            new.rename(folder)
        except (OSError, FedrolexError) as error:
            shutil.rmtree(new, ignore_errors=True)
            Run.refuse(folder)  # somebody else was quicker
            why = error.strerror if isinstance(error, OSError) else error
            raise FedrolexError(f"cannot make {folder}: {why}") from error
        return Run(folder)

    @staticmethod
    def refuse(folder: Path) -> None:
        """Raise, in one line, where a folder cannot be a new run's: without a name, or with something in it already."""
        _check_path(folder)
        if folder.name in UNNAMED:
            raise FedrolexError(f"a new run cannot be {str(folder)!r}: name its folder, such as {folder / 'run'}")
        if folder.exists() and not (folder.is_dir() and next(folder.iterdir(), None) is None):
            how = f"go on with: fedrolex resume {folder} (in Python: train(..., resume=True))"
            raise FedrolexError(f"{folder} exists already: give another folder, or {how}")

    @staticmethod
    def open(folder: Path | str) -> Run:
        """An existing run."""
        folder = Path(folder)
        _check_path(folder)
        if not (folder / "recipe.yaml").is_file():
            runs = sorted(str(each.parent) for each in folder.glob("*/recipe.yaml"))
            inside = f"; those in it are {', '.join(runs[:3])}{' …' if len(runs) > 3 else ''}" if runs else ""
            raise FedrolexError(f"{folder} is not a run: it has no recipe.yaml{inside}")
        return Run(folder)

    def recipe(self) -> Recipe:
        """What the run was started with."""
        return Recipe.read(self.folder / "recipe.yaml")

    def check(self, recipe: Recipe) -> None:
        """Raise, in one line, unless the run can go on by a recipe: with more rounds, or what changes no round."""
        changed = recipe.differs_from(self.recipe())
        if changed is not None:
            rule = f"a run that has begun may change its rounds, to more of them, and {', '.join(FREE)}"
            raise FedrolexError(f"{changed} cannot be changed in {self.folder}: {rule}; start a new run")

    def change(self, recipe: Recipe) -> None:
        """Let the run go on by another recipe."""
        with locked(self.folder):
            self.check(recipe)
            self._check_measured(recipe, self.recipe(), len(self.rows()))
            new = self.folder / ".recipe.yaml.new"
            recipe.write(new)
            os.replace(new, self.folder / "recipe.yaml")

    def _check_measured(self, recipe: Recipe, before: Recipe, round: int) -> None:
        """Raise, in one line, if a recipe's last round is done, and was measured otherwise than it says."""
        if round == recipe.rounds and recipe.evaluation != before.evaluation:
            remedy = f"measure it otherwise with: fedrolex evaluate {self.folder} --set evaluation...=..."
            raise FedrolexError(f"evaluation cannot be changed in {self.folder}, which has done its rounds: {remedy}")

    def rows(self) -> list[dict[str, Any]]:
        """The metrics so far, up to the first line that was not written whole."""
        rows: list[dict[str, Any]] = []
        for line in self.metrics.read_text(errors="replace").splitlines() if self.metrics.is_file() else ():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                break
            if not _is_a_round(row):
                break
            rows.append(row)
        return rows

    def own_task(self) -> bool:
        """Whether the run trains a task given in Python, which a recipe does not describe."""
        return bool(self.environment().get("own_task"))

    def environment(self) -> dict[str, Any]:
        """Code, libraries and machine that the run was begun with; empty where it does not say."""
        path = self.folder / "environment.json"
        try:
            return dict(json.loads(path.read_text())) if path.is_file() else {}
        except (ValueError, TypeError, RecursionError):
            raise FedrolexError(f"{path} is damaged: it must be a JSON object") from None

    def evaluate(self, training: Training, *, best: bool = False) -> dict[str, Any]:
        """Measure the model of the newest checkpoint, or of the best one, again; ``round`` is the last it has seen."""
        path = self.best if best else self.checkpoint
        if not path.is_file():
            why = "the best is kept where the task has validation examples and clients keep nothing between rounds"
            raise FedrolexError(f"there is no {path}: {why if best else f'train with: fedrolex resume {self.folder}'}")
        with locked(self.folder):
            self._restore(path, self.recipe(), training, _fingerprint(training))
            return {"round": training.server.round - 1, **training.evaluate()}

    def go(self, training: Training, progress: Progress | None = None) -> dict[str, Any]:
        """Train from where the run stands to its last round; returns the summary."""
        with locked(self.folder):
            return self._go(training, progress)

    def _go(self, training: Training, progress: Progress | None) -> dict[str, Any]:
        recipe = self.recipe()
        data = _fingerprint(training)
        before, metrics = self._restore(self.checkpoint, recipe, training, data)
        self._check_measured(recipe, before, training.server.round)
        log = self._log_until(training.server.round, metrics)
        everyone = [log, *training.callbacks]
        if training.server.round < recipe.rounds and (said := unmasked_rows(training)):
            training.say(said)
        try:
            tell(everyone, "begin", training, self.folder)
            self._train(recipe, training, data, log, progress)
            summary = self._finish(recipe, training, data, log)
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
        judged = [row.get("validation_accuracy") for row in self.rows()]
        best = max((accuracy for accuracy in judged if accuracy is not None), default=-1.0)
        try:
            while server.round < recipe.rounds:
                try:
                    row = self._round(recipe, training)
                    accuracy = row.get("validation_accuracy")
                    if accuracy is not None and accuracy > best and server.clients is None:
                        best = accuracy
                        self.save(self.best, recipe, data, training, {})
                    log.row(training, row)
                    done = server.state, server.round
                    tell_row(training.callbacks, training, row)
                except FedrolexError:  # a model that is no longer finite, a callback that failed
                    server.state, server.round = done
                    if server.round and not self._ahead(training):
                        self.save(self.checkpoint, recipe, data, training, {"metrics": log.hashes[server.round]})
                    raise
                if server.round % recipe.checkpoint_every == 0 or server.round == recipe.rounds:
                    log.sync()
                    self.save(self.checkpoint, recipe, data, training, {"metrics": log.hashes[server.round]})
                if progress is not None:
                    progress(row)
        except KeyboardInterrupt:
            server.state, server.round = done
            if not self._ahead(training):
                self.save(self.checkpoint, recipe, data, training, {"metrics": log.hashes[server.round]})
            raise
        except OSError as error:
            raise FedrolexError(f"cannot write to {self.folder}: {error.strerror}") from error

    @staticmethod
    def _ahead(training: Training) -> bool:
        """Whether clients keep something of a round that was not finished: then the last checkpoint must do."""
        clients = training.server.clients
        return clients is not None and clients.newer(training.server.round)

    def _restore(self, path: Path, recipe: Recipe, training: Training, data: str) -> tuple[Recipe, str | None]:
        """Put a training, and what its clients keep, where a checkpoint stands; where there is none, at the beginning.

        Refused unless the checkpoint is whole, of this recipe and these data, and finite. Returns the recipe that it
        was trained by so far, and the hash of its metrics, which older ones lack.
        """
        round, kept, before, metrics = 0, None, recipe, None
        if path.is_file():
            tensors, about = checkpoint.read(path)
            try:
                before = Recipe.decode(json.loads(about["recipe"])) if "recipe" in about else recipe
            except (ValueError, RecursionError) as error:
                raise FedrolexError(f"the recipe in checkpoint {path} cannot be read: {error}") from error
            if (changed := recipe.differs_from(before)) is not None:
                where = f"{changed} in {self.folder}/recipe.yaml"
                raise FedrolexError(f"{where} was changed since the checkpoint: start a new run")
            if not same_data(about, data):
                raise FedrolexError(f"the data of {self.folder} has changed since its checkpoint: start a new run")
            said, kept, metrics = about.get("round", ""), about.get("clients"), about.get("metrics")
            if not (said.isascii() and said.isdigit() and len(said) < 19 and int(said) <= recipe.rounds):
                told = f"is of round {said or '?'}, and the run has {recipe.rounds}"
                raise FedrolexError(f"checkpoint {path} {told}: put back a copy, or start a new run")
            if about["format"] == "1":
                tensors = format1.in_sections(tensors, training.server.state)
            round = int(said)
            training.restore(tensors, round)
        elif rows := len(self.rows()):
            if rows > recipe.checkpoint_every:
                remedy = f"put it back, or move {self.metrics.name} away to start the run again"
                raise FedrolexError(f"there is no {path} any more, though {rows} rounds are done: {remedy}")
            training.say(f"{self.folder} has no checkpoint yet: it starts again at round 0")
        if training.method.needs.client_state:
            training.server.clients = ClientStates(self.folder / "clients")
            training.server.clients.restore(round, kept)
        return before, metrics

    def _log_until(self, round: int, hash: str | None) -> MetricsFile:
        """Drop the metrics of rounds that will be made again; those of all rounds before must be there, as they were.

        Returns what goes on with them.
        """
        rows = self.rows()[:round]
        log = MetricsFile(self.metrics, rows)
        remedy = f"put it back as it was, or start a new run with --set weights={self.checkpoint}"
        if len(rows) < round or any(row["round"] != place for place, row in enumerate(rows)):
            raise FedrolexError(f"{self.metrics} does not hold rounds 0 to {round - 1} any more: {remedy}")
        if hash not in (None, log.hashes[round]):
            raise FedrolexError(f"{self.metrics} holds other metrics than its checkpoint was written with: {remedy}")
        checkpoint.write_whole(self.metrics, "".join(json.dumps(row) + "\n" for row in rows).encode())
        return log

    @staticmethod
    def _round(recipe: Recipe, training: Training) -> dict[str, Any]:
        """One round with its evaluation; numbers that are not finite are None, for JSON."""
        row = training.run_round()
        if training.server.round % recipe.evaluate_every == 0 or training.server.round == recipe.rounds:
            found = training.evaluate()
            if taken := sorted(set(row) & set(found)):
                raise FedrolexError(f"the evaluation gives {taken[0]!r}, which a round has already: use another name")
            row.update(found)
        return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in row.items()}

    def save(self, path: Path, recipe: Recipe, data: str, training: Training, hashes: Mapping[str, str]) -> None:
        """Write a checkpoint of the rounds done so far; clients' states first, which go back to any round before.

        ``hashes`` are of other files that belong to it: ``metrics`` and, at a run's end, its models by file name.
        """
        server = training.server
        about = {"round": str(server.round), "recipe": json.dumps(recipe.encode()), "data": data, **hashes}
        if server.clients is not None:
            about["clients"] = server.clients.save(server.round)
        checkpoint.write(path, training.tensors(), about)

    def _finish(self, recipe: Recipe, training: Training, data: str, log: MetricsFile) -> dict[str, Any]:
        rows = self.rows()
        if rows and all(row["void"] for row in rows):
            reasons = [why for row in rows for why in row["dropped"].values()]
            few = f"fewer than {recipe.quorum} clients were there in each"
            raise FedrolexError(f"no round counted: {reasons[0] if reasons else few}")
        last = rows[-1] if rows and "loss" in rows[-1] else training.evaluate()
        judged = score(last)
        server, method = training.server, training.method
        members = sum(len(server.fleet.members(round)) for round in range(recipe.rounds))
        own = ["loss", "mean_absolute_error", "r2", "submodels", "submodel_statistics"]
        own += [short(name) for name in recipe.evaluation.metrics]
        summary = {
            "method": method.name,
            "rounds": recipe.rounds,
            "seed": recipe.seed,
            "task": server.task.name,
            **{key: last[key] for key in last if key.endswith("accuracy") or "accuracy_" in key or key in own},
            "statistics": last.get("statistics"),
            f"best_{judged}": max((r[judged] for r in (*rows, last) if r.get(judged) is not None), default=None),
            **_facts(training),
            "bytes": sum(row["bytes_down"] + row["bytes_up"] for row in rows),
            "macs": _total(row.get("macs") for row in rows),
            "bytes_of_full_model": 2 * method.full_size(server) * members,
            "dropped": sum(len(row["dropped"]) for row in rows),
            "void_rounds": sum(row["void"] for row in rows),
            "seconds": sum(row["seconds"] for row in rows),
            "engine": training.ran,
            "capacities": "redrawn" if recipe.fleet.redrawn else "fixed",
            "run": str(self.folder),
        }
        written = Models.of(training).write(self.folder)
        self.save(self.checkpoint, recipe, data, training, {**written, "metrics": log.hashes[server.round]})
        checkpoint.write_whole(self.folder / "summary.json", f"{json.dumps(summary, indent=1)}\n".encode())
        return summary


def _check_path(folder: Path) -> None:
    """Raise, in one line, where nothing can have this path: it is too long, or has a character that no path has."""
    what = f"a run's folder cannot be {reprlib.repr(str(folder))}"
    with in_one_line(what), suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(folder)


def same_data(about: Mapping[str, str], data: str) -> bool:
    """Whether a checkpoint is of the data with a fingerprint; an older one may know only the part before the +."""
    known = about.get("data", data)
    return data == known or data.startswith(f"{known}+")


def _is_a_round(row: Any) -> bool:
    """Whether metrics say at least what those of a round say, and say it in numbers that are finite."""
    if not (isinstance(row, dict) and all(isinstance(row.get(key), kind) for key, kind in ROW.items())):
        return False
    known = ("bytes_down", "bytes_up", "seconds", *(key for key in JUDGED if row.get(key) is not None))
    return all(isinstance(row[key], int | float) and abs(row[key]) <= float_info.max for key in known)


def _total(counts: Iterable[Any]) -> int | None:
    every = list(counts)
    return sum(every) if all(isinstance(count, int) for count in every) else None


def _fingerprint(training: Training) -> str:
    """What tells the data of a task from other data."""
    task = training.server.task
    with in_one_line(f"fingerprint() of task {task.name} failed"):
        found: object = task.fingerprint()
    if not isinstance(found, str):
        raise FedrolexError(f"fingerprint() of task {task.name} gives a {type(found).__name__}: give text")
    return found


def _facts(training: Training) -> dict[str, Any]:
    with in_one_line(f"facts() of task {training.server.task.name} failed"):
        found = {**training.server.task.facts(), **training.method.facts(training.server)}
        json.dumps(found)  # raises what a summary cannot hold
        return found
