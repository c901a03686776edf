"""``fedrolex report``: what runs did, as one page."""

from pathlib import Path
from typing import Annotated

import typer

from fedrolex.cli.console import console
from fedrolex.cli.progress import working
from fedrolex.report import write_report


def report_command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Runs' folders; of several seeds, their folder.")
    ],
    out: Annotated[Path, typer.Option(help="The page's file.")] = Path("report.html"),
) -> None:
    """Write one page that needs nothing else: curves, windows, coverage, local accuracies, costs, faults, recipes."""
    every = [each for run in runs for each in ([run] if (run / "recipe.yaml").exists() else _of_seeds(run) or [run])]
    with working() as say:
        path = write_report(every, out, say=say)
    console().print(f"report: {path}", highlight=False, soft_wrap=True)


def _of_seeds(folder: Path) -> list[Path]:
    found = [path.parent for path in folder.glob("seed-*/recipe.yaml")]
    return sorted(found, key=lambda path: (len(path.name), path.name))
