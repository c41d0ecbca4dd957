"""Draws results of several GPUs: the sharded norm, and training by the number of GPUs.

    python -m benchmarks.training.gpus_chart SHARDED.json TRAIN_X2.md TRAIN_X4.md OUT.png

The first file comes from `benchmarks.kernels.sharded`; the chart has a bar for each implementation,
whose height is its time over that of the first implementation. Each of the other files has a table
with the columns model, mesh and tokens/s. The row whose mesh is "one GPU" is the baseline.
"""

import collections
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks import command, tables

_COLORS = ("#6f6f6f", "#33418a", "#c1440e")
_INK, _PALE = "#333333", "#777777"
_ONE_GPU = "one GPU"


def speeds(text: str) -> dict[tuple[str, str], dict[int, float]]:
    """Tokens/s by number of GPUs, for each pair of a model and an axis of the mesh.

    A row counts only if its mesh is one axis and its size, or "one GPU".

    Raises:
      ValueError: No table has these columns.
    """
    alone: dict[str, float] = {}
    found: dict[tuple[str, str], dict[int, float]] = collections.defaultdict(dict)
    for model, mesh, speed in tables.rows(text, ("model", "mesh", "tokens/s")):
        speed = float(speed.replace(",", ""))
        if mesh == _ONE_GPU:
            alone[model] = speed
        elif match := re.fullmatch(r"(\w+) (\d+)", mesh):
            found[model, match[1]][int(match[2])] = speed
    return {
        (model, axis): ({1: alone[model]} if model in alone else {}) | by_number
        for (model, axis), by_number in found.items()
    }


def _draw_norm(ax: Axes, records: Sequence[dict[str, Any]]) -> None:
    names = list(records[0]["results"])
    width = 0.8 / len(names)
    for k, (name, color) in enumerate(zip(names, _COLORS, strict=True)):
        times = [record["results"][name]["median_ms"] for record in records]
        first = [record["results"][names[0]]["median_ms"] for record in records]
        bars = ax.bar(
            [i + (k - (len(names) - 1) / 2) * width for i in range(len(records))],
            [time / other for time, other in zip(times, first, strict=True)],
            width,
            color=color,
            label=name,
        )
        ax.bar_label(bars, [f"{time:.2f}" for time in times], fontsize=6, color=_PALE)
    labels = [record["name"].replace(" ", "\n", 1).replace("and", "and\n") for record in records]
    ax.set_xticks(range(len(records)), labels, fontsize=7, color=_INK)
    ax.set_yticks([])
    ax.set_title("sharded_add_rms_norm: ms; bars: time over the first", loc="left", fontsize=10)
    ax.margins(y=0.15)
    ax.legend(frameon=False, fontsize=7, loc="upper left", ncols=len(names))


def _draw_training(ax: Axes, series: dict[tuple[str, str], dict[int, float]]) -> None:
    # Labels of the first series stand above its line, those of the others below theirs.
    offsets = itertools.chain([(-22, 5)], itertools.repeat((4, -11)))
    for ((model, axis), by_number), color, offset in zip(
        series.items(), reversed(_COLORS), offsets, strict=False
    ):
        numbers = sorted(by_number)
        ax.plot(
            numbers,
            [by_number[number] / 1e3 for number in numbers],
            "o-",
            color=color,
            label=f"{model}, {axis}",
        )
        for number in numbers:
            ax.annotate(
                f"{by_number[number] / 1e3:.0f}k",
                (number, by_number[number] / 1e3),
                xytext=offset,
                textcoords="offset points",
                fontsize=7,
                color=_PALE,
            )
    best = max(by_number[1] for by_number in series.values() if 1 in by_number)
    most = max(number for by_number in series.values() for number in by_number)
    ax.plot(
        [1, most],
        [best / 1e3, most * best / 1e3],
        ":",
        color=_PALE,
        label="one GPU, times GPUs",
    )
    ax.set_ylim(bottom=0)
    ax.set_xticks(range(1, most + 1))
    ax.set_xlabel("GPUs", fontsize=8)
    ax.set_title("training: 1000 tokens/s", loc="left", fontsize=10)
    ax.legend(frameon=False, fontsize=7)


def draw(records: Sequence[dict[str, Any]], texts: Sequence[str]) -> Figure:
    """The figure: the norm at the left, training at the right."""
    series: dict[tuple[str, str], dict[int, float]] = {}
    for text in texts:
        for key, by_number in speeds(text).items():
            series[key] = series.get(key, {}) | by_number
    figure = Figure(figsize=(11, 3.6), dpi=150, layout=ConstrainedLayoutEngine())
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_norm(left, records)
    _draw_training(right, series)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, reads the results and writes the image."""
    parser = command.parser("benchmarks.training.gpus_chart", __doc__)
    parser.add_argument("sharded", type=Path)
    parser.add_argument("training", type=Path, nargs="+")
    parser.add_argument("output", type=Path)
    args = parser.parse_args(argv)
    records = json.loads(args.sharded.read_text())
    draw(records, [path.read_text() for path in args.training]).savefig(args.output)


if __name__ == "__main__":
    main()
