"""The page that a run leaves behind: `report.html`, one file that needs no network, and `loss.png`.

Both are made from `metrics.jsonl`, `samples.jsonl` and `config.json` alone, so they can be made
again at any time, also for a run that died or has no held-out results.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train.formats import number_of
from train.reporting.figures import DARK, DETAILS, LIGHT, NARROW, WIDE, details_png, loss_png
from train.reporting.page import escape, figure_html, grid, page_html, section, setting
from train.reporting.results import RunMetrics, headline_numbers, load_metrics, series
from train.reporting.rows import Row, read_rows, write_whole


def write_report(
    run_dir: Path,
    *,
    samples: Sequence[tuple[str, str]],
    summary: Mapping[str, str | int | float],
) -> Path:
    """Writes `report.html` and `loss.png` in a run's directory, and returns the page's path.

    Args:
      run_dir: Directory with metrics.jsonl and perhaps config.json and samples.jsonl.
      samples: Generated texts, each with a heading, for example its temperature.
      summary: Figures to show after the headline numbers, by label. A figure with the label of a
        headline number replaces that number.

    Raises:
      RunError: A file cannot be read or written.
    """
    metrics = load_metrics(run_dir)
    title = run_dir.resolve().name
    write_whole(run_dir / "loss.png", loss_png(metrics, title, LIGHT, WIDE))
    wide, narrow = (
        tuple(loss_png(metrics, "", theme, size) for theme in (LIGHT, DARK))
        for size in (WIDE, NARROW)
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


def _details_html(metrics: RunMetrics) -> str:
    """A panel for each of `DETAILS` in the rows; skipped steps have one only if there are some."""
    panels = []
    for key, title, factor in DETAILS:
        steps, values = series([*metrics.train, *metrics.held_out], key)
        if steps and (key != "skipped_steps" or any(values)):
            values = [factor * value for value in values]
            pictures = tuple(details_png(title, steps, values, theme) for theme in (LIGHT, DARK))
            panels.append(figure_html(title.capitalize(), pictures))
    return section("Details", grid(panels)) if panels and metrics.train else ""


def _subtitle(metrics: RunMetrics, environment: Mapping[str, Any]) -> str:
    steps = max([row["step"] for row in (*metrics.train, *metrics.held_out)], default=0)
    parts = [number_of(steps, "step")]
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
    """The samples of each evaluation, folded."""
    blocks = (
        f'<details class="card"><summary>step {row["step"]:,}, {escape(row["heading"])}</summary>'
        f"<pre>{escape(row['text'])}</pre></details>"
        for row in rows
    )
    return section("Samples over time", "".join(blocks)) if rows else ""


def _config_html(config: Mapping[str, Any]) -> str:
    """A table for each object of the configuration, with its path as heading.

    The table has the entries that are not objects themselves.
    """
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
        f"<tr><th>{escape(key)}</th><td>{setting(value)}</td></tr>"
        for key, value in entries.items()
    )
    return f"<table>{''.join(rows)}</table>"
