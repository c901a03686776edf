"""Where commands print for people."""

from rich.console import Console


def console() -> Console:
    """Standard output; wide enough for whole lines when it is a file or a pipe."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=160)


def share(value: float) -> str:
    """A share as a percentage that only says 100 % when it is all."""
    return f"{min(value, 0.9999 if value < 1 else 1.0):.2%}"
