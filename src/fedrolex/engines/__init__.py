"""Engines run the client work of one cohort; they know nothing of methods."""

from fedrolex.engines.auto import Auto
from fedrolex.engines.choice import Choice
from fedrolex.engines.crew import Crew
from fedrolex.engines.engine import Averaged, Averaging, Engine, Failure, Job, RoundPlan, Upload
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
    "Job",
    "Loop",
    "RoundPlan",
    "Stack",
    "Upload",
]
