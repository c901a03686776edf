"""Recipes: runs described in full; the package's own are YAML files beside this one."""

from fedrolex.recipes.alternatives import alternatives
from fedrolex.recipes.find import find_recipe
from fedrolex.recipes.fleet import FleetRecipe
from fedrolex.recipes.images import ImagesRecipe
from fedrolex.recipes.partition import PartitionRecipe
from fedrolex.recipes.recipe import ClientRecipe, Recipe, recipe_names
from fedrolex.recipes.task import TaskRecipe
from fedrolex.recipes.words import WordsRecipe

__all__ = [
    "ClientRecipe", "FleetRecipe", "ImagesRecipe", "PartitionRecipe", "Recipe", "TaskRecipe", "WordsRecipe",
    "alternatives", "find_recipe", "recipe_names",
]  # fmt: skip
