"""Runs: recipes, training, folders, checkpoints."""

from fedrolex.runs.api import Trained, train
from fedrolex.runs.recipe import ClientRecipe, FleetRecipe, MethodRecipe, Recipe, TaskRecipe
from fedrolex.runs.run import Run, prepare
from fedrolex.runs.training import Training

__all__ = [
    "ClientRecipe", "FleetRecipe", "MethodRecipe", "Recipe", "Run", "TaskRecipe", "Trained", "Training", "prepare",
    "train",
]  # fmt: skip
