"""Engines run the client work of one cohort; they know nothing of methods."""

from fedrolex.engines.engine import Engine, Failure, Job, RoundPlan, Upload
from fedrolex.engines.graph import Graph
from fedrolex.engines.loop import Loop
from fedrolex.engines.stack import Stack

__all__ = ["Engine", "Failure", "Graph", "Job", "Loop", "RoundPlan", "Stack", "Upload"]
