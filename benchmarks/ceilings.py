"""The limits of the card, measured in the same run as the results: GEMM rate, copy bandwidth."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def seconds(fn: Callable[[], Any], *, repeats: int = 10, calls: int = 5) -> float:
    """Wall time of one call: the median over `repeats` groups of `calls` calls and one wait."""
    jax.block_until_ready(fn())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls - 1):
            fn()
        jax.block_until_ready(fn())
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Measured rates that bound every kernel on this card.

    Attributes:
      gemm: FLOP/s of a bfloat16 8192³ product.
      copy: Bytes/s of a copy of 1 GiB, read plus written.
    """

    gemm: float
    copy: float

    def __str__(self) -> str:
        return (
            f"8192³ bfloat16 GEMM {self.gemm / 1e12:.0f} TFLOP/s, copy {self.copy / 1e9:.0f} GB/s"
        )


def measure() -> Ceilings:
    """Measures both rates on random data."""
    size = 8192
    keys = jax.random.split(jax.random.key(0), 3)
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys[:2])
    matmul = jax.jit(jnp.matmul)
    gemm = 2 * size**3 / seconds(lambda: matmul(a, b))
    # XLA cannot return its argument without copying it.
    source = jax.random.bits(keys[2], (2**28,), jnp.uint32)
    copy = jax.jit(jnp.copy)
    return Ceilings(gemm, 2 * source.nbytes / seconds(lambda: copy(source)))
