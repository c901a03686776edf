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
    Scheme,
    Select,
    Static,
    Window,
    spread,
    trace,
)

try:
    __version__ = version("fedrolex")
except PackageNotFoundError:  # a checkout that was not installed
    __version__ = "0+unknown"

__all__ = [
    "Axes", "Axis", "Blocks", "Coverage", "FedrolexError", "Fold", "Hints", "Links", "Ordered", "Random",
    "RandomMiswired", "Rolling", "Scheme", "Select", "Static", "Window", "coverage", "spread", "trace",
]  # fmt: skip
