"""The largest magnitudes of rows and of columns in one pass, as a Mosaic GPU kernel.

A block is one warpgroup with a tile of 64 rows in registers. Its warps have 4 rows at a time. 8
lanes share 128 bytes of a row, so that maxima of rows need three shuffles and those of columns two.
The block writes a maximum for each of its rows and columns, and XLA takes the maxima over blocks. A
maximum does not depend on the order, so it has the same bits as the reference.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.fp8 import reference
from pallas_kernels.fp8.mosaic_gpu import unchanged
from pallas_kernels.fp8.types import BLOCK, BlockwiseInt8, dequantized
from pallas_kernels.gpu.arrays import at_aligned_addresses
from pallas_kernels.gpu.device import BYTES_PER_ACCESS, LANES, WARPS_PER_WARPGROUP
from pallas_kernels.gpu.kernel import gpu_kernel, shared
from pallas_kernels.gpu.layouts import load, store
from pallas_kernels.gpu.math import APPROXIMATE

_ROWS = 64
_ACCESSES = 16  # of a lane, all on their way together: 64 registers
_ROWS_OF_WARP = 4


def amax_of_both(x: Float[Array, "M K"]) -> tuple[Float[Array, "M 1"], Float[Array, "K 1"]]:
    """The largest magnitude of each row and of each column, in float32; NaN if there is a NaN.

    `mosaic_gpu.unsupported_reason` is None for `x`.
    """
    ((by_row, by_column),) = amax_of_computed((x,), unchanged, ((True, True),), name="fp8_amax")
    assert by_row is not None and by_column is not None
    return by_row, by_column


@shared("compute", "wanted", "name")
def amax_of_computed(
    arrays: Sequence[Float[Array, "M K"] | BlockwiseInt8],
    compute: Callable[..., Sequence[jax.Array]],
    wanted: tuple[tuple[bool, bool], ...],
    *,
    name: str,
) -> list[tuple[Float[Array, "M 1"] | None, Float[Array, "K 1"] | None]]:
    """`amax_of_both` of tensors that an elementwise function makes of arrays, in the same pass.

    Args:
      arrays: Arguments of the function, of one shape. Those that are not in int8 have one dtype,
        and there is one of them at least.
      compute: Function of a module, of a tile of each array, in float32 where the array is in int8;
        it returns a tile of each tensor in the dtype of the other arrays.
      wanted: Whether to find the maxima of rows and those of columns, for each tensor.
      name: Name of the kernel.
    """
    leaves, structure = jax.tree.flatten(at_aligned_addresses(list(arrays)))
    num_rows, num_columns = leaves[0].shape
    dtype = next(a.dtype for a in arrays if not isinstance(a, BlockwiseInt8))
    vector = BYTES_PER_ACCESS // dtype.itemsize
    lanes_of_row = LANES // _ROWS_OF_WARP
    step = lanes_of_row * vector  # 64 columns, or 32 of float32
    rows_of_step = WARPS_PER_WARPGROUP * _ROWS_OF_WARP
    most = max(1, _ACCESSES // (_ROWS // rows_of_step) // len(arrays)) * step
    # A row of a tile has one scale.
    whole = BLOCK if len(leaves) > len(arrays) else num_columns
    width = next(w for w in range(most, 0, -step) if num_columns % w == 0 == whole % w)
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((rows_of_step, step), (_ROWS_OF_WARP, vector))),
        warp_dims=(-4,),
        lane_dims=(-2, -3),
        vector_dim=-1,
    )
    row_blocks, column_blocks = num_rows // _ROWS, num_columns // width
    # The tensor's number and the axis of the maximum, for each result.
    results = [(i, axis) for i, w in enumerate(wanted) for axis in (1, 0) if w[1 - axis]]

    def kernel(*refs: Any) -> None:
        gmems, outs = refs[: len(leaves)], refs[len(leaves) :]
        block = jax.lax.axis_index("block")
        row_block = jax.lax.div(block, column_blocks)
        column_block = jax.lax.rem(block, column_blocks)
        rows, columns = pl.ds(row_block * _ROWS, _ROWS), pl.ds(column_block * width, width)

        def tile_of(gmem: Any) -> jax.Array:
            if not isinstance(gmem, BlockwiseInt8):
                return load(gmem.at[rows, columns], layout)
            first = jax.lax.div(column_block * width, BLOCK)
            scale = load(gmem.scale.at[first, rows], layout.reduce(1))
            return dequantized(load(gmem.values.at[rows, columns], layout), scale)

        tiles = compute(*map(tile_of, jax.tree.unflatten(structure, gmems)))
        for (i, axis), out in zip(results, outs, strict=True):
            # The maximum over warps goes through one scratch buffer a block: one warpgroup a block.
            to = out.at[column_block, rows] if axis else out.at[row_block, columns]
            store(to, jnp.max(jnp.abs(tiles[i]), axis=axis))

    out = gpu_kernel(
        kernel,
        kernel_name=name,
        compiler_params=APPROXIMATE,
        out_type=tuple(
            jax.ShapeDtypeStruct(
                (column_blocks, num_rows) if axis else (row_blocks, num_columns), dtype
            )
            for _, axis in results
        ),
        grid=(row_blocks * column_blocks,),
        grid_names=("block",),
    )(*leaves)
    maxima = (reference.amax_of(a, axis=0).reshape(-1, 1) for a in at_aligned_addresses(out))
    return [(next(maxima) if w[0] else None, next(maxima) if w[1] else None) for w in wanted]
