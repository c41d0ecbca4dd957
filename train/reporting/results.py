"""The rows of a run as lists and numbers, for reports and comparisons."""

import dataclasses
import statistics
from collections.abc import Iterable
from pathlib import Path

from train.formats import format_count, format_duration
from train.reporting.rows import Row, read_rows


@dataclasses.dataclass(frozen=True)
class RunMetrics:
    """The rows of metrics.jsonl in the order of steps; each list has at most one row a step."""

    train: list[Row]
    held_out: list[Row]


def load_metrics(run_dir: Path) -> RunMetrics:
    """Reads metrics.jsonl.

    A resumed run repeats the steps after its checkpoint; the later rows count. A line that is no
    row, such as an incomplete last line of a run that died, is left out with a warning.

    Raises:
      RunError: The file cannot be read.
    """
    train: list[Row] = []
    held_out: list[Row] = []
    for row in read_rows(run_dir / "metrics.jsonl"):
        named = row.pop("nonfinite", None)
        if isinstance(named, dict):
            row |= {key: float(value) for key, value in named.items() if value in _NONFINITE}
        rows = held_out if "val_loss" in row else train
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        rows.append(row)
    return RunMetrics(train, held_out)


_NONFINITE = ("nan", "inf", "-inf")


def series(rows: Iterable[Row], key: str) -> tuple[list[float], list[float]]:
    """The steps and the values of a key, from the rows that have the key."""
    points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), (int, float))]
    return [float(step) for step, _ in points], [float(value) for _, value in points]


def headline_numbers(metrics: RunMetrics) -> dict[str, str]:
    """The results of a run, by label; those without a row are left out."""
    train, held_out = metrics.train, metrics.held_out
    last = lambda values: f"{values[-1]:.4f}"
    results = (
        ("Training loss", train, "loss", last),
        ("Held-out loss", held_out, "val_loss", last),
        ("Held-out bits per byte", held_out, "val_bpb", _first_and_last),
        ("Tokens per second", train, "tokens_per_s", lambda v: format_count(statistics.median(v))),
        ("MFU", train, "mfu", lambda values: f"{statistics.median(values):.1%}"),
        ("Peak memory", train, "memory_gib peak_memory_gib", lambda v: f"{max(v):.2f} GiB"),
        ("Tokens", train, "tokens", lambda values: format_count(values[-1])),
        ("Wall time", [*train, *held_out], "elapsed_s", lambda v: format_duration(max(v))),
    )
    numbers: dict[str, str] = {}
    for label, rows, keys, show in results:
        if values := [value for key in keys.split() for value in series(rows, key)[1]]:
            numbers[label] = show(values)
    return numbers


def _first_and_last(values: list[float]) -> str:
    first = f"{values[0]:.3f} → " if len(values) > 1 else ""
    return f"{first}{values[-1]:.3f}"
