"""The page: everything that is known of some runs, in one file that loads nothing."""

import html
import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedrolex.core import FedrolexError, in_one_line
from fedrolex.core.version import VERSION
from fedrolex.report.coverage import reached
from fedrolex.report.kept import keep, kept, key_of
from fedrolex.report.told import told
from fedrolex.report.windows import pictures
from fedrolex.runs import Run, Training
from fedrolex.runs.checkpoint import write_whole
from fedrolex.runs.details import local_accuracies
from fedrolex.runs.load import made_again, placed
from fedrolex.tasks import Task

SCRIPTS = ("basics.js", "charts.js", "windows.js", "coverage.js", "page.js")
MOST = 24  # runs on a page


def write_report(
    runs: Sequence[Path | str], out: Path | str, task: Task | None = None, say: Callable[[str], None] | None = None
) -> Path:
    """Write the page of some runs; for the arguments see :func:`page_of`."""
    path = Path(out)
    if path.is_dir():
        raise FedrolexError(f"{path} is a folder: name the page's file, such as {path / 'report.html'}")
    if not path.parent.is_dir():
        raise FedrolexError(f"there is no folder {path.parent}: make it, or give another file")
    text = page_of(runs, task, say)
    with in_one_line(f"cannot write {path}"):
        write_whole(path, text.encode("utf-8", "backslashreplace"))
    return path


def page_of(runs: Sequence[Path | str], task: Task | None = None, say: Callable[[str], None] | None = None) -> str:
    """The page of some runs, as text.

    Args:
        runs: their folders.
        task: model and data, where the runs were given them in Python; without them the page lacks what needs them.
        say: told what is being looked at, in one line.
    """
    if not runs or len(runs) > MOST:
        raise FedrolexError(f"a report of {len(runs)} runs: give 1 to {MOST}")
    opened = [Run.open(run) for run in runs]
    found = []
    for run in opened:
        if say is not None:
            say(f"looking at {run.folder}")
        found.append(known(run, task))
    title = found[0]["name"] if len(found) == 1 else f"{len(found)} runs compared"
    return filled({"version": VERSION, "title": title, "runs": found})


def known(run: Run, task: Task | None = None) -> dict[str, Any]:
    """All that is known of a run, as JSON data; under ``missing`` why something is not.

    What was found out before and still holds is read from the run's folder, unless a task is given.
    """
    rows = run.rows()
    parts: dict[str, Callable[[Training], Any]] = {
        "windows": lambda training: pictures(training, rows),
        "coverage": lambda training: reached(training, rows),
        "local": lambda training: local_accuracies(placed(run, training).model(), training),
    }
    key = key_of(run) if task is None else None
    before = {} if key is None else kept(run, key)
    found, missing = {name: before[name] for name in parts if name in before}, {}
    todo = {name: part for name, part in parts.items() if name not in found}
    try:
        training = _made_again(run, task) if todo else None
        for name, part in todo.items():
            try:
                assert training is not None
                found[name] = part(training)
            except FedrolexError as error:
                missing[name] = str(error)
    except FedrolexError as error:
        missing = dict.fromkeys(todo, str(error))
    if key is not None and set(found) != set(before):
        keep(run, key, found)
    return {**told(run), "missing": missing, **found}


def _made_again(run: Run, task: Task | None) -> Training:
    """What a run trains; raises, in one line, where that is not known."""
    if task is None and run.own_task():
        raise FedrolexError("its task was given in Python: give it to fedrolex.report.write_report(..., task=task)")
    return made_again(run, task, "auto")


def filled(data: dict[str, Any]) -> str:
    """The page with its data, styles and scripts in it."""
    folder = files("fedrolex.report") / "page"
    given = {
        "title": html.escape(f"{data['title']} · fedrolex"),
        "style": (folder / "style.css").read_text("utf-8"),
        "data": as_script(data),
        "scripts": "\n".join((folder / name).read_text("utf-8") for name in SCRIPTS),
    }
    before, *parts = (folder / "page.html").read_text("utf-8").split("{{")
    return before + "".join(given[name] + rest for name, _, rest in (part.partition("}}") for part in parts))


def as_script(data: Any) -> str:
    """JSON that may stand inside a script element, whatever text is in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
