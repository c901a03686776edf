"""What the paper prints, in per cent: mean and deviation of global accuracy, then of local where a table has it."""

from dataclasses import dataclass

from fedrolex.recipes.paper_setups import Schedule


@dataclass(frozen=True)
class Printed:
    """What the paper prints, in per cent: the mean and the standard deviation of global accuracy, and of local."""

    mean: float
    std: float
    local: float | None = None


def printed(text: str) -> Printed:
    """Of a text such as ``69.44 1.50 95.95``."""
    return Printed(*map(float, text.split()))


COLUMNS = ("cifar10-high", "cifar10-low", "cifar100-high", "cifar100-low", "stackoverflow")


def _row(*texts: str) -> dict[str, str]:
    """A row of a table, by data set; methods that compare scores of classes have none on text."""
    return dict(zip(COLUMNS, texts, strict=False))


OVERALL = {
    "fedrolex": _row("69.44 1.50 95.95", "84.45 0.36", "56.57 0.15 81.58", "58.73 0.33", "29.22 0.24"),
    "heterofl": _row("63.90 2.74", "73.19 1.71", "52.38 0.80", "57.44 0.42", "27.21 0.22"),
    "federated-dropout": _row("46.64 3.05", "76.20 2.53", "45.07 0.07", "46.40 0.21", "23.46 0.12"),
    "smallest": _row("38.82 0.88 85.90", "46.86 0.54 66.02", "12.69 0.50 34.51", "19.70 0.34 33.22", "27.32 0.12"),
    "largest": _row("75.74 0.42 95.54", "84.48 0.58 93.54", "60.89 0.60 81.99", "62.51 0.20 76.43", "29.79 0.32"),
    "feddf": _row("73.81 0.42", "76.55 0.32", "31.87 0.46", "37.87 0.31"),
    "ds-fl": _row("65.27 0.53", "68.44 0.47", "29.12 0.51", "33.56 0.55"),
    "fed-et": _row("78.66 0.31", "81.13 0.28", "35.78 0.45", "41.58 0.36"),
}
"""Table 3; local accuracy from Table 4."""

REAL_WORLD = {
    "fedrolex": _row("63.17 1.45 94.05", "80.14 0.52 91.03", "45.78 1.71 73.33", "48.44 0.51 66.31", "29.55 0.41"),
    "smallest": OVERALL["smallest"],
    "largest": {**OVERALL["largest"], "cifar10-high": "75.74 0.41 95.54"},
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
GAMMA = (2, 4, 8, 16)
OVERLAP = ("0", "0.25", "0.5", "0.75", "1")

RHO_SCHEDULES = {"cifar10": Schedule(1250, (500, 1000)), "cifar100": Schedule(2000, (1000, 1500))}
RHO_MIDDLE = Schedule(1500, (700, 1200))
"""CIFAR-10 between 0.3 and 0.7; for 0.5 nothing is printed."""
GAMMA_SCHEDULE = Schedule(1500, (800, 1200))
TEXT_SCHEDULE = Schedule(1500, (800,))
"""Of both figures."""
