"""The largest magnitudes of rows and of columns in one pass, as a Mosaic GPU kernel.

A block is one warpgroup with a strip of columns, 128 bytes of a row wide. It goes down up to 512
rows. TMA brings 64 rows at a time into shared memory, while the warpgroup handles those before. A
warp has 4 rows at a time, and 8 lanes share a row. A lane keeps the maxima of its own columns in
registers, so maxima of rows need three shuffles, and those of columns two at the end of the strip.
The block writes maxima of its rows and columns, and XLA takes the maxima over blocks. A maximum
does not depend on the order, so it has the same bits as the reference.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.fp8 import reference
from pallas_kernels.fp8.inputs import Inputs, slot_types, tiles_of_block
from pallas_kernels.fp8.mosaic_gpu import unchanged
from pallas_kernels.fp8.types import BlockwiseInt8
from pallas_kernels.gpu.arrays import at_aligned_addresses
from pallas_kernels.gpu.device import BYTES_PER_ACCESS, LANES, WARPS_PER_WARPGROUP
from pallas_kernels.gpu.kernel import gpu_kernel, in_groups, shared
from pallas_kernels.gpu.layouts import store
from pallas_kernels.gpu.math import APPROXIMATE

_ROWS = 64  # of a tile
# Tiles of a block. With 4 in place of 8, XLA has twice as many maxima of columns left to compare.
_MOST_TILES = 8
# With three arrays and 2 slots, six blocks share a multiprocessor. A third slot costs 6 %.
_SLOTS = 2
_ACCESSES = 4  # most loads by a lane at a time, in all arrays together; 6 of three take 2 % longer
_ROWS_OF_WARP = 4  # so 8 lanes read 128 bytes of a row


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
    width = LANES // _ROWS_OF_WARP * vector  # 64 columns, or 32 of float32
    rows_of_access = WARPS_PER_WARPGROUP * _ROWS_OF_WARP
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((rows_of_access, width), (_ROWS_OF_WARP, vector))),
        warp_dims=(-4,),
        lane_dims=(-2, -3),
        vector_dim=-1,
    )
    column_blocks = num_columns // width
    steps = tiles_of_block(num_rows // _ROWS, column_blocks, _MOST_TILES)
    rows_of_block = steps * _ROWS
    row_blocks = num_rows // rows_of_block
    num_slots = min(_SLOTS, steps)
    rows_of_piece = rows_of_access * max(1, _ACCESSES // len(arrays))
    # The tensor's number and the axis of the maximum, for each result.
    results = [(i, axis) for i, w in enumerate(wanted) for axis in (1, 0) if w[1 - axis]]
    of_columns = [i for i, axis in results if axis == 0]

    def kernel(*refs: Any) -> None:
        n = len(leaves)
        gmems, outs, smems, (arrived,) = in_groups(refs, n, len(results), n, 1)
        inputs = Inputs(structure.unflatten(gmems), structure.unflatten(smems), arrived)
        block = jax.lax.axis_index("block")
        row_block = jax.lax.div(block, column_blocks)
        column_block = jax.lax.rem(block, column_blocks)
        first_row, column = row_block * rows_of_block, column_block * width
        fetch = lambda step, slot: inputs.fetch(first_row + step * _ROWS, column, slot)
        for slot in range(num_slots):
            fetch(slot, slot)

        def of_step(step: Any, largest: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            slot = jax.lax.rem(step, num_slots)
            plgpu.barrier_wait(arrived.at[slot])

            def of_piece(piece: Any, largest: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                row = piece * rows_of_piece
                tiles = inputs.load(slot, pl.ds(row, rows_of_piece), layout)
                magnitudes = [jnp.abs(tensor) for tensor in compute(*tiles)]
                rows = pl.ds(first_row + step * _ROWS + row, rows_of_piece)
                for (i, axis), out in zip(results, outs, strict=True):
                    if axis == 1:
                        store(out.at[column_block, rows], jnp.max(magnitudes[i], axis=1))
                return tuple(
                    jnp.maximum(a, magnitudes[i]) for a, i in zip(largest, of_columns, strict=True)
                )

            largest = jax.lax.fori_loop(0, _ROWS // rows_of_piece, of_piece, largest)
            if steps > num_slots:
                plgpu.commit_smem()  # all warps have read the slot
                pl.when(step + num_slots < steps)(lambda: fetch(step + num_slots, slot))
            return largest

        zeros = plgpu.layout_cast(jnp.zeros((rows_of_piece, width), dtype), layout)
        largest = jax.lax.fori_loop(0, steps, of_step, (zeros,) * len(of_columns))
        columns = pl.ds(column, width)
        of_tensor = dict(zip(of_columns, largest, strict=True))
        for (i, axis), out in zip(results, outs, strict=True):
            if axis == 0:
                # The maximum over warps uses one scratch buffer a block, so a block must have one
                # warpgroup.
                store(out.at[row_block, columns], jnp.max(of_tensor[i], axis=0))

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
        scratch_types=(
            *slot_types(arrays, (_ROWS, width), num_slots),
            plgpu.Barrier(num_arrivals=len(leaves), num_barriers=num_slots),
        ),
    )(*leaves)
    maxima = (reference.amax_of(a, axis=0).reshape(-1, 1) for a in at_aligned_addresses(out))
    return [(next(maxima) if w[0] else None, next(maxima) if w[1] else None) for w in wanted]
