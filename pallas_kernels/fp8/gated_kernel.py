"""Two FP8 products with SwiGLU in their epilogue, for Hopper: `silu(x @ w_gate) · (x @ w_up)`.

Both products of a tile are wgmma accumulators of one warpgroup, so the activation needs no pass of
its own. At T=16384 and F=8192 in bfloat16 a pass would read 537 MB and write 268 MB. That takes
0.27 ms at 3 TB/s, and the two products take 0.75 ms. The tensor cores add up the products, with no
promotion of the sums to float32: two more accumulators would not fit the registers.

Rounding: gate and up are rounded to the output's dtype before anything is computed from them, as if
they had been stored. The activation is float32 and rounded once.

The backward reads gate and up in int8, with a scale for 128 columns of a row (`BlockwiseInt8`). A
tile is 128 columns wide, so the warpgroup that has a row of it also has all numbers of a scale.
The rounded gate and up take half as many registers as their accumulators, which are free by then. A
piece of 128 columns in int8 has the bytes of one of 64 columns in 16 bits. So the two slots of a
warpgroup become one for 16 bits and one for int8, filled in turn.
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
    with_columns,
)
from pallas_kernels.fp8.reference import int8_scale_of
from pallas_kernels.fp8.types import BLOCK, BlockwiseInt8, Quantized
from pallas_kernels.gpu import hopper_gemm
from pallas_kernels.gpu.device import reason_not_here, target_device
from pallas_kernels.gpu.hopper_gemm import (
    BLOCK_M,
    TILE_M,
    WARPGROUPS,
    Config,
    MainLoop,
    store_slot,
    wait_for_pieces,
    wait_for_slot,
    whole_tiles,
)
from pallas_kernels.gpu.kernel import gpu_kernel, in_groups
from pallas_kernels.gpu.layouts import store
from pallas_kernels.gpu.math import APPROXIMATE, float32_to_int8, logistic, rounded
from pallas_kernels.implementation import symbolic_reason
from pallas_kernels.mlp import formula

_PIECE = 64  # columns of a tile that go through shared memory at a time: 128 bytes of a row


def runs(x: jax.Array, w_gate: Quantized) -> bool:
    """Whether the kernel runs on the default device for tokens `x`, whose dtype gate and up get."""
    device = target_device()
    reason = symbolic_reason(x) or hopper_gemm.unsupported_device(device) or reason_not_here()
    return reason is None and x.dtype.itemsize == 2 and x.size > 0 and w_gate.values.size > 0


def gated(
    x: Quantized,
    w_gate: Quantized,
    w_up: Quantized,
    *,
    out_dtype: DTypeLike,
    keep: bool,
    find_amax: bool = False,
    config: Config | None = None,
) -> tuple[Float[Array, "T F"], tuple[BlockwiseInt8, ...], Float[Array, "N padded_T"] | None]:
    """`silu(gate) · up` with `gate = x @ w_gate.T` and `up = x @ w_up.T`.

    `runs` must be True for the tokens, except in the interpreter.

    Args:
      x: Input, `[T, D]`.
      w_gate: First weight, `[F, D]`.
      w_up: Second weight, of the same shape and dtype.
      out_dtype: Dtype of the product, of 16 bits; gate and up are rounded to it, too.
      keep: Whether to return gate and up, too.
      find_amax: Whether to return maxima of the product, too.
      config: Launch parameters; chosen if None.

    Returns:
      `(product, kept, maxima)`. `kept` is `(gate, up)`, or empty. `maxima` are the largest
      magnitudes of the product in float32, one for each row of a tile, and 0 in rows past T; or
      None.

    Raises:
      ValueError: The configuration does not fit the device, or `keep` is set and its tiles do not
        have the 128 columns of a scale.
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
    if keep and config.tile_n != BLOCK:
        raise ValueError(
            f"{config.tile_n=} must be {BLOCK} with keep=True: a scale has a tile's row"
        )
    slots = [plgpu.SMEM((WARPGROUPS, 1 if keep else 2, TILE_M, _PIECE), out_dtype)]
    if keep:
        slots.append(plgpu.SMEM((WARPGROUPS, TILE_M, BLOCK), jnp.int8))
    extra_bytes = sum(math.prod(s.shape) * jnp.dtype(s.dtype).itemsize for s in slots)
    loop.check_fits(device, extra_bytes=extra_bytes)
    num_rows, column_tiles = len(x_values), pl.cdiv(len(weights[0]), config.tile_n)
    product = jax.ShapeDtypeStruct((num_rows, len(weights[0])), out_dtype)
    # Mosaic copies whole blocks of 128 columns in int8.
    kept = jax.ShapeDtypeStruct((num_rows, column_tiles * config.tile_n), jnp.int8)
    # Plain stores write a number for each row of a tile, so the array has all rows of the last one.
    padded_rows = num_rows + -num_rows % (config.cluster * BLOCK_M)
    of_rows = jax.ShapeDtypeStruct((column_tiles, padded_rows), jnp.float32)
    outputs = gpu_kernel(
        functools.partial(_kernel, loop, keep, find_amax),
        out_type=(product, *(kept, kept, of_rows, of_rows) * keep, *(of_rows,) * find_amax),
        **loop.launch,
        scratch_types=[*slots, *loop.scratch_types],
        compiler_params=APPROXIMATE,
        kernel_name="fp8_gated_matmul",
    )(
        x_values,
        *weights,
        scales_of_tiles(x.scale, num_tokens, config.cluster * BLOCK_M),
        *(scales_of_tiles(w.scale, num_columns, config.tile_n) for w in (w_gate, w_up)),
    )
    product, *rest = outputs
    maxima = rest.pop() if find_amax else None
    kept = tuple(
        BlockwiseInt8(values[:num_tokens, :num_columns], scale[:, :num_tokens])
        for values, scale in zip(rest[:2], rest[2:], strict=True)
    )
    return product[:num_tokens, :num_columns], kept, maxima


def _kernel(
    loop: MainLoop,
    keep: bool,
    find_amax: bool,
    x_gmem: Any,
    gate_gmem: Any,
    up_gmem: Any,
    *refs: Any,
) -> None:
    """Writes the product of each tile, and gate, up and maxima if they are asked for."""
    sizes = 4, 2 * keep, 2 * keep, find_amax, 1 + keep, len(loop.scratch_types)
    first, kept_gmems, kept_scale_gmems, maxima_gmems, smems, scratch = in_groups(refs, *sizes)
    row_gmem, *column_gmems, output = first
    warpgroup = jax.lax.axis_index("warpgroup")
    slots, *int8_slots = (smem.at[warpgroup] for smem in smems)
    num_pieces = loop.config.tile_n // _PIECE

    def tile(row, column, multiply):
        rows, column_tile = pl.ds(row, TILE_M), jax.lax.div(column, loop.config.tile_n)
        scale_of_rows = load_scale(row_gmem, rows, ROW)
        accumulators = multiply()

        def gate_or_up(sums, gmem, i):
            """Gate or up of a piece."""
            columns = pl.ds(column + i * _PIECE, _PIECE)
            piece = sums[:, i * _PIECE : (i + 1) * _PIECE]
            of_columns = load_scale(gmem, columns, COLUMN)
            return rounded(scaled(piece, scale_of_rows, of_columns), output.dtype)

        def store_int8(pieces, gmem, scale_gmem):
            """Gate or up of the tile."""
            amax = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(p), axis=1) for p in pieces))
            scale = int8_scale_of(amax.astype(jnp.float32))
            inverse = jax.lax.broadcast_in_dim(1 / scale, pieces[0].shape, (0,))
            (slot,) = int8_slots
            wait_for_slot(1)  # after a piece of the product
            for i, piece in enumerate(pieces):
                values = float32_to_int8(piece.astype(jnp.float32) * inverse)
                slot[:, i * _PIECE : (i + 1) * _PIECE] = values
            store_slot(slot, gmem.at[rows, pl.ds(column, BLOCK)])
            store(scale_gmem.at[column_tile, rows], scale)

        pairs = [
            [gate_or_up(*of_one, i) for of_one in zip(accumulators, column_gmems, strict=True)]
            for i in range(num_pieces)
        ]
        largest = jnp.float32(0)
        for i, pair in enumerate(pairs):
            in_float32 = (a.astype(jnp.float32) for a in pair)
            product = formula.product(*in_float32, logistic=logistic)
            if find_amax:
                # Rounding keeps the order of numbers, so it can wait until the maximum is known.
                largest = jnp.maximum(largest, jnp.max(jnp.abs(product), axis=1))
            slot, value = slots.at[0 if keep else i % 2], product.astype(output.dtype)
            wait_for_slot(i * (1 + keep))
            slot[...] = value
            store_slot(slot, output.at[rows, pl.ds(column + i * _PIECE, _PIECE)])
            if keep:  # after the first piece gate, after the second one up
                store_int8([pair[i] for pair in pairs], kept_gmems[i], kept_scale_gmems[i])
        for maxima_gmem in maxima_gmems:
            largest = largest.astype(output.dtype).astype(jnp.float32)
            store(maxima_gmem.at[column_tile, rows], largest)

    loop.run([x_gmem], [[gate_gmem], [up_gmem]], scratch, tile=tile, end=wait_for_pieces)
