"""The FP8 product with row and column scales in its epilogue, for Hopper.

`out = (a @ b.T) · scale_a · scale_b.T` for `a [M, K]` and `b [N, K]`: both operands have K last,
because the FP8 wgmma reads nothing else. The loop is in `pallas_kernels/gpu/hopper_gemm.py`. The
epilogue multiplies the float32 sums by the scale of their row and of their column, and rounds once.

wgmma adds FP8 products with about 14 bits. Over a depth of 16384 a sum then errs by 3.5e-3, twice
the rounding of a bfloat16 result (1.7e-3). With `accumulation="promoted"` the loop adds the sums to
float32 numbers after every 512 of K, and the error is 1.7e-3. That takes as many registers as the
accumulators, so tiles are narrower: 192 or 128 columns in place of 256. With row scales it has
1227 to 1452 TFLOP/s in place of 1349 to 1584 (H100, docs/lab/2026-11-25-fp8-layers.md).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.fp8.types import Quantized
from pallas_kernels.gpu import hopper_gemm
from pallas_kernels.gpu.device import Device, target_device
from pallas_kernels.gpu.hopper_gemm import (
    BLOCK_M,
    TILE_M,
    WARPGROUPS,
    Config,
    MainLoop,
    store_piece,
    wait_for_pieces,
    whole_tiles,
)
from pallas_kernels.gpu.kernel import gpu_kernel, shared

OUT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
# Steps of 128 along K between promotions. A promotion after every step costs 12 % more, and does
# not lower the error.
_PROMOTE_EVERY = 4
_WIDE = 192  # columns of a tile: the most whose accumulators and sums fit the registers
_PIECE_BYTES = 128  # of a row of the result that go through shared memory at a time
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)


def default_config(
    num_rows: int, num_columns: int, depth: int, device: Device, *, promoted: bool
) -> Config:
    """Launch parameters: the best of those that were tried at five sizes on an H200."""
    tile_n, stages = 256, 4
    if promoted:
        # At 12288 columns tiles of 192 had 1304 TFLOP/s and tiles of 128 had 1230. Tiles of 192 are
        # not worth it if the last of them is nearly empty.
        tiles = pl.cdiv(num_columns, _WIDE)
        tile_n, stages = (_WIDE, 4) if num_columns >= 0.95 * _WIDE * tiles else (128, 6)
    return hopper_gemm.default_config(
        num_rows, num_columns, depth, device, tile_n=tile_n, stages=stages
    )


def unsupported_reason(a: Quantized, b: Quantized) -> str | None:
    """Why the kernel does not multiply these arrays, or None if it does."""
    if (reason := hopper_gemm.unsupported_device(target_device())) is not None:
        return reason
    if 0 in a.values.shape or 0 in b.values.shape:
        return f"operands of shapes {a.values.shape} and {b.values.shape} are empty"
    return None


def product(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: DTypeLike,
    promoted: bool,
    config: Config | None = None,
) -> Float[Array, "M N"]:
    """`a @ b.T` of the dequantized operands, in float32, rounded once to `out_dtype`.

    `unsupported_reason` must be None for the arguments. The kernel reads parts of 8 rows by 128 of
    K, and writes 8 rows by 64 columns. Operands of other sizes are padded with zeros first.

    Args:
      a: First operand, `[M, K]`.
      b: Second operand, `[N, K]`.
      out_dtype: Dtype of the result.
      promoted: Whether float32 sums take over after every 512 of K.
      config: Launch parameters; chosen if None.

    Raises:
      ValueError: The configuration does not fit the device.
    """
    return _product(a, b, target_device(), jnp.dtype(out_dtype), promoted, config)


@shared("device", "out_dtype", "promoted", "config")
def _product(
    a: Quantized,
    b: Quantized,
    device: Device,
    out_dtype: jnp.dtype,
    promoted: bool,
    config: Config | None,
) -> jax.Array:
    num_rows, num_columns = len(a.values), len(b.values)
    a_values = whole_tiles(a.values)
    b_values = whole_tiles(with_columns(b.values))
    depth = a_values.shape[1]
    if config is None:
        config = default_config(num_rows, num_columns, depth, device, promoted=promoted)
    loop = MainLoop(
        config=config,
        num_rows=len(a_values),
        num_columns=len(b_values),
        depth=depth,
        dtype=a_values.dtype,
        b_dtype=b_values.dtype,
        promote_every=_PROMOTE_EVERY if promoted else 0,
    )
    pieces = (WARPGROUPS, 2, TILE_M, _PIECE_BYTES // out_dtype.itemsize)
    loop.check_fits(device, extra_bytes=out_dtype.itemsize * math.prod(pieces))
    output = jax.ShapeDtypeStruct((len(a_values), len(b_values)), out_dtype)
    out = gpu_kernel(
        functools.partial(_kernel, loop),
        out_type=output,
        **loop.launch,
        scratch_types=[plgpu.SMEM(pieces, out_dtype), *loop.scratch_types],
        kernel_name="fp8_matmul",
    )(
        a_values,
        b_values,
        scales_of_tiles(a.scale, num_rows, config.cluster * BLOCK_M),
        scales_of_tiles(b.scale, num_columns, config.tile_n),
    )
    return out[:num_rows, :num_columns]


def with_columns(b: jax.Array) -> jax.Array:
    """`[N, K]` with rows of zeros, up to a multiple of 64 that is at least 128.

    The rows are the columns of a result.

    Mosaic stores whole blocks of 8 rows by 128 bytes. A result of one block must not exist: Mosaic
    drops the number of a block where there is one alone, so the pieces of a tile that lie outside
    would overwrite it (docs/lab/2026-11-24-rows-of-64.md).
    """
    return jnp.pad(b, ((0, max(128 - len(b), -len(b) % 64)), (0, 0)))


def scales_of_tiles(scale: jax.Array, size: int, multiple: int) -> jax.Array:
    """One scale, or one for each row with zeros up to whole tiles, which read all their scales."""
    return jnp.pad(scale.reshape(-1), (0, -size % multiple)) if scale.ndim else scale.reshape(1)


def load_scale(gmem: Any, part: Any, layout: Any) -> jax.Array:
    """The scales of a part of the rows or columns, or the only one."""
    if gmem.shape == (1,):
        return gmem[0]
    return plgpu.load(gmem.at[part], layout=layout, optimized=False)


def scaled(sums: jax.Array, of_rows: jax.Array, of_columns: jax.Array) -> jax.Array:
    """Sums times the scales of their rows and columns."""
    for axis, scale in enumerate((of_rows, of_columns)):
        sums *= jax.lax.broadcast_in_dim(scale, sums.shape, (axis,)) if scale.ndim else scale
    return sums


def _kernel(
    loop: MainLoop, a_gmem: Any, b_gmem: Any, row_gmem: Any, column_gmem: Any, *refs: Any
) -> None:
    """Writes the scaled sums of each tile."""
    output, piece_smem, *scratch = refs
    slots = piece_smem.at[jax.lax.axis_index("warpgroup")]
    width = piece_smem.shape[-1]
    num_pieces = loop.config.tile_n // width

    def tile(row, column, multiply):
        rows = pl.ds(row, TILE_M)
        scale_of_rows = load_scale(row_gmem, rows, ROW)
        (sums,) = multiply()
        for i in range(num_pieces):
            columns = pl.ds(column + i * width, width)
            piece = sums[:, i * width : (i + 1) * width]
            piece = scaled(piece, scale_of_rows, load_scale(column_gmem, columns, COLUMN))
            to = output.at[rows, columns]
            store_piece(i, piece.astype(output.dtype), slots, to)

    loop.run([a_gmem], [[b_gmem]], scratch, tile=tile, end=wait_for_pieces)
