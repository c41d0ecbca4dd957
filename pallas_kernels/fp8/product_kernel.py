"""The FP8 product with row and column scales in its epilogue, for Hopper.

`out = (a @ b.T) · scale_a · scale_b.T` for `a [M, K]` and `b [N, K]`: both operands have K last,
because the FP8 wgmma reads nothing else. The loop is in `pallas_kernels/gpu/hopper_gemm.py`. The
epilogue multiplies the float32 sums by the scale of their row and of their column, and rounds once.

wgmma adds FP8 products with about 14 bits. Over a depth of 16384 a sum then errs by 3.5e-3, twice
the rounding of a bfloat16 result (1.7e-3). With `accumulation="promoted"` the loop adds the sums to
float32 numbers after every 512 of K, and the error is 1.7e-3. That takes as many registers as the
accumulators, so tiles are half as wide: 1304 to 1334 TFLOP/s in place of 1400 to 1567 on an H200.
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

from pallas_kernels.fp8.types import DTYPES, Quantized
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
from pallas_kernels.gpu.kernel import gpu_kernel

OUT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_PROMOTE_EVERY = 4  # steps of 128: every step costs 12 % more, and does not lower the error
_WIDE = 192  # columns of a tile: the most whose accumulators and sums fit the registers
_PIECE_BYTES = 128  # of a row of the result that go through shared memory at a time
_LEAST_COLUMNS = 64  # of the result: Mosaic stores whole blocks of 8 rows by 128 bytes
_ROW = plgpu.Layout.WGMMA.reduce(1)
_COLUMN = plgpu.Layout.WGMMA.reduce(0)


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


def unsupported_reason(a: Quantized, b: Quantized, out_dtype: DTypeLike) -> str | None:
    """Why the kernel does not multiply these arrays, or None if it does."""
    if (reason := hopper_gemm.unsupported_device(target_device())) is not None:
        return reason
    for q in (a, b):
        if q.values.dtype not in DTYPES:
            return f"an operand is {q.values.dtype}, not float8_e4m3fn or float8_e5m2"
    if jnp.dtype(out_dtype) not in OUT_DTYPES:
        return f"out_dtype={jnp.dtype(out_dtype).name} is not bfloat16, float16 or float32"
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
    num_rows, num_columns = len(a.values), len(b.values)
    a_values = whole_tiles(a.values)
    b_values = whole_tiles(jnp.pad(b.values, ((0, -num_columns % _LEAST_COLUMNS), (0, 0))))
    depth, device, out_dtype = a_values.shape[1], target_device(), jnp.dtype(out_dtype)
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
        _scales(a.scale, num_rows, config.cluster * BLOCK_M),
        _scales(b.scale, num_columns, config.tile_n),
    )
    return out[:num_rows, :num_columns]


def _scales(scale: jax.Array, size: int, multiple: int) -> jax.Array:
    """One scale, or one for each row with zeros up to whole tiles, which read all their scales."""
    return jnp.pad(scale.reshape(-1), (0, -size % multiple)) if scale.ndim else scale.reshape(1)


def _kernel(
    loop: MainLoop, a_gmem: Any, b_gmem: Any, row_gmem: Any, column_gmem: Any, *refs: Any
) -> None:
    """Writes the scaled sums of each tile."""
    output, piece_smem, *scratch = refs
    slots = piece_smem.at[jax.lax.axis_index("warpgroup")]
    width = piece_smem.shape[-1]
    num_pieces = loop.config.tile_n // width
    # The arrays of a scale for the tensor have one number.
    by_row, by_column = (gmem.shape != (1,) for gmem in (row_gmem, column_gmem))

    def tile(row, column, multiply):
        rows = pl.ds(row, TILE_M)
        if by_row:
            scale_a = plgpu.load(row_gmem.at[rows], layout=_ROW, optimized=False)
        else:
            scale_a = row_gmem[0]
        if not by_column:
            scale_a *= column_gmem[0]
        (sums,) = multiply()
        sums *= jax.lax.broadcast_in_dim(scale_a, sums.shape, (0,)) if by_row else scale_a
        for i in range(num_pieces):
            columns = pl.ds(column + i * width, width)
            piece = sums[:, i * width : (i + 1) * width]
            if by_column:
                scale_b = plgpu.load(column_gmem.at[columns], layout=_COLUMN, optimized=False)
                piece *= jax.lax.broadcast_in_dim(scale_b, piece.shape, (1,))
            to = output.at[rows, columns]
            store_piece(i, num_pieces, piece.astype(output.dtype), slots, to)

    loop.run([a_gmem], [b_gmem], scratch, tile=tile, end=wait_for_pieces)
