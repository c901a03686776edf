"""Examples with numbers to predict, in memory, spread over clients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedrolex.core import FedrolexError
from fedrolex.models import evaluating
from fedrolex.tasks.in_memory import InMemory
from fedrolex.tasks.metrics import Metrics, mean_absolute_error, measured, r2
from fedrolex.tasks.task import Examples


@dataclass(frozen=True)
class Regression(InMemory):
    """A task whose targets are real numbers, ``(examples, values)``; ``(examples,)`` is one value each.

    Attributes:
        name, build, train, test, parts: see :class:`~fedrolex.tasks.in_memory.InMemory`. The model's outputs are
            predictions, ``(examples, values)``.
        loss: of (predictions, targets), the mean over a batch; by default of squared errors.
        frozen: see :class:`~fedrolex.tasks.task.Task`.
    """

    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss
    frozen: Sequence[str] = ()
    classes = 0
    random_inputs = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for what, examples in self.examples().items():
            y = examples.y
            if not y.is_floating_point():
                kind = str(y.dtype).removeprefix("torch.")
                raise FedrolexError(f"targets of {what} are {kind}: give y.float(); classes are a Classification")
            if not bool(y.isfinite().all()):
                raise FedrolexError(f"targets of {what} are not all finite: leave such examples out")
            if y.dim() == 1:
                self._set(**{what: Examples(examples.x, y[:, None])})
        shapes = [tuple(part.y.shape[1:]) for part in (self.test, self.train)]
        if shapes[0] != shapes[1]:
            raise FedrolexError(f"targets of test are {shapes[0]} a row, those of train {shapes[1]}: give the same")

    def check_outputs(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise, in one line, unless there is a prediction for every target."""
        if outputs.shape != targets.shape:
            said = f"the model's outputs for {len(targets)} examples are {tuple(outputs.shape)}"
            remedy = f"give {tuple(targets.shape)}, a prediction for each; classes are whole numbers (y.long())"
            raise FedrolexError(f"{said}, but the targets are {targets[0].numel()} real numbers each: {remedy}")

    def evaluate(
        self, model: nn.Module, *, batch: int = 500, apart: bool = False, metrics: Metrics | None = None
    ) -> dict[str, Any]:
        """Loss, mean absolute error and R² on the test set."""
        y = self.test.y
        with evaluating(model):
            outputs = self.outputs(model, self.test.x, batch)
            self.check_outputs(outputs, y)
            found = {"loss": float(self.loss(outputs, y))}
            found |= {"mean_absolute_error": mean_absolute_error(outputs, y), "r2": r2(outputs, y)}
            return found | measured(metrics or {}, outputs, y, found)
