"""What is shown of finished runs: a table, a verdict, a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedrolex.cli.console import remark, table
from fedrolex.cli.figures import page
from fedrolex.runs import Run

ACCURACIES = {
    "global_accuracy": "global accuracy",
    "local_accuracy": "local accuracy",
    "local_accuracy_masked": "local, masked",
    "rare_accuracy": "rare classes",
    "validation_accuracy": "validation",
    "accuracy_no_oov": "without unknown words",
    "accuracy_no_oov_no_eos": "and ends",
}
REMARKS = {
    "statistics": "batch norm statistics: {}",
    "unused_examples": "{:,} examples are with nobody",
    "public_examples": "{:,} examples put aside as public data",
    "validation_examples": "{:,} examples put aside as validation data",
    "dropped": "{:,} answers dropped",
    "labels_per_client": "{:.2f} labels a client",
}
SPARE = ("training seconds", "local, masked", "validation", "local accuracy", "seed", "of full-model training")


def show_results(screen: Console, results: list[dict[str, Any]], metrics: Sequence[str] = ()) -> None:
    """A table of finished runs, with a column for each of the recipes' own ``metrics``."""
    shown = {key: heading for key, heading in ACCURACIES.items() if any(result.get(key) for result in results)}
    if all(result.get("local_accuracy_masked") == result.get("local_accuracy") for result in results):
        shown.pop("local_accuracy_masked", None)  # every client holds every class
    columns = {"": [str(result["method"]) for result in results], "seed": [str(result["seed"]) for result in results]}
    for key, heading in shown.items():
        columns[heading] = ["" if result.get(key) is None else f"{result[key]:.1%}" for result in results]
    for name in metrics:
        columns[name] = ["" if result.get(name) is None else f"{result[name]:.3g}" for result in results]
    columns["sent"] = [f"{result['bytes'] / 2**20:.1f} MiB" for result in results]
    parts = [result["bytes"] / max(1, result["bytes_of_full_model"]) for result in results]
    columns["of full-model training"] = [f"{part:.1%}" for part in parts]
    columns["training seconds"] = [f"{result['seconds']:.0f}" for result in results]
    for spare in (*SPARE, None):  # what a narrow screen can do without
        wide = [max(len(word) for word in (*heading.split(), *cells, "")) for heading, cells in columns.items()]
        if spare is None or sum(wide) + 3 * len(wide) + 1 <= screen.width:
            break
        columns.pop(spare, None)
    made = table(columns, list(zip(*columns.values(), strict=True)), words=1)
    made.columns[0].no_wrap = True
    screen.print(made)
    for result in results:
        measured = result.get("submodels")
        if measured:
            sizes = ", ".join(f"{capacity}: {value:.1%}" for capacity, value in measured.items())
            screen.print(f"sub-models of {result['method']}, global accuracy: {sizes}", highlight=False)
    first = results[0]
    if remarks := [said.format(first[key]) for key, said in REMARKS.items() if first.get(key)]:
        remark(screen, "; ".join(remarks))
    screen.print(f"run: {first['run']}", style="dim", highlight=False, soft_wrap=True)


def verdict(results: list[dict[str, Any]], methods: list[str]) -> str:
    """One line: did the first method beat what the fleet could do without it? The last one is out of reach."""

    def mean(what: str) -> float:
        found = [float(result["global_accuracy"]) for result in results if result["method"] == what]
        return sum(found) / len(found)

    best = max(methods[1:-1], key=mean)
    gap = 100 * (mean(methods[0]) - mean(best))
    if gap > 0:
        return f"{methods[0]} beats the best this fleet could do without it ({best}) by {gap:.1f} points."
    return f"Here the fleet does better without it: {best}, by {-gap:.1f} points."


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Accuracy over rounds of several runs."""
    with page(path, 1, (7, 4), "both") as axes:
        for place, result in enumerate(results):
            rows = [row for row in Run.open(Path(result["run"])).rows() if "global_accuracy" in row]
            style = {"linewidth": 2.2} if place == 0 else {"linewidth": 1.2, "linestyle": "--"}
            places, values = [r["round"] + 1 for r in rows], [r["global_accuracy"] for r in rows]
            axes.plot(places, values, label=result["method"], marker="o", markersize=3, **style)
        axes.set(xlabel="round", ylabel="accuracy on unseen examples", ylim=(0, 1))
        axes.locator_params(axis="x", integer=True)
        axes.legend(frameon=False, fontsize=8)
