"""Measuring a model: with static batch norms, first their statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedrolex.models.norms import collect, static_norms, with_statistics
from fedrolex.tasks import Task

Statistics = Literal["recalibrated", "test-batch"]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """How models are evaluated.

    Attributes:
        statistics: of static batch norms: ``recalibrated`` collects them from training examples in one pass,
            ``test-batch`` takes those of every test batch.
        batch: examples at once.
        calibration: training examples to collect statistics from.
        submodels: whether sub-models of every capacity are measured too.
    """

    statistics: Statistics = "recalibrated"
    batch: int = 500
    calibration: int = 2000
    submodels: bool = False

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
        found = task.evaluate(model, batch=self.batch, apart=used == "test-batch")
        return {**found, "statistics": used}
