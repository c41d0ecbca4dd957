"""How the rows of `[T, D]` arrays are dealt to warps, and sums over a row."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.device import (
    BYTES_PER_ACCESS,
    LANES,
    MAX_REGISTERS_PER_LANE,
    MAX_WARPS,
    REGISTERS_PER_SM,
    WARPS_PER_WARPGROUP,
)
from pallas_kernels.gpu.layouts import load, rows_of_warps, store


@dataclasses.dataclass(frozen=True, slots=True)
class RowSplit:
    """A row of `hidden_size` elements, dealt to warps.

    Each of the `warps` has `segment` elements and handles `chunk = 32 · vector` of them at a time.
    If the chunk does not divide the segment, the last chunk starts earlier, so that it ends with
    the segment: its first `overlap` elements are also those of the chunk before. Nothing outside
    of the row is touched, and what overlaps is written twice with the same values.

    Attributes:
      hidden_size: D.
      warps: that share a row.
      vector: elements in one access of a lane.
    """

    hidden_size: int
    warps: int
    vector: int

    @property
    def segment(self) -> int:
        """Elements of the row that belong to one warp."""
        return self.hidden_size // self.warps

    @property
    def chunk(self) -> int:
        """Elements that the lanes of a warp access together."""
        return LANES * self.vector

    @property
    def starts(self) -> tuple[int, ...]:
        """Where in the segment the chunks start."""
        whole = range(0, self.segment - self.chunk + 1, self.chunk)
        return (*whole, self.segment - self.chunk) if self.segment % self.chunk else tuple(whole)

    @property
    def overlap(self) -> int:
        """Elements at the start of the last chunk that the chunk before it has too."""
        return -self.segment % self.chunk

    @property
    def elements_per_lane(self) -> int:
        """Elements of a row that a lane has, counting what overlaps twice."""
        return len(self.starts) * self.vector

    @property
    def warpgroups(self) -> int:
        """Warpgroups in a block."""
        return max(1, self.warps // WARPS_PER_WARPGROUP)

    @property
    def registers(self) -> int:
        """Registers a lane can have, if the block is alone on its multiprocessor."""
        lanes = self.warpgroups * WARPS_PER_WARPGROUP * LANES
        return min(MAX_REGISTERS_PER_LANE, REGISTERS_PER_SM // lanes)


# Chunks are unrolled; beyond this many the code, not the memory, is what a kernel waits for.
_MAX_CHUNKS = 16


def split_row(hidden_size: int, warps: int, itemsize: int) -> RowSplit | None:
    """The row dealt to `warps` warps with the widest accesses, or None if that is not possible.

    Args:
      hidden_size: D.
      warps: 1 or a multiple of 4.
      itemsize: bytes of the widest of the arrays that are read and written by rows.
    """
    if hidden_size % warps:
        return None
    segment = hidden_size // warps
    vector = BYTES_PER_ACCESS // itemsize
    while vector and (segment % vector or LANES * vector > segment):
        vector //= 2
    if not vector:
        return None
    split = RowSplit(hidden_size, warps, vector)
    return split if len(split.starts) <= _MAX_CHUNKS else None


def splits(hidden_size: int, itemsize: int) -> list[RowSplit]:
    """All ways to deal a row, those with the fewest warps first."""
    numbers = (1, *range(WARPS_PER_WARPGROUP, MAX_WARPS + 1, WARPS_PER_WARPGROUP))
    found = (split_row(hidden_size, warps, itemsize) for warps in numbers)
    return [split for split in found if split is not None]


def column_parts(split: RowSplit) -> int | None:
    """Into how many parts the backward must cut the columns so that `dweight` fits registers.

    None if that would need parts of chunks.
    """
    num_chunks = len(split.starts)
    for parts in range(1, num_chunks + 1):
        elements = split.elements_per_lane // parts
        # As ptxas counts for sm_90a: 64 registers hold the sums of 16 elements, 128 those of 32
        # but not of 64.
        if num_chunks % parts == 0 and 3 * elements // 2 + 40 <= split.registers:
            return None if parts > 1 and split.overlap else parts
    return None


def ring_shape(split: RowSplit, stages: int, num_operands: int) -> tuple[int, ...]:
    """Of the rows that the backward has in shared memory: each warpgroup has slots of its own."""
    chunk = (WARPS_PER_WARPGROUP, split.chunk)
    return (stages, split.warpgroups, num_operands, len(split.starts), *chunk)


def widest_itemsize(x: jax.Array, residual: jax.Array | None) -> int:
    """Bytes of the widest element that the forward reads by rows."""
    return x.dtype.itemsize if residual is None else max(x.dtype.itemsize, residual.dtype.itemsize)


class Rows:
    """The rows of arrays as a kernel sees them.

    A *tile* is what the four warps of a warpgroup handle at a time: their part of a row or, with
    one warp a row, four rows. If four does not divide the number of rows, the last tile starts
    earlier and repeats rows of the one before it; it is the same block's, after that one.

    Attributes:
      split: how a row is dealt.
      layout: of a `[4, chunk]` value in registers.
      shape: of the arrays in global memory.
      weight_shape: of the weight in global memory.
      num_tiles: all tiles; a block with several warpgroups has as many of a tile at a time.
      num_full_tiles: without the one that repeats rows.
      exchange: scratch memory for `sum`.
    """

    def __init__(self, split: RowSplit, num_tokens: int):
        self.split = split
        self.layout = rows_of_warps(split.vector)
        self._row_is_one_warp = split.warps == 1
        self._num_tokens = num_tokens
        self.shape: tuple[int, ...]
        self.weight_shape: tuple[int, ...]
        if self._row_is_one_warp:
            self.shape, self.weight_shape = (num_tokens, split.segment), (split.segment,)
            self.num_full_tiles = num_tokens // WARPS_PER_WARPGROUP
        else:
            self.shape = (num_tokens, split.warps, split.segment)
            self.weight_shape = self.shape[1:]
            self.num_full_tiles = num_tokens
        self._ragged = self._row_is_one_warp and num_tokens % WARPS_PER_WARPGROUP != 0
        self.num_tiles = self.num_full_tiles + self._ragged
        # Two places for partial sums, in turn: a warp that is at the next row already must not
        # overwrite what a slower one still reads.
        self.exchange = (
            plgpu.SMEM((2, split.warpgroups, WARPS_PER_WARPGROUP), jnp.float32),
            plgpu.Barrier(num_arrivals=split.warpgroups),
        )

    def first(self, tile: Any) -> Any:
        """The first row of a tile."""
        if not self._row_is_one_warp:
            return tile
        row = WARPS_PER_WARPGROUP * tile
        return jnp.minimum(row, self._num_tokens - WARPS_PER_WARPGROUP) if self._ragged else row

    def at(self, ref: Any, row: Any, warpgroup: Any, start: Any) -> Any:
        """The `[4, chunk]` part of a tile with this first row, from column `start` on."""
        columns = pl.ds(start, self.split.chunk)
        if self._row_is_one_warp:
            return ref.at[pl.ds(row, WARPS_PER_WARPGROUP), columns]
        return ref.at[row, pl.ds(WARPS_PER_WARPGROUP * warpgroup, WARPS_PER_WARPGROUP), columns]

    def load_weight(self, ref: Any, warpgroup: Any, start: Any) -> jax.Array:
        """The weight for the chunk at `start`, in its own dtype; for `scale`."""
        columns = pl.ds(start, self.split.chunk)
        if self._row_is_one_warp:
            return load(ref.at[columns], self.layout.reduce(0))
        warps = pl.ds(WARPS_PER_WARPGROUP * warpgroup, WARPS_PER_WARPGROUP)
        return load(ref.at[warps, columns], self.layout)

    def scale(self, weight: jax.Array, offset: float) -> jax.Array:
        """`weight + offset` in float32, `[4, chunk]`."""
        weight = weight.astype(jnp.float32)
        if offset:
            weight += offset
        if self._row_is_one_warp:
            shape = (WARPS_PER_WARPGROUP, self.split.chunk)
            return jax.lax.broadcast_in_dim(weight, shape, (1,))
        return weight

    def sum(
        self,
        chunks: Sequence[jax.Array],
        warpgroup: Any,
        partial_smem: Any,
        barrier: Any,
        step: Any = 0,
    ) -> jax.Array:
        """The sum of a row: a scalar or, with one warp a row, the four sums of a tile.

        Args:
          chunks: float32 values of the chunks.
          warpgroup: which one this is.
          partial_smem: the first scratch of `exchange`.
          barrier: the second.
          step: how many sums this block took before.
        """
        split = self.split
        *most, last = chunks
        if split.overlap:
            column = plgpu.broadcasted_iota(jnp.int32, last.shape, 1, layout=self.layout)
            last = jnp.where(column >= split.overlap, last, 0.0)
        total = last
        for chunk in most:
            total += chunk
        by_warp = jnp.sum(total, axis=1)
        if self._row_is_one_warp:
            return by_warp
        slot = jax.lax.rem(step, 2)
        store(partial_smem.at[slot, warpgroup], by_warp)
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        row_total = partial_smem[slot, 0, 0]
        for warp in range(1, split.warps):
            row_total += partial_smem[slot, *divmod(warp, WARPS_PER_WARPGROUP)]
        return row_total

    def spread(self, value: jax.Array) -> jax.Array:
        """What is one number a row, so that it can be multiplied with a chunk."""
        if self._row_is_one_warp:
            return jax.lax.broadcast_in_dim(value, (WARPS_PER_WARPGROUP, self.split.chunk), (0,))
        return value

    def load_scalar(self, ref: Any, row: Any) -> jax.Array:
        """A number for each row, from the tile's first row on, ready to be multiplied."""
        if self._row_is_one_warp:
            rows = ref.at[pl.ds(row, WARPS_PER_WARPGROUP)]
            return self.spread(load(rows, self.layout.reduce(1)))
        return ref[row]

    def store_scalar(self, ref: Any, row: Any, warpgroup: Any, value: jax.Array) -> None:
        """Stores what `sum` returned, or was made of it."""
        if self._row_is_one_warp:
            store(ref.at[pl.ds(row, WARPS_PER_WARPGROUP)], value)
        else:

            @pl.when(warpgroup == 0)
            def _store():
                ref[row] = value

    # Of the backward, where block b has the tiles b, b + num_blocks, b + 2·num_blocks, ...

    def num_steps(self, block: Any, num_blocks: int) -> Any:
        """Tiles of a block. The ragged one is its owner's last and beyond the others by number."""
        full = (self.num_full_tiles - block + num_blocks - 1) // num_blocks
        if not self._ragged:
            return full
        owner = (self.num_full_tiles - 1) % num_blocks
        return full + jnp.where(block == owner, 1, 0)

    def max_steps(self, num_blocks: int) -> int:
        """The most that `num_steps` is for any block."""
        return -(-self.num_full_tiles // num_blocks) + self._ragged

    def unseen(self, chunk: jax.Array, row: Any, tile: Any) -> jax.Array:
        """`chunk` with zeros for the rows that the tile before has as well."""
        if not self._ragged:
            return chunk
        first_unseen = WARPS_PER_WARPGROUP * jnp.minimum(tile, self.num_full_tiles)
        rows = row + plgpu.broadcasted_iota(jnp.int32, chunk.shape, 0, layout=self.layout)
        return jnp.where(rows >= first_unseen, chunk, 0.0)


def as_scaled(x_hat: jax.Array, casting: str, dtype: jnp.dtype) -> jax.Array:
    """`x · rstd` as it is multiplied with the weight, in float32."""
    return x_hat.astype(dtype).astype(jnp.float32) if casting == "llama" else x_hat
