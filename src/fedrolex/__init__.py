"""One model, every device: train a large PyTorch model on devices that each hold only a part of it."""

from importlib.metadata import PackageNotFoundError, version

from fedrolex.coverage import Coverage, coverage
from fedrolex.errors import FedrolexError
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

try:
    __version__ = version("fedrolex")
except PackageNotFoundError:  # a checkout that was not installed
    __version__ = "0+unknown"

__all__ = [
    "Axes", "Axis", "Blocks", "Coverage", "FedrolexError", "Fold", "Hints", "Links", "Ordered", "Random",
    "RandomMiswired", "Rolling", "Run", "Scheme", "Select", "Static", "Window", "coverage", "exact", "pick", "spread",
    "trace",
]  # fmt: skip
