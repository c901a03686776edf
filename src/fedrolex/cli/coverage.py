"""``fedrolex coverage``: how soon everything is trained, in theory; which weights of a model a scheme reaches."""

import json
from dataclasses import asdict, fields
from fractions import Fraction
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from fedrolex.cli.arguments import build_model, read_inputs
from fedrolex.cli.console import console, remark, share, table
from fedrolex.cli.figures import check_figure, draw_coverage
from fedrolex.cli.lemmas import INDICES, TIMES, lemma_rows, node_rows, show_lemmas, show_nodes
from fedrolex.cli.options import Arguments, AsJson, Figure, Inputs
from fedrolex.core import SCHEMES, FedrolexError, in_one_line
from fedrolex.slicing import Axes, Rolling, Scheme, exact, spread, trace
from fedrolex.theory.coverage import Coverage, coverage

MODEL = "fedrolex.models:preresnet18"
SPREAD = "spread"
DRAWN = 500_000_000  # sub-models in the trials of a simulation
MOST = 10_000_000  # windows that are counted; a minute for each million


def make_scheme(name: str, clients: int, overlap: str, seed: int) -> Scheme:
    """A scheme by name, registered or ``package.module:Name``; ``spread`` is rolling with offsets of their own."""
    if name == SPREAD:
        return Rolling(overlap=overlap, offset=spread(clients))
    kind = SCHEMES.find(name, "--scheme")
    own = {each.name for each in fields(kind)}
    with in_one_line(f"--scheme {name} cannot be made"):
        made: Scheme = kind(**{key: value for key, value in (("overlap", overlap), ("seed", seed)) if key in own})
        return made


def coverage_command(
    factory: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:FACTORY]", help="The model.", show_default=f"{MODEL}, and the lemmas before it"
        ),
    ] = None,
    inputs: Inputs = None,
    arguments: Arguments = None,
    schemes: Annotated[
        list[str] | None,
        typer.Option(
            "--scheme",
            help=f"{', '.join([*SCHEMES.names(), SPREAD])}, or package.module:Name. Repeatable.",
            show_default="rolling",
        ),
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
    indices: Annotated[
        list[int] | None,
        typer.Option(min=2, max=4096, help="Sub-models in the lemmas. Repeatable.", show_default="2, 5, 8, 16, 64"),
    ] = None,
    times: Annotated[
        list[int] | None,
        typer.Option(min=1, max=1000, help="How often each must be trained. Repeatable.", show_default="1, 2, 3, 5"),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=1024, help="Nodes of the layer that is covered.")] = 64,
    trials: Annotated[int, typer.Option(min=2, max=100_000, help="Trials of each simulation.")] = 5000,
    seed: Annotated[int, typer.Option(help="Seed of random windows and of the simulations.")] = 0,
    figure: Figure = None,
    as_json: AsJson = False,
) -> None:
    """Rounds until everything is trained, in theory; nodes and weights each scheme reaches, counted.

    The theory is left out when a model is named, unless --indices, --times or --figure ask for it.
    """
    check_figure(figure)
    betas = [exact(c) for c in capacities or ["1/2", "1/4", "1/8", "1/16"]]
    chosen = [(name, make_scheme(name, clients, overlap, seed)) for name in schemes or ["rolling"]]
    theory = factory is None or figure is not None or bool(indices or times)
    factory = factory or MODEL
    model = build_model(factory, arguments or [])
    axes = trace(model, read_inputs(inputs or [], model))
    count = rounds or max(axis.size for axis in axes.cut_axes)
    if (windows := clients * count * len(betas) * len(chosen)) > MOST:
        asked = f"{clients:,} clients in {count:,} rounds, for every scheme and capacity, have {windows:,} windows"
        raise FedrolexError(f"{asked}: at most {MOST:,} are counted, give fewer --clients or --rounds")
    if theory and (draws := trials * max(indices or INDICES) * max(times or TIMES)) > DRAWN:
        asked = f"{trials:,} trials with so many --indices and --times draw {draws:,} sub-models and more"
        raise FedrolexError(f"{asked}: at most {DRAWN:,} are drawn, give fewer --trials")
    lemmas = lemma_rows(indices or INDICES, times or TIMES, trials, seed) if theory else []
    layer = node_rows(nodes, betas, trials, seed) if theory else []
    found = _count(axes, chosen, betas, clients, count, quiet=as_json)
    if figure is not None:
        draw_coverage(lemmas, layer, [(name, str(beta), result.matrices) for name, beta, result in found], figure)
    if as_json:
        rows = [{"scheme": name, "capacity": str(beta), **result.encode()} for name, beta, result in found]
        theory_rows = {"lemmas": [asdict(row) for row in lemmas], "nodes": [asdict(row) for row in layer]}
        typer.echo(json.dumps({"model": factory, "results": rows, **theory_rows}, indent=1))
        return
    screen = console()
    if theory:
        show_lemmas(screen, lemmas, trials)
        show_nodes(screen, layer, trials)
    _show(screen, found, f"{factory}, {count} rounds of {clients} client{'s' * (clients > 1)}")
    if figure is not None:
        screen.print(f"figure: {figure}", highlight=False)


def _show(screen: Console, found: list[tuple[str, Fraction, Coverage]], title: str) -> None:
    headings = ("scheme", "capacity", "nodes", "weights", "in matrices", "never trained", "unevenness")
    cells = []
    for name, beta, result in found:
        shares = [share(part) for part in (result.nodes, result.weights, result.matrices)]
        cells.append((name, str(beta), *shares, f"{result.untouched:,}", f"{result.variation:.2f}"))
    screen.print(table(headings, cells, title, words=1))
    remark(screen, "Shares reached: a weight is trained only when both its ends are in the window.")
    remark(screen, "Unevenness: standard deviation over mean of the updates per weight of a matrix.")


def _count(
    axes: Axes, schemes: list[tuple[str, Scheme]], betas: list[Fraction], clients: int, rounds: int, quiet: bool
) -> list[tuple[str, Fraction, Coverage]]:
    found = []
    err = Console(stderr=True)
    with Progress(console=err, transient=True, disable=quiet or not err.is_terminal) as progress:
        task = progress.add_task("counting", total=len(schemes) * len(betas) * rounds)
        for name, scheme in schemes:
            for beta in betas:
                result = coverage(axes, scheme, [beta] * clients, rounds, lambda _: progress.advance(task))
                found.append((name, beta, result))
    return found
