"""Engines run the client work of one cohort; they know nothing of methods."""

from fedrolex.clients.messages import (
    Averaged,
    Averaging,
    Engine,
    Failure,
    Holding,
    Job,
    RoundPlan,
    Upload,
    out_of_memory,
)
from fedrolex.engines.auto import Auto
from fedrolex.engines.choice import Choice
from fedrolex.engines.cpu.crew import Crew
from fedrolex.engines.cpu.loop import Loop
from fedrolex.engines.cpu.stack import Stack
from fedrolex.engines.gpu.graph import Graph

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
