"""Draws the results of `benchmarks/kernels/norm_widths.py`: the fraction of a copy by width.

    python -m benchmarks.kernels.norm_widths_chart H100.json H200.json OUT.png

The chart has a panel for each operation and direction, and a line for each file, with the default
launch parameters.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullLocator, PercentFormatter

from benchmarks import command

_COLORS = "#33418a", "#c1440e", "#44aa99", "#999933"
_TICKS = 512, 1024, 2048, 4096, 8192, 16384


def draw(results: Sequence[dict[str, Any]]) -> Figure:
    """The figure.

    Args:
      results: Contents of the JSON files.
    """
    cases = [(entry["op"], entry["direction"]) for result in results for entry in result["entries"]]
    panels = list(dict.fromkeys(cases))
    layout = ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1)
    figure = Figure(figsize=(10, 2.8 * len(panels)), dpi=110, layout=layout)
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    for (op, direction), ax in zip(panels, axes, strict=True):
        for result, color in zip(results, _COLORS, strict=False):
            points = sorted(
                (entry["shape"][1], entry["copy"]["median_ms"] / default["median_ms"])
                for entry in result["entries"]
                if (entry["op"], entry["direction"]) == (op, direction)
                and "error" not in (default := entry["configs"]["default"])
            )
            label = result["device"].removeprefix("NVIDIA ")
            ax.plot(*zip(*points, strict=True), "o-", color=color, label=label, markersize=4)
        ax.set_title(f"{op}, {direction}", loc="left", fontweight="bold")
        ax.set_xscale("log", base=2)
        ax.set_xticks(_TICKS, [str(width) for width in _TICKS])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_ylabel("speed, % of a copy")
        ax.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0, symbol=""))
        ax.axhline(1, color="#999999", linewidth=1, linestyle=(0, (4, 3)))
        ax.grid(axis="y", color="#e6e6e6")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, loc="lower right")
    axes[-1].set_xlabel("hidden size D")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, reads the results and writes the image."""
    parser = command.parser("benchmarks.kernels.norm_widths_chart", __doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("output", type=Path)
    args = parser.parse_args(argv)
    if len(args.results) > len(_COLORS):
        parser.error(f"{len(args.results)} files; there are colors for {len(_COLORS)}")
    draw([json.loads(path.read_text()) for path in args.results]).savefig(args.output)


if __name__ == "__main__":
    main()
