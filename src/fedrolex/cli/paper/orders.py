"""What ``fedrolex paper`` is to make: cells of a table, asked for on the command line or, several times, in a file."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from fedrolex.cli.paper.shelf import Made, Shelf
from fedrolex.cli.train import Planned
from fedrolex.core import FedrolexError, check_words, one_of
from fedrolex.recipes.decode import from_plain, read_yaml
from fedrolex.recipes.paper import TABLES, Cell, cells
from fedrolex.recipes.paper_setups import Kind

MOST = 2**63


@dataclass(frozen=True, kw_only=True)
class Order:
    """Cells of one table in one kind.

    Attributes:
        table: its name.
        cells: ``SETUP``, ``SETUP/ROW`` or ``TABLE/SETUP/ROW``; none given: all that have the kind.
        kind: of reproduction.
        seeds: a run of each cell for every one.
        scale: multiplies rounds.
        settings: changed keys of the recipes, ``key=value``.
    """

    table: str = ""
    cells: list[str] = field(default_factory=list)
    kind: Kind = "tuned"
    seeds: list[int] = field(default_factory=lambda: [1])
    scale: float = 1.0
    settings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        one_of("table", self.table, list(TABLES))
        one_of("kind", self.kind, get_args(Kind))
        check_words("order", self)
        if not 0 < self.scale <= 1:
            raise FedrolexError(f"scale is {self.scale}: give a part of the rounds, above 0 and at most 1")
        once = len(set(self.seeds)) == len(self.seeds) > 0
        if not once or not all(0 <= seed < MOST for seed in self.seeds):
            raise FedrolexError(f"seeds are {self.seeds}: give at least one, each once, from 0 to 2^63 - 1")
        if any(word.split("=")[0].strip() == "seed" for word in self.settings):
            raise FedrolexError("settings have a seed: a cell is run for each of the seeds")
        first = next(iter(self.chosen()), None)  # raises where a named cell is not there
        if first is None:
            has = dict.fromkeys(kind for cell in cells(self.table) for kind in cell.kinds)
            raise FedrolexError(f"{self.table} has no cells of kind {self.kind}: use {' or '.join(has)}")
        self.shelf(Path()).recipe(first)  # raises where settings are none

    def shelf(self, runs: Path) -> Shelf:
        """Where its runs and results are."""
        return Shelf(self.table, self.kind, self.scale, tuple(self.settings), runs)

    def chosen(self) -> list[Cell]:
        """The cells that are asked for and have the kind; all where nothing is asked for."""
        every = cells(self.table)
        for word in self.cells:
            asked = [cell for cell in every if word in _names(cell)]
            if not asked:
                some = ", ".join(cell.label for cell in every[:6])
                raise FedrolexError(f"cell {word!r} is not in {self.table}: there are {some} …; --list names all")
            if not any(self.kind in cell.kinds for cell in asked):
                first = asked[0]
                why = ", since the paper quotes it from another one" if first.quoted else ""
                raise FedrolexError(f"{first.name} has no kind {self.kind}{why}: use kind {' or '.join(first.kinds)}")
        wanted = [cell for cell in every if not self.cells or {*_names(cell)} & {*self.cells}]
        return [cell for cell in wanted if self.kind in cell.kinds]

    def lacking(self, made: Collection[Made]) -> list[tuple[Cell, list[int]]]:
        """Its cells of which some seeds are not made yet, with these seeds."""
        found = [(cell, [seed for seed in self.seeds if (cell.label, seed) not in made]) for cell in self.chosen()]
        return [(cell, seeds) for cell, seeds in found if seeds]

    def plans(self, runs: Path, data: str | None, made: Collection[Made]) -> Iterator[Planned]:
        """The runs that are not made yet."""
        shelf = self.shelf(runs)
        for cell, seeds in self.lacking(made):
            recipe = replace(shelf.recipe(cell), data=data)
            for seed in seeds:
                folder = shelf.folder(cell) / f"seed-{seed}"
                yield Planned(cell.label, folder, replace(recipe, seed=seed), folder, folder)


def _names(cell: Cell) -> tuple[str, ...]:
    """What a cell may be asked for by: its data set, its name in the table, its whole name."""
    return cell.setup, cell.label, cell.name


def read_orders(path: Path, scale: float, settings: Sequence[str]) -> list[Order]:
    """The orders of a YAML file, a list with the keys of :class:`Order`; all rounds scaled, all recipes changed."""
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise FedrolexError(f"cannot read {path}: {why}") from error
    data = read_yaml(text, str(path))
    if not isinstance(data, list) or not data:
        raise FedrolexError(f"{path} is no list of orders: give entries such as - {{table: overall, seeds: [1]}}")
    found = []
    for number, entry in enumerate(data, 1):
        try:
            order: Order = from_plain(Order, entry)
            found.append(replace(order, scale=round(order.scale * scale, 9), settings=[*order.settings, *settings]))
        except FedrolexError as error:
            raise FedrolexError(f"{path}, entry {number}: {str(error).removeprefix('recipe ')}") from None
    return found
