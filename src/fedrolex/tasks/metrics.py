"""Metrics by name: functions of a model's outputs and the targets of the test examples that give a number."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fedrolex.core import FedrolexError
from fedrolex.slicing import one_line

Metric = Callable[[Tensor, Tensor], float]
"""Of outputs ``(n, classes)`` and targets ``(n,)``; of words, padding is left out before."""

Metrics = Mapping[str, Metric]

SCORES = ("global_accuracy", "r2")
"""What models are compared by, whichever of them a task measures: the higher, the better."""


def top5(outputs: Tensor, targets: Tensor) -> float:
    """The share of targets that are among the five classes with the highest scores."""
    _check_classes(targets)
    best = outputs.topk(min(5, outputs.shape[-1]), -1).indices
    return float((best == targets[..., None]).any(-1).double().mean())


def worst_class(outputs: Tensor, targets: Tensor) -> float:
    """The lowest accuracy of all classes that occur among the targets."""
    _check_classes(targets)
    right = outputs.argmax(-1) == targets
    return min(float(right[targets == label].double().mean()) for label in targets.unique().tolist())


def _check_classes(targets: Tensor) -> None:
    if targets.is_floating_point():
        raise ValueError("it is of classes, and targets are real numbers")


def mean_absolute_error(outputs: Tensor, targets: Tensor) -> float:
    """How far predictions are from their targets, in the targets' unit, both of one shape."""
    return float((outputs.double() - targets.double()).abs().mean())


def r2(outputs: Tensor, targets: Tensor) -> float:
    """R², the explained share of the targets' variance, both ``(n, values)``, the values pooled.

    1 is perfect, 0 is no better than always saying the mean; where all targets are the same, nothing is between them.
    """
    wrong = float((outputs.double() - targets.double()).square().sum())
    spread = float((targets.double() - targets.double().mean(0)).square().sum())
    return 1 - wrong / spread if spread else float(wrong == 0)


def score(found: Mapping[str, Any]) -> str:
    """The name of the metric among those found that models are compared by."""
    name = next((name for name in SCORES if name in found), None)
    if name is None:
        raise FedrolexError(f"there is nothing to compare models by: evaluate() of a task gives {' or '.join(SCORES)}")
    return name


def measured(metrics: Metrics, outputs: Tensor, targets: Tensor, beside: Mapping[str, Any]) -> dict[str, float]:
    """Every metric's number; one that fails, gives something else, or is called as one of ``beside``, raises."""
    found: dict[str, float] = {}
    for name, metric in metrics.items():
        if short(name) in {**beside, **found}:
            raise FedrolexError(f"metric {name}: there is a metric {short(name)!r} already: use another name")
        try:
            value: object = metric(outputs, targets.clone())
            if isinstance(value, str | bytes):
                raise TypeError("it gives text, not a number")
            found[short(name)] = float(value)  # type: ignore[arg-type]
        except (Exception, SystemExit) as error:
            raise FedrolexError(f"metric {name} failed: {type(error).__name__}: {one_line(error)}") from error
    return found


def short(name: str) -> str:
    """A metric's name in results: of ``package.module:name`` the last part."""
    return name.rpartition(":")[2]
