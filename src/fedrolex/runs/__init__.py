"""Runs: recipes, training, folders, checkpoints."""

from fedrolex.recipes.recipe import ClientRecipe, EvaluationRecipe, FleetRecipe, MethodRecipe, Recipe
from fedrolex.recipes.task_recipe import ImagesRecipe, PartitionRecipe, WordsRecipe
from fedrolex.runs.api import Trained, train
from fedrolex.runs.prepare import prepare
from fedrolex.runs.run import Run
from fedrolex.runs.training import Training

__all__ = [
    "ClientRecipe", "EvaluationRecipe", "FleetRecipe", "ImagesRecipe", "MethodRecipe", "PartitionRecipe", "Recipe",
    "Run", "Trained", "Training", "WordsRecipe", "prepare", "train",
]  # fmt: skip
