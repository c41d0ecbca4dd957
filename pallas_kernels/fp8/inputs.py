"""Tiles of a kernel's arrays, copied into shared memory before they are used."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp8.types import BLOCK, BlockwiseInt8
from pallas_kernels.gpu.device import target_device
from pallas_kernels.gpu.layouts import load
from pallas_kernels.gpu.math import int8_to_float32

# With 7.8, 3.9, 1.9 and 1 blocks a multiprocessor, both FP8 copies of 2048 x 2048 bfloat16 take
# 7.4, 6.9, 7.2 and 9.0 us (H200, 2026-11-29).
_BLOCKS_PER_SM = 2


def tiles_of_block(along: int, across: int, most: int) -> int:
    """How many tiles, one after the other, a block handles.

    It is the largest number up to `most` that divides `along` and leaves two blocks or more for
    each multiprocessor; 1 if there is none.

    Args:
      along: Number of tiles in the direction in which a block goes.
      across: Number of tiles in the other direction.
      most: The largest number to take.
    """
    least = _BLOCKS_PER_SM * target_device().num_sms
    divisors = (n for n in range(1, most + 1) if along % n == 0)
    fitting = (n for n in divisors if along // n * across >= least)
    return max(fitting, default=1)


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """Arrays of one shape, and slots for a tile of each of them.

    Attributes:
      arrays: References to matrices `[M, K]` in device memory, or `BlockwiseInt8` of references.
      slots: References to shared memory `[slots, R, C]`, of the same structure. References to
        scales are `[slots, R]`, because the columns of a tile lie in one group that shares a scale.
      arrived: A barrier for each slot.
    """

    arrays: Sequence[Any]
    slots: Sequence[Any]
    arrived: Any

    def fetch(self, row: Any, column: Any, slot: Any) -> None:
        """Starts the copies of the tile at `(row, column)` into a slot."""

        def copy(source: Any, to: Any) -> None:
            plgpu.copy_gmem_to_smem(source, to.at[slot], self.arrived.at[slot])

        def copy_matrix(matrix: Any, to: Any) -> None:
            _, num_rows, num_columns = to.shape
            copy(matrix.at[pl.ds(row, num_rows), pl.ds(column, num_columns)], to)

        for array, place in zip(self.arrays, self.slots, strict=True):
            if isinstance(array, BlockwiseInt8):
                copy_matrix(array.values, place.values)
                rows = pl.ds(row, place.scale.shape[1])
                copy(array.scale.at[jax.lax.div(column, BLOCK), rows], place.scale)
            else:
                copy_matrix(array, place)

    def load(self, slot: Any, rows: Any, layout: Any) -> list[jax.Array]:
        """Rows of the tiles in a slot; those in int8 as `values · scale` in float32."""

        def of_array(place: Any) -> jax.Array:
            if not isinstance(place, BlockwiseInt8):
                return plgpu.load(place.at[slot, rows], layout=layout)
            matrix: Any = place.values
            values = int8_to_float32(plgpu.load(matrix.at[slot, rows], layout=layout))
            scale = load(place.scale.at[slot, rows], layout.reduce(1))
            return values * jax.lax.broadcast_in_dim(scale, values.shape, (0,))

        return [of_array(place) for place in self.slots]


def slot_types(arrays: Sequence[Any], tile: tuple[int, int], num_slots: int) -> list[Any]:
    """Scratch memory for the slots of `Inputs`, one entry for each leaf of the arrays."""
    types = []
    for a in arrays:
        in_int8 = isinstance(a, BlockwiseInt8)
        types.append(plgpu.SMEM((num_slots, *tile), (a.values if in_int8 else a).dtype))
        if in_int8:
            types.append(plgpu.SMEM((num_slots, tile[0]), a.scale.dtype))
    return types
