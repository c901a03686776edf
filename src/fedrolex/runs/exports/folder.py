"""An exported model as a folder: tensors (safetensors), what they are tensors of (JSON), and copies for other runtimes.

A model is described by the task that makes the server's model and the window it was cut by, so that it is rebuilt
without the run and, for bundled data sets, without data. Nothing that is read is executed.
"""

from __future__ import annotations

import json
import os
import reprlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedrolex.core import FedrolexError, in_one_line
from fedrolex.models import ColumnModel
from fedrolex.recipes import Recipe
from fedrolex.recipes.task import GivenInPython
from fedrolex.rounds import Server
from fedrolex.runs import checkpoint
from fedrolex.runs.model import filled
from fedrolex.slicing import WHOLE, Window, exact, trace
from fedrolex.slicing.axes import WINDOW
from fedrolex.tasks import Task

KIND, FORMAT = "fedrolex export", 1
ABOUT, TENSORS = "model.json", "model.safetensors"
LARGEST = 2**10  # how many times wider a server's model can be
MOST_VALUES = 2**27  # of an input


# --- what a model is made of ---


def describe(model: nn.Module, server: Server) -> dict[str, Any] | None:
    """What makes a method's model again: a network of the server's, the window of one, or columns of such.

    None where it is none of these: an ensemble of one's own, say.
    """
    if isinstance(model, ColumnModel):
        parts = [describe(column, server) for column in model.columns]
        seen = None if model.seen is None else model.seen.tolist()
        return None if None in parts else {"row": parts, "seen": seen}
    if WINDOW in vars(model):
        return {"network": None, "window": vars(model)[WINDOW].encode(), "cut": True}
    names = [name for name, network in server.networks.items() if network.module is model]
    own = names and model is not server.main.module
    return {"network": names[0] if own else None, "window": {}} if names else None


@dataclass(frozen=True)
class NetworkSource:
    """Makes the networks that exported models are parts of.

    Attributes:
        recipe: of the run; its task makes them where none is given.
        task: given in Python.
        scale: how many times wider than the task's the main network is.
        shape, dtype: of an input, a batch's size left out.
    """

    recipe: Recipe
    task: Task | None
    scale: int
    shape: Sequence[int]
    dtype: str

    def __post_init__(self) -> None:
        if self.task is None and isinstance(self.recipe.task, GivenInPython):
            raise FedrolexError("the exported model is of a task given in Python: give it, load(FOLDER, task=task)")
        if type(self.scale) is not int or not 1 <= self.scale <= LARGEST:
            raise FedrolexError(f"scale is {self.scale!r}: give 1 to {LARGEST}")
        whole = isinstance(self.shape, list) and all(type(size) is int and size > 0 for size in self.shape)
        if not whole or prod(self.shape) > MOST_VALUES:
            raise FedrolexError(f"an input's shape is {reprlib.repr(self.shape)}: give at most {MOST_VALUES:,} values")

    def network(self, name: str | None) -> nn.Module:
        """The main network or, of a name, a capacity's own; its weights are of no meaning."""
        with torch.random.fork_rng(devices=[]):
            if name is None:
                return self.recipe.task.make_model(self.scale) if self.task is None else self.task.build(self.scale)
            if self.task is None:
                own = self.recipe.task.make_models()
            else:
                own = {exact(capacity): make() for capacity, make in getattr(self.task, "models", {}).items()}
            return own[exact(name) * self.recipe.fleet.server_scale]

    def example(self, model: nn.Module) -> Tensor:
        """Two inputs of a network, to trace it with."""
        own = getattr(model, "slicing_example", None)
        if self.task is not None:
            return self.task.example().cpu()
        if callable(own):
            return cast(Tensor, own())
        drawn = torch.randn(2, *self.shape, generator=torch.Generator().manual_seed(0))
        return drawn.to(getattr(torch, self.dtype))


def rebuild(described: Mapping[str, Any], source: NetworkSource) -> nn.Module:
    """The module that was described, with weights of no meaning."""
    if "row" in described:
        seen = described["seen"]
        columns = [rebuild(part, source) for part in described["row"]]
        return ColumnModel(columns, None if seen is None else torch.tensor(seen, dtype=torch.bool))
    module, window = source.network(described["network"]), Window.decode(described["window"])
    cut = described.get("cut", window != WHOLE)  # what is cut may be of other modules, even where it is the whole
    return trace(module, source.example(module)).cut(module, window) if cut else module


def _scores(shape: Any) -> int:
    """How many scores a model of this output shape gives."""
    if not isinstance(shape, list) or any(type(size) is not int for size in shape):
        raise FedrolexError(f"an output's shape is {reprlib.repr(shape)}: give whole numbers")
    return min(max(0, shape[-1]), MOST_VALUES) if shape else 0


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, also those that no state dict has; tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


# --- on disk ---


def write_export(folder: Path, model: nn.Module, about: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """Write a new folder, all or nothing: tensors, what they are, and ``files`` by name."""
    refuse(folder)
    new = folder.with_name(f".{folder.name}.new-{os.getpid()}")
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in named_tensors(model).items()}
    told = {"kind": KIND, "format": FORMAT, **about, "checksum": checkpoint.checksum(tensors, {})}
    try:
        new.mkdir(parents=True)
        (new / TENSORS).write_bytes(save(tensors))
        (new / ABOUT).write_text(json.dumps(told, indent=1) + "\n")
        for name, data in files.items():
            (new / name).write_bytes(data)
        if folder.exists():
            folder.rmdir()
        new.rename(folder)
    except OSError as error:
        raise FedrolexError(f"cannot write {folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def refuse(folder: Path) -> None:
    """Raise, in one line, where a folder has something in it already."""
    if not folder.name:
        raise FedrolexError(f"an exported model cannot be {str(folder)!r}: name its folder")
    if folder.exists() and not (folder.is_dir() and next(folder.iterdir(), None) is None):
        raise FedrolexError(f"{folder} exists already: give another folder with --out, or delete it")


def is_export(folder: Path) -> bool:
    """Whether a folder is an exported model's."""
    try:
        return (folder / ABOUT).is_file() and not (folder / "recipe.yaml").exists()
    except (OSError, ValueError):  # no path can be like that
        return False


def read_about(folder: Path) -> dict[str, Any]:
    """What an exported model says about itself."""
    path = folder / ABOUT
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise FedrolexError(f"{path} is not there, or damaged: {error}") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise FedrolexError(f"{path} is not of an exported model")
    if found.get("format") != FORMAT:
        raise FedrolexError(f"{path} has format {found.get('format')!r}; this version reads {FORMAT}: update fedrolex")
    return found


def read_export(folder: Path, task: Task | None = None) -> nn.Module:
    """An exported model, in evaluation mode; a folder that is damaged is refused in one line."""
    about = read_about(folder)
    path = folder / TENSORS
    tensors, _ = checkpoint.read_any(path)
    if checkpoint.checksum(tensors, {}) != about.get("checksum"):
        raise FedrolexError(f"{path} is not what {ABOUT} says, or damaged: export it again")
    if about.get("module") is None:
        raise FedrolexError(f"{folder} holds a model that only its own method can make: run model.pt2 or model.onnx")
    try:
        with in_one_line("it is damaged"):
            given = about["input"]
            source = NetworkSource(Recipe.decode(about["recipe"]), task, about["scale"], given["shape"], given["dtype"])
            bare, classes = rebuild(about["module"], source), _scores(about["output"]["shape"])
    except FedrolexError as error:
        raise FedrolexError(f"{folder / ABOUT} cannot be used: {error}") from error
    refusal = f"{path} does not fit the model that {ABOUT} describes"
    return filled(bare, tensors, named_tensors, classes, refusal)
