"""``fedrolex slice``: the axes of any importable model, what stays whole and why, its size at each capacity."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console

from fedrolex.cli.arguments import build_model, read_inputs
from fedrolex.cli.console import console, remark, table
from fedrolex.cli.figures import check_figure, draw_axes
from fedrolex.cli.options import Arguments, AsJson, Inputs
from fedrolex.core import one_of
from fedrolex.slicing import Axes, Rounding, exact, trace
from fedrolex.slicing.axis import KINDS
from fedrolex.slicing.rules.contractions import SPATIAL
from fedrolex.slicing.trace import own_hints

CAPACITIES = ["1", "1/2", "1/4", "1/8", "1/16"]


def slice_command(
    factory: Annotated[
        str, typer.Argument(metavar="MODULE:FACTORY", help="What makes the model, e.g. torchvision.models:resnet18.")
    ],
    inputs: Inputs = None,
    arguments: Arguments = None,
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
    as_json: AsJson = False,
) -> None:
    """Derive the axes of a model and prove them."""
    betas = [exact(c) for c in capacities or CAPACITIES]
    one_of("--rounding", rounding, get_args(Rounding))
    check_figure(picture, "--picture")
    read_inputs(inputs or [])
    model = build_model(factory, arguments or [])
    example = read_inputs(inputs or [], model)
    hints = replace(own_hints(model), evaluation_only=evaluation_only)
    axes = trace(model, example, hints)
    sizes = [(str(beta), axes.parameters(beta, rounding)) for beta in betas]  # type: ignore[arg-type]
    if picture is not None:
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
    rows = []
    for axis in axes.axes.values():
        widths = [str(axes.widths(c, rounding)[axis.name]) if axis.kind == "width" else "" for c in columns]
        rows.append((axis.name, axis.kind, str(axis.size), str(len(axis.members)), *widths))
    shown = table(("axis", "kind", "size", "dimensions", *columns), rows, f"Axes of {factory}", words=2)
    for column in shown.columns[4:]:
        column.style = "cyan"
    for row, axis in zip(shown.rows, axes.axes.values(), strict=True):
        row.style = None if axis.kind == "width" else "dim"
    screen.print(shown)
    kinds = {axis.kind for axis in axes.axes.values()} - {"width"}
    for kind in KINDS:
        if kind in kinds:
            remark(screen, f"  {kind}: {KINDS[kind]}")
    full = axes.parameters("1")
    screen.print(table(("capacity", "parameters", "share"), [(c, f"{n:,}", f"{n / full:.2%}") for c, n in sizes]))
    _show_frozen(screen, axes)
    for note in axes.notes:
        screen.print(f"note: {note.about}: {note.what}", highlight=False, markup=False)
    screen.print(
        f"proved: {len(axes.cut_axes)} axes can be cut. Permuting every axis leaves the function unchanged; "
        "half and quarter width run and train.",
        style="green",
    )


def _show_frozen(screen: Console, axes: Axes) -> None:
    """Whole dimensions grouped by reason; kernel positions are not worth a line."""
    reasons = Counter(note.what for note in axes.frozen if note.what != SPATIAL)
    for why, count in reasons.most_common():
        places = [note.about for note in axes.frozen if note.what == why]
        more = f" and {count - 3} more" if count > 3 else ""
        screen.print(f"whole: {', '.join(places[:3])}{more}: {why}", highlight=False, markup=False)
