"""Measures the GPU time of callables that take turns, whether they use JAX or PyTorch.

CUPTI records the start and the end of every kernel in the process, whichever library launched it.
The time of a call is the sum over its kernels. Three things do not count: gaps between kernels,
work of the host, and the driver's copies and fills (CUPTI lists memcpy and memset as other kinds of
activity, which this profiler does not request). A callable that uses PyTorch must end in
`torch.cuda.synchronize()`, because waiting for JAX's arrays does not wait for PyTorch's stream.

CUPTI has one subscriber at a time: no measurement works under Nsight or another profiler.
"""

import dataclasses
import importlib
import itertools
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

# The largest L2 cache in `pallas_kernels/hardware.py` has 126 MB (B200); an H100 has 50.
_ROTATION_BYTES = 2**29


def require_gpu() -> str:
    """The kind of the GPU to measure on. Ends the program if there is none.

    Must run before anything else uses JAX: otherwise JAX would reserve three quarters of the
    memory, and PyTorch needs some in the same process.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    device = jax.devices()[0]
    if device.platform != "gpu" or not device.device_kind.startswith("NVIDIA"):
        sys.exit(f"this needs an NVIDIA GPU; JAX's first device is {device.device_kind!r}")
    return device.device_kind


def rotation(num_bytes: int) -> int:
    """Number of input sets of `num_bytes` that keeps each one out of the L2 until its turn."""
    return math.ceil(_ROTATION_BYTES / num_bytes)


@dataclasses.dataclass(frozen=True)
class Case:
    """Work to time.

    Attributes:
      name: Name, unique among the cases that are compared.
      calls: Calls that do the same work on different inputs.
      error: Reason why it is not timed; None if it is.
      temporary_bytes: Memory of a call beside arguments and results; None if it is unknown.
    """

    name: str
    calls: Sequence[Callable[[], Any]] = ()
    error: str | None = None
    temporary_bytes: int | None = None


@dataclasses.dataclass
class Timing:
    """The measurements of a case.

    Attributes:
      times_ms: Milliseconds of one call, one figure for each round.
      error: Reason why times are missing, None if none is.
    """

    times_ms: list[float] = dataclasses.field(default_factory=list)
    error: str | None = None

    @property
    def median_ms(self) -> float:
        """Median over the rounds, in milliseconds."""
        return statistics.median(self.times_ms)

    def summary(self) -> dict[str, Any]:
        """An entry of a JSON file: the error, or median, minimum and maximum in milliseconds."""
        if self.error is not None:
            return {"error": self.error}
        return {
            "median_ms": self.median_ms,
            "min_ms": min(self.times_ms),
            "max_ms": max(self.times_ms),
        }


def first_line(error: Exception) -> str:
    """Type and first line of an error, at most 300 characters, for a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def kernel_ms(calls: Sequence[Callable[[], Any]]) -> float:
    """Runs the calls one after the other and returns the milliseconds of all their kernels.

    Raises:
      RuntimeError: No kernel ran, or CUPTI cannot be used.
    """
    # `jax.experimental.mosaic.gpu.profiler.measure` does the same for JAX functions only.
    cupti = importlib.import_module("jax._src.lib.mosaic_gpu")._mosaic_gpu_ext
    out = None
    cupti._cupti_init()
    try:
        for call in calls:
            out = call()
        jax.block_until_ready(out)  # on one stream the last call ends last
    finally:
        kernels = cupti._cupti_get_timings(True)
    if not kernels:
        raise RuntimeError("CUPTI saw no kernel")
    return sum(milliseconds for _, milliseconds in kernels)


def wall_ms(calls: Sequence[Callable[[], Any]]) -> float:
    """Wall milliseconds of all `calls`; CUPTI would add up the kernels of several GPUs."""
    start = time.perf_counter()
    jax.block_until_ready([call() for call in calls])
    return (time.perf_counter() - start) * 1e3


def compare(
    cases: Sequence[Case],
    *,
    rounds: int,
    calls_per_round: int = 4,
    measure: Callable[[Sequence[Callable[[], Any]]], float] = kernel_ms,
) -> dict[str, Timing]:
    """Times the cases in turns: each round runs every case, so that all see the same card.

    Clocks and temperature drift over minutes, while the cases of a round run within a second. Each
    round has another order, the same in every run. In a fixed order a case always follows the same
    other case, and on a card at its power limit that shifted ratios by 3 to 7 %
    (docs/lab/2026-11-23-order-of-rounds.md). Calls of all cases walk through the input sets
    together, so that a set which one case used is not in the cache for the next. A case that raises
    an error runs no more, and its error is kept.

    Args:
      cases: Cases to time, and cases with errors, which are not run. The first round warms all of
        them up and is not measured.
      rounds: Number of measured rounds.
      calls_per_round: Calls of a case in a round; their mean is the figure of the round.
      measure: Function that runs calls and returns the milliseconds of all of them.

    Returns:
      The timings by the name of the case.

    Raises:
      ValueError: Two cases have the same name.
    """
    timings = {case.name: Timing(error=case.error) for case in cases}
    if len(timings) != len(cases):
        raise ValueError(f"names of cases must be unique, got {[case.name for case in cases]}")
    turn = itertools.count()
    orders = random.Random(0)
    for measured in [False] + [True] * rounds:
        for case in orders.sample(cases, len(cases)):
            timing = timings[case.name]
            if timing.error is not None:
                continue
            calls = [case.calls[next(turn) % len(case.calls)] for _ in range(calls_per_round)]
            try:
                if measured:
                    timing.times_ms.append(measure(calls) / calls_per_round)
                else:
                    for call in calls:
                        jax.block_until_ready(call())
            # Errors of a compiler or a driver and out of memory are results as well.
            except Exception as error:
                timing.error = first_line(error)
    return timings
