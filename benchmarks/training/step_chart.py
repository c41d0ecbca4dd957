"""Draws time and memory of training steps, a bar for each row of the tables of results.

    python -m benchmarks.training.step_chart OURS.md NEWER.md TE.md TORCH.md OUT.png

`train_step`, `train_step_te` and `train_step_torch` of `benchmarks.training` write the tables. If
several tables have the same variant, the last one counts.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks import command, tables

_OURS, _THEIRS = "#c1440e", "#33418a"
_INK, _PALE = "#333333", "#777777"
# Variants of PyTorch begin with the name of a library, those of TransformerEngine with that of a
# loss, and ours with that of a layer loop.
_THEIR_NAMES = {
    "logits": "TransformerEngine",
    "ours": "TransformerEngine with our loss",
    "fp8=current": "FP8 current",
    "fp8=delayed": "FP8 delayed",
    "liger": "transformers with Liger",
    "liger_loss": "transformers with Liger's loss",
    "huggingface": "transformers",
    "full": "checkpointed",
    "compile": "compiled",
    "fp8=tensorwise": "FP8 tensorwise (torchao)",
    "fp8=rowwise": "FP8 rowwise (torchao)",
}


def rows_of(text: str) -> list[tuple[str, float, float]]:
    """`(variant, ms, GiB)` of the first table in a file of results.

    Raises:
      ValueError: No table has these columns.
    """
    return [
        (name, float(milliseconds), float(memory.removesuffix(" GiB")))
        for name, milliseconds, memory in tables.rows(text, ("variant", "ms/step", "memory"))
    ]


def draw(texts: Sequence[str]) -> Figure:
    """The figure. Its title is the first line of the first file, with date and device."""
    by_variant = {row[0]: row for text in texts for row in rows_of(text)}
    rows = sorted(by_variant.values(), key=lambda row: row[1])
    parts = [name.split(":") for name, _, _ in rows]
    is_theirs = [words[0] in _THEIR_NAMES for words in parts]
    labels = [
        ", ".join(_THEIR_NAMES.get(word, word) for word in words)
        if theirs
        else f"ours: {', '.join(words)}"
        for words, theirs in zip(parts, is_theirs, strict=True)
    ]
    colors = [_THEIRS if theirs else _OURS for theirs in is_theirs]
    layout = ConstrainedLayoutEngine(w_pad=0.1)
    figure = Figure(figsize=(11, 0.42 * len(rows) + 1.3), dpi=150, layout=layout)
    heading, details = [line for line in texts[0].splitlines() if line][:2]
    title = ", ".join([heading.lstrip("# "), *details.split(", ")[:2]])
    figure.suptitle(title, x=0.01, ha="left", color=_INK)
    for ax, column, title in zip(
        figure.subplots(1, 2, sharey=True), (1, 2), ("ms a step", "GiB"), strict=True
    ):
        bars = ax.barh(range(len(rows)), [row[column] for row in rows], 0.72, color=colors)
        ax.bar_label(bars, fmt="%.0f" if column == 1 else "%.1f", padding=3, color=_PALE)
        ax.set_title(title, loc="left", fontsize=10, color=_INK)
        ax.set_yticks(range(len(rows)), labels, fontsize=10, color=_INK)
        ax.set_xticks([])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        ax.margins(x=0.14)
    figure.axes[0].invert_yaxis()  # the fastest on top, on both axes
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, reads the tables and writes the image."""
    parser = command.parser("benchmarks.training.step_chart", __doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("output", type=Path)
    args = parser.parse_args(argv)
    draw([path.read_text() for path in args.results]).savefig(args.output)


if __name__ == "__main__":
    main()
