"""Abstract arguments of the loss, and the compile tests' conditions on each of its kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from aot.harness import ARCHS, CHIPS, Kernel

MIB = 2**20


def floats(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def labels_of(num_tokens: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_tokens,), jnp.int32)


def assert_runs_well(kernel: Kernel) -> None:
    assert kernel.arch == ARCHS["h100"]
    assert (kernel.spill_bytes, kernel.stack_bytes, kernel.warnings) == (0, 0, ()), kernel
    assert kernel.smem_bytes <= CHIPS["h100"].limits.smem_bytes
