"""The metrics of a run: FLOPs and MFU, tokens per second, and the file `metrics.jsonl`.

`metrics.jsonl` has one JSON object a line, and each line is flushed, so a killed run loses at most
the line that it was writing. The rows are synced to the disk before each checkpoint, so a machine
that fails loses at most the rows after the last checkpoint. Readers leave out a line that is no
row, with a warning.

JSON has no NaN and no infinity. A value of that kind becomes null, and the key "nonfinite" of the
row says which value it was: `{"loss": null, "nonfinite": {"loss": "nan"}}`. Other programs see a
missing value; `train.reporting.results.load_metrics` restores the float.
"""

import collections
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.hardware import Hardware
from train.config import TrainConfig
from train.errors import naming
from train.reporting.rows import cut_rows, write_whole
from train.teacher import teacher_model

type Metrics = Mapping[str, Any]


def flops_per_token(config: Any, mean_context: float) -> float:
    """Model FLOPs of one training token: forward plus backward, nothing recomputed.

    `6 * matmul parameters + 12 * layers * N * H * C`. The backward of a matmul is two matmuls, so
    training is three times the forward, as in PaLM (https://arxiv.org/abs/2204.02311, appendix
    B). The embedding lookup is no matmul; the output projection is one, tied or not.

    QKᵀ and PV have `2 * 2 * N * H * C` FLOPs per token and layer, for a context of C tokens. In a
    row of one document with causal attention, C is half of the row in the mean, as torchtitan and
    MaxText count. PaLM and nanoGPT count the whole row, and report a higher MFU for the same speed.

    The count leaves out rematerialization (with it, the figure would be hardware FLOPs, HFU),
    norms, softmax and the optimizer.

    Args:
      config: `LlamaConfig`, or an object with its Hugging Face size fields.
      mean_context: Mean number of tokens that a token attends to, C. The token itself counts half.
    """
    query_size = config.num_attention_heads * config.head_dim
    key_value_size = config.num_key_value_heads * config.head_dim
    attention = config.hidden_size * (query_size + 2 * key_value_size) + (
        query_size * config.hidden_size
    )
    mlp = 3 * config.hidden_size * config.intermediate_size
    head = config.hidden_size * config.vocab_size
    matmul_parameters = config.num_hidden_layers * (attention + mlp) + head
    scores = config.num_hidden_layers * 2 * 2 * query_size * mean_context
    return 3.0 * (2 * matmul_parameters + scores)


def flops_of_run(config: TrainConfig) -> Callable[[Metrics], float]:
    """A function from the mean contexts to the model FLOPs of a training token of a run.

    They include the forward of a teacher if there is one. Its folder is read here, once. The mean
    contexts have the names that they have in the metrics of the step (`train.step`).
    """
    teacher = teacher_model(config)

    def flops(contexts: Metrics) -> float:
        found = flops_per_token(config.model, contexts["mean_context"])
        if teacher:
            found += flops_per_token(teacher, contexts["teacher_mean_context"]) / 3
        return found

    return flops


def mfu(flops_per_s: float | None, hardware: Hardware | None, num_devices: int) -> float | None:
    """Model FLOPs utilization: the share, up to 1, of the devices' dense bfloat16 peak.

    It is None if the speed or the peak is unknown. `flops_per_s` counts all devices.
    """
    if hardware is None or flops_per_s is None:
        return None
    return flops_per_s / (hardware.bf16_flops * num_devices)


def device_memory() -> dict[str, float]:
    """Memory in use and its peak so far in GiB, on the fullest local device.

    It is empty if the backend does not report memory, for example on a CPU.
    """
    stats = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    keys = {"memory_gib": "bytes_in_use", "peak_memory_gib": "peak_bytes_in_use"}
    return {
        name: max(values) / 2**30
        for name, key in keys.items()
        if (values := [entry[key] for entry in stats if key in entry])
    }


def run_environment() -> dict[str, Any]:
    """The command line, the versions and the devices, to repeat a measurement."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tokenizers", "numpy")
    return {
        "command": shlex.join(sys.orig_argv),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
        "platform": jax.devices()[0].client.platform_version,
        "device_kind": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
    }


class MetricsWriter:
    """Writes `config.json` and appends to `metrics.jsonl` in a run's directory.

    Generated text goes to `samples.jsonl`, one row for each text. If the directory has these files,
    new rows are appended to them. Before that, an incomplete last line of a killed run is cut off,
    and so are rows of steps after `last_step`. A warning counts the missing rows of steps up to
    `last_step`. Rows of metrics go to each of `trackers`, too.

    Attributes:
      run_dir: Directory of the run.
      elapsed_s: `elapsed_s` of the last row that was there before; 0 without rows.

    Raises:
      RunError: A file cannot be read or written, for example on a full disk.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        last_step: int | None = None,
        trackers: Sequence[Any] = (),
    ):
        self.run_dir = run_dir
        self._trackers = trackers
        self._path = self.run_dir / "metrics.jsonl"
        self._samples = self.run_dir / "samples.jsonl"
        with naming(self.run_dir):
            self.run_dir.mkdir(parents=True, exist_ok=True)
        if self._samples.exists():
            cut_rows(self._samples, last_step)
        with naming(self._path):
            self._path.touch()
        last_row, steps = cut_rows(self._path, last_step)
        self.elapsed_s = last_row.get("elapsed_s", 0.0)
        missing = [step for step in range(1, (last_step or 0) + 1) if step not in steps]
        if missing:
            warnings.warn(
                f"{self._path}: the rows of {len(missing)} of {last_step} steps are missing, first "
                f"the row of step {missing[0]}; the report lacks them",
                stacklevel=2,
            )
        with naming(self._path):
            self._file = self._path.open("ab")

    def write(self, row: Metrics) -> None:
        """Appends one row. Arrays of one element become numbers."""
        values = {key: _plain(value) for key, value in row.items()}
        nonfinite = {
            key: str(value)
            for key, value in values.items()
            if isinstance(value, float) and not math.isfinite(value)
        }
        if nonfinite:
            values |= {key: None for key in nonfinite} | {"nonfinite": nonfinite}
        line = json.dumps(values, allow_nan=False).encode() + b"\n"
        with naming(self._path):
            self._file.write(line)
            self._file.flush()
        for tracker in self._trackers:
            tracker.write(row)

    def write_sample(self, step: int, heading: str, text: str) -> None:
        """Appends text that the model generated after a step."""
        row = {"step": step, "heading": heading, "text": text}
        with naming(self._samples), self._samples.open("ab") as file:
            file.write(json.dumps(row).encode() + b"\n")

    def sync(self) -> None:
        """Waits until all rows are on the disk, where they survive a failure of the machine."""
        with naming(self._path):
            os.fsync(self._file.fileno())
        if self._samples.exists():
            with naming(self._samples), self._samples.open("ab") as file:
                os.fsync(file.fileno())

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes `config` to config.json, with `run_environment()` under "environment".

        Dataclasses become objects. Dtypes, classes and functions become their names. Any other
        value that JSON does not have becomes a string.
        """
        content = jsonable({**config, "environment": run_environment()})
        text = json.dumps(content, indent=2, allow_nan=False)
        write_whole(self.run_dir / "config.json", f"{text}\n".encode())

    def close(self) -> None:
        """Syncs and closes metrics.jsonl."""
        with naming(self._path):
            try:
                self.sync()
            finally:
                self._file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class SilentWriter:
    """A `MetricsWriter` that writes nothing, for all processes except process 0."""

    elapsed_s = 0.0

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir

    def write(self, row: Metrics) -> None:
        """Does nothing."""

    def write_sample(self, step: int, heading: str, text: str) -> None:
        """Does nothing."""

    def sync(self) -> None:
        """Does nothing."""


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def jsonable(value: Any) -> Any:
    """The value as JSON, as `MetricsWriter.write_config` writes it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(key): jsonable(entry) for key, entry in value.items()}
        case list() | tuple():
            return [jsonable(entry) for entry in value]
        case _:
            return getattr(value, "__name__", None) or str(value)


class Throughput:
    """Tokens and FLOPs per second over the last `window` steps, without the time in `pause`.

    Report a step when its results have arrived, because a jitted call returns before the device has
    finished. The clock starts with the report of the second step. The first step may have waited
    for compilation. Its report waits until the second step is sent to the device, which takes
    longer than for later steps: on four H200s the report was 0.27 s late, and the next 20 steps
    seemed 5 % too fast.
    """

    def __init__(self, window: int = 20, *, clock: Callable[[], float] = time.perf_counter):
        if window < 1:
            raise ValueError(f"{window=} must be at least 1 step")
        self._clock = clock
        self._paused = 0.0
        self._tokens = 0
        self._flops = 0.0
        self._has_first = False
        # (seconds of training, tokens, FLOPs) at each report after the first; `window` intervals
        # have one more end.
        self._marks: collections.deque[tuple[float, int, float]] = collections.deque(
            maxlen=window + 1
        )

    def update(self, tokens: int, flops: float) -> None:
        """Reports that one more step with so many tokens and FLOPs is done."""
        self._tokens += tokens
        self._flops += flops
        if self._has_first:
            self._marks.append((self._clock() - self._paused, self._tokens, self._flops))
        self._has_first = True

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """A block whose time does not count, for an evaluation or a checkpoint."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - start

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second; None before the third report."""
        return self._per_second(1)

    @property
    def flops_per_s(self) -> float | None:
        """FLOPs per second; None before the third report."""
        return self._per_second(2)

    @property
    def step_time_s(self) -> float | None:
        """Seconds per step; None before the third report."""
        num_steps = len(self._marks) - 1
        return self._seconds / num_steps if num_steps > 0 else None

    def _per_second(self, part: int) -> float | None:
        if not self._seconds:
            return None
        return (self._marks[-1][part] - self._marks[0][part]) / self._seconds

    @property
    def _seconds(self) -> float:
        return self._marks[-1][0] - self._marks[0][0] if self._marks else 0.0
