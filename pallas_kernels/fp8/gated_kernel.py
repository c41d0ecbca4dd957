"""Two FP8 products with SwiGLU in their epilogue, for Hopper: `silu(x @ w_gate) · (x @ w_up)`.

Both products of a tile are wgmma accumulators of one warpgroup, so the activation needs no pass of
its own. At T=16384 and F=8192 in bfloat16 a pass would read 537 MB and write 268 MB. That takes
0.27 ms at 3 TB/s, and the two products take 0.75 ms. The tensor cores add up the products, with no
promotion of the sums to float32: two more accumulators would not fit the registers.

Rounding: gate and up are rounded to the output's dtype before anything is computed from them, as if
they had been stored. The activation is float32 and rounded once.
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

from pallas_kernels.fp8.product_kernel import (
    COLUMN,
    ROW,
    load_scale,
    scaled,
    scales_of_tiles,
    unsupported_reason,
    with_columns,
)
from pallas_kernels.fp8.types import Quantized
from pallas_kernels.gpu import hopper_gemm
from pallas_kernels.gpu.device import runs_here, target_device
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
from pallas_kernels.gpu.layouts import store
from pallas_kernels.mlp import formula

_PIECE = 64  # columns of a tile that go through shared memory at a time: 128 bytes of a row


def runs(x: Quantized, w_gate: Quantized, out_dtype: DTypeLike) -> bool:
    """Whether the kernel runs on the default device for these arrays."""
    is_16_bits = jnp.dtype(out_dtype).itemsize == 2
    return is_16_bits and not (unsupported_reason(x, w_gate, out_dtype) or runs_here())


def gated(
    x: Quantized,
    w_gate: Quantized,
    w_up: Quantized,
    *,
    out_dtype: DTypeLike,
    keep: bool,
    find_amax: bool = False,
    config: Config | None = None,
) -> tuple[Float[Array, "T F"], ...]:
    """`(silu(gate) · up,)` with `gate = x @ w_gate.T` and `up = x @ w_up.T`.

    `runs` must be True for the arguments, except in the interpreter.

    Args:
      x: Input, `[T, D]`.
      w_gate: First weight, `[F, D]`.
      w_up: Second weight, of the same shape and dtype.
      out_dtype: Dtype of the results, of 16 bits.
      keep: Whether to return gate and up, too: `(product, gate, up)`.
      find_amax: Whether to return, as the last result, the largest magnitudes of the product in
        float32: `[tiles, padded T]`, one for each row of a tile; 0 in rows past T.
      config: Launch parameters; chosen if None.

    Raises:
      ValueError: The configuration does not fit the device.
    """
    num_tokens, num_columns = len(x.values), len(w_gate.values)
    device, out_dtype = target_device(), jnp.dtype(out_dtype)
    x_values = whole_tiles(x.values)
    weights = [whole_tiles(with_columns(w.values)) for w in (w_gate, w_up)]
    depth = x_values.shape[1]
    if config is None:
        config = hopper_gemm.default_config(
            num_tokens, num_columns, depth, device, tile_n=128, stages=4
        )
    loop = MainLoop(
        config=config,
        num_rows=len(x_values),
        num_columns=len(weights[0]),
        depth=depth,
        dtype=x_values.dtype,
        num_b=2,
        b_dtype=weights[0].dtype,
    )
    pieces = (WARPGROUPS, 2, TILE_M, _PIECE)
    loop.check_fits(device, extra_bytes=out_dtype.itemsize * math.prod(pieces))
    output = jax.ShapeDtypeStruct((len(x_values), len(weights[0])), out_dtype)
    num_outputs = 3 if keep else 1
    # Plain stores write the maxima of a tile, so the array has all rows of the last tile.
    padded_rows = len(x_values) + -len(x_values) % (config.cluster * BLOCK_M)
    column_tiles = pl.cdiv(len(weights[0]), config.tile_n)
    maxima = jax.ShapeDtypeStruct((column_tiles, padded_rows), jnp.float32)
    outputs = gpu_kernel(
        functools.partial(_kernel, loop, num_outputs, find_amax),
        out_type=(output,) * num_outputs + (maxima,) * find_amax,
        **loop.launch,
        scratch_types=[plgpu.SMEM(pieces, out_dtype), *loop.scratch_types],
        kernel_name="fp8_gated_matmul",
    )(
        x_values,
        *weights,
        scales_of_tiles(x.scale, num_tokens, config.cluster * BLOCK_M),
        *(scales_of_tiles(w.scale, num_columns, config.tile_n) for w in (w_gate, w_up)),
    )
    results = tuple(a[:num_tokens, :num_columns] for a in outputs[:num_outputs])
    return *results, *outputs[num_outputs:]


def _kernel(
    loop: MainLoop,
    num_outputs: int,
    find_amax: bool,
    x_gmem: Any,
    gate_gmem: Any,
    up_gmem: Any,
    *refs: Any,
) -> None:
    """Writes the product of each tile, and gate, up and maxima if they are asked for."""
    scale_gmems, outputs = refs[:3], refs[3 : 3 + num_outputs]
    maxima_gmem = refs[3 + num_outputs] if find_amax else None
    piece_smem, *scratch = refs[3 + num_outputs + find_amax :]
    slots = piece_smem.at[jax.lax.axis_index("warpgroup")]
    num_pieces = loop.config.tile_n // _PIECE
    num_stores = num_pieces * num_outputs
    row_gmem, *column_gmems = scale_gmems

    def tile(row, column, multiply):
        rows = pl.ds(row, TILE_M)
        scale_of_rows = load_scale(row_gmem, rows, ROW)
        accumulators = multiply()
        largest = jnp.float32(0)
        for i in range(num_pieces):
            columns = pl.ds(column + i * _PIECE, _PIECE)
            gate, up = (
                scaled(
                    sums[:, i * _PIECE : (i + 1) * _PIECE],
                    scale_of_rows,
                    load_scale(gmem, columns, COLUMN),
                ).astype(piece_smem.dtype)
                for sums, gmem in zip(accumulators, column_gmems, strict=True)
            )
            product = formula.product(gate.astype(jnp.float32), up.astype(jnp.float32))
            values = (product.astype(piece_smem.dtype), gate, up)[:num_outputs]
            if find_amax:
                # Rounding keeps the order of numbers, so it can wait until the maximum is known.
                largest = jnp.maximum(largest, jnp.max(jnp.abs(product), axis=1))
            for j, (value, output) in enumerate(zip(values, outputs, strict=True)):
                to = output.at[rows, columns]
                store_piece(i * num_outputs + j, num_stores, value, slots, to)
        if maxima_gmem is not None:
            rounded = largest.astype(piece_smem.dtype).astype(jnp.float32)
            store(maxima_gmem.at[jax.lax.div(column, loop.config.tile_n), rows], rounded)

    loop.run([x_gmem], [gate_gmem, up_gmem], scratch, tile=tile, end=wait_for_pieces)
