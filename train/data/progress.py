"""The progress of tokenizing, on the terminal."""

import time

import rich.console
import rich.progress

from train.formats import format_count, format_duration

LINE_SECONDS = 10.0  # between lines if there is no terminal


class TokenizingProgress:
    """A progress bar on a terminal; without a terminal, a line every ten seconds.

    The speed counts the work of this process, without the work of a process that was killed.
    """

    def __init__(self, name: str, total_bytes: int, num_bytes: int, num_tokens: int):
        self._name, self._total = name, total_bytes
        self._first = num_bytes, num_tokens
        self._start = self._printed = time.monotonic()
        console = rich.console.Console(highlight=False)
        self._live = console.file.isatty()
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("tokenizing {task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.fields[text]}", markup=False),
            console=console,
            disable=not self._live,
        )
        self._task = self._bar.add_task(name, total=total_bytes, completed=num_bytes, text="")

    def __enter__(self) -> "TokenizingProgress":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def update(self, num_bytes: int, num_tokens: int) -> None:
        """Shows that `num_bytes` bytes have been read and `num_tokens` tokens made."""
        now = time.monotonic()
        new_bytes, new_tokens = num_bytes - self._first[0], num_tokens - self._first[1]
        seconds = now - self._start
        remaining = (self._total - num_bytes) * seconds / max(new_bytes, 1)
        text = (
            f"{num_bytes / self._total:.0%}  {format_count(float(num_tokens))} tokens  "
            f"{format_count(new_tokens / seconds)} tok/s  eta {format_duration(remaining)}"
        )
        self._bar.update(self._task, completed=num_bytes, text=text)
        if not self._live and now - self._printed >= LINE_SECONDS:
            print(f"tokenizing {self._name}: {text}", flush=True)
            self._printed = now
