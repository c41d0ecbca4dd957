"""Draws the results of `benchmarks/kernels/bench.py`: the fraction of the limit by shape.

    python -m benchmarks.kernels.chart RMS_NORM.json ADD_RMS_NORM.json OUT.png

The chart has a panel for each operation and direction, a group of bars for each shape, and a bar
for each implementation.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import PercentFormatter

from benchmarks import command
from benchmarks.kernels import shapes

# Label and color of each column, in the order of the bars. Our colors stand out; the layer norm,
# another operation, is grey.
_STYLES = {
    "mosaic_gpu": ("this project", "#c1440e"),
    "default": ("this project, default", "#e8a184"),
    "reference": ("XLA", "#33418a"),
    "torch": ("PyTorch", "#88ccee"),
    "torch.compile": ("torch.compile", "#44aa99"),
    "Liger": ("Liger", "#ddcc77"),
    "QuACK": ("QuACK", "#aa4499"),
    "cuDNN": ("cuDNN", "#117733"),
    "tokamax": ("tokamax", "#6699cc"),
    "TransformerEngine": ("TransformerEngine", "#661100"),
    "LayerNorm (XLA)": ("LayerNorm, XLA", "#6f6f6f"),
    "LayerNorm (torch)": ("LayerNorm, PyTorch", "#929292"),
    "LayerNorm (torch.compile)": ("LayerNorm, torch.compile", "#b3b3b3"),
    "LayerNorm (Liger)": ("LayerNorm, Liger", "#d2d2d2"),
}
_INK = "#333333"
_PALE = "#777777"


def draw(results: Sequence[dict[str, Any]], names: Sequence[str] | None) -> Figure:
    """The figure.

    Args:
      results: Contents of the JSON files of `bench`, one for each operation.
      names: Columns to draw. None draws all except `default`, which repeats another column.

    Raises:
      ValueError: A column has no color.
    """
    panels = [
        (result, direction)
        for result in results
        for direction in dict.fromkeys(row["direction"] for row in result["records"])
    ]
    columns = {name for result in results for row in result["records"] for name in row["columns"]}
    if unknown := columns - _STYLES.keys():
        raise ValueError(f"the columns {sorted(unknown)} have no color: add them to _STYLES")
    chosen = columns - {"default"} if names is None else columns & set(names)
    drawn = [name for name in _STYLES if name in chosen]

    layout = ConstrainedLayoutEngine(h_pad=0.14, w_pad=0.1)
    figure = Figure(figsize=(12, 2.7 * len(panels) + 1.2), dpi=150, layout=layout)
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    handles: dict[str, Any] = {}
    for (result, direction), ax in zip(panels, axes, strict=True):
        _panel(ax, result, direction, drawn, handles)
    devices = sorted({f"{result['device']}, {result['date']}" for result in results})
    figure.supxlabel(f"bfloat16, {'; '.join(devices)}", x=0.99, ha="right", fontsize=9, color=_PALE)
    figure.legend(
        [handles[name] for name in drawn if name in handles],
        [_STYLES[name][0] for name in drawn if name in handles],
        loc="outside upper left",
        ncols=min(len(handles), 6),
        frameon=False,
        fontsize=10,
        labelcolor=_INK,
        handlelength=1.1,
        handleheight=1.1,
    )
    return figure


def _panel(
    ax: Axes,
    result: dict[str, Any],
    direction: str,
    drawn: Sequence[str],
    handles: dict[str, Any],
) -> None:
    rows = [row for row in result["records"] if row["direction"] == direction]
    present = [name for name in drawn if name in rows[0]["columns"]]
    width = 0.84 / len(present)
    for index, name in enumerate(present):
        offset = (index - (len(present) - 1) / 2) * width
        measured = [row["columns"][name].get("fraction") for row in rows]
        places = [place for place, value in enumerate(measured) if value is not None]
        values = [value for value in measured if value is not None]
        bars = ax.bar([p + offset for p in places], values, width * 0.92, color=_STYLES[name][1])
        handles.setdefault(name, bars)
        if name == "mosaic_gpu":
            labels = [f"{value:.0%}".removesuffix("%") for value in values]
            ax.bar_label(
                bars, labels, padding=2, fontsize=8.5, color=_STYLES[name][1], fontweight="bold"
            )
    ax.set_title(
        f"{result['op']}, {direction}",
        loc="left",
        pad=10,
        fontsize=12,
        fontweight="bold",
        color=_INK,
    )
    ax.set_ylabel("speed, % of a copy", fontsize=9.5, color=_INK)
    ax.set_xticks(
        range(len(rows)), [shapes.label(row["shape"]) for row in rows], fontsize=9.5, color=_INK
    )
    ax.set_xlim(-0.55, len(rows) - 0.45)
    ax.tick_params(axis="both", length=0)
    ax.yaxis.set_major_formatter(PercentFormatter(xmax=1, symbol=""))
    ax.tick_params(axis="y", labelsize=9, labelcolor=_PALE)
    ax.set_axisbelow(True)
    ax.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    ax.axhline(1, color="#999999", linewidth=1, linestyle=(0, (4, 3)), zorder=0.5)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color("#bbbbbb")


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, reads the results and writes the image."""
    parser = command.parser("benchmarks.kernels.chart", __doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("output", type=Path)
    parser.add_argument("--implementations", nargs="+", help="names of columns; default: all")
    args = parser.parse_args(argv)
    results = [json.loads(path.read_text()) for path in args.results]
    draw(results, args.implementations).savefig(args.output)


if __name__ == "__main__":
    main()
