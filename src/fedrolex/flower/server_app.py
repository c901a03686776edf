"""The app of the server: the training loop of every run, with devices in the place of a simulation's clients."""

from dataclasses import replace
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedrolex.flower.client_app import OwnTask, prepared
from fedrolex.flower.engine import Devices, on_devices
from fedrolex.flower.secure_engine import SecureDevices
from fedrolex.flower.settings import Settings
from fedrolex.recipes import Recipe
from fedrolex.recipes.task import GivenInPython
from fedrolex.runs import Run
from fedrolex.runs.run import Progress


def server_app(recipe: Recipe | None = None, task: OwnTask | None = None) -> ServerApp:
    """A Flower app for the server.

    Args:
        recipe: the run; by default the run-config names it.
        task: model and test data of one's own, instead of the recipe's.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        train_on(grid, context, recipe, task, progress=lambda row: print(_line(row), flush=True))

    return app


def train_on(
    grid: Grid, context: Context, recipe: Recipe | None = None, task: OwnTask | None = None,
    progress: Progress | None = None,
) -> dict[str, object]:  # fmt: skip
    """Train on the nodes of a grid, from where the run's folder stands; returns the summary."""
    settings = Settings.read(context.run_config)
    described = settings.described(recipe)
    training = prepared(described, task, context)
    folder, written = Path(settings.out), described if task is None else replace(described, task=GivenInPython())
    if folder.is_dir() and any(folder.iterdir()):
        run = Run.open(folder)
        run.change(written)
    else:
        run = Run.create(folder, written, own_task=task is not None)
    on_devices(training, grid, described, settings, SecureDevices if settings.secure else Devices)
    summary = run.go(training, progress)
    print(f"{summary['run']}: {summary.get('global_accuracy', summary.get('loss'))}", flush=True)
    if "privacy" in summary:
        print(summary["privacy"], flush=True)
    return summary


def _line(row: dict[str, object]) -> str:
    judged = {k: v for k, v in row.items() if isinstance(v, float) and k.endswith("accuracy")}
    said = "".join(f", {name} {value:.3f}" for name, value in judged.items())
    dropped = row["dropped"]
    assert isinstance(dropped, dict)
    lost = "".join(f"\n  device {client} left out: {why}" for client, why in dropped.items())
    return f"round {row['round']}: {row['clients']} devices{' (void)' if row['void'] else ''}{said}{lost}"
