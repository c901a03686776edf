"""Every cell of the paper's tables and figures as a recipe, in three kinds and a variant.

A cell is ``TABLE/SETUP/ROW``, such as ``overall/cifar10-high/fedrolex``: a row of one of the paper's tables or figures
on one data set. ``fedrolex show TABLE/SETUP/ROW@KIND`` prints its recipe. The kinds:

- ``printed``: what the paper's text and appendix say. Capacities belong to clients, norms are measured with statistics.
- ``released``: what the authors' code executed: Adam and batches of 128 in the workers, the rate falls by 4, capacities
  are drawn anew every round, norms take the statistics of test batches of 100, windows are rounded up, absent classes
  have a score of 0, and Federated Dropout draws for every convolution apart. TensorFloat-32, which cuDNN takes unless
  it is told not to. Cells of ``weighting`` have the weights of the authors' code, too, which are not the appendix's.
- ``tuned``: ours. A rate that works in 1000 rounds and falls late, images shifted into their mean colour, the rest as
  released where the paper is silent (masks, class-wise averages, split). ``tuned-redrawn`` has capacities drawn anew
  every round.

On text there is no ``released``: the Transformer of the released code throws its averages away and trains nothing.

Beside the paper's rows stand those a practitioner would ask for: everyone at one width, only those who can hold it, and
columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from fedrolex.core import FedrolexError, one_of
from fedrolex.recipes.paper_numbers import (
    GAMMA,
    GAMMA_SCHEDULE,
    OVERALL,
    OVERLAP,
    PARTICIPATION,
    REAL_WORLD,
    RHO,
    RHO_MIDDLE,
    RHO_SCHEDULES,
    TEXT_SCHEDULE,
    WEIGHTING,
    Printed,
    printed,
)  # fmt: skip
from fedrolex.recipes.paper_setups import KINDS, PAPER_SETUPS, SETUPS, Kind, Schedule, Words
from fedrolex.recipes.recipe import Recipe, own_recipe


@dataclass(frozen=True)
class Cell:
    """One row of a table, or one point of a figure, on one data set.

    Attributes:
        table, setup, row: its name.
        words: settings of the row in every kind that it has.
        printed: what the paper prints; None where it prints nothing, or draws a figure without numbers.
        schedule: as the appendix prints it for the cell; None is the set-up's, of methods that train parts.
        quoted: the paper quotes the number from another paper's set-up.
        beside: a row that is not the paper's.
    """

    table: str
    setup: str
    row: str
    words: Words
    printed: Printed | None = None
    schedule: Schedule | None = None
    quoted: bool = False
    beside: bool = False

    @property
    def label(self) -> str:
        """Its name in its table."""
        return f"{self.setup}/{self.row}"

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"{self.table}/{self.label}"

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds it has; what the paper quotes from another one has only ours."""
        return tuple(self.words)

    def recipe(self, kind: Kind, scale: float = 1.0) -> Recipe:
        """The recipe of the cell, its rounds and milestones multiplied by ``scale``."""
        one_of("kind", kind, self.kinds)
        setup = SETUPS[self.setup]
        words = [*setup.settings(kind, self.schedule), *filter(setup.knows, self.words[kind])]
        return shorter(own_recipe(setup.recipe).with_settings(words), scale)


def shorter(recipe: Recipe, scale: float) -> Recipe:
    """The recipe with rounds, and the rounds at which something happens, multiplied by ``scale``."""
    if scale == 1:
        return recipe

    def scaled(number: int) -> int:
        return max(1, round(number * scale))

    client = replace(recipe.client, milestones=[scaled(milestone) for milestone in recipe.client.milestones])
    return replace(
        recipe,
        client=client,
        rounds=scaled(recipe.rounds),
        evaluate_every=scaled(recipe.evaluate_every),
        checkpoint_every=scaled(recipe.checkpoint_every),
    )


# --- rows ---


def _words(*words: str, rate: float, released: Sequence[str] = ()) -> Words:
    """Settings of a method that averages weights: the paper does not say that classes are averaged apart."""
    found: dict[Kind, tuple[str, ...]] = dict.fromkeys(KINDS, (*words, f"client.lr={rate}", "method.rows=true"))
    return {**found, "printed": (*words, "method.rows=false"), "released": (*words, "method.rows=true", *released)}


def _with(more: str, words: Words) -> Words:
    return {kind: (more, *each) for kind, each in words.items()}


WINDOWS, NESTED, COLUMNS, SAME_WIDTH = 0.02, 0.02, 0.02, 0.02
"""Rates of tuned runs: of windows that move (FedRolex, Federated Dropout), of HeteroFL, of columns, and where everyone
trains the same width."""

UP = ("method.rounding=ceil",)
DROPOUT = _words("method=fed_dropout", rate=WINDOWS)
MISWIRED = _words("method=submodels", "method.scheme=fedrolex.slicing.published:RandomMiswired", rate=WINDOWS)
COUNTED = "method=fedrolex.methods.published_counts:PublishedCounts"
PARTS: dict[str, Words] = {
    "fedrolex": _words("method=fedrolex", rate=WINDOWS, released=UP),
    "heterofl": _words("method=heterofl", rate=NESTED, released=UP),
    "federated-dropout": {**DROPOUT, "released": MISWIRED["released"]},
}
DISTILLED = {
    "feddf": ("method=feddf", "method.examples=2000", "method.steps=50"),
    "ds-fl": ("method=dsfl", "method.epochs=1"),
    "fed-et": ("method=fedet", "method.examples=2000"),
}
"""Fewer public examples, steps and epochs a round than their own defaults, by which a thousand rounds take days."""


def _width(width: str) -> Words:
    """Everyone trains this width, begun at its own."""
    return _words("method=fedavg", f"method.width={width}", "method.own_width=true", rate=SAME_WIDTH, released=UP)


def _able(*widths: str) -> Words:
    """Only those who can hold them train these widths, each begun at its own."""
    return _words("method=columns", f"method.columns={list(widths)}", rate=SAME_WIDTH)


BESIDE: dict[str, Words] = {
    "columns": _words("method=columns", "method.turns=true", rate=COLUMNS),
    "columns-one-by-one": _words("method=columns", "method.one_by_one=true", rate=COLUMNS),
    "columns-twice-one-by-one": _words(
        "method=columns", "method.columns=[1/2, 1/4, 1/4, 1/8, 1/8, 1/16, 1/16]", "method.one_by_one=true", rate=COLUMNS
    ),
    "columns-1-4-one-by-one": _words(
        "method=columns", "method.columns=[1/4, 1/8, 1/16]", "method.one_by_one=true", rate=COLUMNS
    ),
    "everyone-1-2": _width("1/2"),
    "everyone-1-4": _width("1/4"),
    "everyone-1-8": _width("1/8"),
    "only-who-can-1": _able("1"),
    "only-who-can-1-2": _able("1/2"),
    "only-who-can-1-4": _able("1/4"),
    "only-who-can-1-8": _able("1/8"),
    "only-who-can-1-4-twice": _able("1/4", "1/4"),
}
"""What the same fleet could do without partial training, and columns."""

SAME = {"smallest": "1/16", "largest": "1"}
PUBLIC = {"cifar10": "cifar100", "cifar100": "cifar10"}


SPREAD = [name for name in SETUPS if name != "cifar10-rare"]
"""Data sets of tables that are about all of them."""


def _cell(table: str, setup: str, row: str, words: Words, text: str | None = None, **more: object) -> Cell:
    """A cell in the kinds that its data set has."""
    kept = {kind: each for kind, each in words.items() if kind in SETUPS[setup].kinds}
    return Cell(table, setup, row, kept, text and printed(text), **more)  # type: ignore[arg-type]


def _overall() -> Iterator[Cell]:
    for setup in SPREAD:
        for row, words in PARTS.items():
            yield _cell("overall", setup, row, words, OVERALL[row].get(setup))
        for row, width in SAME.items():
            yield _cell("overall", setup, row, _width(width), OVERALL[row].get(setup), schedule=SETUPS[setup].plain)
        for row, settings in DISTILLED.items() if setup in PAPER_SETUPS else ():
            words = {"tuned": (*settings, f"task.public={PUBLIC[SETUPS[setup].recipe]}")}
            yield _cell("overall", setup, row, words, OVERALL[row][setup], quoted=True)
        for row, words in BESIDE.items():
            yield _cell("overall", setup, row, words, beside=True)


def _rho() -> Iterator[Cell]:
    for setup in SPREAD:
        data = SETUPS[setup].recipe
        for rho in RHO:
            words = _with(f"fleet.capacities=rho:{rho}", PARTS["fedrolex"])
            middle = data == "cifar10" and 0.3 <= float(rho) <= 0.7
            schedule = RHO_MIDDLE if middle else RHO_SCHEDULES.get(data, TEXT_SCHEDULE)
            yield _cell("rho", setup, f"fedrolex-{rho}", words, schedule=schedule)


def _gamma() -> Iterator[Cell]:
    for setup in SPREAD:
        for gamma in GAMMA:
            fleet, size = f"fleet.capacities=gamma:{gamma}", f"1/{gamma}"
            rows = {
                "fedrolex": PARTS["fedrolex"], "federated-dropout": PARTS["federated-dropout"], "own-size": _able(size),
                "columns": _able(size, size),
            }  # fmt: skip
            for row, words in rows.items():
                schedule = GAMMA_SCHEDULE if setup in PAPER_SETUPS else TEXT_SCHEDULE
                name, beside = f"{row}-{gamma}", row not in PARTS
                yield _cell("gamma", setup, name, _with(fleet, words), schedule=schedule, beside=beside)


def _real_world() -> Iterator[Cell]:
    income = "fleet.capacities=income"
    for setup in SPREAD:
        words = _with(income, PARTS["fedrolex"])
        yield _cell("real-world", setup, "fedrolex", words, REAL_WORLD["fedrolex"].get(setup))
        for row, width in SAME.items():
            words, text = _with(income, _width(width)), REAL_WORLD[row].get(setup)
            yield _cell("real-world", setup, row, words, text, schedule=SETUPS[setup].plain)
        for row, words in BESIDE.items():
            yield _cell("real-world", setup, row, _with(income, words), beside=True)


def _weighting() -> Iterator[Cell]:
    for weighting, by_setup in WEIGHTING.items():
        chosen = f"method.weighting={weighting}"
        words = _words("method=fedrolex", chosen, rate=WINDOWS)
        words = {**words, "released": _words(COUNTED, chosen, rate=WINDOWS, released=UP)["released"]}
        for setup, text in by_setup.items():
            yield _cell("weighting", setup, weighting, words, text)


def _overlap() -> Iterator[Cell]:
    for setup in PAPER_SETUPS:
        for r in OVERLAP:
            words = _words("method=fedrolex", f"method.overlap={r}", rate=WINDOWS, released=UP)
            yield _cell("overlap", setup, f"fedrolex-{r}", words)


def _participation() -> Iterator[Cell]:
    for row, by_cohort in PARTICIPATION.items():
        for cohort, text in by_cohort.items():
            words = _with(f"fleet.cohort={cohort}", PARTS[row])
            yield _cell("participation", "cifar10-high", f"{row}-{cohort}", words, text)


def _rare() -> Iterator[Cell]:
    """Not the paper's: it never ties data to capacity, where leaving devices out must lose."""
    for row, words in {**PARTS, **{row: _width(width) for row, width in SAME.items()}, **BESIDE}.items():
        yield _cell("rare", "cifar10-rare", row, {"tuned": words["tuned"]}, beside=True)


TABLES = {
    "overall": _overall, "rho": _rho, "gamma": _gamma, "real-world": _real_world, "weighting": _weighting,
    "overlap": _overlap, "participation": _participation, "rare": _rare,
}  # fmt: skip
"""What makes the cells of every table and figure that is trained, by name."""


def cells(table: str) -> list[Cell]:
    """The cells of a table or figure."""
    one_of("table", table, list(TABLES))
    return list(TABLES[table]())


def find_cell(name: str) -> Cell:
    """A cell by its name, ``TABLE/SETUP/ROW``."""
    table, _, rest = name.partition("/")
    found = cells(table)
    for cell in found:
        if cell.name == name:
            return cell
    names = [cell.name for cell in found if cell.setup == rest.partition("/")[0]] or [cell.name for cell in found]
    raise FedrolexError(
        f"no cell {name!r} in {table}: there are {', '.join(names[:8])}{' …' if len(names) > 8 else ''}"
    )


def cell_recipe(name: str) -> Recipe:
    """The recipe of ``TABLE/SETUP/ROW@KIND``."""
    cell, _, kind = name.partition("@")
    found = find_cell(cell)
    if not kind and len(found.kinds) == 1:
        (kind,) = found.kinds
    if not kind:
        raise FedrolexError(f"{cell} is a recipe in several kinds: give {cell}@KIND, one of {', '.join(found.kinds)}")
    one_of("kind", kind, get_args(Kind))
    return found.recipe(kind)  # type: ignore[arg-type]
