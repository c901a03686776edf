"""Engines run the client work of one cohort; they know nothing of methods."""

from fedrolex.engines.auto import Auto
from fedrolex.engines.choice import Choice
from fedrolex.engines.crew import Crew
from fedrolex.engines.engine import Averaged, Averaging, Engine, Failure, Holding, Job, RoundPlan, Upload, out_of_memory
from fedrolex.engines.graph import Graph
from fedrolex.engines.loop import Loop
from fedrolex.engines.stack import Stack

__all__ = [
    "Auto",
    "Averaged",
    "Averaging",
    "Choice",
    "Crew",
    "Engine",
    "Failure",
    "Graph",
    "Holding",
    "Job",
    "Loop",
    "RoundPlan",
    "Stack",
    "Upload",
    "out_of_memory",
]
