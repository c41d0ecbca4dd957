"""The page that a run leaves behind: `report.html`, one file that needs no network, and `loss.png`.

Both are made from `metrics.jsonl` and `config.json` alone, so they can be made again at any time,
also for a run that died or has no held-out results.
"""

import dataclasses
import io
import json
import math
import os
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from train.reporting.metrics import format_count, format_duration
from train.reporting.page import escape, figure_html, grid, page_html, section
from train.reporting.rows import Row, read_rows, write_whole

type RunDir = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class RunMetrics:
    """The rows of metrics.jsonl in order of step: one per step at most in each list."""

    train: list[Row]
    held_out: list[Row]


def load_metrics(run_dir: RunDir) -> RunMetrics:
    """Reads metrics.jsonl.

    A resumed run repeats the steps after its checkpoint: the later rows count. A line that is no
    row, such as a last one that the run died in, is left out with a warning.

    Raises:
      RunError: the file cannot be read.
    """
    train: list[Row] = []
    held_out: list[Row] = []
    for row in read_rows(Path(run_dir) / "metrics.jsonl"):
        named = row.pop("nonfinite", None)
        if isinstance(named, dict):
            row |= {key: float(value) for key, value in named.items() if value in _NONFINITE}
        rows = held_out if "val_loss" in row else train
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        rows.append(row)
    return RunMetrics(train, held_out)


_NONFINITE = ("nan", "inf", "-inf")


def plot(run_dir: RunDir) -> Path:
    """Draws loss and speed over the steps of a run to `loss.png` in its directory."""
    path = Path(run_dir) / "loss.png"
    write_whole(path, _png(load_metrics(run_dir), _title(run_dir), LIGHT, _WIDE))
    return path


def write_report(
    run_dir: RunDir,
    *,
    samples: Sequence[tuple[str, str]],
    summary: Mapping[str, str | int | float],
) -> Path:
    """Writes `report.html` and `loss.png` in a run's directory; gives the page's path.

    Args:
      run_dir: has metrics.jsonl and, if the run got so far, config.json.
      samples: generated texts, each with a heading: the prompt or the temperature, say.
      summary: figures to show after the headline numbers, by label. One with the label of a
        headline number replaces it.

    Raises:
      RunError: a file cannot be read or written.
    """
    run_dir = Path(run_dir)
    metrics = load_metrics(run_dir)
    title = _title(run_dir)
    plot(run_dir)
    wide, narrow = (
        tuple(_png(metrics, "", theme, size) for theme in (LIGHT, DARK))
        for size in (_WIDE, _NARROW)
    )
    config_path = run_dir / "config.json"
    config = json.loads(config_path.read_text()) if config_path.exists() else {}
    environment = config.pop("environment", {})
    command = environment.pop("command", None)

    body = [
        f"<header><h1>{escape(title)}</h1>{_subtitle(metrics, environment)}</header>",
        _headline(headline_numbers(metrics) | dict(summary)),
        figure_html("Loss and speed over steps", wide, narrow)
        if metrics.train or metrics.held_out
        else "<p>The run ended before its first row of metrics.</p>",
        _details_html(metrics),
        _samples_html(samples),
        _earlier_samples_html(_load_samples(run_dir)),
        _config_html(config),
        section("Environment", _table(environment)) if environment else "",
        section("Command", f"<pre>{escape(command)}</pre>") if command else "",
    ]
    path = run_dir / "report.html"
    write_whole(path, page_html(title, body))
    return path


def _load_samples(run_dir: Path) -> list[Row]:
    """The rows of samples.jsonl."""
    path = run_dir / "samples.jsonl"
    rows = read_rows(path) if path.exists() else ()
    return [row for row in rows if {"heading", "text"} <= row.keys()]


def _title(run_dir: RunDir) -> str:
    return Path(run_dir).resolve().name


# The numbers ---------------------------------------------------------------------------------


def series(rows: Iterable[Row], key: str) -> tuple[list[float], list[float]]:
    """Steps and values of the rows that have a key."""
    points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), (int, float))]
    return [float(step) for step, _ in points], [float(value) for _, value in points]


def headline_numbers(metrics: RunMetrics) -> dict[str, Any]:
    """What a run comes to, by label."""
    numbers: dict[str, Any] = {}
    _, loss = series(metrics.train, "loss")
    if loss:
        numbers["Training loss"] = f"{loss[-1]:.4f}"
    _, val_loss = series(metrics.held_out, "val_loss")
    if val_loss:
        numbers["Held-out loss"] = f"{val_loss[-1]:.4f}"
    _, bpb = series(metrics.held_out, "val_bpb")
    if bpb:
        first = f"{bpb[0]:.3f} → " if len(bpb) > 1 else ""
        numbers["Held-out bits per byte"] = f"{first}{bpb[-1]:.3f}"
    _, speed = series(metrics.train, "tokens_per_s")
    if speed:
        numbers["Tokens per second"] = format_count(statistics.median(speed))
    _, mfu = series(metrics.train, "mfu")
    if mfu:
        numbers["MFU"] = f"{statistics.median(mfu):.1%}"
    memory = [
        value
        for key in ("memory_gib", "peak_memory_gib")
        for value in series(metrics.train, key)[1]
    ]
    if memory:
        numbers["Peak memory"] = f"{max(memory):.2f} GiB"
    _, tokens = series(metrics.train, "tokens")
    if tokens:
        numbers["Tokens"] = format_count(tokens[-1])
    _, elapsed = series([*metrics.train, *metrics.held_out], "elapsed_s")
    if elapsed:
        numbers["Wall time"] = format_duration(max(elapsed))
    return numbers


# The plot ------------------------------------------------------------------------------------


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
    """Mean over a centred window of about 4 % of the run; NaNs do not spread.

    Centred, so that the curve does not lag behind a falling loss. At the start, where that is
    steep, the window shrinks on both sides; at the end only on the side that is missing, for else
    the last point would be the last step's loss with all of its noise.
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


# Inches. The page is up to 992 pixels wide, and the wide figure is shown from 768: with letters of
# 9 points they are at least 11 pixels high. A page of 500 pixels leaves 434 to a narrow figure or a
# panel, with letters of 13.
_WIDE = (7.9, 5.4)
_NARROW = (4.2, 4.6)
_PANEL = (4.2, 1.9)


def empty_figure(size: tuple[float, float], theme: Theme) -> Any:
    """A figure in the colours of the page."""
    # Imported here: it takes half a second, which a training run need not wait for.
    from matplotlib.figure import Figure

    # A `Figure` of its own needs neither pyplot's global state nor a display.
    return Figure(figsize=size, dpi=160, layout="constrained", facecolor=theme.background)


def _png(metrics: RunMetrics, title: str, theme: Theme, size: tuple[float, float]) -> bytes:
    from matplotlib.ticker import MaxNLocator

    figure = empty_figure(size, theme)
    loss_axes, speed_axes = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1))
    if title:
        shown = title if len(title) <= 60 else f"{title[:40]}…{title[-19:]}"
        # As it is: a name is no formula, whatever dollar signs it has.
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
    """A figure in the style of the page."""
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
        # The page has the name, too.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format="png", facecolor=theme.background)
    return buffer.getvalue()


# What is drawn besides loss and speed: key of the rows, title, factor.
_DETAILS = (
    ("grad_norm", "gradient norm", 1),
    ("lr", "learning rate", 1),
    ("data_wait_s", "wait for data (ms)", 1000),
    ("skipped_steps", "skipped steps", 1),
    ("memory_gib", "memory in use (GiB)", 1),
    ("val_accuracy", "held-out accuracy", 1),
)


def _details_html(metrics: RunMetrics) -> str:
    """A panel for each of `_DETAILS` that the run has; none of skipped steps if there are none."""
    panels = []
    for key, title, factor in _DETAILS:
        steps, values = series([*metrics.train, *metrics.held_out], key)
        if steps and (key != "skipped_steps" or any(values)):
            values = [factor * value for value in values]
            pictures = tuple(_details_png(title, steps, values, theme) for theme in (LIGHT, DARK))
            panels.append(figure_html(title.capitalize(), pictures))
    return section("Details", grid(panels)) if panels and metrics.train else ""


def _details_png(title: str, steps: list[float], values: list[float], theme: Theme) -> bytes:
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
    axes.set_ylabel("loss (nats per token)")
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
    """Draws tokens/s; gives the axes of MFU, if there is one, that reads the same curve."""
    from matplotlib.ticker import FuncFormatter

    steps, speed = series(metrics.train, "tokens_per_s")
    top = 1.15 * max(speed, default=1.0)
    marker = "o" if len(steps) == 1 else None
    axes.plot(steps, speed, color=theme.speed, linewidth=1.4, marker=marker)
    axes.set_ylabel("tokens/s")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axes.set_ylim(0, top)
    ratios = [
        row["mfu"] / row["tokens_per_s"]
        for row in metrics.train
        if row.get("mfu") and row.get("tokens_per_s")
    ]
    if not ratios:
        return []
    mfu_axes = axes.twinx()
    mfu_axes.set_gid("twin")  # reads the same grid
    mfu_axes.set_ylabel("MFU")
    mfu_axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    mfu_axes.set_ylim(0, top * statistics.median(ratios))
    return [mfu_axes]


def limit_loss(axes: Any, loss: list[float], val_loss: list[float]) -> str:
    """Leaves the first, steep part of a long run out of sight, where it would flatten the rest.

    Returns:
      What is not seen, in words; "" if all is.
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


# The page ------------------------------------------------------------------------------------


def _subtitle(metrics: RunMetrics, environment: Mapping[str, Any]) -> str:
    steps = max([row["step"] for row in (*metrics.train, *metrics.held_out)], default=0)
    parts = [f"{steps:,} steps"]
    if device := environment.get("device_kind"):
        parts.append(f"{environment.get('num_devices', 1)} \N{MULTIPLICATION SIGN} {device}")
    if jax_version := environment.get("jax"):
        parts.append(f"JAX {jax_version}")
    if started := environment.get("started"):
        parts.append(str(started))
    return f"<p>{escape(' · '.join(parts))}</p>"


def _headline(numbers: Mapping[str, Any]) -> str:
    tiles = (
        f"<div><dt>{escape(label)}</dt><dd>{escape(_number(value))}</dd></div>"
        for label, value in numbers.items()
    )
    return f'<dl class="tiles">{"".join(tiles)}</dl>' if numbers else ""


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _samples_html(samples: Sequence[tuple[str, str]]) -> str:
    blocks = (f"<h3>{escape(heading)}</h3><pre>{escape(text)}</pre>" for heading, text in samples)
    cards = "".join(f'<div class="card">{block}</div>' for block in blocks)
    return section("Samples", cards) if samples else ""


def _earlier_samples_html(rows: Sequence[Row]) -> str:
    """The samples of each evaluation, folded up."""
    blocks = (
        f'<details class="card"><summary>step {row["step"]:,}, {escape(row["heading"])}</summary>'
        f"<pre>{escape(row['text'])}</pre></details>"
        for row in rows
    )
    return section("Samples over time", "".join(blocks)) if rows else ""


def _config_html(config: Mapping[str, Any]) -> str:
    """One table for every object, headed by its path, of the entries that are not objects."""
    groups: dict[str, dict[str, Any]] = {}

    def collect(path: str, entries: Mapping[str, Any]) -> None:
        plain = {key: value for key, value in entries.items() if not isinstance(value, dict)}
        if plain:
            groups[path or "run"] = plain
        for key, value in entries.items():
            if isinstance(value, dict):
                collect(f"{path}.{key}" if path else key, value)

    collect("", config)
    cards = (
        f'<div class="card"><h3>{escape(path)}</h3>{_table(entries)}</div>'
        for path, entries in groups.items()
    )
    content = f'<div class="columns">{"".join(cards)}</div>'
    return section("Configuration", content) if groups else ""


def _table(entries: Mapping[str, Any]) -> str:
    rows = (
        f"<tr><th>{escape(key)}</th><td>{escape(_config_value(value))}</td></tr>"
        for key, value in entries.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _config_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
