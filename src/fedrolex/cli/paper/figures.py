"""Figures of ``fedrolex paper``: along the paper's axes, against what was sent, and over single clients."""

from collections.abc import Callable, Mapping, Sequence
from math import floor
from pathlib import Path
from statistics import mean
from typing import Any

from fedrolex.cli.figures import COLOURS, page

Row = dict[str, Any]
CURVES = {"rho": "share of clients that hold the whole model, ρ", "gamma": "server's width over the clients', γ",
          "overlap": "overlap of consecutive windows, r"}  # fmt: skip
"""What the figures of the paper have along their axis."""

SMALL, LARGE = 2.5, 5.0  # widths of bins, in points
FEW_TIMES = 3  # as much traffic as the row that sends least fits on a plain axis
MANY_TIMES = 20_000  # on a logarithmic axis that reaches further only powers of ten have room
MARKERS = ("o", "s", "^", "D")  # likewise, along an axis
DASHES = ("-", "--", ":", "-.")  # of the first rows, of those after all colours were used once, twice, ...


def draw_along(axis: str, rows: Sequence[Row], title: str, path: Path) -> None:
    """Accuracy along a figure's axis, a line for every row and set-up; dashed what it is with offsets of classes."""

    def draw(side: Any, rows: Sequence[Row]) -> None:
        lines: dict[tuple[str, bool], list[tuple[float, Row]]] = {}  # by row, and whether with offsets
        for row in rows:
            line, _, at = row["row"].rpartition("-")
            lines.setdefault((line, False), []).append((float(at), row["global"]))
            if "offsets" in row:
                lines.setdefault((line, True), []).append((float(at), row["offsets"]["global"]))
        order = list(dict.fromkeys(line for line, _ in lines))
        for (line, offsets), points in lines.items():
            places, values = zip(*sorted(points, key=lambda point: point[0]), strict=True)
            means, spreads = [each["mean"] for each in values], [each["std"] or 0 for each in values]
            again, colour = divmod(order.index(line), len(COLOURS))
            style = {"color": COLOURS[colour], "marker": MARKERS[again % len(MARKERS)], "markersize": 3.5, "capsize": 3}
            label, dashes = (f"{line}, with offsets", "--") if offsets else (line, "-")
            side.errorbar(places, means, spreads if any(spreads) else None, linestyle=dashes, label=label, **style)
        side.set_xticks(sorted({at for points in lines.values() for at, _ in points}))
        side.set(xlabel=axis, ylabel="global accuracy, %")
        side.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=3.5)

    _draw_setups(rows, title, path, draw, (6.4, 4.2))


def draw_traffic(rows: Sequence[Row], title: str, path: Path) -> None:
    """Accuracy against what clients and server have sent, which the paper lacks; means over seeds."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(row["row"] for row in rows))}

    def draw(side: Any, rows: Sequence[Row]) -> None:
        for row in rows:
            number = numbers[row["row"]]
            curves = [{int(at): value for at, value in run["curve"].items()} for run in row["runs"]]
            rounds = sorted(set.intersection(*map(set, curves)))
            sent = [row["gib"] * at / row["rounds"] for at in rounds]
            means = [mean(curve[at] for curve in curves) for at in rounds]
            dashes = DASHES[number // len(COLOURS) % len(DASHES)]
            colour = COLOURS[number % len(COLOURS)]
            side.plot(sent, means, dashes, color=colour, label=row["row"], marker="o", markevery=[-1], markersize=4)
        side.set(xlabel="sent in both directions, GiB", ylabel="global accuracy, %")
        totals = [row["gib"] for row in rows]
        if max(totals) > FEW_TIMES * min(totals):
            _set_log(side)
        side.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=3.5)

    _draw_setups(rows, title, path, draw, (6.4, 4.2))


def _set_log(side: Any) -> None:
    """A logarithmic axis on which plain numbers stand, so few that they can be read."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    side.set_xscale("log")
    low, high = side.get_xlim()
    side.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < MANY_TIMES * low else (1.0,)))
    side.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    side.xaxis.set_minor_locator(NullLocator())


def draw_local(rows: Sequence[Row], title: str, path: Path) -> None:
    """How local accuracy is spread over clients, those of all seeds together; a histogram for every row."""
    most = max(len(each) for each in _by_setup(rows).values())
    _draw_setups(rows, title, path, _draw_clients, (5.4, 1.6 + 0.62 * most))


def has_local(row: Row) -> bool:
    """Whether some run of a row was measured client by client."""
    return any("local_by_client" in run for run in row["runs"])


def _draw_clients(side: Any, rows: Sequence[Row]) -> None:
    """Histograms one below the other, along one axis; the row's mean is a line in it and a number beside it."""
    runs = {row["row"]: [run["local_by_client"] for run in row["runs"] if "local_by_client" in run] for row in rows}
    values = {name: [value for run in each for value in run["masked"]] for name, each in runs.items()}
    least = min(value for each in values.values() for value in each)
    start = min(90.0, 10.0 * floor(least / 10))
    bin = SMALL if start >= 50 else LARGE
    edges = [start + bin * place for place in range(round((100 - start) / bin) + 1)]
    shares = {name: _shares(each, edges) for name, each in values.items()}
    tallest = max(share for each in shares.values() for share in each)
    for place, name in enumerate(reversed(values)):
        colour, found = COLOURS[0], values[name]
        heights = [0.85 * share / tallest for share in shares[name]]
        side.bar(edges[:-1], heights, bin * 0.94, place, align="edge", color=colour, zorder=2)
        side.plot([mean(found)] * 2, [place, place + 0.88], color=COLOURS[1], linewidth=1.6, zorder=3)
        side.text(100 + 0.012 * (100 - start), place + 0.3, f"{mean(found):.1f}", fontsize=8, color=COLOURS[1])
        side.axhline(place, color="#bbbbbb", linewidth=0.6, zorder=1)
    seeds = {name: len(each) for name, each in runs.items()}
    labels = [f"{name}\n{seeds[name]} seed{'s' * (seeds[name] > 1)}" for name in reversed(values)]
    side.set_yticks([place + 0.4 for place in range(len(labels))], labels, fontsize=8)
    side.tick_params(axis="y", length=0)
    side.grid(visible=False, axis="y")
    side.grid(axis="x", color="#eeeeee")
    side.set(xlim=(start, 100), ylim=(0, len(labels) + 0.05))
    about = f"(clients of all seeds pooled; tallest bar: {tallest:.0%} of them; line: mean)"
    side.set_xlabel(f"local accuracy, masked to a client's own classes, %\n{about}", fontsize=8)


def _shares(values: Sequence[float], edges: Sequence[float]) -> list[float]:
    """The part of values between each edge and the next; the last edge belongs to its bin."""
    width = edges[1] - edges[0]
    places = [min(floor((value - edges[0]) / width), len(edges) - 2) for value in values]
    return [places.count(place) / len(values) for place in range(len(edges) - 1)]


def _by_setup(rows: Sequence[Row]) -> Mapping[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["setup"], []).append(row)
    return found


def _draw_setups(
    rows: Sequence[Row],
    title: str,
    path: Path,
    draw: Callable[[Any, Sequence[Row]], None],
    size: tuple[float, float] = (4.8, 4.2),
) -> None:
    """A panel of a size, in inches, for every set-up."""
    setups = _by_setup(rows)
    with page(path, len(setups), (size[0] * len(setups), size[1]), squeeze=False) as sides:
        for side, (setup, each) in zip(sides[0], setups.items(), strict=True):
            draw(side, each)
            side.set_title(f"{setup}, {title}", loc="left", fontsize=10)
