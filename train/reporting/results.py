"""The rows of a run as lists and numbers, for reports and comparisons."""

import dataclasses
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def headline_numbers(metrics: RunMetrics) -> dict[str, Any]:
    """The results of a run, by label."""
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
