"""``fedrolex``: the commands, and what happens when something is wrong with what the user gave."""

import os
import signal
import sys
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand
from typer.main import get_command

from fedrolex.cli.options import Group
from fedrolex.core import FedrolexError
from fedrolex.core.importing import resolve
from fedrolex.core.version import VERSION

COMMANDS = {
    "train": ("train:train_command", "Train one recipe or several; with none, the quickstart."),
    "resume": ("train:resume_command", "Go on from the last checkpoint, bit for bit; --set rounds=N for more rounds."),
    "runs": ("runs:runs_command", "List runs: their state, rounds, accuracy, method and task."),
    "evaluate": (
        "evaluate:evaluate_command",
        "Measure the model of a run's newest checkpoint again, beside what was reported for its round.",
    ),
    "compare": (
        "runs:compare_command",
        "How good runs are side by side, and in which settings of their recipes they differ.",
    ),
    "report": (
        "report:report_command",
        "Write one page that needs nothing else: curves, windows, coverage, local accuracies, costs, faults, recipes.",
    ),
    "export": (
        "export:export_command",
        "Write the model that a device of a capacity runs: chosen, calibrated, measured.",
    ),
    "list": ("listing:list_command", "Everything that recipes may name, and from where it comes."),
    "show": ("listing:show_command", "The fully resolved recipe: every key that counts, defaults included."),
    "slice": ("slice:slice_command", "Derive the axes of a model and prove them."),
    "coverage": (
        "coverage:coverage_command",
        "Rounds until everything is trained, in theory; nodes and weights each scheme reaches, counted.",
    ),
    "costs": (
        "costs:costs_command",
        "Parameters, size and operations at each capacity of a recipe's fleet, and the fleet's mean.",
    ),
    "fit": ("fit:fit_command", "The largest capacity whose training step fits into a device's memory."),
    "paper": (
        "paper.command:paper_command",
        "Reproduce a table, figure or lemma of the paper: train the cells that are missing, then collect all.",
    ),
    "data": ("data:data_app", "Get data sets, and see which are there."),
}
"""Of every command the place in ``fedrolex.cli``, and the first line of its help: it is imported only when it runs."""


SHORT_WAITS = "GOMP_SPINCOUNT", "1000"
"""Threads that wait for each other sleep after so many turns: on busy cores spinning ones wait for minutes."""


class Commands(Group):
    """The commands by name. Listing them imports none; PyTorch alone takes seconds."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name, help=said) for name, (_, said) in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command that the first of the words names, imported, and the words after it."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else imported(name), rest


def imported(name: str) -> Any:
    """The command of a name, with its options."""
    found = resolve(f"fedrolex.cli.{COMMANDS[name][0]}", here=False)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False)
        alone.command(name)(found)
        found = alone
    return get_command(found)


app = typer.Typer(
    name="fedrolex", cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedrolex {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train one large PyTorch model on devices that each hold only a part of it."""


def main() -> None:
    """Entry point: a user's mistake is one line on stderr and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # letters that a terminal has not, bytes in a file's name
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(*SHORT_WAITS)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill is a Ctrl-C: finished rounds are kept
    try:
        app()
    except FedrolexError as error:
        _stop(2, f"error: {error}")
    except KeyboardInterrupt:
        _stop(130, "stopped")
    except BrokenPipeError:
        raise SystemExit(1) from None
    except RuntimeError as error:
        from fedrolex.rounds import out_of_memory  # with PyTorch, which raised it

        if not out_of_memory(error):
            raise
        remedy = "use a smaller model, batch or cohort, or end what else runs there"
        _stop(1, f"error: the device's memory ran out: {remedy}")
    except OSError as error:
        _stop(1, f"error: {error}")


def _stop(status: int, said: str) -> NoReturn:
    print(said, file=sys.stderr)
    raise SystemExit(status) from None
