"""The largest magnitudes of rows and of columns in one pass, as a Mosaic GPU kernel.

A block is one warpgroup with a tile of 64 rows in registers. Its warps have 4 rows at a time. 8
lanes share 128 bytes of a row, so that maxima of rows need three shuffles and those of columns two.
The block writes a maximum for each of its rows and columns, and XLA takes the maxima over blocks. A
maximum does not depend on the order, so it has the same bits as the reference.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.fp8 import reference
from pallas_kernels.gpu.arrays import at_aligned_addresses
from pallas_kernels.gpu.device import BYTES_PER_ACCESS, LANES, WARPS_PER_WARPGROUP
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.layouts import load, store

_ROWS = 64
_ACCESSES = 16  # of a lane, all on their way together: 64 registers
_ROWS_OF_WARP = 4


def amax_of_both(x: Float[Array, "M K"]) -> tuple[Float[Array, "M 1"], Float[Array, "K 1"]]:
    """The largest magnitude of each row and of each column, in float32; NaN if there is a NaN.

    `mosaic_gpu.unsupported_reason` is None for `x`.
    """
    x = at_aligned_addresses(x)
    num_rows, num_columns = x.shape
    vector = BYTES_PER_ACCESS // x.dtype.itemsize
    lanes_of_row = LANES // _ROWS_OF_WARP
    step = lanes_of_row * vector  # 64 columns, or 32 of float32
    rows_of_step = WARPS_PER_WARPGROUP * _ROWS_OF_WARP
    most = _ACCESSES // (_ROWS // rows_of_step) * step
    width = next(w for w in range(most, 0, -step) if num_columns % w == 0)
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((rows_of_step, step), (_ROWS_OF_WARP, vector))),
        warp_dims=(-4,),
        lane_dims=(-2, -3),
        vector_dim=-1,
    )
    row_blocks, column_blocks = num_rows // _ROWS, num_columns // width

    def kernel(x_gmem: Any, of_rows_gmem: Any, of_columns_gmem: Any) -> None:
        block = jax.lax.axis_index("block")
        row_block = jax.lax.div(block, column_blocks)
        column_block = jax.lax.rem(block, column_blocks)
        rows, columns = pl.ds(row_block * _ROWS, _ROWS), pl.ds(column_block * width, width)
        tile = jnp.abs(load(x_gmem.at[rows, columns], layout))
        store(of_rows_gmem.at[column_block, rows], jnp.max(tile, axis=1))
        # The maximum over warps goes through one scratch buffer a block: one warpgroup a block.
        store(of_columns_gmem.at[row_block, columns], jnp.max(tile, axis=0))

    of_rows, of_columns = gpu_kernel(
        kernel,
        kernel_name="fp8_amax",
        out_type=(
            jax.ShapeDtypeStruct((column_blocks, num_rows), x.dtype),
            jax.ShapeDtypeStruct((row_blocks, num_columns), x.dtype),
        ),
        grid=(row_blocks * column_blocks,),
        grid_names=("block",),
    )(x)
    by_row, by_column = (
        reference.amax_of(a, axis=0) for a in at_aligned_addresses((of_rows, of_columns))
    )
    return by_row.reshape(-1, 1), by_column.reshape(-1, 1)
