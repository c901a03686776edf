"""Tasks: model, data, partition, loss and metrics."""

from fedrolex.tasks.classification import Classification
from fedrolex.tasks.masking import Mask, masked
from fedrolex.tasks.measure import Measure
from fedrolex.tasks.regression import Regression
from fedrolex.tasks.task import Examples, Task
from fedrolex.tasks.words import NextWord

__all__ = ["Classification", "Examples", "Mask", "Measure", "NextWord", "Regression", "Task", "masked"]
