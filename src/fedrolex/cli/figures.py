"""Pictures of coverage, of costs, and of a model's axes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedrolex.cli.lemmas import LemmaRow, NodeRow
from fedrolex.core import FedrolexError
from fedrolex.slicing import Axes
from fedrolex.theory.costs import Cost, MeanCost
from fedrolex.theory.lemmas import expected_rounds

COLOURS = ("#2a6fbb", "#c1762a", "#7d8c3c", "#8a5fb0", "#c94f4f")
KINDS = ("width", "heads", "factor", "groups", "outputs", "rows")
COLOURS_OF_KINDS = dict(zip(KINDS, (*COLOURS, "#a8a8a8"), strict=True))
FORMATS = (".png", ".svg", ".pdf")


def check_figure(path: Path | None, option: str = "--figure") -> None:
    """Refuse a file whose name does not say a format we write, before anything is computed."""
    if path is not None and path.suffix not in FORMATS:
        raise FedrolexError(f"{option} {path}: the file must end in .png, .svg or .pdf")


@contextmanager
def page(path: Path, panels: int, size: tuple[float, float], grid: str = "y", **layout: Any) -> Iterator[Any]:
    """A row of panels, ``size`` inches in all, written to ``path`` at the end; ``layout`` is matplotlib's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure, sides = plt.subplots(1, panels, figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.12), **layout)
    try:
        for side in figure.axes:
            side.spines[["top", "right"]].set_visible(False)
            side.grid(axis=grid, color="#eeeeee")
            side.set_axisbelow(True)
        yield sides
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise FedrolexError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        plt.close(figure)


def draw_coverage(
    lemmas: Sequence[LemmaRow], nodes: Sequence[NodeRow], weights: Sequence[tuple[str, str, float]], path: Path
) -> None:
    """Left the lemmas, in the middle the nodes of a layer, right the weights of a model.

    ``weights`` are (scheme, capacity, share of the matrices' weights reached).
    """
    with page(path, 3, (14.4, 4.2)) as (left, middle, right):
        _draw_lemmas(left, lemmas)
        _draw_nodes(middle, nodes)
        _draw_weights(right, weights)


def _draw_lemmas(side: Any, rows: Sequence[LemmaRow]) -> None:
    times = sorted({row.times for row in rows})
    largest = max(row.indices for row in rows)
    grid = sorted({round(2 * (largest / 2) ** (step / 24)) for step in range(25)})
    for colour, m in zip(COLOURS, times if len(times) <= 3 else (times[0], times[1], times[-1]), strict=False):
        points = [row for row in rows if row.times == m]
        side.plot(grid, [expected_rounds(i, m) for i in grid], color=colour, label=f"random, m = {m}")
        _draw_simulated(side, [row.indices for row in points], points, colour)
        side.plot(grid, [m * i for i in grid], color=colour, linestyle="--", linewidth=1)
    side.plot([], [], color="#555555", linestyle="--", linewidth=1, label="rolling, m·I")
    _draw_simulated(side, [], [], "#555555", "simulated, ± 2 s.e.")
    side.set(xscale="log", yscale="log", xlabel="disjoint sub-models, I", ylabel="rounds")
    ticks = sorted({row.indices for row in rows})
    side.set_xticks(ticks, [str(i) for i in ticks])
    side.set_xticks([], minor=True)
    side.set_title("Until each sub-model was trained m times", loc="left", fontsize=10)
    side.legend(frameon=False, fontsize=8)


def _draw_simulated(
    side: Any, places: Sequence[int], rows: Sequence[LemmaRow | NodeRow], colour: str, label: str | None = None
) -> None:
    means, spreads = [row.simulated for row in rows], [2 * row.standard_error for row in rows]
    side.errorbar(places, means, spreads, color=colour, fmt="o", markersize=3.5, capsize=3, label=label)


def _draw_nodes(side: Any, rows: Sequence[NodeRow]) -> None:
    places = range(len(rows))
    side.plot(places, [row.rolling for row in rows], "s--", color="#555555", markersize=5, label="rolling by one node")
    side.plot(places, [row.random for row in rows], color=COLOURS[0], label="random, expected")
    _draw_simulated(side, places, rows, COLOURS[0], "random, simulated, ± 2 s.e.")
    side.set_xticks(places, [f"{row.capacity}\n({row.width})" for row in rows])
    side.set(xlabel="capacity (nodes held at once)", ylabel="rounds", ylim=(0, None))
    side.set_title(f"Until each of {rows[0].nodes} nodes of a layer was held", loc="left", fontsize=10)
    side.legend(frameon=False, fontsize=8)


def _draw_weights(side: Any, rows: Sequence[tuple[str, str, float]]) -> None:
    schemes, capacities = list(dict.fromkeys(r[0] for r in rows)), list(dict.fromkeys(r[1] for r in rows))
    share = {(scheme, capacity): value for scheme, capacity, value in rows}
    bar = 0.8 / len(schemes)
    for place, scheme in enumerate(schemes):
        spots = [i + (place - (len(schemes) - 1) / 2) * bar for i in range(len(capacities))]
        values = [100 * share[scheme, capacity] for capacity in capacities]
        side.bar(spots, values, bar * 0.92, color=COLOURS[place % len(COLOURS)], label=scheme)
        for spot, value in zip(spots, values, strict=True):
            shown = f"{min(value, 99.9 if value < 100 else 100):.3g}"  # only says 100 when it is all
            side.text(spot, value + 1, shown, ha="center", fontsize=7 if len(schemes) < 4 else 5.5)
    side.set_xticks(range(len(capacities)), capacities)
    side.set(xlabel="capacity", ylabel="% of the weights between two layers", ylim=(0, 118), yticks=range(0, 101, 20))
    side.set_title("Weights of the model ever trained", loc="left", fontsize=10)
    side.legend(frameon=False, fontsize=8, ncols=len(schemes), loc="upper right")


def draw_costs(names: Sequence[str], costs: Sequence[Cost], mean: MeanCost, path: Path) -> None:
    """Parameters and multiply-accumulates of each capacity, with the fleet's mean."""
    with page(path, 2, (9.6, 4.2)) as (left, right):
        _draw_cost(left, names, [one.parameters for one in costs], mean.parameters, "Parameters of a sub-model")
        _draw_cost(right, names, [one.macs for one in costs], mean.macs, "Multiply-accumulates of one example, forward")


def _draw_cost(side: Any, names: Sequence[str], values: Sequence[int], mean: float, title: str) -> None:
    side.bar(range(len(names)), values, 0.7, color=COLOURS[0])
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # the mean's line may pass there
    for place, value in enumerate(values):
        side.text(place, value + 0.02 * max(values), short(value), ha="center", fontsize=8, bbox=behind)
    side.axhline(mean, color=COLOURS[1], linestyle="--", linewidth=1.2, zorder=0, label=f"fleet mean {short(mean)}")
    side.legend(frameon=False, fontsize=8)
    side.set_xticks(range(len(names)), names)
    side.set(xlabel="capacity", ylim=(0, max(values) * 1.15))
    side.set_title(title, loc="left", fontsize=10)


def short(value: float) -> str:
    """A count in thousands (k), millions (M) or billions (G), three digits."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def draw_axes(axes: Axes, path: Path, title: str) -> None:
    """One row an axis, one column a parameter; a mark where the axis is (part of) a dimension of it.

    A full square marks the side a parameter writes to, an open one the side it reads from. Bars on the
    right show the axes' sizes.
    """
    columns = [n for n, t in axes.tensors.items() if t.role == "parameter"]
    place = {name: i for i, name in enumerate(columns)}
    rows = list(axes.axes.values())
    size = (min(40.0, 4 + 0.16 * len(columns)), min(60.0, 1.8 + 0.22 * len(rows)))
    with page(path, 2, size, "x", sharey=True, width_ratios=[5, 1]) as (left, right):
        for row, axis in enumerate(rows):
            colour = COLOURS_OF_KINDS[axis.kind]
            members = [(t, d) for t, d in axis.members if t in place]
            if members:
                spots = [place[t] for t, _ in members]
                left.plot([min(spots), max(spots)], [row, row], color=colour, linewidth=0.8, alpha=0.4, zorder=1)
            for tensor, dim in members:
                fill = "white" if dim in axes.tensors[tensor].reads else colour
                left.scatter(place[tensor], row, s=22, marker="s", zorder=2, edgecolors=colour, facecolors=fill)
            right.barh(row, axis.size, color=colour, height=0.7)
            right.text(axis.size, row, f" {axis.size}", va="center", fontsize=7)
        left.set_yticks(range(len(rows)), [a.name for a in rows], fontsize=7)
        left.set_xticks(range(len(columns)), columns, rotation=90, fontsize=5)
        left.set_xlim(-1, len(columns))
        left.invert_yaxis()
        left.set_title(f"{title}: which dimensions share their indices", fontsize=10, loc="left")
        right.set_title("size", fontsize=9, loc="left")
        right.set_xlim(0, max(a.size for a in rows) * 1.3)
        right.xaxis.set_visible(False)
        _draw_kinds(left.figure, [kind for kind in COLOURS_OF_KINDS if any(axis.kind == kind for axis in rows)])


def _draw_kinds(figure: Any, kinds: Sequence[str]) -> None:
    """What the colours and the open squares mean, below the picture."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], marker="s", linestyle="", color=COLOURS_OF_KINDS[kind], label=kind) for kind in kinds]
    handles += [Line2D([], [], marker="s", linestyle="", markerfacecolor="white", color="black", label="reads from it")]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), fontsize=7, frameon=False)
