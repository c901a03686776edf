"""Tasks: model, data, partition, loss and metrics."""

from fedrolex.tasks.digits import DigitsNet, digits
from fedrolex.tasks.task import Examples, Task

__all__ = ["DigitsNet", "Examples", "Task", "digits"]
