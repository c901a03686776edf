"""``fedrolex``: the commands, and what happens when something is wrong with what the user gave."""

import signal
import sys
from io import TextIOWrapper
from typing import Annotated, NoReturn

import typer

from fedrolex import __version__
from fedrolex.cli.costs import costs_command
from fedrolex.cli.coverage import coverage_command
from fedrolex.cli.data import data_app
from fedrolex.cli.evaluate import evaluate_command
from fedrolex.cli.export import export_command
from fedrolex.cli.fit import fit_command
from fedrolex.cli.listing import list_command, show_command
from fedrolex.cli.paper import paper_command
from fedrolex.cli.report import report_command
from fedrolex.cli.runs import compare_command, runs_command
from fedrolex.cli.slice import slice_command
from fedrolex.cli.train import resume_command, train_command
from fedrolex.core import FedrolexError
from fedrolex.rounds import out_of_memory

app = typer.Typer(name="fedrolex", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("train")(train_command)
app.command("resume")(resume_command)
app.command("runs")(runs_command)
app.command("evaluate")(evaluate_command)
app.command("compare")(compare_command)
app.command("report")(report_command)
app.command("export")(export_command)
app.command("list")(list_command)
app.command("show")(show_command)
app.command("slice")(slice_command)
app.command("coverage")(coverage_command)
app.command("costs")(costs_command)
app.command("fit")(fit_command)
app.command("paper")(paper_command)
app.add_typer(data_app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedrolex {__version__}")
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
        if not out_of_memory(error):
            raise
        remedy = "use a smaller model, batch or cohort, or end what else runs there"
        _stop(1, f"error: the device's memory ran out: {remedy}")
    except OSError as error:
        _stop(1, f"error: {error}")


def _stop(status: int, said: str) -> NoReturn:
    print(said, file=sys.stderr)
    raise SystemExit(status) from None
