"""Tensors of 8-bit values and their scales, each as one pytree."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
DTYPES = (E4M3, E5M2)
BLOCK = 128  # columns of a matrix in int8 that share a scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized array, which `values · scale` approximates.

    It is a pytree with two leaves, so it passes through `jax.jit`, `jax.checkpoint` and
    `jax.lax.scan`.

    Attributes:
      values: Array of dtype `float8_e4m3fn` or `float8_e5m2`, `[..., K]`. Products contract the
        last axis, because the FP8 matrix products of Hopper read it without a stride.
      scale: Float32 scales: `[]`, one for the tensor, or `[..., 1]`, one for each row.
    """

    # JAX's transformations put shapes, axes and other leaves into pytrees, too.
    values: jax.Array | Any
    scale: jax.Array | Any

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """`values · scale`, computed in float32 and rounded once to `dtype`."""
        return (self.values.astype(jnp.float32) * self.scale).astype(dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockwiseInt8:
    """A matrix in int8 with a scale for 128 columns of each row.

    `fp8_swiglu_mlp` keeps gate and up in this form for its backward. It is a pytree. The last block
    of a row is narrower if 128 does not divide the number of columns.

    Attributes:
      values: Array `[T, F]` of int8, from -127 to 127. In a block whose scale is NaN they mean
        nothing.
      scale: Float32 scales `[ceil(F / 128), T]`. The rows lie side by side in memory, as a kernel
        reads and writes the scales of a tile.
    """

    values: jax.Array | Any
    scale: jax.Array | Any

    def dequantize(self) -> jax.Array:
        """`values · scale` in float32, rounded once."""
        num_blocks, num_rows = self.scale.shape
        scale = jnp.broadcast_to(self.scale.T[:, :, None], (num_rows, num_blocks, BLOCK))
        scale = scale.reshape(num_rows, num_blocks * BLOCK)[:, : self.values.shape[1]]
        return self.values.astype(jnp.float32) * scale


def check_dtype(dtype: DTypeLike) -> None:
    """Raises ValueError unless the dtype is one of FP8."""
    if jnp.dtype(dtype) not in DTYPES:
        names = " or ".join(jnp.dtype(d).name for d in DTYPES)
        raise ValueError(f"dtype={jnp.dtype(dtype).name} is no dtype of FP8; take {names}")
