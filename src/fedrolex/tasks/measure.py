"""Measuring a model: with static batch norms, first their statistics."""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedrolex.core import METRICS, FedrolexError, check_numbers, check_words
from fedrolex.models import collect, static_norms, with_statistics
from fedrolex.tasks.task import Task

Statistics = Literal["recalibrated", "test-batch"]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """How models are evaluated.

    Attributes:
        statistics: of static batch norms: ``recalibrated`` collects them from training examples in one pass,
            ``test-batch`` takes those of every test batch.
        batch: examples at once; 100 in the published code, where it matters.
        calibration: training examples to collect statistics from.
        submodels: whether sub-models of every capacity are measured too.
        metrics: names of more metrics to take, see :data:`~fedrolex.core.registry.METRICS`.
    """

    statistics: Statistics = "recalibrated"
    batch: int = 500
    calibration: int = 2000
    submodels: bool = False
    metrics: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_words("evaluation", self)
        check_numbers("evaluation", self, least={"batch": 1, "calibration": 1})
        for name in self.metrics:
            METRICS.find(name)

    def __call__(self, task: Task, model: nn.Module, server: nn.Module) -> dict[str, Any]:
        """Metrics of the server's model or of a sub-model of it.

        ``statistics`` among them says how batch norms were evaluated: as asked where they are static, ``running``
        where they keep their own, null where there are none. A sub-model that
        runs from a traced graph has no norms to recalibrate: it is measured on test batches.
        """
        used: str | None = None
        if static_norms(server):
            used = self.statistics if static_norms(model) else "test-batch"
            if used == "recalibrated":
                model = with_statistics(model, collect(model, task.some_inputs(self.calibration, self.batch)))
        elif any(isinstance(module, _BatchNorm) for module in server.modules()):
            used = "running"
        how: dict[str, Any] = {"batch": self.batch, "apart": used == "test-batch"}
        if self.metrics:  # a task of one's own need not take them
            if "metrics" not in signature(task.evaluate).parameters:
                raise FedrolexError(f"task {task.name} takes no evaluation.metrics: its evaluate() has no metrics")
            how["metrics"] = {name: METRICS.find(name) for name in self.metrics}
        return {**task.evaluate(model, **how), "statistics": used}
