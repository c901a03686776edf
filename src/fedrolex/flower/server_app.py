"""The app of the server: the training loop of every run, with devices in the place of a simulation's clients."""

from dataclasses import replace
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedrolex.flower.client_app import OwnTask, prepared
from fedrolex.flower.engine import Devices, Exchange
from fedrolex.flower.fleet import Roster
from fedrolex.flower.secure import SecureDevices
from fedrolex.flower.settings import Settings, digest
from fedrolex.recipes import Recipe
from fedrolex.recipes.task import GivenInPython
from fedrolex.rounds import Round, State
from fedrolex.runs import Callback, Run, Training
from fedrolex.runs.run import Progress


class Strays(Callback):
    """Adds to a round's metrics the replies that were answers to nothing."""

    def __init__(self, engine: Devices) -> None:
        self.engine = engine

    def round_ends(self, round: Round, new: State, row: dict[str, object]) -> None:
        """Tell how many, and which."""
        row["strays"] = list(self.engine.strays)


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
    on_devices(training, grid, described, settings)
    summary = run.go(training, progress)
    print(f"{summary['run']}: {summary.get('global_accuracy', summary.get('loss'))}", flush=True)
    return summary


def on_devices(training: Training, grid: Grid, recipe: Recipe, settings: Settings) -> Devices:
    """Let a training run on the nodes of a grid."""
    key = digest(recipe)
    roster = Roster(
        grid, training.server.fleet, key, timeout=settings.timeout, patience=settings.patience,
        enough=recipe.quorum, say=training.say,
    )  # fmt: skip
    exchange = Exchange(
        recipe=key, timeout=settings.timeout, grace=None if settings.grace < 0 else settings.grace,
        quorum=recipe.quorum, transport=settings.transport, factor=settings.norm_factor,
    )  # fmt: skip
    engine = Devices(grid, roster.present, exchange, training.say)
    if settings.secure:
        engine = SecureDevices(grid, roster.present, exchange, training.say).secured(
            least=settings.least, share=settings.threshold, reach=settings.reach
        )
    training.server.fleet, training.engine = roster.present, engine
    training.callbacks = [*training.callbacks, Strays(engine)]
    return engine


def _line(row: dict[str, object]) -> str:
    judged = {k: v for k, v in row.items() if isinstance(v, float) and k.endswith("accuracy")}
    said = "".join(f", {name} {value:.3f}" for name, value in judged.items())
    dropped = row["dropped"]
    assert isinstance(dropped, dict)
    lost = "".join(f"\n  device {client} left out: {why}" for client, why in dropped.items())
    return f"round {row['round']}: {row['clients']} devices{' (void)' if row['void'] else ''}{said}{lost}"
