"""What is shown of runs while they go on: a live line each on a terminal, a line now and then in a pipe."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.text import Text

from fedrolex.cli.results import in_words
from fedrolex.recipes import Recipe
from fedrolex.runs.run import Progress as RoundDone
from fedrolex.runs.training import LATE
from fedrolex.tasks.metrics import SCORES

NAMED = 8  # clients of a round, in one line
SILENCE = 20  # seconds without a word in a pipe
RECENT = 20  # rounds that the time left is judged by
POINTS = 12  # of a spark-line
Watch = Callable[[str, Recipe, Sequence[Mapping[str, Any]]], RoundDone]
BARS = "▁▂▃▄▅▆▇█"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Watched:
    """A run as it is watched: what its rounds so far come to.

    Args:
        what: its name.
        rounds: how many it has.
        before: metrics of the rounds that are done already.
        now: a clock's time, in seconds.
    """

    def __init__(self, what: str, rounds: int, before: Iterable[Mapping[str, Any]] = (), now: float = 0.0) -> None:
        self.what, self.rounds, self.done = what, rounds, 0
        self._sent: dict[int, int] = {}
        self._dropped: dict[int, int] = {}
        self._scores: dict[int, tuple[str, float]] = {}
        self._times = [now]
        for row in before:
            self._note(row)

    def add(self, row: Mapping[str, Any], now: float) -> None:
        """A round is over; one that was known already is made again."""
        for known in (self._sent, self._dropped, self._scores):
            for round in [each for each in known if each >= row["round"]]:
                del known[round]
        self._note(row)
        self._times = [*self._times, now][-RECENT - 1 :]

    def _note(self, row: Mapping[str, Any]) -> None:
        round = row["round"]
        self.done = round + 1
        self._sent[round] = row["bytes_down"] + row["bytes_up"]
        self._dropped[round] = len(row["dropped"])
        name = next((name for name in SCORES if row.get(name) is not None), None)
        if name is not None:
            self._scores[round] = (name, row[name])

    @property
    def score(self) -> str:
        """What the model was measured at last; empty before that."""
        return in_words(*self._scores[max(self._scores)]) if self._scores else ""

    @property
    def spark(self) -> str:
        """The last measurements as bars, from their lowest to their highest."""
        values = [value for _, (_, value) in sorted(self._scores.items())][-POINTS:]
        low, high = (min(values), max(values)) if values else (0.0, 0.0)
        return "".join(BARS[round((value - low) / (high - low or 1) * (len(BARS) - 1))] for value in values)

    @property
    def sent(self) -> str:
        """Bytes of all rounds, both ways, in words."""
        number, place = float(sum(self._sent.values())), 0
        while number >= 1024 and place < len(UNITS) - 1:
            number, place = number / 1024, place + 1
        return f"{number:.1f} {UNITS[place]}" if place else f"{number:.0f} B"

    @property
    def dropped(self) -> str:
        """How many answers were not used; empty where all were."""
        count = sum(self._dropped.values())
        return f"{count:,} dropped" if count else ""

    @property
    def left(self) -> str:
        """Time until the last round, by the latest ones; empty before the first."""
        if len(self._times) < 2:
            return ""
        a_round = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        return f"{timedelta(seconds=round(a_round * (self.rounds - self.done)))} left"

    def line(self) -> str:
        """All of it in one line, for a pipe."""
        told = (self.score, f"{self.sent} sent", self.dropped, self.left)
        return f"{self.what}: round {self.done} of {self.rounds}, {', '.join(each for each in told if each)}"


class _Said(ProgressColumn):
    """Something that a watched run says of itself."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__()

    def render(self, task: Task) -> Text:
        return Text(str(getattr(task.fields["run"], self._name)), no_wrap=True)


class _Rounds(ProgressColumn):
    def render(self, task: Task) -> Text:
        run: Watched = task.fields["run"]
        return Text(f"{run.done}/{run.rounds}", no_wrap=True)


@contextmanager
def shown(quiet: bool) -> Iterator[Watch]:
    """Rounds, time left, accuracy, bytes and dropped answers of runs: live on a terminal, in a pipe a line.

    On a terminal that is too small for all runs, those that are done make room for new ones.

    Gives a function that takes a run's name, its recipe, and the metrics of the rounds that are done already, when the
    run begins; what it returns is called after every round.

    Args:
        quiet: show nothing but why clients are dropped.
    """
    screen = Console(stderr=True)
    with Progress(*columns(screen), console=screen, disable=quiet or not screen.is_terminal) as bar:

        def watched(name: str, recipe: Recipe, done: Sequence[Mapping[str, Any]] = ()) -> RoundDone:
            room = max(1, screen.height - 2)
            for task in [task for task in bar.tasks if task.finished][: max(0, len(bar.tasks) + 1 - room)]:
                bar.remove_task(task.id)
            run = Watched(f"{name}, seed {recipe.seed}", recipe.rounds, done, time.monotonic())
            return _step(bar, screen, run, quiet)

        yield watched


def columns(screen: Console) -> list[ProgressColumn]:
    """What a screen has room for; a spark-line where it has the letters, too."""
    spark = screen.width >= 80 and screen.encoding.lower().startswith("utf")
    names = ["score", *["spark"] * spark, "left", *["sent"] * (screen.width >= 95), "dropped"]
    said: list[ProgressColumn] = [_Said(name) for name in names]
    return [_Said("what"), BarColumn(20 if screen.width >= 110 else 8), _Rounds(), *said]


def _step(bar: Progress, screen: Console, run: Watched, quiet: bool) -> RoundDone:
    """What is shown of a run after every round."""
    task = bar.add_task("", total=run.rounds, completed=run.done, run=run)
    last = time.monotonic()

    def step(row: dict[str, Any]) -> None:
        nonlocal last
        for said in dropped(row):
            screen.print(said, highlight=False, markup=False, soft_wrap=True)
        run.add(row, time.monotonic())
        bar.update(task, completed=run.done)
        if not (quiet or screen.is_terminal) and time.monotonic() - last > SILENCE:
            last = time.monotonic()
            screen.print(run.line(), highlight=False, markup=False, soft_wrap=True)

    return step


@contextmanager
def working() -> Iterator[Callable[[str], None]]:
    """Inside, what is told of long work is shown: as it changes on a terminal, now and then as a line in a pipe."""
    screen, last = Console(stderr=True), time.monotonic()
    with screen.status("") as status:  # which shows nothing in a pipe

        def say(said: str) -> None:
            nonlocal last
            status.update(escape(said))
            if not screen.is_terminal and time.monotonic() - last > SILENCE:
                last = time.monotonic()
                screen.print(said, highlight=False, markup=False, soft_wrap=True)

        yield say


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
