"""The forward kernel of RMSNorm, with or without the residual addition before it."""

import functools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.gpu.arrays import at_aligned_addresses
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.layouts import load, store
from pallas_kernels.norm.config import Config
from pallas_kernels.norm.reference import Options
from pallas_kernels.norm.rows import Rows, as_scaled, split_row, widest_itemsize


@runtime_checkable  # for the checks of types in tests
class Epilogue(Protocol):
    """Makes other arrays of the rows `y` while they are in registers; `y` is not stored."""

    def out_types(self, rows: Rows, num_tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Types of the arrays that it stores."""
        ...

    def scratch_types(self, rows: Rows) -> tuple[Any, ...]:
        """Types of its scratch memory. A block uses it for at most one row of several warps."""
        ...

    def store(
        self,
        rows: Rows,
        values: Sequence[jax.Array],
        row: Any,
        warpgroup: Any,
        gmems: Sequence[Any],
        scratch: Sequence[Any],
    ) -> None:
        """Stores its arrays for a tile: `values` are those of the chunks, `row` the first row."""
        ...


def forward(
    options: Options,
    config: Config,
    x: Float[Array, "T D"],
    residual: Float[Array, "T D"] | None,
    weight: Float[Array, " D"],
    epilogue: Epilogue | None = None,
) -> tuple[Any, Float[Array, "T D"] | None, Float[Array, " T"]]:
    """`(y, residual_out, rstd)`; the arrays of an epilogue are in the place of `y`."""
    x, residual, weight = at_aligned_addresses((x, residual, weight))
    num_tokens, hidden_size = x.shape
    split = split_row(hidden_size, config.fwd_warps, widest_itemsize(x, residual))
    assert split is not None  # `check_config` has refused other sizes
    rows = Rows(split, num_tokens)
    has_residual = residual is not None
    tiles_per_block = min(split.most_tiles, rows.num_full_tiles)
    num_blocks = rows.num_full_tiles // tiles_per_block
    row_shape = jax.ShapeDtypeStruct(rows.shape, x.dtype)
    of_y = (row_shape,) if epilogue is None else epilogue.out_types(rows, num_tokens)
    outputs = gpu_kernel(
        functools.partial(
            _kernel,
            options,
            config.fwd_reread,
            rows,
            tiles_per_block,
            num_blocks,
            has_residual,
            epilogue,
            len(of_y),
        ),
        out_type=(
            *of_y,
            *(row_shape,) * has_residual,
            jax.ShapeDtypeStruct((num_tokens,), jnp.float32),
        ),
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=split.warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            *rows.exchange,
            *(() if epilogue is None else epilogue.scratch_types(rows)),
        ),
        kernel_name="add_rms_norm_fwd" if has_residual else "rms_norm_fwd",
    )(
        x.reshape(rows.shape),
        *(() if residual is None else (residual.reshape(rows.shape),)),
        weight.reshape(rows.weight_shape),
    )
    y, others = outputs[: len(of_y)], outputs[len(of_y) :]
    residual_out = others[0].reshape(x.shape) if has_residual else None
    made = y[0].reshape(x.shape) if epilogue is None else tuple(y)
    return at_aligned_addresses((made, residual_out, others[-1]))


def _kernel(
    options: Options,
    reread: bool,
    rows: Rows,
    tiles_per_block: int,
    num_blocks: int,
    has_residual: bool,
    epilogue: Epilogue | None,
    num_y: int,
    *refs: Any,
) -> None:
    """Norms the tiles of a block. The last block also has the tiles that are left over."""
    residual_gmem = residual_out_gmem = None
    if has_residual:
        x_gmem, residual_gmem, weight_gmem, *others = refs
        residual_out_gmem = others.pop(num_y)
    else:
        x_gmem, weight_gmem, *others = refs
    y_gmems, (rstd_gmem, partial_smem, barrier, *scratch) = others[:num_y], others[num_y:]
    block = jax.lax.axis_index("block")
    warpgroup = jax.lax.axis_index("warpgroup")
    split, dtype = rows.split, x_gmem.dtype
    load_weight = functools.partial(rows.load_weight, weight_gmem, warpgroup)

    def total(row, chunk):
        """The chunk that is normalized, as it is stored."""
        value = load(rows.at(x_gmem, row, warpgroup, chunk), chunk.layout)
        if residual_gmem is None:
            return value
        added = load(rows.at(residual_gmem, row, warpgroup, chunk), chunk.layout)
        return (value.astype(jnp.float32) + added.astype(jnp.float32)).astype(dtype)

    def normalize(tiles):
        first_rows = [rows.first(tile) for tile in tiles]
        # All loads come first, so that they are on their way together.
        loaded = [[total(row, chunk) for chunk in split.chunks] for row in first_rows]
        weights = [] if reread else [load_weight(chunk) for chunk in split.chunks]
        for row, values in zip(first_rows, loaded, strict=True):
            if residual_out_gmem is not None:
                for chunk, value in zip(split.chunks, values, strict=True):
                    store(rows.at(residual_out_gmem, row, warpgroup, chunk), value)
            squares = [jnp.square(value.astype(jnp.float32)) for value in values]
            mean = rows.sum(squares, warpgroup, partial_smem, barrier) * (1 / split.hidden_size)
            rstd = jax.lax.rsqrt(mean + options.eps)
            rows.store_scalar(rstd_gmem, row, warpgroup, rstd)
            normed = []
            for i, chunk in enumerate(split.chunks):
                if reread:
                    source_gmem = x_gmem if residual_out_gmem is None else residual_out_gmem
                    value = load(rows.at(source_gmem, row, warpgroup, chunk), chunk.layout)
                    weight = load_weight(chunk)
                else:
                    value, weight = values[i], weights[i]
                x_hat = value.astype(jnp.float32) * rows.spread(rstd, chunk)
                x_hat = as_scaled(x_hat, options.casting, dtype)
                y = (x_hat * rows.scale(weight, options.weight_offset)).astype(dtype)
                if epilogue is None:
                    store(rows.at(y_gmems[0], row, warpgroup, chunk), y)
                else:
                    normed.append(y)
            if epilogue is not None:
                epilogue.store(rows, normed, row, warpgroup, y_gmems, scratch)

    first = block * tiles_per_block
    normalize([first + i for i in range(tiles_per_block)])
    num_left = rows.num_tiles - num_blocks * tiles_per_block
    if num_left:

        @pl.when(block == num_blocks - 1)
        def _rest():
            jax.lax.fori_loop(
                0, num_left, lambda i, _: normalize([first + tiles_per_block + i]), None
            )
