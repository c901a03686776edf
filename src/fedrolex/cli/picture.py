"""A picture of a model's axes: which dimensions of which tensors are cut together."""

from pathlib import Path

from fedrolex.core import FedrolexError
from fedrolex.slicing import Axes

COLOURS = {
    "width": "#2a6fbb", "heads": "#c1762a", "groups": "#8a5fb0", "factor": "#7d8c3c", "rows": "#a8a8a8",
    "outputs": "#c94f4f",
}  # fmt: skip


def draw_axes(axes: Axes, path: Path, title: str) -> None:
    """One row an axis, one column a parameter; a mark where the axis is (part of) a dimension of it.

    A full square marks the side a parameter writes to, an open one the side it reads from. Bars on the
    right show the axes' sizes.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    columns = [n for n, t in axes.tensors.items() if t.role == "parameter"]
    place = {name: i for i, name in enumerate(columns)}
    rows = list(axes.axes.values())
    figure, (left, right) = plt.subplots(
        1, 2, sharey=True, layout="constrained", gridspec_kw={"width_ratios": [5, 1]},
        figsize=(min(40.0, 4 + 0.16 * len(columns)), min(60.0, 1.8 + 0.22 * len(rows))),
    )  # fmt: skip
    for row, axis in enumerate(rows):
        colour = COLOURS[axis.kind]
        members = [(t, d) for t, d in axis.members if t in place]
        if members:
            spots = [place[t] for t, _ in members]
            left.plot([min(spots), max(spots)], [row, row], color=colour, linewidth=0.8, alpha=0.4, zorder=1)
        for tensor, dim in members:
            reads = dim in axes.tensors[tensor].reads
            left.scatter(
                place[tensor],
                row,
                s=22,
                marker="s",
                zorder=2,
                edgecolors=colour,
                facecolors="white" if reads else colour,
            )
        right.barh(row, axis.size, color=colour, height=0.7)
        right.text(axis.size, row, f" {axis.size}", va="center", fontsize=7)
    left.set_yticks(range(len(rows)), [a.name for a in rows], fontsize=7)
    left.set_xticks(range(len(columns)), columns, rotation=90, fontsize=5)
    left.set_xlim(-1, len(columns))
    left.invert_yaxis()
    left.grid(axis="x", color="#eeeeee", zorder=0)
    left.set_title(f"{title}: which dimensions share their indices", fontsize=10, loc="left")
    right.set_title("size", fontsize=9, loc="left")
    right.set_xlim(0, max(a.size for a in rows) * 1.3)
    right.xaxis.set_visible(False)
    for side in (left, right):
        side.spines[["top", "right"]].set_visible(False)
    kinds = [k for k in COLOURS if any(a.kind == k for a in rows)]
    handles = [Line2D([], [], marker="s", linestyle="", color=COLOURS[k], label=k) for k in kinds]
    handles += [Line2D([], [], marker="s", linestyle="", markerfacecolor="white", color="black", label="reads from it")]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), fontsize=7, frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise FedrolexError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        plt.close(figure)
