"""What is shown of finished runs: a table, a verdict, a picture."""

from collections.abc import Sequence
from math import isfinite, sqrt
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console

from fedrolex.cli.console import remark, table
from fedrolex.cli.figures import page
from fedrolex.cli.seeds import number
from fedrolex.recipes.alternatives import BOUND
from fedrolex.runs import Run
from fedrolex.tasks.metrics import score

ACCURACIES = {
    "global_accuracy": "global accuracy",
    "accuracy_as_trained": "without offsets",
    "local_accuracy": "local accuracy",
    "local_accuracy_masked": "local, masked",
    "rare_accuracy": "rare classes",
    "validation_accuracy": "validation",
    "accuracy_no_oov": "without unknown words",
    "accuracy_no_oov_no_eos": "and ends",
}
ERRORS = {"mean_absolute_error": "mean absolute error", "r2": "R²"}
NAMES = ACCURACIES | ERRORS
REMARKS = {
    "test_examples": "measured on {:,} examples",
    "statistics": "batch norm statistics: {}",
    "unused_examples": "{:,} examples are with nobody",
    "public_examples": "{:,} examples put aside as public data",
    "validation_examples": "{:,} examples put aside as validation data",
    "dropped": "{:,} answers dropped",
    "privacy": "{}",
    "labels_per_client": "{:.2f} labels a client",
}
RISING = 0.01  # of accuracy or R², from the best evaluation before to the last
SENT = ("bytes", "bytes_of_full_model")
SPARE = ("training seconds", "local, masked", "validation", "local accuracy", "seed", "of full-model bytes")


def show_results(
    screen: Console, results: list[dict[str, Any]], metrics: Sequence[str] = (), means: Sequence[dict[str, Any]] = ()
) -> None:
    """A table of finished runs, with a column for each of the recipes' own ``metrics``.

    Below them the ``means``, see :func:`~fedrolex.cli.seeds.over_seeds`, of methods with several seeds.
    """
    rows = [*results, *(each for each in means if len(each["seeds"]) > 1)]
    shown = {key: heading for key, heading in ACCURACIES.items() if any(result.get(key) for result in results)}
    if all(result.get("local_accuracy_masked") == result.get("local_accuracy") for result in results):
        shown.pop("local_accuracy_masked", None)  # every client holds every class
    if all(result.get("local_accuracy") == result.get("global_accuracy") for result in results):
        shown.pop("local_accuracy", None)  # every client is tested on the same examples
    seeds = [str(row["seed"]) if "seed" in row else f"{len(row['seeds'])} seeds" for row in rows]
    columns = {"": [str(row["method"]) for row in rows], "seed": seeds}
    for key, heading in shown.items():
        columns[heading] = [number(row.get(key), ".1%") for row in rows]
    headings = {key: heading for key, heading in ERRORS.items() if any(key in result for result in results)}
    for name, heading in (headings | {name: name for name in metrics}).items():
        columns[heading] = [number(row.get(name), ".3g") for row in rows]
    columns["sent"] = [f"{number(row['bytes'], '.1f', 2**20)} MiB" for row in rows]
    columns["of full-model bytes"] = [f"{_part(row):.1%}" for row in rows]
    columns["training seconds"] = [number(row["seconds"], ".0f") for row in rows]
    for spare in (*SPARE, None):  # what a narrow screen can do without
        wide = [max(len(word) for word in (*heading.split(), *cells, "")) for heading, cells in columns.items()]
        if spare is None or sum(wide) + 3 * len(wide) + 1 <= screen.width:
            break
        columns.pop(spare, None)
    made = table(columns, list(zip(*columns.values(), strict=True)), words=1, ends=[len(results) - 1])
    made.columns[0].no_wrap = True
    screen.print(made)
    for result in results:
        measured = result.get("submodels")
        if measured:
            by = score(result)
            sizes = ", ".join(f"{capacity}: {in_words(by, value)}" for capacity, value in measured.items())
            screen.print(f"sub-models of {result['method']}, {NAMES[by]}: {sizes}", highlight=False)
    first = results[0]
    if remarks := [said.format(first[key]) for key, said in REMARKS.items() if first.get(key)]:
        remark(screen, "; ".join(remarks))
    screen.print(f"run: {first['run']}", style="dim", highlight=False, soft_wrap=True)


def _part(row: dict[str, Any]) -> float:
    """What was sent, as a part of what training the full model would have sent."""
    sent, full = (row[key]["mean"] if isinstance(row[key], dict) else row[key] for key in SENT)
    return float(sent / max(1, full))


def in_words(by: str, value: float | None) -> str:
    """What models are compared by, as it is shown: an accuracy in percent, R² as it is."""
    return "" if value is None else f"{value:.1%}" if by in ACCURACIES else f"{value:.3f}"


def verdict(results: list[dict[str, Any]], methods: list[str]) -> str:
    """One line: did the first method beat what the fleet could do without it? A bound is out of reach."""
    by = score(results[0])

    def mean(what: str) -> float:
        found = [float("-inf") if result[by] is None else result[by] for result in results if result["method"] == what]
        return float(sum(found) / len(found))

    best = max((what for what in methods[1:] if not what.endswith(BOUND)), key=mean)
    gap = mean(methods[0]) - mean(best)
    if not isfinite(gap):
        return f"{methods[0] if mean(methods[0]) < mean(best) else best} was not measured: there is nothing to compare."
    if gap == 0:
        return f"{methods[0]} is as good as the best of what else is in this table ({best})."
    far = f"{100 * abs(gap):.1f} points" if by in ACCURACIES else f"{abs(gap):.3f} in {NAMES[by]}"
    chance = _chance([result for result in results if result["method"] == best], mean(best)) if by in ACCURACIES else 0
    little = " Chance alone makes as much of so few test examples." * (abs(gap) < chance)
    if gap > 0:
        return f"{methods[0]} beats the best of what else is in this table ({best}) by {far}.{little}"
    recipe = next(Path(result["run"]) / "recipe.yaml" for result in results if result["method"] == best)
    return f"Here the fleet does better without {methods[0]}: {best}, by {far}.{little} Its recipe is {recipe}."


def _chance(results: Sequence[dict[str, Any]], accuracy: float) -> float:
    """Two standard errors of the difference between two models of about this accuracy, by the test examples alone."""
    examples = sum(result.get("test_examples") or 0 for result in results)
    return 2 * sqrt(2 * accuracy * (1 - accuracy) / examples) if examples else 0


def still_rising(run: Run) -> str | None:
    """One line where the last evaluation of a run is its best, by a point or more: more rounds may be worth it."""
    rows = run.rows()
    by = score(next((row for row in reversed(rows) if "loss" in row), rows[-1]))
    values = [row[by] for row in rows if row.get(by) is not None]
    if len(values) < 2 or values[-1] - max(values[:-1]) < RISING or 1 - values[-1] < RISING:
        return None
    more = f"fedrolex resume {quote(str(run.folder))} --set rounds={2 * len(rows)}"
    before, last = (in_words(by, value) for value in (max(values[:-1]), values[-1]))
    return f"It was still rising, from {before} to {last}; for more rounds: {more}"


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Accuracy, or R², over rounds of several runs."""
    by = score(results[0])
    with page(path, 1, (7, 4), "both") as axes:
        for place, result in enumerate(results):
            rows = [row for row in Run.open(Path(result["run"])).rows() if row.get(by) is not None]
            style = {"linewidth": 2.2} if place == 0 else {"linewidth": 1.2, "linestyle": "--"}
            places, values = [r["round"] + 1 for r in rows], [r[by] for r in rows]
            axes.plot(places, values, label=result["method"], marker="o", markersize=3, **style)
        axes.set(xlabel="round", ylabel=f"{'accuracy' if by in ACCURACIES else NAMES[by]} on unseen examples")
        axes.set_ylim(0 if by in ACCURACIES else None, 1)
        axes.locator_params(axis="x", integer=True)
        axes.legend(frameon=False, fontsize=8)
