"""The page about two runs: their curves, their results and the settings that differ."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict

from train.errors import FolderError
from train.formats import format_count
from train.reporting.figures import (
    DARK,
    LIGHT,
    Theme,
    finished_png,
    limit_loss,
    panel,
    smooth,
)
from train.reporting.page import escape, figure_html, grid, page_html, section, setting
from train.reporting.results import RunMetrics, headline_numbers, load_metrics, series
from train.reporting.rows import write_whole


def write_comparison(first: Path, second: Path, output: Path) -> None:
    """Writes the page about two runs to `output`. Like the report, it needs no network.

    Raises:
      FolderError: A folder is not a run.
      DiskError: A file cannot be read or written.
    """
    for run_dir in (first, second):
        if not (run_dir / "metrics.jsonl").is_file():
            raise FolderError(f"{run_dir} is not a run: it has no metrics.jsonl; name a run")
    names = _names(first, second)
    metrics = [load_metrics(run_dir) for run_dir in (first, second)]
    panels = [
        figure_html(
            f"{title} of both runs",
            [_panel_png(key, title, metrics, theme) for theme in (LIGHT, DARK)],
        )
        for key, title in _PANELS
    ]
    numbers = [headline_numbers(each) for each in metrics]
    settings = [_settings(run_dir) for run_dir in (first, second)]
    different = [
        name
        for name in sorted({*settings[0], *settings[1]})
        if settings[0].get(name) != settings[1].get(name) and name not in _NO_SETTINGS
    ]
    commands = [
        f'<div class="card"><h3>{escape(name)}</h3><pre>{escape(each[_COMMAND])}</pre></div>'
        for name, each in zip(names, settings, strict=True)
        if _COMMAND in each
    ]
    labels = list(dict.fromkeys([*numbers[0], *numbers[1]]))
    title = f"{names[0]} and {names[1]}"
    body = [
        f"<header><h1>{escape(title)}</h1></header>",
        _legend(names),
        grid(panels),
        section("Results", _table(names, labels, numbers)),
        section("Different settings", _table(names, different, settings))
        if different
        else section("Different settings", "<p>None.</p>"),
        section("Commands", "".join(commands)) if commands else "",
    ]
    write_whole(output, page_html(title, body))


_COMMAND = "environment.command"
# Entries of config.json that always differ.
_NO_SETTINGS = (_COMMAND, "environment.started")


def _names(first: Path, second: Path) -> tuple[str, str]:
    """The names of both folders, or their paths if the names are equal."""
    names = first.resolve().name, second.resolve().name
    return names if names[0] != names[1] else (str(first), str(second))


def _settings(run_dir: Path) -> dict[str, Any]:
    """The entries of config.json by dotted path."""
    path = run_dir / "config.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    config = content.pop("config", {})
    return flatten_dict(config, sep=".") | flatten_dict(content, sep=".")


def _table(names: Sequence[str], labels: Sequence[str], columns: Sequence[dict[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = (
        f"<tr><th>{escape(label)}</th>"
        + "".join(f"<td>{_cell(column.get(label))}</td>" for column in columns)
        + "</tr>"
        for label in labels
    )
    return f'<table class="runs"><tr><th></th>{head}</tr>{"".join(rows)}</table>'


def _cell(value: Any) -> str:
    return "-" if value is None else setting(value)


_PANELS = (
    ("loss", "training loss (nats per token)"),
    ("val_loss", "held-out loss (nats per token)"),
    ("grad_norm", "gradient norm"),
    ("tokens_per_s", "tokens/s"),
)


def _legend(names: Sequence[str]) -> str:
    """The colour of each run. It is text of the page, because a figure cannot show every name."""
    # `_panel_png` draws the runs in the same order.
    entries = (
        f'<li><span class="{color}">\N{BLACK SQUARE}</span> {escape(name)}</li>'
        for name, color in zip(names, ("train", "held-out"), strict=True)
    )
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _panel_png(key: str, title: str, metrics: Sequence[RunMetrics], theme: Theme) -> bytes:
    figure, axes = panel(title, theme)
    values_of = []
    for each, color in zip(metrics, (theme.train, theme.held_out), strict=True):
        steps, values = series([*each.train, *each.held_out], key)
        values_of += values
        shown = values if key == "val_loss" else smooth(values)
        marker = "o" if key == "val_loss" or len(steps) == 1 else None
        axes.plot(steps, shown, color=color, linewidth=1.6, marker=marker, markersize=3.5)
    if key == "loss" and (note := limit_loss(axes, values_of, [])):
        axes.set_title(f"{title}\n{note}", loc="left", fontsize=9.5, color=theme.text)
    if key == "tokens_per_s":
        axes.set_ylim(0, 1.15 * max(values_of, default=1.0))
        axes.yaxis.set_major_formatter(lambda value, _: format_count(value))
    return finished_png(figure, [axes], theme)
