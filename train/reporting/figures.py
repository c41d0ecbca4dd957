"""The figures of a report, as PNGs for a light and a dark page."""

import dataclasses
import io
import math
import statistics
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from train.formats import format_count
from train.reporting.results import RunMetrics, series


@dataclasses.dataclass(frozen=True, kw_only=True)
class Theme:
    """Colours of a figure on a light or a dark page."""

    background: str
    text: str
    muted: str
    grid: str
    train: str
    held_out: str
    speed: str


# Okabe and Ito's palette, told apart with any colour vision.
LIGHT = Theme(
    background="#ffffff",
    text="#1f2328",
    muted="#59636e",
    grid="#e4e7eb",
    train="#0072b2",
    held_out="#d55e00",
    speed="#007a5a",
)
DARK = Theme(
    background="#161b22",
    text="#e6edf3",
    muted="#9198a1",
    grid="#2b323b",
    train="#56b4e9",
    held_out="#f0883e",
    speed="#3fb98f",
)


def smooth(values: list[float]) -> Float[np.ndarray, " N"]:
    """Mean over a centred window of about 4 % of the run, which leaves out NaNs.

    The window is centred, so the curve does not lag behind a falling loss. At the start, where the
    loss is steep, the window shrinks on both sides. At the end it shrinks on the right side alone;
    otherwise the last point would be the last loss with all of its noise.
    """
    array = np.array(values)
    finite = np.isfinite(array)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(array))
    radius = np.minimum(len(array) // 50, index)
    low, high = index - radius, np.minimum(index + radius + 1, len(array))
    count = counts[high] - counts[low]
    return np.where(count > 0, (sums[high] - sums[low]) / np.maximum(count, 1), np.nan)


# Sizes in inches. The page is up to 992 pixels wide. From 768 on it shows the wide figure, whose
# letters of 9 points are then at least 11 pixels high. A page of 500 pixels has 434 for a narrow
# figure or a panel, with letters of 13 pixels.
WIDE = (7.9, 5.4)
NARROW = (4.2, 4.6)
_PANEL = (4.2, 1.9)


def empty_figure(size: tuple[float, float], theme: Theme) -> Any:
    """A figure in the colours of the page."""
    # Imported here, because it takes half a second, which a training run need not wait for.
    from matplotlib.figure import Figure

    # `Figure` itself, without pyplot, which has global state and may need a display.
    return Figure(figsize=size, dpi=160, layout="constrained", facecolor=theme.background)


def loss_png(metrics: RunMetrics, title: str, theme: Theme, size: tuple[float, float]) -> bytes:
    """Loss and speed over the steps, as a PNG of `size` inches."""
    from matplotlib.ticker import MaxNLocator

    figure = empty_figure(size, theme)
    loss_axes, speed_axes = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1))
    if title:
        shown = title if len(title) <= 60 else f"{title[:40]}…{title[-19:]}"
        # `parse_math=False`, because a name with dollar signs is no formula.
        figure.suptitle(
            shown.encode(errors="replace").decode(),
            color=theme.text,
            fontsize=13,
            fontweight="bold",
            parse_math=False,
        )

    _draw_loss(loss_axes, metrics, theme)
    all_axes = [loss_axes, speed_axes, *_draw_speed(speed_axes, metrics, theme)]
    speed_axes.set_xlabel("step")
    speed_axes.xaxis.set_major_locator(
        MaxNLocator(nbins=int(size[0]) + 1, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
    )

    return finished_png(figure, all_axes, theme)


def finished_png(figure: Any, all_axes: Sequence[Any], theme: Theme) -> bytes:
    """A figure as a PNG, in the style of the page."""
    for axes in all_axes:
        axes.set_facecolor(theme.background)
        axes.margins(x=0.01)
        axes.tick_params(colors=theme.muted, labelsize=9, length=0)
        axes.yaxis.label.set_color(theme.muted)
        axes.xaxis.label.set_color(theme.muted)
        axes.spines[:].set_visible(False)
        if axes.get_gid() != "twin":
            axes.grid(color=theme.grid, linewidth=0.8)
            axes.set_axisbelow(True)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # The page shows the name as well.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format="png", facecolor=theme.background)
    return buffer.getvalue()


# The panels besides loss and speed: key of the rows, title, factor.
DETAILS = (
    ("grad_norm", "gradient norm", 1),
    ("lr", "learning rate", 1),
    ("data_wait_s", "wait for data (ms)", 1000),
    ("skipped_steps", "skipped steps", 1),
    ("memory_gib", "memory in use (GiB)", 1),
    ("val_accuracy", "held-out accuracy", 1),
    ("reward_margin", "margin of rewards", 1),
    ("reward_accuracy", "accuracy of rewards", 1),
    ("val_reward_margin", "held-out margin of rewards", 1),
    ("val_reward_accuracy", "held-out accuracy of rewards", 1),
    ("divergence", "divergence from the teacher", 1),
)


def details_png(title: str, steps: list[float], values: list[float], theme: Theme) -> bytes:
    """One of `DETAILS` over the steps, as a PNG."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = panel(title, theme)
    marker = "o" if len(steps) == 1 else None
    axes.plot(steps, values, color=theme.train, linewidth=1.2, marker=marker)
    if title == "skipped steps":
        axes.set_ylim(0, 1.05 * max(1, *values))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    elif min(values) >= 0:
        axes.set_ylim(bottom=0)
    return finished_png(figure, [axes], theme)


def panel(title: str, theme: Theme) -> tuple[Any, Any]:
    """A small figure and its axes over the steps."""
    from matplotlib.ticker import MaxNLocator

    figure = empty_figure(_PANEL, theme)
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=9.5, color=theme.text)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    return figure, axes


def _draw_loss(axes: Any, metrics: RunMetrics, theme: Theme) -> None:
    steps, loss = series(metrics.train, "loss")
    val_steps, val_loss = series(metrics.held_out, "val_loss")
    of_pairs = any("reward_margin" in row for row in metrics.train)
    axes.set_ylabel(f"loss (nats per {'pair' if of_pairs else 'token'})")
    if steps:
        # A single point draws no line.
        line = {"color": theme.train, "marker": "o" if len(steps) == 1 else None}
        axes.plot(steps, loss, alpha=0.3, linewidth=0.8, **line)
        axes.plot(steps, smooth(loss), linewidth=1.9, label="training", **line)
    if val_steps:
        marked = {"marker": "o", "markersize": 4.5}
        axes.plot(
            val_steps, val_loss, color=theme.held_out, linewidth=1.6, label="held out", **marked
        )
    diverged = [step for step, value in zip(steps, loss, strict=True) if not math.isfinite(value)]
    if diverged:
        label = f"not finite at step {diverged[0]:.0f}"
        axes.axvline(diverged[0], color=theme.muted, linestyle=":", label=label)
    if steps or val_steps:
        axes.legend(frameon=False, labelcolor=theme.text, fontsize=9)
    note = limit_loss(axes, loss, val_loss)
    if note:
        axes.set_title(note, loc="right", fontsize=9, color=theme.muted)


def _draw_speed(axes: Any, metrics: RunMetrics, theme: Theme) -> list[Any]:
    """Draws tokens/s. Returns the axes of MFU, a second scale of the same curve, if any.

    The scale is that of the median FLOPs of a token. The FLOPs of a step depend on its documents.
    """
    steps, speed = series(metrics.train, "tokens_per_s")
    top = 1.15 * max(speed, default=1.0)
    marker = "o" if len(steps) == 1 else None
    axes.plot(steps, speed, color=theme.speed, linewidth=1.4, marker=marker)
    axes.set_ylabel("tokens/s")
    axes.yaxis.set_major_formatter(lambda value, _: format_count(value))
    axes.set_ylim(0, top)
    ratios = [
        row["mfu"] / row["tokens_per_s"]
        for row in metrics.train
        if row.get("mfu") and row.get("tokens_per_s")
    ]
    if not ratios:
        return []
    mfu_axes = axes.twinx()
    mfu_axes.set_gid("twin")  # shares the grid
    mfu_axes.set_ylabel("MFU")
    mfu_axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    mfu_axes.set_ylim(0, top * statistics.median(ratios))
    return [mfu_axes]


def limit_loss(axes: Any, loss: list[float], val_loss: list[float]) -> str:
    """Cuts off the first, steep part of a long run, which would flatten the rest.

    Returns:
      A note that names the cut; "" if nothing is cut.
    """
    finite = [value for value in loss if math.isfinite(value)]
    if len(finite) < 50:
        return ""
    shown = [*finite, *filter(math.isfinite, val_loss)]
    low, high = min(shown), float(np.quantile(finite, 0.98))
    margin = 0.05 * (high - low)
    if high <= low:
        return ""
    axes.set_ylim(low - margin, high + margin)
    top = max(shown)
    return (
        f"cut off at {high + margin:.3g}; the highest is {top:.3g}" if top > high + margin else ""
    )
