"""The recipes that come with the package, by name, and those of users, by file."""

from importlib import resources
from pathlib import Path

from fedrolex.core import FedrolexError
from fedrolex.recipes.decode import read_yaml
from fedrolex.recipes.recipe import Recipe


def recipe_names() -> list[str]:
    """Names of the embedded recipes."""
    files = resources.files("fedrolex.recipes").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def find_recipe(name: str) -> Recipe:
    """An embedded recipe by name, or one from a file."""
    if name in recipe_names():
        text = (resources.files("fedrolex.recipes") / f"{name}.yaml").read_text()
        return Recipe.decode(read_yaml(text, f"recipe {name}"))
    if not Path(name).is_file():
        raise FedrolexError(f"no recipe {name!r}: give a YAML file or one of {', '.join(recipe_names())}")
    return Recipe.read(Path(name))
