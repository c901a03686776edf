"""One model, every device: train a large PyTorch model on devices that each hold only a part of it."""

from importlib.metadata import PackageNotFoundError, version

from fedrolex.coverage import Coverage, coverage
from fedrolex.errors import FedrolexError
from fedrolex.fleet import Fleet
from fedrolex.runs import ClientRecipe, FleetRecipe, MethodRecipe, Recipe, TaskRecipe, Trained, train
from fedrolex.slicing import (
    Axes,
    Axis,
    Blocks,
    Fold,
    Hints,
    Links,
    Ordered,
    Random,
    RandomMiswired,
    Rolling,
    Run,
    Scheme,
    Select,
    Static,
    Window,
    exact,
    pick,
    spread,
    trace,
)
from fedrolex.tasks import Examples, Task

try:
    __version__ = version("fedrolex")
except PackageNotFoundError:  # a checkout that was not installed
    __version__ = "0+unknown"

__all__ = [
    "Axes",
    "Axis",
    "Blocks",
    "ClientRecipe",
    "Coverage",
    "Examples",
    "FedrolexError",
    "Fleet",
    "FleetRecipe",
    "Fold",
    "Hints",
    "Links",
    "MethodRecipe",
    "Ordered",
    "Random",
    "RandomMiswired",
    "Recipe",
    "Rolling",
    "Run",
    "Scheme",
    "Select",
    "Static",
    "Task",
    "TaskRecipe",
    "Trained",
    "Window",
    "coverage",
    "exact",
    "pick",
    "spread",
    "trace",
    "train",
]
