"""Measuring a model: first the statistics of static batch norms, and offsets of its classes where they are wanted."""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

from torch import Tensor, nn

from fedrolex.core import METRICS, FedrolexError, check_numbers, check_words
from fedrolex.models import WithOffsets, by_batch, class_offsets, collect, evaluating, static_norms, with_statistics
from fedrolex.tasks.classification import Classification
from fedrolex.tasks.task import Task

Statistics = Literal["recalibrated", "test-batch"]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """How models are evaluated.

    Attributes:
        statistics: of static batch norms: ``recalibrated`` collects them from training examples in one pass,
            ``test-batch`` takes those of every test batch.
        batch: examples at once; 100 in the published code, where it matters.
        calibration: training examples to collect statistics from, and so many to find offsets by.
        offsets: every class's score has an offset added, see :mod:`fedrolex.models.offsets`; found by the validation
            examples or, where there are none, by training examples.
        submodels: whether sub-models of every capacity are measured too.
        metrics: names of more metrics to take, see :data:`~fedrolex.core.registry.METRICS`.
    """

    statistics: Statistics = "recalibrated"
    batch: int = 500
    calibration: int = 2000
    offsets: bool = False
    submodels: bool = False
    metrics: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_words("evaluation", self)
        check_numbers("evaluation", self, least={"batch": 1, "calibration": 1})
        for name in self.metrics:
            METRICS.find(name)

    def ready(self, task: Task, model: nn.Module) -> nn.Module:
        """The model as it is measured: where its static norms are to be recalibrated, a copy that has statistics."""
        if self.statistics == "recalibrated" and static_norms(model):
            inputs = task.some_inputs(self.calibration, max(3, self.batch))  # never one alone
            model = with_statistics(model, collect(model, inputs))
        return WithOffsets(model, self._offsets(task, model)) if self.offsets else model

    def check(self, task: Task) -> None:
        """Raise, in one line, where a task's models cannot be measured so."""
        if not self.offsets:
            return
        if not isinstance(task, Classification):
            raise FedrolexError(f"evaluation.offsets is for tasks of classes, not for {task.name}: leave it out")
        if task.validation is None and task.tests_on_training:
            remedy = "give validation examples, too"
            raise FedrolexError(f"evaluation.offsets would be fitted on the test examples: {remedy}")

    def _offsets(self, task: Task, model: nn.Module) -> Tensor:
        self.check(task)
        held = task.held_out(self.calibration)
        assert isinstance(held, Classification)
        with evaluating(model):
            scores = held.outputs(model, held.test.x, self.batch)
        if scores.dim() != 2 or not bool(scores.isfinite().all()):
            what = "not all finite" if scores.dim() == 2 else f"{tuple(scores.shape)}"
            needed = "evaluation.offsets needs a finite score for every class"
            raise FedrolexError(f"{needed}, the model's are {what}: leave it out")
        return class_offsets(scores, held.test.y)

    def __call__(self, task: Task, model: nn.Module) -> dict[str, Any]:
        """Metrics of a model.

        ``statistics`` among them says what its batch norms did: ``recalibrated`` and ``running`` ones had statistics,
        collected just now or in training; with ``test-batch`` at least one took those of every test batch (asked for,
        or called as a function, which can be given none); null where there are none.
        """
        ready = self.ready(task, model)
        took = by_batch(ready, task.example())
        used = ("test-batch" if any(took) else "recalibrated" if static_norms(model) else "running") if took else None
        how: dict[str, Any] = {"batch": self.batch, "apart": used == "test-batch"}
        if self.metrics:  # a task of one's own need not take them
            if "metrics" not in signature(task.evaluate).parameters:
                raise FedrolexError(f"task {task.name} takes no evaluation.metrics: its evaluate() has no metrics")
            how["metrics"] = {name: METRICS.find(name) for name in self.metrics}
        return {**task.evaluate(ready, **how), "statistics": used}
