"""What the same fleet could do without partial training: the lines every result stands beside."""

from dataclasses import replace

from fedrolex.methods import FedAvg
from fedrolex.recipes import Recipe, carried
from fedrolex.slicing import exact


def alternatives(recipe: Recipe) -> dict[str, Recipe]:
    """The plain alternatives of a recipe's fleet, by what they are.

    Everyone trains the smallest model; only the devices that can hold the middle size train that; and the
    bound no such fleet reaches, everyone training the largest.
    """
    levels = sorted((exact(c) for c in recipe.fleet.capacities), reverse=True)
    smallest, middle, largest = levels[-1], levels[len(levels) // 2], levels[0]
    task = recipe.task.plain(recipe.method.wants())

    def homogeneous(width: object, *, able_only: bool = False) -> Recipe:
        method = carried(recipe.method, FedAvg, width=str(width), able_only=able_only)
        return replace(recipe, task=task, method=method, compare=False)

    return {
        f"everyone trains {smallest}": homogeneous(smallest),
        f"only who can trains {middle}": homogeneous(middle, able_only=True),
        f"everyone trains {largest} (a bound: they cannot)": homogeneous(largest),
    }
