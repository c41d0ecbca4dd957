"""What a run tells about itself: FLOPs and MFU, tokens per second, metrics.jsonl, the terminal.

`metrics.jsonl` holds one JSON object a line, flushed line by line, so that a killed run loses at
most the line it was writing. A machine that fails loses at most the rows after the last checkpoint:
they are synced to the disk before it is written. A line that is no row is left out of all that is
made of the file, with a warning. JSON has no NaN and no infinity: such a value is written as null,
and the row gets a key "nonfinite" that says which it was, `{"loss": null, "nonfinite": {"loss":
"nan"}}`. Readers that know nothing of it see a missing value; `train.reporting.report.load_metrics`
puts the float back.
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
from train.errors import naming
from train.reporting.rows import cut_rows, write_whole

type Metrics = Mapping[str, Any]


def flops_per_token(config: Any, sequence_length: int) -> float:
    """Model FLOPs of one training token: forward plus backward, nothing recomputed.

    `6 * matmul parameters + 6 * layers * N * H * S`. The backward of a matmul is two matmuls, so
    training is three times the forward, as in PaLM (https://arxiv.org/abs/2204.02311, appendix
    B). The embedding lookup is no matmul; the output projection is one, tied or not. Attention
    is causal: of QKᵀ and PV, `2 * 2 * N * H * S` per token and layer, half is needed and half is
    counted, as torchtitan and MaxText do; PaLM and nanoGPT count it in full and so report a
    higher MFU for the same speed. Rematerialization is not counted (that would be hardware
    FLOPs, HFU), nor are document boundaries inside a row, norms, softmax or the optimizer.

    Args:
      config: `LlamaConfig`, or anything with its Hugging Face size fields.
      sequence_length: S.
    """
    query_size = config.num_attention_heads * config.head_dim
    key_value_size = config.num_key_value_heads * config.head_dim
    attention = config.hidden_size * (query_size + 2 * key_value_size) + (
        query_size * config.hidden_size
    )
    mlp = 3 * config.hidden_size * config.intermediate_size
    head = config.hidden_size * config.vocab_size
    matmul_parameters = config.num_hidden_layers * (attention + mlp) + head
    scores = config.num_hidden_layers * 2 * 2 * query_size * sequence_length / 2
    return 3.0 * (2 * matmul_parameters + scores)


def mfu(
    tokens_per_second: float | None,
    flops_per_token: float,
    hardware: Hardware | None,
    num_devices: int,
) -> float | None:
    """Model FLOPs utilization: the share of the devices' dense bfloat16 peak, 1 being all of it.

    None where the speed or the peak is unknown. `tokens_per_second` is that of all devices.
    """
    if hardware is None or tokens_per_second is None:
        return None
    return tokens_per_second * flops_per_token / (hardware.bf16_flops * num_devices)


def device_memory() -> dict[str, float]:
    """Memory in use and its peak so far in GiB, on the fullest local device.

    Empty where the backend does not tell, as on a CPU.
    """
    stats = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    keys = {"memory_gib": "bytes_in_use", "peak_memory_gib": "peak_bytes_in_use"}
    return {
        name: max(values) / 2**30
        for name, key in keys.items()
        if (values := [entry[key] for entry in stats if key in entry])
    }


def run_environment() -> dict[str, Any]:
    """What is needed to take a number again: command line, versions and devices."""
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

    Generated text goes to `samples.jsonl`, a row for each. A directory that already has these is
    gone on with: rows are appended, after a last line that a killed run left incomplete, and rows
    of steps after `last_step`, are cut off. Rows of steps up to there that are missing are told
    with a warning. Rows of metrics go to each of `trackers`, too.

    Attributes:
      run_dir: the directory.
      elapsed_s: of the last row that was there before, 0 where there is none.

    Raises:
      RunError: a file cannot be read or written, for example on a full disk.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        last_step: int | None = None,
        trackers: Sequence[Any] = (),
    ):
        self.run_dir = Path(run_dir)
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
                f"{self._path}: the rows of {len(missing)} of {last_step} steps are missing, the "
                f"first that of step {missing[0]}; the report lacks them",
                stacklevel=2,
            )
        with naming(self._path):
            self._file = self._path.open("ab")

    def write(self, row: Metrics) -> None:
        """Appends one row. Arrays of one element, as a jitted step returns, become numbers."""
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
        """Returns when all rows are on the disk, also if the machine fails."""
        with naming(self._path):
            os.fsync(self._file.fileno())
        if self._samples.exists():
            with naming(self._samples), self._samples.open("ab") as file:
                os.fsync(file.fileno())

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes `config` to config.json, with `run_environment()` under "environment".

        Dataclasses become objects; dtypes, classes and functions become their names; anything
        else that JSON does not have becomes a string.
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
    """A `MetricsWriter` that writes nothing, for the processes that leave that to the first."""

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
    """As `MetricsWriter.write_config` writes it."""
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
    """Tokens per second over the last `window` steps, without the time spent in `pause`.

    The clock starts when the second step is reported. The first may have waited for compilation,
    and its report for the second to be sent to the device, which is slower than later ones: on four
    H200s 0.27 s late, which made the next 20 steps 5 % too fast. Report a step when its results
    have arrived: a jitted call returns before the device has done it.
    """

    def __init__(self, window: int = 20, *, clock: Callable[[], float] = time.perf_counter):
        if window < 1:
            raise ValueError(f"{window=} must be at least 1 step")
        self._clock = clock
        self._paused = 0.0
        self._steps = 0
        self._tokens = 0
        # (seconds of training, steps, tokens) at the end of each report; one more than intervals.
        self._marks: collections.deque[tuple[float, int, int]] = collections.deque(
            maxlen=window + 1
        )

    def update(self, tokens: int, steps: int = 1) -> None:
        """Reports that `steps` more steps, `tokens` tokens in all, are done."""
        is_first = not self._steps
        self._steps += steps
        self._tokens += tokens
        if not is_first:
            self._marks.append((self._clock() - self._paused, self._steps, self._tokens))

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time inside this block, for evaluation or a checkpoint, is not training time."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - start

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second; None before the third report."""
        if len(self._marks) < 2 or not self._seconds:
            return None
        return (self._marks[-1][2] - self._marks[0][2]) / self._seconds

    @property
    def step_time_s(self) -> float | None:
        """Seconds per step; None before the third report."""
        if len(self._marks) < 2:
            return None
        return self._seconds / (self._marks[-1][1] - self._marks[0][1])

    @property
    def _seconds(self) -> float:
        return self._marks[-1][0] - self._marks[0][0]
