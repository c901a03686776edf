"""One model, every device: train a large PyTorch model on devices that each hold only a part of it."""

from importlib.metadata import PackageNotFoundError, version

from fedrolex.core.errors import FedrolexError
from fedrolex.rounds.fleet import Fleet
from fedrolex.slicing import (
    Axes,
    Arc,
    Axis,
    Blocks,
    Fold,
    Hints,
    Links,
    Ordered,
    Random,
    RandomMiswired,
    Rolling,
    Scheme,
    Select,
    Static,
    Window,
    exact,
    pick,
    spread,
    trace,
)
from fedrolex.tasks import Classification, Examples, NextWord, Task
from fedrolex.theory.coverage import Coverage, coverage

try:
    __version__ = version("fedrolex")
except PackageNotFoundError:  # a checkout that was not installed
    __version__ = "0+unknown"

__all__ = [
    "Arc",
    "Axes",
    "Axis",
    "Blocks",
    "Classification",
    "Coverage",
    "Examples",
    "FedrolexError",
    "Fleet",
    "Fold",
    "Hints",
    "Links",
    "NextWord",
    "Ordered",
    "Random",
    "RandomMiswired",
    "Rolling",
    "Scheme",
    "Select",
    "Static",
    "Task",
    "Window",
    "coverage",
    "exact",
    "pick",
    "spread",
    "trace",
]
