"""Abstract arguments of the loss, and the compile tests' conditions on each of its kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from aot.harness import ARCHS, CHIPS, Kernel

MIB = 2**20
# Tiles of a warpgroup's own take 192 of a lane's 232 registers. These kernels spill some of the
# others around the pieces of a tile: bytes that are stored and loaded. The most, 584, is with a
# softcap and the sums for the entropy; without them it is 400. The MLP's forward spills the place
# of a tile: two numbers, stored before its steps and loaded after.
MOST_SPILLED = {
    "gated_matmul": 16,
    "linear_statistics": 104,
    "linear_exponentials": 584,
    "linear_exponentials_again": 584,
}


def floats(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def labels_of(num_tokens: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_tokens,), jnp.int32)


def assert_spills_little(kernel: Kernel) -> None:
    most = MOST_SPILLED.get(kernel.name, 0)
    assert kernel.spill_bytes <= most and kernel.stack_bytes <= most, kernel
    assert all(most and "Registers are spilled" in w for w in kernel.warnings), kernel


def assert_runs_well(kernel: Kernel, chip: str = "h100") -> None:
    assert kernel.arch == ARCHS[chip]
    assert_spills_little(kernel)
    assert kernel.smem_bytes <= CHIPS[chip].limits.smem_bytes
