"""`python -m train compare RUN RUN`: one page with the curves of two runs and what differs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.command_line import Parser, file_or_folder
from train.hf_folder import FolderError
from train.report import (
    DARK,
    LIGHT,
    RunMetrics,
    Theme,
    escape,
    figure_html,
    finished_png,
    headline_numbers,
    limit_loss,
    load_metrics,
    page_html,
    section,
    series,
    smooth,
)


def run(arguments: Sequence[str]) -> None:
    """Writes the page."""
    parser = Parser(
        "compare", "Writes a page with the curves of two runs and their differing settings."
    )
    parser.add_argument("runs", type=file_or_folder, nargs=2, metavar="RUN")
    parser.add_argument(
        "--output", type=file_or_folder, default=Path("compare.html"), help="default: compare.html"
    )
    flags = parser.parse_args(arguments)
    first, second = flags.runs
    write_comparison(first, second, flags.output)
    print(flags.output)


def write_comparison(first: Path, second: Path, output: Path) -> None:
    """Writes the page about two runs to `output`; like the report, it needs no network.

    Raises:
      FolderError: one is not a run.
    """
    for run_dir in (first, second):
        if not (run_dir / "metrics.jsonl").is_file():
            raise FolderError(f"{run_dir} is not a run: it has no metrics.jsonl")
    names = _names(first, second)
    metrics = [load_metrics(run_dir) for run_dir in (first, second)]
    light, dark = (_png(names, metrics, theme) for theme in (LIGHT, DARK))
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
        figure_html(light, dark, "Loss, gradient norm and speed of both runs over steps"),
        section("Results", _table(names, labels, numbers)),
        section("Different settings", _table(names, different, settings))
        if different
        else section("Different settings", "<p>None.</p>"),
        section("Commands", "".join(commands)) if commands else "",
    ]
    output.write_text(page_html(title, body))


_COMMAND = "environment.command"
# Of config.json, what differs in any case.
_NO_SETTINGS = (_COMMAND, "environment.started")


def _names(first: Path, second: Path) -> tuple[str, str]:
    """Their folders' names, or the paths where these are equal."""
    names = first.resolve().name, second.resolve().name
    return names if names[0] != names[1] else (str(first), str(second))


def _settings(run_dir: Path) -> dict[str, Any]:
    """The entries of config.json by dotted path."""
    path = run_dir / "config.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    flat: dict[str, Any] = {}

    def collect(prefix: str, entries: dict[str, Any]) -> None:
        for name, value in entries.items():
            if isinstance(value, dict):
                collect(f"{prefix}{name}.", value)
            else:
                flat[prefix + name] = value

    collect("", content.pop("config", {}))
    collect("", content)
    return flat


def _table(names: Sequence[str], labels: Sequence[str], columns: Sequence[dict[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = (
        f"<tr><th>{escape(label)}</th>"
        + "".join(f"<td>{escape(_text(column.get(label)))}</td>" for column in columns)
        + "</tr>"
        for label in labels
    )
    return f'<table class="runs"><tr><th></th>{head}</tr>{"".join(rows)}</table>'


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


_PANELS = (
    ("loss", "training loss (nats per token)"),
    ("val_loss", "held-out loss (nats per token)"),
    ("grad_norm", "gradient norm"),
    ("tokens_per_s", "tokens/s"),
)


def _png(names: Sequence[str], metrics: Sequence[RunMetrics], theme: Theme) -> bytes:
    # Imported here: it takes half a second, which `--help` need not wait for.
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    from train.metrics import format_count

    figure = Figure(figsize=(9, 6.4), dpi=160, layout="constrained", facecolor=theme.background)
    all_axes = figure.subplots(2, 2, sharex=True).flatten().tolist()
    for axes, (key, title) in zip(all_axes, _PANELS, strict=True):
        values_of = []
        for name, each, color in zip(names, metrics, (theme.train, theme.held_out), strict=True):
            steps, values = series([*each.train, *each.held_out], key)
            values_of += values
            shown = values if key == "val_loss" else smooth(values)
            marker = "o" if key == "val_loss" or len(steps) == 1 else None
            axes.plot(
                steps, shown, color=color, linewidth=1.6, marker=marker, markersize=3.5, label=name
            )
        axes.set_title(title, loc="left", fontsize=9.5, color=theme.text)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        if key == "loss":
            limit_loss(axes, values_of, [])
        if key == "tokens_per_s":
            axes.set_ylim(0, 1.15 * max(values_of, default=1.0))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    all_axes[0].legend(frameon=False, labelcolor=theme.text, fontsize=9)
    for axes in all_axes[2:]:
        axes.set_xlabel("step")
    return finished_png(figure, all_axes, theme)
