"""The largest magnitudes of rows and of columns in one pass, as a Mosaic GPU kernel.

A block is one warpgroup with 64 rows. Each of its warps has 16 of them, of which a lane loads 16
bytes each. The block writes a maximum for each of its rows and columns, and XLA takes the maxima
over blocks. A maximum does not depend on the order, so it has the same bits as the reference.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.gpu.device import BYTES_PER_ACCESS, LANES, WARPS_PER_WARPGROUP
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.layouts import load, rows_of_warps, store

_ROWS = 64  # rows of a block: 64 registers a lane, all loads on their way together


def amax_of_both(x: Float[Array, "M K"]) -> tuple[Float[Array, "M 1"], Float[Array, "K 1"]]:
    """The largest magnitude of each row and of each column, in float32; NaN if there is a NaN.

    `mosaic_gpu.unsupported_reason` is None for `x`.
    """
    num_rows, num_columns = x.shape
    vector = BYTES_PER_ACCESS // x.dtype.itemsize
    while LANES * vector > num_columns:
        vector //= 2
    width = LANES * vector
    row_blocks, column_blocks = num_rows // _ROWS, pl.cdiv(num_columns, width)
    of_rows, of_columns = gpu_kernel(
        functools.partial(_kernel, vector, column_blocks),
        kernel_name="fp8_amax",
        out_type=(
            jax.ShapeDtypeStruct((column_blocks, num_rows), x.dtype),
            jax.ShapeDtypeStruct((row_blocks, column_blocks * width), x.dtype),
        ),
        grid=(row_blocks * column_blocks,),
        grid_names=("block",),
    )(x)
    # The last block starts earlier, so that it ends with the row. Columns that it shares with the
    # block before are here twice.
    whole = (column_blocks - 1) * width
    of_columns = jnp.concatenate(
        [of_columns[:, :whole], of_columns[:, whole - num_columns :]], axis=1
    )
    return _joined(of_rows), _joined(of_columns)


def _joined(maxima: Float[Array, "blocks n"]) -> Float[Array, "n 1"]:
    return jnp.max(maxima, axis=0).astype(jnp.float32)[:, None]


def _kernel(
    vector: int, column_blocks: int, x_gmem: Any, of_rows_gmem: Any, of_columns_gmem: Any
) -> None:
    """The maxima of a block."""
    block = jax.lax.axis_index("block")
    row_block = jax.lax.div(block, column_blocks)
    column_block = jax.lax.rem(block, column_blocks)
    width = LANES * vector
    column = jnp.minimum(column_block * width, x_gmem.shape[1] - width)
    columns, layout = pl.ds(column, width), rows_of_warps(vector)
    starts = [row_block * _ROWS + i for i in range(0, _ROWS, WARPS_PER_WARPGROUP)]
    places = [pl.ds(start, WARPS_PER_WARPGROUP) for start in starts]
    tiles = [jnp.abs(load(x_gmem.at[rows, columns], layout)) for rows in places]
    for rows, tile in zip(places, tiles, strict=True):
        store(of_rows_gmem.at[column_block, rows], jnp.max(tile, axis=1))
    # One warpgroup a block: the maximum over warps goes through one scratch buffer a block.
    own = pl.ds(column_block * width, width)
    store(of_columns_gmem.at[row_block, own], jnp.max(functools.reduce(jnp.maximum, tiles), axis=0))
