"""``fedrolex slice``: the axes of any importable model, what stays whole and why, its size at each capacity."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedrolex.cli.arguments import INPUT, build_model, read_inputs
from fedrolex.cli.console import console
from fedrolex.core import FedrolexError
from fedrolex.slicing import Axes, Rounding, exact, trace
from fedrolex.slicing.axes import KINDS
from fedrolex.slicing.rules.contractions import SPATIAL
from fedrolex.slicing.trace import own_hints

CAPACITIES = ["1", "1/2", "1/4", "1/8", "1/16"]


def slice_command(
    factory: Annotated[
        str, typer.Argument(metavar="MODULE:FACTORY", help="What makes the model, e.g. torchvision.models:resnet18.")
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="[NAME=]SHAPE[:DTYPE[:HIGH]]",
            help=f"An input of the example, e.g. 2x20:int64:1000 [default: the model's own, or {INPUT}]. Repeatable.",
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            metavar="NAME=VALUE",
            help="An argument of the factory; VALUE is YAML, or MODULE:OBJECT. Repeatable.",
        ),
    ] = None,
    capacities: Annotated[
        list[str] | None,
        typer.Option("--capacity", help="A capacity to show. Repeatable.", show_default=", ".join(CAPACITIES)),
    ] = None,
    rounding: Annotated[str, typer.Option(help="Widths are floor or ceil of capacity × size.")] = "floor",
    evaluation_only: Annotated[
        bool,
        typer.Option("--evaluation-only", help="Trace evaluation alone, for models whose training mode cannot be."),
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="Also draw the axes to this file (png, svg or pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Derive the axes of a model and prove them."""
    betas = [exact(c) for c in capacities or CAPACITIES]
    if rounding not in ("floor", "ceil"):
        raise FedrolexError(f"--rounding {rounding!r} is unknown: use floor or ceil")
    if picture is not None and picture.suffix not in (".png", ".svg", ".pdf"):
        raise FedrolexError(f"--picture {picture}: the file must end in .png, .svg or .pdf")
    read_inputs(inputs or [])
    model = build_model(factory, arguments or [])
    example = read_inputs(inputs or [], model)
    hints = replace(own_hints(model), evaluation_only=evaluation_only)
    axes = trace(model, example, hints)
    sizes = [(str(beta), axes.parameters(beta, rounding)) for beta in betas]  # type: ignore[arg-type]
    if picture is not None:
        from fedrolex.cli.picture import draw_axes

        draw_axes(axes, picture, title=factory)
    if as_json:
        typer.echo(json.dumps(describe(factory, axes, sizes), indent=1, ensure_ascii=False))
    else:
        show(console(), factory, axes, sizes, rounding)  # type: ignore[arg-type]


def describe(factory: str, axes: Axes, sizes: list[tuple[str, int]]) -> dict[str, Any]:
    """What ``--json`` prints."""
    full = axes.parameters("1")
    return {
        "model": factory,
        "axes": [
            {"name": a.name, "size": a.size, "kind": a.kind, "members": [f"{t}:{d}" for t, d in a.members]}
            for a in axes.axes.values()
        ],
        "frozen": [{"dimension": note.about, "why": note.what} for note in axes.frozen],
        "notes": [{"about": note.about, "what": note.what} for note in axes.notes],
        "capacities": [{"capacity": c, "parameters": n, "share": n / full} for c, n in sizes],
        "proved": True,
        "layouts": axes.encode(),
    }


def show(screen: Console, factory: str, axes: Axes, sizes: list[tuple[str, int]], rounding: Rounding) -> None:
    """The same for people."""
    columns = [c for c, _ in sizes if c != "1"]
    table = Table(title=f"Axes of {factory}", title_justify="left", title_style="bold")
    table.add_column("axis", overflow="fold")
    table.add_column("size", justify="right")
    table.add_column("kind")
    table.add_column("dimensions", justify="right")
    for c in columns:
        table.add_column(c, justify="right", style="cyan")
    for axis in axes.axes.values():
        widths = [str(axes.widths(c, rounding)[axis.name]) if axis.kind == "width" else "" for c in columns]
        style = None if axis.kind == "width" else "dim"
        table.add_row(axis.name, str(axis.size), axis.kind, str(len(axis.members)), *widths, style=style)
    screen.print(table)
    kinds = {axis.kind for axis in axes.axes.values()} - {"width"}
    for kind in KINDS:
        if kind in kinds:
            screen.print(f"  [dim]{kind}: {KINDS[kind]}[/dim]")
    _show_sizes(screen, axes, sizes)
    _show_frozen(screen, axes)
    for note in axes.notes:
        screen.print(f"note: {note.about}: {note.what}", highlight=False, markup=False)
    screen.print(
        f"proved: {len(axes.cut_axes)} axes can be cut. Permuting every axis leaves the function unchanged; "
        "half and quarter width run and train.",
        style="green",
    )


def _show_sizes(screen: Console, axes: Axes, sizes: list[tuple[str, int]]) -> None:
    table = Table()
    table.add_column("capacity", justify="right")
    table.add_column("parameters", justify="right")
    table.add_column("share", justify="right")
    full = axes.parameters("1")
    for c, count in sizes:
        table.add_row(c, f"{count:,}", f"{count / full:.2%}")
    screen.print(table)


def _show_frozen(screen: Console, axes: Axes) -> None:
    """Whole dimensions grouped by reason; kernel positions are not worth a line."""
    reasons = Counter(note.what for note in axes.frozen if note.what != SPATIAL)
    for why, count in reasons.most_common():
        places = [note.about for note in axes.frozen if note.what == why]
        more = f" and {count - 3} more" if count > 3 else ""
        screen.print(f"whole: {', '.join(places[:3])}{more}: {why}", highlight=False, markup=False)
