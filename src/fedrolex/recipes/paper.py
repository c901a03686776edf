"""Every cell of the paper's tables and figures as a recipe, in three kinds and a variant.

A cell is ``TABLE/SETUP/ROW``, such as ``overall/cifar10-high/fedrolex``: a row of one of the paper's tables or figures
on one data set. ``fedrolex show TABLE/SETUP/ROW@KIND`` prints its recipe. The kinds:

- ``printed``: what the paper's text and appendix say. Capacities belong to clients, norms are measured with statistics.
- ``released``: what the authors' code executed: Adam and batches of 128 in the workers, the rate falls by 4, capacities
  are drawn anew every round, norms take the statistics of test batches of 100, windows are rounded up, absent classes
  have a score of 0, and Federated Dropout draws for every convolution apart. TensorFloat-32, which cuDNN takes unless
  it is told not to.
- ``tuned``: ours. A rate that works in 1000 rounds and falls late, images shifted into their mean colour, the rest as released where
  the paper is silent (masks, class-wise averages, split). ``tuned-redrawn`` has capacities drawn anew every round.

Beside the paper's rows stand those a practitioner would ask for: everyone at one width, only those who can hold it, and
columns.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from fedrolex.core import FedrolexError, one_of
from fedrolex.recipes.recipe import Recipe, own_recipe

Kind = Literal["printed", "released", "tuned", "tuned-redrawn"]
Words = Mapping[Kind, tuple[str, ...]]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Schedule:
    """The length of a run, and the rounds at which its rate falls."""

    rounds: int
    milestones: tuple[int, ...]


TUNED = Schedule(1000, (800, 950))
"""Of a tuned run."""


@dataclass(frozen=True)
class Setup:
    """A data set spread over clients.

    Attributes:
        recipe: the package's recipe that it starts from.
        labels: how many a client holds.
        lr, batch: as printed.
        parts: as printed, of methods that train parts.
        plain: as printed, where everyone trains the same model.
        words: settings of its own.
    """

    recipe: str
    labels: int
    lr: float
    batch: int
    parts: Schedule
    plain: Schedule
    words: tuple[str, ...] = ()


LONG = Schedule(3500, (1000, 1500))
PAPER_SETUPS = {
    "cifar10-high": Setup("cifar10", 2, 2e-4, 10, Schedule(2500, (800, 1500)), Schedule(1250, (500, 1000))),
    "cifar10-low": Setup("cifar10", 5, 2e-4, 10, Schedule(2000, (800, 1250)), Schedule(1500, (500, 1000))),
    "cifar100-high": Setup("cifar100", 20, 1e-4, 24, LONG, LONG),
    "cifar100-low": Setup("cifar100", 50, 1e-4, 24, LONG, LONG),
}
"""By name; high and low are the paper's words for how different clients' labels are."""

RARE = ("task.partition.name=labels", "task.partition.rare=[7, 8, 9]", "task.partition.rare_capacity=1/8")
SETUPS = PAPER_SETUPS | {"cifar10-rare": replace(PAPER_SETUPS["cifar10-high"], labels=3, words=RARE)}
"""The paper's, and one in which three classes belong to devices of an eighth and below."""


@dataclass(frozen=True)
class Printed:
    """What the paper prints, in per cent: the mean and the standard deviation of global accuracy, and of local."""

    mean: float
    std: float
    local: float | None = None


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
    def name(self) -> str:
        """As on the command line."""
        return f"{self.table}/{self.setup}/{self.row}"

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds it has; what the paper quotes from another one has only ours."""
        return tuple(self.words)

    def recipe(self, kind: Kind, scale: float = 1.0) -> Recipe:
        """The recipe of the cell, its rounds and milestones multiplied by ``scale``."""
        one_of("kind", kind, self.kinds)
        setup = SETUPS[self.setup]
        words = [*_kind_words(self, setup, kind), *setup.words, *self.words[kind]]
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


def _kind_words(cell: Cell, setup: Setup, kind: Kind) -> list[str]:
    """Settings of a kind on a data set."""
    schedule = TUNED if "tuned" in kind else cell.schedule or setup.parts
    rounds = schedule.rounds
    words = [
        f"rounds={rounds}", f"client.milestones={list(schedule.milestones)}", f"evaluate_every={rounds // 20}",
        f"checkpoint_every={rounds // 10}", "callbacks=[]", f"task.partition.labels={setup.labels}",
    ]  # fmt: skip
    if kind == "printed":
        words += [
            f"client.lr={setup.lr}", f"client.batch={setup.batch}", "client.clip=null", "client.mask=none",
            "task.partition.name=labels", "precision=tf32",
        ]  # fmt: skip
    elif kind == "released":
        words += [
            "client.optimizer=adam", "client.momentum=0.0", "client.lr=0.0002", "client.batch=128", "client.decay=0.25",
            "fleet.redrawn=true", "evaluation.statistics=test-batch", "evaluation.batch=100",
            "precision=tf32",
        ]  # fmt: skip
    else:
        words += ["task.padding=mean", "precision=bf16", f"fleet.redrawn={str(kind == 'tuned-redrawn').lower()}"]
    return words


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
PARTS: dict[str, Words] = {
    "fedrolex": _words("method=fedrolex", rate=WINDOWS, released=UP),
    "heterofl": _words("method=heterofl", rate=NESTED, released=UP),
    "federated-dropout": {**DROPOUT, "released": MISWIRED["released"]},
}
DISTILLED = {"feddf": "feddf", "ds-fl": "dsfl", "fed-et": "fedet"}


def _width(width: str) -> Words:
    """Everyone trains this width, begun at its own."""
    return _words("method=fedavg", f"method.width={width}", "method.own_width=true", rate=SAME_WIDTH, released=UP)


def _able(*widths: str) -> Words:
    """Only those who can hold them train these widths, each begun at its own."""
    return _words("method=columns", f"method.columns={list(widths)}", rate=SAME_WIDTH)


BESIDE: dict[str, Words] = {
    "columns": _words("method=columns", "method.turns=true", rate=COLUMNS),
    "everyone-1-4": _width("1/4"),
    "only-who-can-1-2": _able("1/2"),
    "only-who-can-1-4": _able("1/4"),
    "only-who-can-1-8": _able("1/8"),
    "only-who-can-1-4-twice": _able("1/4", "1/4"),
}
"""What the same fleet could do without partial training, and columns."""

OVERALL = {
    "fedrolex": ("69.44 1.50 95.95", "84.45 0.36", "56.57 0.15 81.58", "58.73 0.33"),
    "heterofl": ("63.90 2.74", "73.19 1.71", "52.38 0.80", "57.44 0.42"),
    "federated-dropout": ("46.64 3.05", "76.20 2.53", "45.07 0.07", "46.40 0.21"),
    "smallest": ("38.82 0.88 85.90", "46.86 0.54 66.02", "12.69 0.50 34.51", "19.70 0.34 33.22"),
    "largest": ("75.74 0.42 95.54", "84.48 0.58 93.54", "60.89 0.60 81.99", "62.51 0.20 76.43"),
    "feddf": ("73.81 0.42", "76.55 0.32", "31.87 0.46", "37.87 0.31"),
    "ds-fl": ("65.27 0.53", "68.44 0.47", "29.12 0.51", "33.56 0.55"),
    "fed-et": ("78.66 0.31", "81.13 0.28", "35.78 0.45", "41.58 0.36"),
}
"""Table 3: global accuracy on the four set-ups, mean and deviation; then local accuracy, where another table has it."""

REAL_WORLD = {
    "fedrolex": ("63.17 1.45 94.05", "80.14 0.52 91.03", "45.78 1.71 73.33", "48.44 0.51 66.31"),
    "smallest": OVERALL["smallest"],
    "largest": ("75.74 0.41 95.54", *OVERALL["largest"][1:]),
}
"""Table 4."""
WEIGHTING = {
    "uniform": {"cifar10-high": "69.44 1.50 95.95", "cifar100-high": "56.57 0.15 81.58"},
    "size": {"cifar10-high": "69.09 1.42 95.98", "cifar100-high": "56.99 0.27 81.23"},
    "updates": {"cifar10-high": "68.83 0.89 96.01", "cifar100-high": "56.63 0.36 81.23"},
    "hybrid": {"cifar10-high": "68.78 0.89 96.05", "cifar100-high": "56.71 0.20 81.49"},
}
PARTICIPATION = {
    "fedrolex": {5: "57.90 2.72", 10: "69.44 1.50", 20: "71.85 1.22"},
    "heterofl": {5: "48.43 1.78", 10: "63.90 2.74", 20: "65.07 2.17"},
    "federated-dropout": {5: "42.06 1.29", 10: "46.64 3.05", 20: "55.20 4.64"},
}
RHO = [f"{tenth / 10:.1f}" for tenth in range(11)]
RHO_SCHEDULES = {"cifar10": Schedule(1250, (500, 1000)), "cifar100": Schedule(2000, (1000, 1500))}
RHO_MIDDLE = Schedule(1500, (700, 1200))  # CIFAR-10 between 0.3 and 0.7; for 0.5 nothing is printed
GAMMA = (2, 4, 8, 16)
GAMMA_SCHEDULE = Schedule(1500, (800, 1200))
OVERLAP = ("0", "0.25", "0.5", "0.75", "1")
SAME = {"smallest": "1/16", "largest": "1"}
PUBLIC = {"cifar10": "cifar100", "cifar100": "cifar10"}


def _printed(text: str) -> Printed:
    return Printed(*map(float, text.split()))


def _overall() -> Iterator[Cell]:
    for setup, texts in zip(PAPER_SETUPS, zip(*OVERALL.values(), strict=True), strict=True):
        printed = dict(zip(OVERALL, map(_printed, texts), strict=True))
        for row, words in PARTS.items():
            yield Cell("overall", setup, row, words, printed[row])
        for row, width in SAME.items():
            yield Cell("overall", setup, row, _width(width), printed[row], SETUPS[setup].plain)
        for row, method in DISTILLED.items():
            public = f"task.public={PUBLIC[SETUPS[setup].recipe]}"
            yield Cell("overall", setup, row, {"tuned": (f"method={method}", public)}, printed[row], quoted=True)
        for row, words in BESIDE.items():
            yield Cell("overall", setup, row, words, beside=True)


def _rho() -> Iterator[Cell]:
    for setup in PAPER_SETUPS:
        data = SETUPS[setup].recipe
        for rho in RHO:
            words = _with(f"fleet.capacities=rho:{rho}", PARTS["fedrolex"])
            middle = data == "cifar10" and 0.3 <= float(rho) <= 0.7
            schedule = RHO_MIDDLE if middle else RHO_SCHEDULES[data]
            yield Cell("rho", setup, f"fedrolex-{rho}", words, schedule=schedule)


def _gamma() -> Iterator[Cell]:
    for setup in PAPER_SETUPS:
        for gamma in GAMMA:
            fleet, size = f"fleet.capacities=gamma:{gamma}", f"1/{gamma}"
            rows = {
                "fedrolex": PARTS["fedrolex"], "federated-dropout": PARTS["federated-dropout"], "own-size": _able(size),
                "columns": _able(size, size),
            }  # fmt: skip
            for row, words in rows.items():
                beside = row not in PARTS
                yield Cell("gamma", setup, f"{row}-{gamma}", _with(fleet, words), None, GAMMA_SCHEDULE, beside=beside)


def _real_world() -> Iterator[Cell]:
    income = "fleet.capacities=income"
    for setup, texts in zip(PAPER_SETUPS, zip(*REAL_WORLD.values(), strict=True), strict=True):
        printed = dict(zip(REAL_WORLD, map(_printed, texts), strict=True))
        yield Cell("real-world", setup, "fedrolex", _with(income, PARTS["fedrolex"]), printed["fedrolex"])
        for row, width in SAME.items():
            yield Cell("real-world", setup, row, _with(income, _width(width)), printed[row], SETUPS[setup].plain)
        for row, words in BESIDE.items():
            yield Cell("real-world", setup, row, _with(income, words), beside=True)


def _weighting() -> Iterator[Cell]:
    for weighting, by_setup in WEIGHTING.items():
        words = _words("method=fedrolex", f"method.weighting={weighting}", rate=WINDOWS, released=UP)
        for setup, text in by_setup.items():
            yield Cell("weighting", setup, weighting, words, _printed(text))


def _overlap() -> Iterator[Cell]:
    for setup in PAPER_SETUPS:
        for r in OVERLAP:
            words = _words("method=fedrolex", f"method.overlap={r}", rate=WINDOWS, released=UP)
            yield Cell("overlap", setup, f"fedrolex-{r}", words)


def _participation() -> Iterator[Cell]:
    for row, by_cohort in PARTICIPATION.items():
        for cohort, text in by_cohort.items():
            words = _with(f"fleet.cohort={cohort}", PARTS[row])
            yield Cell("participation", "cifar10-high", f"{row}-{cohort}", words, _printed(text))


def _rare() -> Iterator[Cell]:
    """Not the paper's: it never ties data to capacity, where leaving devices out must lose."""
    for row, words in {**PARTS, **{row: _width(width) for row, width in SAME.items()}, **BESIDE}.items():
        yield Cell("rare", "cifar10-rare", row, {"tuned": words["tuned"]}, beside=True)


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
    if not kind:
        raise FedrolexError(f"{cell} is a recipe in several kinds: give {cell}@KIND, one of {', '.join(found.kinds)}")
    one_of("kind", kind, get_args(Kind))
    return found.recipe(kind)  # type: ignore[arg-type]
