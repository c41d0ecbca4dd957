"""The progress of a run on the terminal."""

import functools
import time
from typing import Any

import rich.console
import rich.progress
import rich.table

from train.formats import format_count, format_duration
from train.reporting.metrics import Metrics


class Progress:
    """A progress bar on a terminal, or a line of text every `every` steps; a context manager.

    Held-out results get a line of their own in both. Values that are missing or None are left out.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        every: int = 10,
        console: rich.console.Console | None = None,
    ):
        self._total = total_steps
        self._every = every
        self._console = console or rich.console.Console(highlight=False)
        self._live = self._console.file.isatty()
        self._latest: dict[str, Any] = {}
        self._first: tuple[int, float] | None = None
        self._printed: int | None = None
        # A narrow terminal cuts the last metrics and keeps the step.
        column = functools.partial(rich.table.Column, no_wrap=True)
        step_width = 2 * len(str(total_steps)) + 1
        self._bar = rich.progress.Progress(
            rich.progress.BarColumn(None, table_column=column(ratio=1, min_width=10)),
            rich.progress.TextColumn(
                "{task.completed}/{task.total}", table_column=column(min_width=step_width)
            ),
            rich.progress.TextColumn("{task.fields[text]}", table_column=column()),
            console=self._console,
            disable=not self._live,
            expand=True,
        )
        self._task = self._bar.add_task("train", total=total_steps, text="")

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def update(self, step: int, metrics: Metrics) -> None:
        """Shows that `step` steps are done, with a row of metrics like those in metrics.jsonl."""
        now = time.perf_counter()
        if self._first is None:
            self._first = (step, now)
        metrics = {key: value for key, value in metrics.items() if value is not None}
        eta = self._eta(step, now)
        self._latest |= metrics | {"eta": eta}
        self._bar.update(self._task, completed=step, text=_join(self._latest, _BAR))
        if "val_loss" in metrics:
            self.print(f"step {step}/{self._total}  {_join(metrics, _HELD_OUT_LINE)}")
        elif not self._live and metrics and self._due(step):
            self.print(f"step {step}/{self._total}  {_join(metrics | {'eta': eta}, _LINE)}")

    def print(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        # `soft_wrap`, because a log file has no width to wrap at.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()

    def _due(self, step: int) -> bool:
        bucket = step // self._every
        due = self._printed is None or bucket > self._printed or step >= self._total
        if due:
            self._printed = bucket
        return due

    def _eta(self, step: int, now: float) -> float | None:
        assert self._first is not None
        first_step, first_time = self._first
        if step <= first_step:
            return None
        return (self._total - step) * (now - first_time) / (step - first_step)


# The metrics in the order shown. On the bar the time left comes first, because a narrow terminal
# cuts the last ones.
_OF_OBJECTIVES = ("reward_margin", "reward_accuracy", "divergence")
_LINE = ("loss", *_OF_OBJECTIVES, "lr", "grad_norm", "tokens_per_s", "mfu", "memory", "eta")
_HELD_OUT_LINE = ("val_loss", "val_bpb", "val_reward_margin", "val_reward_accuracy")
_BAR = ("eta", "loss", "val_loss", "tokens_per_s", "mfu", "memory")


def _join(metrics: Metrics, keys: tuple[str, ...]) -> str:
    return "  ".join(text for key in keys if (text := _format(key, metrics)) is not None)


def _format(key: str, metrics: Metrics) -> str | None:
    if key == "memory":
        used, peak = (metrics.get(name) for name in ("memory_gib", "peak_memory_gib"))
        amounts = [f"{float(amount):.1f}" for amount in (used, peak) if amount is not None]
        return f"mem {'/'.join(amounts)} GiB" if amounts else None
    if metrics.get(key) is None:
        return None
    value = float(metrics[key])
    match key:
        case "eta":
            return f"eta {format_duration(value)}"
        case "lr":
            mantissa, exponent = f"{value:.1e}".split("e")
            return f"lr {mantissa}e{int(exponent)}"
        case "grad_norm":
            return f"grad {value:.2f}"
        case "tokens_per_s":
            return f"{format_count(value)} tok/s"
        case "mfu":
            return f"mfu {value:.1%}"
        case _:
            return f"{key.replace('_', ' ')} {value:.3f}"
