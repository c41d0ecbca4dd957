"""The sweep over launch parameters of a kernel: candidates are compiled, checked and timed."""

import contextlib
import dataclasses
import functools
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import agreement, timing
from benchmarks.agreement import Rejected
from benchmarks.kernels import ops
from benchmarks.kernels.formulas import Arrays
from benchmarks.kernels.ops import Contender, Direction
from benchmarks.kernels.tunables import TUNABLES, Config

_CHECKED_ELEMENTS = 2**21
# The smallest error that counts, over the value. Sums may be in any order, which moves them by
# epsilons of float32.
LEAST_ERROR = 64 * 2.0**-23
# There can be hundreds of candidates. All run a few screening rounds; the finalists, the fastest of
# them, run all rounds.
_SCREENING_ROUNDS = 3
_FINALISTS = 8
# A candidate replaces the default if it gains this much, and is faster in this part of the rounds.
LEAST_GAIN, FASTER_ROUNDS = 0.01, 0.75

# Lowering holds Python's lock: two thirds of the time of a norm's kernel, 0.85 of the loss's.
_THREADS = 3


class OutOfTime(Rejected):
    """A candidate is not compiled, because the time of its sweep is over."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The candidates of one kernel.

    Attributes:
      timings: Timing of every candidate, or its error; the default is the first.
      copy: Timing of the copy in the same rounds.
      left_out: Number of candidates that were not compiled, because the time was over.
    """

    timings: dict[Config, timing.Timing]
    copy: timing.Timing
    left_out: int = 0

    @property
    def default(self) -> Config:
        """The parameters that the kernel has without a new row."""
        return next(iter(self.timings))

    def best(self) -> Config | None:
        """The fastest candidate; None if all failed."""
        return next(iter(fastest(self.timings)), None)

    def keeps_default(self) -> bool:
        """Whether the best candidate gains less than the noise."""
        if self.timings[self.default].error is not None or (best := self.best()) is None:
            return False
        before, after = self.timings[self.default], self.timings[best]
        pairs = list(zip(before.times_ms, after.times_ms, strict=True))
        faster = sum(old > new for old, new in pairs)
        gain = before.median_ms / after.median_ms - 1
        return gain < LEAST_GAIN or faster < FASTER_ROUNDS * len(pairs)

    def chosen(self) -> Config | None:
        """The default or the best candidate; None if all failed."""
        return self.default if self.keeps_default() else self.best()

    def fraction(self, config: Config) -> float:
        """Speed of a candidate over the speed of the copy."""
        return self.copy.median_ms / self.timings[config].median_ms

    def speeds(self) -> dict[str, Any]:
        """Its part of an entry of the JSON file, from which `report` makes a line."""
        best, failed = self.best(), self.timings[self.default].error is not None
        return {
            "default": None if failed else round(self.fraction(self.default), 4),
            "best": None if best is None else round(self.fraction(best), 4),
            "keeps_default": self.keeps_default(),
            "candidates": len(self.timings),
            "left_out": self.left_out,
        }


def contender(op: str, config: Config | None, implementation: str = "mosaic_gpu") -> Contender:
    """An implementation with these launch parameters; None is for the default ones."""
    fn = functools.partial(TUNABLES[op].fn, implementation=implementation, config=config)
    return Contender(str(config), TUNABLES[op].formula, fn)


def sampled(results: Arrays) -> dict[str, np.ndarray]:
    """Results by name: whole vectors, and some rows of larger arrays."""
    got = {}
    for name, array in results.items():
        if array.ndim == 2:
            # With the last row. An odd step visits every place in a block of rows.
            array = array[:: -(array.size // _CHECKED_ELEMENTS | 1)]
        got[name] = np.asarray(array, np.float64)
    return got


def inaccuracy(
    got: dict[str, np.ndarray], plain: dict[str, np.ndarray], exact: dict[str, np.ndarray]
) -> str | None:
    """The first array of `got` that errs over 1.2 times as much as plain JAX's, in words, or None.

    Plain JAX computes in the same dtype. Errors below `LEAST_ERROR` of the value are allowed.
    """
    for name, value in exact.items():
        allowed = max(1.2 * rms(plain[name] - value), LEAST_ERROR * rms(value))
        error = rms(got[name] - value)
        if not error <= allowed:  # also NaN
            return f"{name} errs by {error:.1e}, allowed {allowed:.1e}"
    return None


@contextlib.contextmanager
def captured_stdout() -> Iterator[IO[bytes]]:
    """Yields a file that receives what the process prints meanwhile, its C++ included.

    Mosaic GPU prints the output of ptxas there. It could write that output into a folder, but then
    it would also write its layout constraints, and formatting them takes longer than compiling.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield file
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)


def spills(ptxas: str) -> str | None:
    """The spilled bytes in the output of ptxas, in words; None without spills."""
    found = [int(size) for size in re.findall(r"(\d+) bytes spill stores", ptxas)]
    if not found:
        return "ptxas printed nothing about spills"
    return f"spills {max(found)} bytes" if max(found) else None


_compiling = threading.Lock()  # the output of ptxas does not say which candidate it is about


def without_spills(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a candidate; raises `Rejected` if its kernel spills registers."""
    with _compiling, captured_stdout() as file:
        compiled = lowered.compile()
        file.seek(0)
        ptxas = file.read().decode(errors="replace")
    if reason := spills(ptxas):
        raise Rejected(reason)
    return compiled


def sweep(
    op: str,
    shape: tuple[int, int],
    sets: list[Arrays],
    direction: Direction,
    candidates: Sequence[Config],
    *,
    rounds: int,
    deadline: float,
) -> Sweep:
    """Compiles, checks and times the candidates of one direction.

    Args:
      op: Operation, of `TUNABLES`.
      shape: Shape of an input.
      sets: Sets of inputs and cotangents.
      direction: Direction to time.
      candidates: Launch parameters, the default ones first. All candidates for the backward must
        have the same forward, one that works.
      rounds: Number of measured rounds of the finalists.
      deadline: Reading of `time.monotonic` after which no candidate is compiled, but for the first
        of each thread.
    """
    kept = None
    if direction == "backward":
        # All candidates keep the same arrays, so one forward computes them.
        with captured_stdout():
            kept = ops.keep(contender(op, candidates[0]), sets)
    in_float32 = cast(sets[0], np.dtype(np.float32))

    def compiled(config: Config) -> list[ops.Call]:
        if config not in candidates[:_THREADS] and time.monotonic() > deadline:
            raise OutOfTime("left out: the time was over")
        made = contender(op, config)
        return ops.prepare(made, sets, direction, kept=kept, compile_program=without_spills)

    with ThreadPoolExecutor(_THREADS) as pool:
        of_plain, of_exact = (
            pool.submit(ops.prepare, contender(op, None, "reference"), some, direction)
            for some in (sets[:1], [in_float32])
        )
        found = {config: pool.submit(compiled, config) for config in candidates}
    plain, exact = (sampled(some.result()[0]()) for some in (of_plain, of_exact))
    del in_float32, of_plain, of_exact

    wrong = lambda got: inaccuracy(sampled(got), plain, exact)
    cases = {
        config: agreement.checked(str(config), of_config.result, wrong)
        for config, of_config in found.items()
    }
    itemsize = next(iter(sets[0].values())).dtype.itemsize
    copy = ops.copy(TUNABLES[op].passes[direction] * itemsize * shape[0] * shape[1])
    screened, _ = ops.compare_with_copy(copy, list(cases.values()), _SCREENING_ROUNDS)
    timings = {config: screened[case.name] for config, case in cases.items()}
    finalists = fastest(timings)[:_FINALISTS]
    if timings[candidates[0]].error is None:
        finalists = list(dict.fromkeys([candidates[0], *finalists]))
    final, limit = ops.compare_with_copy(copy, [cases[config] for config in finalists], rounds)
    timings |= {config: final[cases[config].name] for config in finalists}
    left_out = sum(isinstance(of_config.exception(), OutOfTime) for of_config in found.values())
    return Sweep(timings, limit, left_out)


def fastest(timings: dict[Config, timing.Timing]) -> list[Config]:
    """The candidates that have a time, those with most rounds first, then the fastest."""
    timed = [config for config, found in timings.items() if found.error is None]
    order = lambda config: (-len(timings[config].times_ms), timings[config].median_ms)
    return sorted(timed, key=order)


def rms(array: np.ndarray) -> float:
    """The root mean square."""
    return float(np.sqrt(np.mean(np.square(array))))


def cast(arrays: Arrays, dtype: np.dtype) -> Arrays:
    """The floating-point arrays cast to `dtype`, and the integers."""
    return {
        name: array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array
        for name, array in arrays.items()
    }
