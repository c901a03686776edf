"""What the fleet of a recipe could do instead."""

from dataclasses import replace
from fractions import Fraction

from fedrolex.methods import Columns, FedAvg, Method
from fedrolex.recipes.recipe import Recipe
from fedrolex.recipes.settings import carried
from fedrolex.rounds import Fleet

FEW = 10_000  # clients that are looked at one by one
BOUND = "(a bound: they cannot)"
"""Ends the name of what is beyond a fleet."""
LITTLE = 1.5  # what one by one may cost, by the squares of widths, as a part of the widest column alone


def alternatives(recipe: Recipe, begun: Columns | None = None) -> dict[str, Recipe]:
    """What a recipe's fleet could do instead, by name: every result stands beside these.

    Everyone trains the smallest model; only the devices that can hold the middle size train that; everyone trains the
    largest, a bound no such fleet reaches; and a row of columns, where there are several to train and the recipe does
    not do so itself: one by one where that costs little more than the widest column alone. Each model begins as one of
    its size does. Where all devices are alike, the first says it all.

    Args:
        begun: the row of columns, where one has begun already; an earlier version did not train them one by one.
    """
    scale, fleet = recipe.fleet.server_scale, recipe.fleet.build(recipe.seed, recipe.fleet.expected)
    levels = [level * scale for level in _held(fleet)]
    smallest, middle, largest = levels[-1], levels[(len(levels) - 1) // 2], levels[0]
    task = recipe.task.plain(recipe.method.wants())

    def trained_by(method: Method) -> Recipe:
        return replace(recipe, task=task, method=method, compare=False)

    def homogeneous(width: object, *, able_only: bool = False) -> Recipe:
        return trained_by(carried(recipe.method, FedAvg, width=str(width), able_only=able_only, own_width=True))

    found = {f"everyone trains {smallest}": homogeneous(smallest)}
    if largest != smallest:
        found[f"only who can trains {middle}"] = homogeneous(middle, able_only=True)
        found[f"everyone trains {largest} {BOUND}"] = homogeneous(largest)
    columns = begun or carried(recipe.method, Columns)
    widths = columns.widths(fleet, scale)
    cheap = sum(width**2 for width in widths) <= LITTLE * max(widths) ** 2
    columns = begun or replace(columns, one_by_one=cheap)
    if len(widths) > 1 and columns != recipe.method:
        found[f"columns {', '.join(map(str, widths))}{' one by one' * columns.one_by_one}"] = trained_by(columns)
    return found


def _held(fleet: Fleet) -> list[Fraction]:
    """The capacities that clients have, the largest first."""
    if fleet.redrawn or fleet.clients > FEW:
        levels = {level for level, share in zip(fleet.levels, fleet.level_shares, strict=True) if share}
    else:
        levels = {fleet.capacity(client) for client in range(fleet.clients)}
    return sorted(levels, reverse=True)
