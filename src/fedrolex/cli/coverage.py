"""``fedrolex coverage``: which nodes and which weights of a model a scheme reaches."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fedrolex.cli.arguments import build_model, read_inputs
from fedrolex.cli.console import console, share
from fedrolex.coverage import Coverage, coverage
from fedrolex.errors import FedrolexError
from fedrolex.slicing import Axes, Blocks, Random, Rolling, Scheme, Static, exact, spread, trace

MODEL = "fedrolex.models:preresnet18"
SCHEMES = ("rolling", "spread", "blocks", "static", "random")


def make_scheme(name: str, clients: int, overlap: str, seed: int) -> Scheme:
    """A scheme by the name the command line gives it."""
    match name:
        case "rolling":
            return Rolling(overlap=overlap)
        case "spread":
            return Rolling(overlap=overlap, offset=spread(clients))
        case "blocks":
            return Blocks()
        case "static":
            return Static()
        case "random":
            return Random(seed=seed)
    raise FedrolexError(f"scheme {name!r} is unknown: use one of {', '.join(SCHEMES)}")


def coverage_command(
    factory: Annotated[str, typer.Argument(metavar="[MODULE:FACTORY]", help="The model.")] = MODEL,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="[NAME=]SHAPE[:DTYPE[:HIGH]]",
            help="An input of the example. Repeatable.",
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Option("--arg", metavar="NAME=VALUE", help="An argument of the factory. Repeatable.")
    ] = None,
    schemes: Annotated[
        list[str] | None,
        typer.Option("--scheme", help=f"One of {', '.join(SCHEMES)}. Repeatable.", show_default="rolling"),
    ] = None,
    capacities: Annotated[
        list[str] | None,
        typer.Option(
            "--capacity", help="A capacity; each is counted on its own. Repeatable.", show_default="1/2, 1/4, 1/8, 1/16"
        ),
    ] = None,
    clients: Annotated[int, typer.Option(min=1, help="Clients a round, all of that capacity.")] = 1,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds to count.", show_default="size of the widest axis, one full roll")
    ] = None,
    overlap: Annotated[str, typer.Option(help="Overlap r of consecutive rolling windows: 1 moves by one node.")] = "1",
    seed: Annotated[int, typer.Option(help="Seed of random windows.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Count the nodes and weights each scheme reaches after some rounds."""
    betas = [exact(c) for c in capacities or ["1/2", "1/4", "1/8", "1/16"]]
    chosen = [(name, make_scheme(name, clients, overlap, seed)) for name in schemes or ["rolling"]]
    model = build_model(factory, arguments or [])
    axes = trace(model, read_inputs(inputs or [], model))
    count = rounds or max(axis.size for axis in axes.cut_axes)
    found = _count(axes, chosen, betas, clients, count, quiet=as_json)
    if as_json:
        rows = [{"scheme": name, "capacity": str(beta), **result.encode()} for name, beta, result in found]
        typer.echo(json.dumps({"model": factory, "results": rows}, indent=1))
        return
    table = Table(
        title=f"{factory}, {count} rounds of {clients} client{'s' * (clients > 1)}",
        title_justify="left",
        title_style="bold",
    )
    for heading in ("scheme", "capacity", "nodes", "weights", "in matrices", "never trained", "unevenness"):
        table.add_column(heading, justify="left" if heading == "scheme" else "right")
    for name, beta, result in found:
        table.add_row(
            name,
            str(beta),
            share(result.nodes),
            share(result.weights),
            share(result.matrices),
            f"{result.untouched:,}",
            f"{result.variation:.2f}",
        )
    screen = console()
    screen.print(table)
    screen.print("Shares reached: a weight is trained only when both its ends are in the window.", style="dim")
    screen.print("Unevenness: standard deviation over mean of the updates per weight of a matrix.", style="dim")


def _count(
    axes: Axes, schemes: list[tuple[str, Scheme]], betas: list[Fraction], clients: int, rounds: int, quiet: bool
) -> list[tuple[str, Fraction, Coverage]]:
    found = []
    with Progress(
        console=Console(stderr=True), transient=True, disable=quiet or not Console(stderr=True).is_terminal
    ) as progress:
        task = progress.add_task("counting", total=len(schemes) * len(betas) * rounds)
        for name, scheme in schemes:
            for beta in betas:
                result = coverage(axes, scheme, [beta] * clients, rounds, lambda _: progress.advance(task))
                found.append((name, beta, result))
    return found
