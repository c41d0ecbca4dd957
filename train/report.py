"""The page that a run leaves behind: `report.html`, one file that needs no network, and `loss.png`.

Both are made from `metrics.jsonl` and `config.json` alone, so they can be made again at any time,
also for a run that died or has no held-out results.
"""

import base64
import dataclasses
import html
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

from train.metrics import format_count, format_duration

type Row = dict[str, Any]
type RunDir = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class RunMetrics:
    """The rows of metrics.jsonl in order of step: one per step at most in each list."""

    train: list[Row]
    held_out: list[Row]


def load_metrics(run_dir: RunDir) -> RunMetrics:
    """Reads metrics.jsonl.

    A resumed run repeats the steps after its checkpoint: the later rows count. A last line that
    is not JSON is a row the run died in, and is left out with a warning.

    Raises:
      ValueError: a line before the last is not JSON.
    """
    path = Path(run_dir) / "metrics.jsonl"
    lines = path.read_text(errors="replace").splitlines()
    train: list[Row] = []
    held_out: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}:{number} is not JSON: {line[:80]!r}") from error
            warnings.warn(f"{path}: left out the incomplete last line {line[:80]!r}", stacklevel=2)
            continue
        row |= {key: float(value) for key, value in row.pop("nonfinite", {}).items()}
        rows = held_out if "val_loss" in row else train
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        rows.append(row)
    return RunMetrics(train, held_out)


def plot(run_dir: RunDir) -> Path:
    """Draws loss and speed over the steps of a run to `loss.png` in its directory."""
    path = Path(run_dir) / "loss.png"
    path.write_bytes(_png(load_metrics(run_dir), _title(run_dir), LIGHT))
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
    """
    run_dir = Path(run_dir)
    metrics = load_metrics(run_dir)
    title = _title(run_dir)
    plot(run_dir)
    light, dark = (_png(metrics, "", theme) for theme in (LIGHT, DARK))
    details = _details_png(metrics, LIGHT), _details_png(metrics, DARK)
    config_path = run_dir / "config.json"
    config = json.loads(config_path.read_text()) if config_path.exists() else {}
    environment = config.pop("environment", {})
    command = environment.pop("command", None)

    body = [
        f"<header><h1>{escape(title)}</h1>{_subtitle(metrics, environment)}</header>",
        _headline(headline_numbers(metrics) | dict(summary)),
        figure_html(light, dark, "Loss and speed over steps")
        if metrics.train or metrics.held_out
        else "<p>The run ended before its first row of metrics.</p>",
        section("Details", figure_html(*details, "Gradient norm, learning rate and others"))
        if metrics.train
        else "",
        _samples_html(samples),
        _earlier_samples_html(_load_samples(run_dir)),
        _config_html(config),
        section("Environment", _table(environment)) if environment else "",
        section("Command", f"<pre>{escape(command)}</pre>") if command else "",
    ]
    path = run_dir / "report.html"
    path.write_text(page_html(title, body))
    return path


def _load_samples(run_dir: Path) -> list[Row]:
    """The rows of samples.jsonl, less a last one that the run died in."""
    path = run_dir / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def page_html(title: str, body: Iterable[str]) -> str:
    """A page of the parts that are not empty."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def _title(run_dir: RunDir) -> str:
    return Path(run_dir).resolve().name


# The numbers ---------------------------------------------------------------------------------


def series(rows: Iterable[Row], key: str) -> tuple[list[float], list[float]]:
    """Steps and values of the rows that have a key."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
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


def _png(metrics: RunMetrics, title: str, theme: Theme) -> bytes:
    # Imported here: it takes half a second, which a training run need not wait for.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # A `Figure` of its own needs neither pyplot's global state nor a display.
    figure = Figure(figsize=(9, 6.2), dpi=160, layout="constrained", facecolor=theme.background)
    loss_axes, speed_axes = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1))
    if title:
        figure.suptitle(title, color=theme.text, fontsize=13, fontweight="bold")

    _draw_loss(loss_axes, metrics, theme)
    all_axes = [loss_axes, speed_axes, *_draw_speed(speed_axes, metrics, theme)]
    speed_axes.set_xlabel("step")
    speed_axes.xaxis.set_major_locator(
        MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
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


def _details_png(metrics: RunMetrics, theme: Theme) -> bytes:
    """A small plot of each of `_DETAILS` that the run has, two in a row."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    found = [
        (title, steps, [factor * value for value in values])
        for key, title, factor in _DETAILS
        for steps, values in [series([*metrics.train, *metrics.held_out], key)]
        if steps
    ]
    num_rows = -(-len(found) // 2)
    size = (9, 1.9 * max(num_rows, 1))
    figure = Figure(figsize=size, dpi=160, layout="constrained", facecolor=theme.background)
    all_axes = [figure.add_subplot(num_rows, 2, i + 1) for i in range(len(found))]
    for axes, (title, steps, values) in zip(all_axes, found, strict=True):
        marker = "o" if len(steps) == 1 else None
        axes.plot(steps, values, color=theme.train, linewidth=1.2, marker=marker)
        axes.set_title(title, loc="left", fontsize=9.5, color=theme.text)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        if title == "skipped steps":
            axes.set_ylim(0, 1.05 * max(1, *values))
            axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        elif min(values) >= 0:
            axes.set_ylim(bottom=0)
    for axes in all_axes[-2:]:
        axes.set_xlabel("step")
    return finished_png(figure, all_axes, theme)


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
        axes.legend(frameon=False, labelcolor=theme.text, fontsize=9, ncols=3)
    limit_loss(axes, loss, val_loss)


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


def limit_loss(axes: Any, loss: list[float], val_loss: list[float]) -> None:
    """Leaves the first, steep part of a long run out of sight, where it would flatten the rest."""
    finite = [value for value in loss if math.isfinite(value)]
    if len(finite) < 50:
        return
    low = min([*finite, *filter(math.isfinite, val_loss)])
    high = float(np.quantile(finite, 0.98))
    margin = 0.05 * (high - low)
    if high > low:
        axes.set_ylim(low - margin, high + margin)


# The page ------------------------------------------------------------------------------------


def escape(value: Any) -> str:
    """As text of a page."""
    return html.escape(str(value))


def section(heading: str, content: str) -> str:
    """A part of a page."""
    return f"<section><h2>{escape(heading)}</h2>{content}</section>"


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


def figure_html(light: bytes, dark: bytes, text: str) -> str:
    """A picture in the colours of the page, with a text for those who do not see it."""
    sources = [base64.b64encode(png).decode() for png in (light, dark)]
    return (
        '<figure><picture><source media="(prefers-color-scheme: dark)" '
        f'srcset="data:image/png;base64,{sources[1]}">'
        f'<img alt="{text}" src="data:image/png;base64,{sources[0]}">'
        "</picture></figure>"
    )


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


_STYLE = """
:root { color-scheme: light dark; --page: #f6f8fa; --card: #ffffff; --text: #1f2328;
  --muted: #59636e; --line: #d8dee4; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --card: #161b22; --text: #e6edf3;
  --muted: #9198a1; --line: #30363d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 62rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
header { margin-bottom: 1.5rem; }
h1 { margin: 0; font-size: 1.75rem; letter-spacing: -0.01em; overflow-wrap: anywhere; }
header p { margin: 0.25rem 0 0; color: var(--muted); }
h2 { margin: 2.25rem 0 0.75rem; font-size: 1.15rem; }
h3 { margin: 0; padding: 0.55rem 0.85rem; font-size: 0.85rem; font-weight: 600;
  color: var(--muted); border-bottom: 1px solid var(--line); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11.5rem, 1fr));
  gap: 0.75rem; margin: 0 0 1.25rem; }
.tiles > div, figure, section > pre, .card, section > table { background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; }
.tiles > div { padding: 0.75rem 0.9rem; }
dt { color: var(--muted); font-size: 0.8rem; }
dd { margin: 0.1rem 0 0; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
figure { margin: 0; padding: 0.75rem; }
img { display: block; width: 100%; height: auto; }
pre { margin: 0; padding: 0.85rem 1rem; overflow-x: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; }
.columns { columns: 2 24rem; column-gap: 0.75rem; }
summary { padding: 0.55rem 0.85rem; font-size: 0.85rem; color: var(--muted); cursor: pointer; }
details[open] summary { border-bottom: 1px solid var(--line); }
.card { break-inside: avoid; margin-bottom: 0.75rem; overflow: hidden; }
table { width: 100%; border-collapse: separate; border-spacing: 0; font-size: 0.85rem; }
th, td { padding: 0.3rem 0.85rem; text-align: left; vertical-align: top; font-weight: 400;
  overflow-wrap: anywhere; }
tr + tr > * { border-top: 1px solid var(--line); }
th { width: 45%; color: var(--muted); }
table.runs { table-layout: fixed; }
table.runs th { width: auto; }
td { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 0.8rem; }
"""
