"""What is shown of runs while they go on."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedrolex.cli.results import in_words
from fedrolex.recipes import Recipe
from fedrolex.runs.run import Progress as RoundDone
from fedrolex.runs.training import LATE
from fedrolex.tasks.metrics import SCORES

NAMED = 8  # clients of a round, in one line
SILENCE = 20  # seconds without a word in a pipe


@contextmanager
def shown(names: Sequence[str], recipes: Sequence[Recipe], quiet: bool) -> Iterator[list[RoundDone]]:
    """Rounds, time left and accuracy of every run on a terminal; in a pipe a line now and then."""
    screen = Console(stderr=True)
    name, accuracy = TextColumn("{task.description}"), TextColumn("{task.fields[accuracy]}")
    columns = (name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), accuracy)
    with Progress(*columns, console=screen, disable=quiet or not screen.is_terminal) as bar:
        yield [_step(bar, screen, name, recipe, quiet) for name, recipe in zip(names, recipes, strict=True)]


def _step(bar: Progress, screen: Console, name: str, recipe: Recipe, quiet: bool) -> RoundDone:
    """What is shown of a run after every round."""
    what = f"{name}, seed {recipe.seed}"
    task = bar.add_task(what, total=recipe.rounds, accuracy="")
    last = time.monotonic()

    def step(row: dict[str, Any]) -> None:
        nonlocal last
        for said in dropped(row):
            screen.print(said, highlight=False, markup=False, soft_wrap=True)
        bar.update(task, completed=row["round"] + 1)
        accuracy = next((in_words(name, row[name]) for name in SCORES if name in row), "")
        if accuracy:
            bar.update(task, accuracy=accuracy)
        if not (quiet or screen.is_terminal) and time.monotonic() - last > SILENCE:
            last = time.monotonic()
            screen.print(f"{what}: round {row['round'] + 1} of {recipe.rounds} {accuracy}".rstrip(), highlight=False)

    return step


def dropped(row: Mapping[str, Any]) -> list[str]:
    """Whose answers of a round were not used, a line for every reason but for stragglers, who were asked for."""
    reasons: dict[str, list[str]] = {}
    for client, why in row["dropped"].items():
        if why != LATE:
            reasons.setdefault(why, []).append(client)
    return [
        f"round {row['round']}: client{'s' * (len(who) > 1)} {', '.join(who[:NAMED])}"
        f"{f' and {len(who) - NAMED} more' if len(who) > NAMED else ''} dropped: {why}"
        for why, who in reasons.items()
    ]
