"""Recipes by name: the package's own, cells of the paper, files."""

from pathlib import Path

from fedrolex.core import FedrolexError, did_you_mean
from fedrolex.recipes.paper import TABLES, cell_recipe
from fedrolex.recipes.recipe import Recipe, own_recipe, recipe_names


def find_recipe(name: str) -> Recipe:
    """One of the package's own recipes, a cell of the paper (``TABLE/SETUP/ROW@KIND``), or one from a file."""
    if name in recipe_names():
        return own_recipe(name)
    if Path(name).is_file():
        return Recipe.read(Path(name))
    if "@" in name or name.partition("/")[0] in TABLES:
        return cell_recipe(name)
    near = did_you_mean(name, recipe_names())
    raise FedrolexError(f"no recipe {name!r}{near}: give a YAML file or one of {', '.join(recipe_names())}")
