"""Where commands print for people."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Standard output, words as they are; wide enough for whole lines when it is a file or a pipe."""
    as_they_are: dict[str, Any] = {"markup": False, "emoji": False}  # a run may be called [bold] or :+1:
    plain = Console(**as_they_are)
    return plain if plain.is_terminal else Console(width=160, **as_they_are)


def table(
    headings: Iterable[str],
    rows: Iterable[Sequence[str]],
    title: str = "",
    words: int = 0,
    ends: Collection[int] = (),
    unbroken: bool = False,
) -> Table:
    """A table of numbers; the first ``words`` columns are words, and there is a line below the rows of ``ends``.

    ``unbroken``: what stands in the first column can be copied, whatever that does to the others.
    """
    made = Table(title=title or None, title_justify="left", title_style="bold")
    for place, heading in enumerate(headings):
        whole = unbroken and place == 0
        made.add_column(heading, justify="left" if place < words else "right", overflow="fold", no_wrap=whole)
    for place, row in enumerate(rows):
        made.add_row(*row, end_section=place in ends)
    return made


def remark(screen: Console, text: str) -> None:
    """A line beside what counts."""
    screen.print(text, style="dim", highlight=False, soft_wrap=True)


def share(value: float) -> str:
    """A share as a percentage that only says 100 % when it is all."""
    return f"{min(value, 0.9999 if value < 1 else 1.0):.2%}"
