"""The forward kernel of RMSNorm, with or without the residual addition before it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.gpu.arrays import at_aligned_addresses
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.layouts import load, store
from pallas_kernels.norm.config import Options
from pallas_kernels.norm.rows import Rows, as_scaled, split_row, widest_itemsize


def forward(
    options: Options,
    x: Float[Array, "T D"],
    residual: Float[Array, "T D"] | None,
    weight: Float[Array, " D"],
) -> tuple[Float[Array, "T D"], Float[Array, "T D"] | None, Float[Array, " T"]]:
    """`(y, residual_out, rstd)`."""
    x, residual, weight = at_aligned_addresses((x, residual, weight))
    num_tokens, hidden_size = x.shape
    split = split_row(hidden_size, options.config.fwd_warps, widest_itemsize(x, residual))
    assert split is not None  # `check_config` has refused other sizes
    rows = Rows(split, num_tokens)
    has_residual = residual is not None
    # Narrow rows: a block has so many of them that each lane has some 16 elements on their way.
    tiles_per_block = max(1, min(8, 16 // split.elements_per_lane)) if split.warps == 1 else 1
    tiles_per_block = min(tiles_per_block, rows.num_full_tiles)
    num_blocks = rows.num_full_tiles // tiles_per_block
    row_shape = jax.ShapeDtypeStruct(rows.shape, x.dtype)
    outputs = gpu_kernel(
        functools.partial(_kernel, options, rows, tiles_per_block, num_blocks, has_residual),
        out_type=(
            *(row_shape,) * (2 if has_residual else 1),
            jax.ShapeDtypeStruct((num_tokens,), jnp.float32),
        ),
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=split.warpgroups,
        thread_name="warpgroup",
        scratch_types=rows.exchange,
        kernel_name="add_rms_norm_fwd" if has_residual else "rms_norm_fwd",
    )(
        x.reshape(rows.shape),
        *(() if residual is None else (residual.reshape(rows.shape),)),
        weight.reshape(rows.weight_shape),
    )
    *outputs, rstd = outputs
    y, residual_out = (a.reshape(x.shape) for a in outputs) if has_residual else (*outputs, None)
    return at_aligned_addresses((y.reshape(x.shape), residual_out, rstd))


def _kernel(
    options: Options,
    rows: Rows,
    tiles_per_block: int,
    num_blocks: int,
    has_residual: bool,
    *refs: Any,
) -> None:
    """What a block does: its tiles, and in the last block the tiles that are left over."""
    residual_gmem = residual_out_gmem = None
    if has_residual:
        x_gmem, residual_gmem, weight_gmem, y_gmem, residual_out_gmem, *others = refs
    else:
        x_gmem, weight_gmem, y_gmem, *others = refs
    rstd_gmem, partial_smem, barrier = others
    block = jax.lax.axis_index("block")
    warpgroup = jax.lax.axis_index("warpgroup")
    split, dtype, reread = rows.split, x_gmem.dtype, options.config.fwd_reread
    load_weight = functools.partial(rows.load_weight, weight_gmem, warpgroup)

    def total(row, start):
        """The chunk that is normalized, as it is stored."""
        chunk = load(rows.at(x_gmem, row, warpgroup, start), rows.layout)
        if residual_gmem is None:
            return chunk
        added = load(rows.at(residual_gmem, row, warpgroup, start), rows.layout)
        return (chunk.astype(jnp.float32) + added.astype(jnp.float32)).astype(dtype)

    def normalize(tiles):
        first_rows = [rows.first(tile) for tile in tiles]
        # All loads come first, so that they are on their way together.
        chunks = [[total(row, start) for start in split.starts] for row in first_rows]
        weights = [] if reread else [load_weight(start) for start in split.starts]
        for row, values in zip(first_rows, chunks, strict=True):
            if residual_out_gmem is not None:
                for start, value in zip(split.starts, values, strict=True):
                    store(rows.at(residual_out_gmem, row, warpgroup, start), value)
            squares = [jnp.square(value.astype(jnp.float32)) for value in values]
            mean = rows.sum(squares, warpgroup, partial_smem, barrier) * (1 / split.hidden_size)
            rstd = jax.lax.rsqrt(mean + options.eps)
            rows.store_scalar(rstd_gmem, row, warpgroup, rstd)
            rstd = rows.spread(rstd)
            for i, start in enumerate(split.starts):
                if reread:
                    source_gmem = x_gmem if residual_out_gmem is None else residual_out_gmem
                    value = load(rows.at(source_gmem, row, warpgroup, start), rows.layout)
                    weight = load_weight(start)
                else:
                    value, weight = values[i], weights[i]
                x_hat = as_scaled(value.astype(jnp.float32) * rstd, options.casting, dtype)
                y = (x_hat * rows.scale(weight, options.weight_offset)).astype(dtype)
                store(rows.at(y_gmem, row, warpgroup, start), y)

    first = block * tiles_per_block
    normalize([first + i for i in range(tiles_per_block)])
    num_left = rows.num_tiles - num_blocks * tiles_per_block
    if num_left:

        @pl.when(block == num_blocks - 1)
        def _rest():
            jax.lax.fori_loop(
                0, num_left, lambda i, _: normalize([first + tiles_per_block + i]), None
            )
