"""Quantization in plain JAX: tests compare with it, and XLA fuses it."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.fp8.types import BLOCK, BlockwiseInt8

# An array of smaller numbers counts as zeros. Above this limit no scale is a subnormal number, no
# reciprocal of a scale is infinite, and a subnormal float32 over a scale rounds to 0 in both
# dtypes. So it makes no difference whether a device flushes subnormal numbers to 0.
LEAST_AMAX = 2.0**-90


def amax_of(x: Float[Array, "*T K"], *, axis: int | None) -> Array:
    """The largest magnitude over an axis, which keeps size 1, or over all, `[]`.

    In float32; NaN if there is a NaN.
    """
    # Without signs, bits are in the order of the numbers, and a NaN is the largest. XLA for CPUs
    # loses a NaN in a maximum of float32 numbers (JAX 0.11.2 and 0.12).
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), f"uint{8 * x.dtype.itemsize}")
    largest = jnp.max(bits, axis=axis, keepdims=axis is not None, initial=0)
    return jax.lax.bitcast_convert_type(largest, x.dtype).astype(jnp.float32)


def scale_of(amax: Array, dtype: DTypeLike) -> Array:
    """`amax · (1 / largest finite number of dtype)`, or 1 if `amax` is below `LEAST_AMAX`."""
    # XLA multiplies by the reciprocal of a constant. It is written here, so that every backend
    # rounds in the same place.
    inverse = 1 / float(jnp.finfo(dtype).max)
    return jnp.where(amax < LEAST_AMAX, 1.0, amax * inverse).astype(jnp.float32)


def values_of(x: Float[Array, "*T K"], scale: Array, dtype: DTypeLike) -> Array:
    """`x · (1 / scale)` in float32, rounded to the nearest number of `dtype`, ties to even."""
    return (x.astype(jnp.float32) * (1 / scale)).astype(dtype)


def values_of_both(
    x: Float[Array, "M K"], scale: Array | None, transposed_scale: Array | None, dtype: DTypeLike
) -> tuple[Array | None, Array | None]:
    """`values_of` of `x` and of `x.T`; None where the scale is None."""
    return (
        None if scale is None else values_of(x, scale, dtype),
        None if transposed_scale is None else values_of(x.T, transposed_scale, dtype),
    )


def int8_scale_of(amax: Array) -> Array:
    """`amax · (1 / 127)`, 1 if `amax` is below `LEAST_AMAX`, and NaN if it is infinite or NaN."""
    scale = jnp.where(amax < LEAST_AMAX, 1.0, amax * (1 / 127))
    return jnp.where(amax < jnp.inf, scale, jnp.nan).astype(jnp.float32)


def blockwise_int8(x: Float[Array, "T F"]) -> BlockwiseInt8:
    """`x` in int8: `round(x · (1 / scale))` in float32, to the nearest integer, ties to even.

    `scale = amax · (1 / 127)`, where `amax` is the largest magnitude of 128 columns of a row. A
    block of zeros has the scale 1. A block with a NaN or an infinity has the scale NaN.
    """
    num_rows, num_columns = x.shape
    num_blocks = -(-num_columns // BLOCK)
    padded = jnp.pad(x, ((0, 0), (0, num_blocks * BLOCK - num_columns)))
    blocks = padded.reshape(num_rows, num_blocks, BLOCK)
    scale = int8_scale_of(amax_of(blocks, axis=2))
    values = jnp.round(blocks.astype(jnp.float32) * (1 / scale)).astype(jnp.int8)
    return BlockwiseInt8(values.reshape(padded.shape)[:, :num_columns], scale[:, :, 0].T)
