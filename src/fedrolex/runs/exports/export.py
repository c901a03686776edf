"""``export(run, capacity)``: the model that a device of a capacity runs, measured and written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedrolex.core import FedrolexError
from fedrolex.core.threads import spread_over, threads_for
from fedrolex.models import WithOffsets, evaluating
from fedrolex.recipes import Recipe
from fedrolex.runs.environment import environment
from fedrolex.runs.exports.candidates import Candidate, calibrated, candidates, score_of
from fedrolex.runs.exports.distil import distilled
from fedrolex.runs.exports.folder import NetworkSource, named_tensors, read_export, rebuild, refuse, write_export
from fedrolex.runs.exports.formats import BATCH, FORMATS, INPUT, OUTPUT, can_write, check_formats, written_in
from fedrolex.runs.load import DeviceName, Restored, restored
from fedrolex.runs.model import Models
from fedrolex.slicing import Capacity, exact
from fedrolex.tasks import Classification, Task

HELD = 2000  # training examples to choose by, where no others were put aside


@dataclass(frozen=True)
class Exported:
    """A sub-model for a device.

    Attributes:
        folder: where it was written.
        model: in evaluation mode, with statistics.
        report: how good it is, and every window that was tried; plain data.
    """

    folder: Path
    model: nn.Module
    report: dict[str, Any]


@dataclass(frozen=True)
class Options:
    """How a sub-model is chosen and written.

    Attributes:
        windows: most windows to try.
        distil: whether it learns from the whole model.
        public: stored inputs to distil on; None is the task's public examples.
        steps: of the distillation.
        one_model: a part of the server's main network instead of what the method makes of a capacity, e.g. columns.
        formats: beside safetensors; None is all that can be written.
        offsets: the model has offsets of its classes, whether the run was measured so or not.
    """

    windows: int = 16
    distil: bool = False
    public: Tensor | None = None
    steps: int = 500
    one_model: bool = False
    formats: Sequence[str] | None = None
    offsets: bool = False

    def __post_init__(self) -> None:
        for what, number in (("windows", self.windows), ("steps", self.steps)):
            if type(number) is not int or number < 1:
                raise FedrolexError(f"{what} is {number!r}: give a whole number of at least 1")
        check_formats(self.formats or ())
        if self.one_model and not self.distil:
            raise FedrolexError("one model in place of several knows nothing until it is taught: distil, too")

    @property
    def wanted(self) -> list[str]:
        """The formats to write."""
        return [each for each in FORMATS if can_write(each)] if self.formats is None else list(self.formats)


def unsaid(said: str) -> None:
    """For work that nobody watches."""


@dataclass(frozen=True)
class Exporter:
    """Exports models of one run.

    Attributes:
        found: the run.
        options: for all of them.
        task: given in Python, where the run's was.
        say: told what is being done, in one line.
    """

    found: Restored
    options: Options
    task: Task | None = None
    say: Callable[[str], None] = unsaid

    @classmethod
    def of(
        cls,
        run: Path | str,
        options: Options,
        *,
        task: Task | None = None,
        device: DeviceName = "cpu",
        data: str | None = None,
        say: Callable[[str], None] = unsaid,
    ) -> Exporter:
        """For a run's folder; for the arguments see :func:`~fedrolex.runs.load.restored`."""
        say(f"reading {run}")
        found = restored(run, task, device, data)
        found.check_data()
        training = found.training
        if options.offsets:
            training.measure = replace(training.measure, offsets=True)
            training.measure.check(training.server.task)
        return cls(found, options, task, say)

    @property
    def capacities(self) -> list[Fraction]:
        """Of the run's clients, those that there is a model for."""
        method, server = self.found.training.method, self.found.training.server
        every = list(method.sizes(server))
        return every if self.options.one_model else [each for each in every if method.submodel(server, each)]

    @cached_property
    def whole(self) -> nn.Module:
        """The model that the run is judged by, as it is measured."""
        return Models.of(self.found.training)()

    @cached_property
    def whole_score(self) -> float:
        """Of that model on the test examples: all capacities are shown beside it."""
        return score_of(self.found.training.server.task, self.whole, self.found.training.measure)

    @cached_property
    def held(self) -> Task:
        """The task with examples to choose by in place of its test examples."""
        return self.found.training.server.task.held_out(HELD)

    def folder_for(self, capacity: Fraction, out: Path | None = None, *, alone: bool = False) -> Path:
        """Where a capacity's model is written: in ``out``, which is for it ``alone`` or has a folder for each."""
        if out is not None and alone:
            return out
        return (out or self.found.run.folder / "exports") / str(capacity).replace("/", "-")

    def __call__(self, capacity: Capacity, out: Path | str | None = None) -> Exported:
        """Choose, calibrate, teach where asked, measure on the test examples, and write."""
        level = exact(capacity)
        folder = self.folder_for(level) if out is None else Path(out)
        refuse(folder)
        server = self.found.training.server
        with spread_over(threads_for(server.parameters)):
            chosen, tried = self._choose(level)
            model, test = self._measured(chosen)
        report = {
            "capacity": str(level),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "round": chosen.round,
            "windows": tried,
            "chosen_on": self._chosen_on(),
            "test": test,
        }
        self._write(folder, model, chosen, report)
        return Exported(folder, model, report)

    def _choose(self, level: Fraction) -> tuple[Candidate, list[dict[str, Any]]]:
        """The best candidate by its calibrated score on held-out examples, and the scores of all."""
        training, options = self.found.training, self.options
        best: tuple[float, Candidate] | None = None
        tried: list[dict[str, Any]] = []
        for one in candidates(training.method, training.judged, level, options.windows, plain=options.one_model):
            self.say(f"capacity {level}: window {len(tried) + 1}, of at most {options.windows}")
            before = score_of(self.held, one.model, training.measure)
            after = score_of(self.held, calibrated(training.server.task, one.model, training.measure), training.measure)
            tried.append({"round": one.round, "before": before, "after": after})
            if best is None or after > best[0]:
                best = after, one
        assert best is not None
        return best[1], tried

    def _measured(self, chosen: Candidate) -> tuple[nn.Module, dict[str, Any]]:
        """The model to write, and its scores on the test examples on the way there."""
        training = self.found.training
        task, measure = training.server.task, training.measure
        model = calibrated(task, chosen.model, measure)
        self.say("measuring on the test examples")
        test: dict[str, Any] = {
            "whole": self.whole_score,
            "before": score_of(task, chosen.model, measure),
            "after": score_of(task, model, measure),
            "distilled": None,
        }
        if self.options.distil:
            options, seed = self.options, training.server.seed
            self.say(f"distilling, {options.steps} steps")
            taught = distilled(chosen.model, self.whole, task, self.held, options.public, options.steps, seed)
            model = calibrated(task, taught, measure)
            test["distilled"] = score_of(task, model, measure)
        return model, test

    def _chosen_on(self) -> dict[str, Any]:
        task = self.found.training.server.task
        aside = getattr(task, "validation", None) is not None
        held: Any = getattr(self.held, "test", ())
        return {"examples": "validation" if aside else "training", "count": len(held)}

    def _write(self, folder: Path, model: nn.Module, chosen: Candidate, report: Mapping[str, Any]) -> None:
        training, recipe = self.found.training, self.found.run.recipe()
        server = training.server
        plain, example = model.cpu(), server.task.example().cpu()
        scale = self._scale(recipe)
        about = {
            "recipe": recipe.encode(),
            "scale": scale,
            "module": chosen.described if self._comes_back(chosen, plain, example, recipe, scale) else None,
            "input": {
                "name": INPUT,
                "shape": list(example.shape[1:]),
                "dtype": str(example.dtype).removeprefix("torch."),
                "first_dimension": BATCH,
                **_pixels(server.task),
            },
            "output": {"name": OUTPUT, "shape": self._shape(plain, example)},
            **_class_names(server.task),
            "run": str(self.found.run.folder),
            "rounds": server.round,
            "report": dict(report),
            "environment": environment(),
        }
        names = {key: json.dumps(value) for key, value in _class_names(server.task).items()}
        files = {}
        for format in self.options.wanted:
            self.say(f"capacity {report['capacity']}: writing model.{format}")
            files[f"model.{format}"] = written_in(format, plain, example, names)
        write_export(folder, plain, about, files)
        if about["module"] is not None:
            read_export(folder, self.task)

    @staticmethod
    def _shape(model: nn.Module, example: Tensor) -> list[int]:
        """Of an example's output."""
        with evaluating(model):
            return list(model(example).shape[1:])

    def _scale(self, recipe: Recipe) -> int:
        """How many times wider than the task's the main network is: some methods build it in its own width."""
        server = self.found.training.server
        wide = server.main.axes.state(server.main.module)
        with torch.random.fork_rng(devices=[]):
            made = named_tensors(server.task.build(server.scale))
        return server.scale if all(made[name].shape == tensor.shape for name, tensor in wide.items()) else 1

    def _comes_back(self, chosen: Candidate, model: nn.Module, example: Tensor, recipe: Recipe, scale: int) -> bool:
        """Whether the description makes a module of the same tensors: with a vocabulary of its own it may not."""
        if chosen.described is None:
            return False
        dtype = str(example.dtype).removeprefix("torch.")
        made = rebuild(chosen.described, NetworkSource(recipe, self.task, scale, list(example.shape[1:]), dtype))
        bare = model.model if isinstance(model, WithOffsets) else model
        own, wanted = ({n: t.shape for n, t in named_tensors(m).items() if "running" not in n} for m in (made, bare))
        return own == wanted


def _pixels(task: Task) -> dict[str, Any]:
    """How stored images become inputs: pixel · scale + shift, a channel."""
    pixels = task.pixels if isinstance(task, Classification) else None
    return (
        {} if pixels is None else {"scale": pixels.scale.flatten().tolist(), "shift": pixels.shift.flatten().tolist()}
    )


def _class_names(task: Task) -> dict[str, Any]:
    """The names of the classes in the order of the model's scores; nothing where the task does not know them."""
    names = [str(name) for name in task.class_names] if isinstance(task, Classification) else []
    return {"classes": names} if names else {}


@torch.inference_mode(False)
@torch.enable_grad()
def export(
    run: Path | str,
    capacity: Capacity,
    out: Path | str | None = None,
    *,
    task: Task | None = None,
    windows: int = 16,
    distil: bool = False,
    public: Tensor | None = None,
    steps: int = 500,
    one_model: bool = False,
    formats: Sequence[str] | None = None,
    offsets: bool = False,
    device: DeviceName = "cpu",
) -> Exported:
    """The model that a device of a capacity runs: chosen, calibrated, measured and written to a folder.

    Args:
        run: the run's folder.
        capacity: one of the fleet's.
        out: a new folder; None is one in the run's.
        task: model and data, where the run was given them in Python.
        windows, distil, public, steps, one_model, formats, offsets: see :class:`Options`.
        device: where it is measured and taught.
    """
    options = Options(windows, distil, public, steps, one_model, formats, offsets)
    return Exporter.of(run, options, task=task, device=device)(capacity, out)
