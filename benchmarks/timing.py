"""Time on the GPU of any callable, JAX or PyTorch, in this process, several of them taking turns.

CUPTI records the start and end of every kernel that runs while it listens, whoever launched it. The
time of a call is the sum over its kernels. Not in it: gaps between kernels, what the host does, and
copies and fills by the driver (memcpy and memset are activities of their own kind, for which this
profiler does not ask). A callable that uses PyTorch must end in `torch.cuda.synchronize()`: waiting
for JAX's arrays does not wait for PyTorch's stream.

CUPTI has one subscriber at a time: no measurement runs under Nsight or a JAX or PyTorch profiler.
"""

import dataclasses
import importlib
import itertools
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

# The largest L2 of the cards in `pallas_kernels/hardware.py` has 126 MB (B200), of an H100 50.
_ROTATION_BYTES = 2**29


def require_gpu() -> str:
    """The kind of the GPU to measure on; ends the program where there is none.

    To be called before anything else uses JAX: JAX would take three quarters of the memory at once,
    and PyTorch needs some in the same process.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    device = jax.devices()[0]
    if device.platform != "gpu" or not device.device_kind.startswith("NVIDIA"):
        sys.exit(f"needs an NVIDIA GPU; JAX's first device is {device.device_kind!r}")
    return device.device_kind


def rotation(num_bytes: int) -> int:
    """How many sets of inputs of `num_bytes` so that none is in the L2 when its turn comes."""
    return math.ceil(_ROTATION_BYTES / num_bytes)


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to time.

    Attributes:
      name: unique among the cases that are compared.
      calls: the same work on different inputs.
    """

    name: str
    calls: Sequence[Callable[[], Any]]


@dataclasses.dataclass
class Timing:
    """What was measured of a case.

    Attributes:
      times_ms: of one call, one figure per round.
      error: why there are none or no more of them.
    """

    times_ms: list[float] = dataclasses.field(default_factory=list)
    error: str | None = None

    @property
    def median_ms(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.times_ms)

    def summary(self) -> dict[str, Any]:
        """For a JSON file: the error, or median, minimum and maximum in milliseconds."""
        if self.error is not None:
            return {"error": self.error}
        return {
            "median_ms": self.median_ms,
            "min_ms": min(self.times_ms),
            "max_ms": max(self.times_ms),
        }


def first_line(error: Exception) -> str:
    """Type and first line of an error, for a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def kernel_ms(calls: Sequence[Callable[[], Any]]) -> float:
    """Milliseconds of all kernels of `calls`, run one after the other.

    Raises:
      RuntimeError: no kernel ran, or CUPTI cannot be used.
    """
    # `jax.experimental.mosaic.gpu.profiler.measure` is these lines, but takes JAX functions only.
    cupti = importlib.import_module("jax._src.lib.mosaic_gpu")._mosaic_gpu_ext
    out = None
    cupti._cupti_init()
    try:
        for call in calls:
            out = call()
        jax.block_until_ready(out)  # one stream: the last is done when all are
    finally:
        kernels = cupti._cupti_get_timings(True)
    if not kernels:
        raise RuntimeError("CUPTI saw no kernel")
    return sum(milliseconds for _, milliseconds in kernels)


def compare(
    cases: Sequence[Case],
    *,
    rounds: int,
    calls_per_round: int = 4,
    measure: Callable[[Sequence[Callable[[], Any]]], float] = kernel_ms,
) -> dict[str, Timing]:
    """Times the cases in turns: each round runs every case, so that all see the same card.

    Clocks and temperature drift over minutes; what is compared is measured within a second. The
    order is another in each round, and the same in each run: in a fixed one a case has the same
    before it every time, and on a card at its limit of power that once shifted ratios by 3 to 7 %
    (docs/lab/2026-11-23-order-of-rounds.md). Calls walk through the sets of inputs without regard
    to the case, so that a set used by one case is not in the cache for the next. A case that raises
    is out, with the error kept.

    Args:
      cases: what to time. The first round warms all of them up, unmeasured.
      rounds: measured rounds.
      calls_per_round: calls of a case per round; their mean is the figure of the round.
      measure: milliseconds of some calls together.

    Returns:
      The timings by name of the case.
    """
    timings = {case.name: Timing() for case in cases}
    if len(timings) != len(cases):
        raise ValueError(f"names must be unique, got {[case.name for case in cases]}")
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
            except Exception as error:  # a compiler's, a driver's or out of memory: all are results
                timing.error = first_line(error)
    return timings
