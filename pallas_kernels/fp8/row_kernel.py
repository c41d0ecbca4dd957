"""Quantization with a scale for each row in one pass, as a Mosaic GPU kernel.

A row stays in registers between its maximum and its rounding. So device memory sees 2 bytes read
and 1 written for an element of bfloat16. The transposed copy needs the maxima of columns before its
first value. So `mosaic_gpu.py` makes it, in a second pass.

Mosaic computes a reciprocal by an instruction that may err in the last bit. Hence a value within
one part in 2^23 of a tie may be rounded to the other of its two neighbours. Scales are exact.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.fp8 import reference
from pallas_kernels.gpu.arrays import at_aligned_addresses
from pallas_kernels.gpu.device import WARPS_PER_WARPGROUP
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.layouts import load, store
from pallas_kernels.gpu.math import rounded
from pallas_kernels.norm.config import config_of
from pallas_kernels.norm.rows import Rows, split_row, splits


def fits(x: Float[Array, "M K"]) -> bool:
    """Whether the warps of a block can share a row; 33088 columns is the first width without."""
    return bool(splits(x.shape[-1], x.dtype.itemsize))


def quantize_rows(x: Float[Array, "M K"], dtype: DTypeLike) -> tuple[Array, Float[Array, "M 1"]]:
    """`(values, scale)` of `reference`, for an `x` that fits and that `mosaic_gpu` supports."""
    x = at_aligned_addresses(x)
    num_rows, num_columns = x.shape
    # The norm's forward reads and writes a row in the same way, and its parameters are measured.
    split = split_row(num_columns, config_of(x, None).fwd_warps, x.dtype.itemsize)
    assert split is not None  # `fits` is true
    rows, quantizer = Rows(split, num_rows), Quantizer(jnp.dtype(dtype))
    tiles_per_block = math.gcd(rows.num_tiles, split.most_tiles)
    values, scale = gpu_kernel(
        functools.partial(_kernel, rows, tiles_per_block, quantizer),
        kernel_name="fp8_quantize_rows",
        out_type=quantizer.out_types(rows, num_rows),
        grid=(rows.num_tiles // tiles_per_block,),
        grid_names=("block",),
        num_threads=split.warpgroups,
        thread_name="warpgroup",
        scratch_types=quantizer.scratch_types(rows),
    )(x.reshape(rows.shape))
    return at_aligned_addresses((values.reshape(x.shape), scale[:, None]))


def _kernel(
    rows: Rows,
    tiles_per_block: int,
    quantizer: "Quantizer",
    x_gmem: Any,
    values_gmem: Any,
    scale_gmem: Any,
    *scratch: Any,
) -> None:
    """Quantizes the rows of a block."""
    warpgroup = jax.lax.axis_index("warpgroup")
    first = jax.lax.axis_index("block") * tiles_per_block
    tiles = [rows.first(first + i) for i in range(tiles_per_block)]
    # All loads come first, so that they are on their way together.
    loaded = [
        [load(rows.at(x_gmem, row, warpgroup, chunk), chunk.layout) for chunk in rows.split.chunks]
        for row in tiles
    ]
    for row, values in zip(tiles, loaded, strict=True):
        quantizer.store(rows, values, row, warpgroup, (values_gmem, scale_gmem), scratch)


@dataclasses.dataclass(frozen=True, slots=True)
class Quantizer:
    """Stores FP8 values and scales of rows in registers, as an `Epilogue` of the norm's forward.

    Attributes:
      dtype: Dtype of the values.
    """

    dtype: jnp.dtype

    def out_types(self, rows: Rows, num_tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Types of the values and of the scales."""
        return (
            jax.ShapeDtypeStruct(rows.shape, self.dtype),
            jax.ShapeDtypeStruct((num_tokens,), jnp.float32),
        )

    def scratch_types(self, rows: Rows) -> tuple[Any, ...]:
        """Scratch memory through which the warps of a row find its maximum."""
        warpgroups = rows.split.warpgroups
        return (
            plgpu.SMEM((warpgroups, WARPS_PER_WARPGROUP), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups),
        )

    def store(
        self,
        rows: Rows,
        values: Sequence[jax.Array],
        row: Any,
        warpgroup: Any,
        gmems: Sequence[Any],
        scratch: Sequence[Any],
    ) -> None:
        """Stores a tile from row `row` on. `values` are its chunks, of at most 32 bits."""
        values_gmem, scale_gmem = gmems
        values = [rounded(value, value.dtype) for value in values]
        scale = reference.scale_of(_amax(rows, values, warpgroup, *scratch), self.dtype)
        rows.store_scalar(scale_gmem, row, warpgroup, scale)
        inverse = 1 / scale
        for chunk, value in zip(rows.split.chunks, values, strict=True):
            quantized = value.astype(jnp.float32) * rows.spread(inverse, chunk)
            store(rows.at(values_gmem, row, warpgroup, chunk), quantized.astype(self.dtype))


def _amax(
    rows: Rows, values: Sequence[jax.Array], warpgroup: Any, partial_smem: Any, barrier: Any
) -> jax.Array:
    """The largest magnitude of a row: a scalar or, with one warp a row, four of them."""
    # Bits of magnitudes are in the order of the numbers, and a NaN is the largest.
    magnitudes = [jnp.abs(value.astype(jnp.float32)) for value in values]
    bits = [jax.lax.bitcast_convert_type(a, jnp.int32) for a in magnitudes]
    # Chunks of one width are compared lane by lane.
    widths = [chunk.vector for chunk in rows.split.chunks]
    of_width = [
        [a for a, w in zip(bits, widths, strict=True) if w == width] for width in set(widths)
    ]
    by_warp = [jnp.max(functools.reduce(jnp.maximum, some), axis=1) for some in of_width]
    largest = functools.reduce(jnp.maximum, by_warp)
    largest = jax.lax.bitcast_convert_type(largest, jnp.float32)
    if rows.split.warps > 1:
        store(partial_smem.at[warpgroup], largest)
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        warps = range(rows.split.warps)
        partial = [partial_smem[divmod(warp, WARPS_PER_WARPGROUP)] for warp in warps]
        largest = functools.reduce(jnp.maximum, partial)
    return largest
