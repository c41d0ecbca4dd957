"""The compiled step as text, its memory, and a trace of some steps."""

from pathlib import Path
from typing import Any

import jax

from train.errors import naming
from train.reporting.rows import write_whole
from train.step import memory_in_bytes


def write_hlo(folder: Path, compiled: Any, memory: str) -> None:
    """Writes a compiled step to `train_step.txt`, and its memory to `memory.txt`."""
    with naming(folder):
        folder.mkdir(exist_ok=True)
    write_whole(folder / "train_step.txt", compiled.as_text().encode())
    write_whole(folder / "memory.txt", f"{memory}\n{compiled.memory_analysis()}\n".encode())


def memory_report(compiled: Any) -> str:
    """The memory that a compiled step needs on each device, and its share of the device."""
    sizes = compiled.memory_analysis()
    peak = memory_in_bytes(compiled)
    own_outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    parts = [
        f"memory of the step: arguments {_shown(sizes.argument_size_in_bytes)}",
        f"temporaries {_shown(sizes.temp_size_in_bytes)}",
        f"outputs that are not arguments {_shown(own_outputs)}",
        f"in all {_shown(peak)}",
    ]
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        parts.append(f"of {_shown(limit)} ({peak / limit:.0%})")
    return ", ".join(parts)


def _shown(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


class Profile:
    """A trace of the steps from the first to the last of `steps`; a context manager.

    TensorBoard's profile plug-in, XProf and https://ui.perfetto.dev show the trace. A run that
    resumes in the middle of the steps traces the rest of them.
    """

    def __init__(self, folder: Path, steps: tuple[int, int] | None):
        self._folder = folder
        self._first, self._last = steps or (1, 0)
        self._running = False
        self._traced = 0  # the last step that began

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def begin(self, step: int) -> None:
        """Starts the trace if this step is in it. Call it before the step is dispatched."""
        if not self._running and self._first <= step <= self._last:
            jax.profiler.start_trace(str(self._folder))
            self._running = True
        self._traced = step

    def end(self, step: int, results: Any) -> None:
        """Ends the trace, with the results of its last step. Call it after a step is dispatched."""
        if self._running and step >= self._last:
            jax.block_until_ready(results)
            self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            print(f"trace of the steps up to {self._traced}: {self._folder}")
