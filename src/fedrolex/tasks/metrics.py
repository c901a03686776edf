"""Metrics by name: functions of a model's outputs and the targets of the test examples that give a number."""

from collections.abc import Callable, Mapping

from torch import Tensor

from fedrolex.core import FedrolexError
from fedrolex.slicing import one_line

Metric = Callable[[Tensor, Tensor], float]
"""Of outputs ``(n, classes)`` and targets ``(n,)``; of words, padding is left out before."""

Metrics = Mapping[str, Metric]


def top5(outputs: Tensor, targets: Tensor) -> float:
    """The share of targets that are among the five classes with the highest scores."""
    best = outputs.topk(min(5, outputs.shape[-1]), -1).indices
    return float((best == targets[..., None]).any(-1).double().mean())


def worst_class(outputs: Tensor, targets: Tensor) -> float:
    """The lowest accuracy of all classes that occur among the targets."""
    right = outputs.argmax(-1) == targets
    return min(float(right[targets == label].double().mean()) for label in targets.unique().tolist())


def measured(metrics: Metrics, outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Every metric's number; a metric that fails, or gives something else, raises in one line."""
    found = {}
    for name, metric in metrics.items():
        try:
            found[short(name)] = float(metric(outputs, targets))
        except Exception as error:
            raise FedrolexError(f"metric {name} failed: {type(error).__name__}: {one_line(error)}") from error
    return found


def short(name: str) -> str:
    """A metric's name in results: of ``package.module:name`` the last part."""
    return name.rpartition(":")[2]
