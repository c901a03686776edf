"""``fedrolex costs``: what each capacity of a recipe's fleet costs a client. Needs no data."""

import json
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

import typer
from rich.table import Table
from torch import nn

from fedrolex.cli.arguments import read_inputs
from fedrolex.cli.console import console, remark, table
from fedrolex.cli.figures import check_figure, draw_costs
from fedrolex.cli.options import AsJson, Figure, RecipeName, Settings
from fedrolex.recipes import find_recipe
from fedrolex.slicing import exact, trace
from fedrolex.theory.costs import Cost, MeanCost, cost, fleet_mean, paper_rounding

# The paper's PreResNet18 with ten classes at 1, 1/2, 1/4, 1/8, 1/16, and what its table prints for the largest
# and the smallest capacity and for the mean: parameters and FLOPs in millions, sizes in what it calls MB.
PAPER_COUNTS = (11_172_170, 2_796_714, 701_018, 176_178, 44_510)
PAPER = {
    "largest": {"parameters": "11.1722", "size": "42.62", "flops": "557.656"},
    "smallest": {"parameters": "0.04451", "size": "0.17", "flops": "2.41318"},
    "mean": {"parameters": "2.9781232", "size": "11.36", "flops": "149.048384"},
}


def costs_command(
    recipe: RecipeName, settings: Settings = None, figure: Figure = None, as_json: AsJson = False
) -> None:
    """Parameters, size and operations at each capacity of a recipe's fleet, and the fleet's mean."""
    check_figure(figure)
    plan = find_recipe(recipe).with_settings(settings or [])
    names = list(plan.fleet.capacities)
    parts = [exact(name) / plan.fleet.server_scale for name in names]
    model = plan.task.make_model(plan.fleet.server_scale)
    example = read_inputs([], model)
    axes = trace(model, example).freeze(*plan.task.frozen_axes())
    rounding: Any = getattr(plan.method, "rounding", "floor")
    own = plan.task.make_models()
    costs = [
        cost(model, axes, part, example, rounding)
        if exact(name) not in own
        else replace(_whole(own[exact(name)], example), capacity=part)
        for name, part in zip(names, parts, strict=True)
    ]
    mean = fleet_mean(costs, plan.fleet.shares)
    paper = plan.fleet.server_scale == 1 and _is_the_papers(costs, plan.fleet.shares)
    if figure is not None:
        draw_costs(names, costs, mean, figure)
    shares = [Fraction(share) for share in plan.fleet.shares or [f"1/{len(names)}"] * len(names)]
    if as_json:
        rows = [
            {**asdict(one), "capacity": name, "share": float(share), "of_server": str(one.capacity)}
            for name, share, one in zip(names, shares, costs, strict=True)
        ]
        found = {"recipe": recipe, "model": type(model).__name__, "server_parameters": axes.parameters()}
        found |= {"capacities": rows, "mean": asdict(mean), "paper": PAPER if paper else None}
        typer.echo(json.dumps(found, indent=1))
        return
    screen = console()
    title = f"{recipe}: {type(model).__name__}, {axes.parameters():,} parameters on the server"
    screen.print(_table(title, names, shares, costs, mean, paper))
    rule = " Paper-style FLOPs: HeteroFL's summary, a layer's cost once for each of its parameter tensors."
    counted = "MACs: multiply-accumulates of one example's forward pass."
    remark(screen, counted + rule * (mean.paper_flops is not None))
    if paper:
        remark(screen, _rounded(costs))
    if figure is not None:
        screen.print(f"figure: {figure}", highlight=False)


def _whole(model: nn.Module, example: Any) -> Cost:
    """Of a network that clients train as it is."""
    return cost(model, trace(model, example), Fraction(1), example)


def _is_the_papers(costs: list[Cost], shares: Any) -> bool:
    """Whether these are the model and the fleet of the paper's table."""
    uniform = shares is None or all(Fraction(str(share)) == Fraction(1, len(costs)) for share in shares)
    return uniform and tuple(one.parameters for one in costs) == PAPER_COUNTS and costs[0].paper_flops is not None


def _table(
    title: str, names: list[str], shares: list[Fraction], costs: list[Cost], mean: MeanCost, paper: bool
) -> Table:
    """A row for each capacity, and one for the mean; beside them what the paper prints, where it does."""
    headings = ["capacity", "share", "parameters", "MiB", "MACs"]
    headings += ["paper-style FLOPs"] * (mean.paper_flops is not None)
    headings += ["paper: parameters, M", "paper: MB", "paper: FLOPs, M"] * paper
    printed = ["largest", *[""] * (len(costs) - 2), "smallest", "mean"] if paper else [""] * (len(costs) + 1)
    rows = []
    parts = [*(f"{float(share):.0%}" for share in shares), ""]
    every: list[Cost | MeanCost] = [*costs, mean]
    for name, share, one, place in zip([*names, "mean"], parts, every, printed, strict=True):
        mib = one.bytes / 2**20
        size = f"{mib:,.2f}" if mib >= 0.1 else f"{mib:.2g}"
        flops = [] if one.paper_flops is None else [f"{one.paper_flops:,.0f}"]
        theirs = PAPER[place].values() if place else ()
        rows.append((name, share, f"{one.parameters:,.0f}", size, f"{one.macs:,.0f}", *flops, *theirs))
    return table(headings, rows, title, ends=[len(costs) - 1])


def _rounded(costs: list[Cost]) -> str:
    """Why the paper's means are not ours."""
    parameters = paper_rounding([one.parameters for one in costs]) / 1e6
    flops = paper_rounding([one.paper_flops or 0 for one in costs]) / 1e6
    return (
        "The paper rounds each capacity to six digits, then takes the mean; from our numbers that gives its "
        f"{parameters:.7f} M parameters and {flops:.6f} M FLOPs. Its MB are MiB."
    )
