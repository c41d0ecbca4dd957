"""How warps share the rows of `[T, D]` arrays, and sums over a row."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

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


class Chunk(NamedTuple):
    """A part of a warp's segment that its lanes access together, each `vector` neighbours.

    Attributes:
      start: Place in the segment where it begins.
      vector: Number of elements in one access of a lane.
    """

    start: Any
    vector: int

    @property
    def size(self) -> int:
        """Number of elements of a warp."""
        return LANES * self.vector

    @property
    def columns(self) -> Any:
        """Its elements, as an index of the segment."""
        return pl.ds(self.start, self.size)

    @property
    def layout(self) -> Any:
        """Layout of its `[4, size]` values in registers, for four warps."""
        return rows_of_warps(self.vector)


@dataclasses.dataclass(frozen=True, slots=True)
class RowSplit:
    """A row of `hidden_size` elements, dealt to warps.

    Each of the `warps` has `segment` elements and handles a chunk of them at a time. Nothing
    outside of the row is touched. If chunks of `vector` elements a lane do not divide the segment,
    one or more chunks of narrower accesses follow. The last chunk may start earlier, so that it
    ends with the segment. Its first `overlap` elements are then also in the chunks before, and are
    written twice with the same values.

    Attributes:
      hidden_size: Size of a row, D.
      warps: Number of warps that share a row.
      vector: Number of elements in the widest access of a lane.
    """

    hidden_size: int
    warps: int
    vector: int

    @property
    def segment(self) -> int:
        """Elements of the row that belong to one warp."""
        return self.hidden_size // self.warps

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks of a segment, in the order of their places."""
        return _chunks(self.segment, self.vector)

    @property
    def widths(self) -> dict[int, int]:
        """The number of chunks of each width of access, in the order of the chunks."""
        return Counter(chunk.vector for chunk in self.chunks)

    @property
    def overlap(self) -> int:
        """Elements at the start of the last chunk that are also in the chunks before it."""
        return sum(chunk.size for chunk in self.chunks) - self.segment

    @property
    def elements_per_lane(self) -> int:
        """Elements of a row that a lane has; the overlap counts twice."""
        return sum(chunk.vector for chunk in self.chunks)

    @property
    def most_tiles(self) -> int:
        """Tiles whose loads a block has on their way together: about 16 elements of a lane."""
        return max(1, min(8, 16 // self.elements_per_lane)) if self.warps == 1 else 1

    @property
    def warpgroups(self) -> int:
        """Warpgroups in a block."""
        return max(1, self.warps // WARPS_PER_WARPGROUP)

    @property
    def lanes(self) -> int:
        """Lanes in a block."""
        return self.warpgroups * WARPS_PER_WARPGROUP * LANES

    @property
    def registers(self) -> int:
        """Registers a lane can have, if the block is alone on its multiprocessor."""
        return min(MAX_REGISTERS_PER_LANE, REGISTERS_PER_SM // self.lanes)


@functools.cache
def _chunks(segment: int, vector: int) -> tuple[Chunk, ...]:
    """The chunks of a segment; see `RowSplit`."""
    whole, rest = divmod(segment, LANES * vector)
    chunks = [Chunk(i * LANES * vector, vector) for i in range(whole)]
    while rest:
        # The narrowest access that covers the rest alone, or, if it would repeat more than an
        # eighth of the segment, the widest that does not reach its end.
        narrow = 1
        while LANES * narrow < rest:
            narrow *= 2
        if narrow > 1 and LANES * narrow - rest > segment // 8:
            narrow //= 2
        chunks.append(Chunk(segment - max(rest, LANES * narrow), narrow))
        rest = max(0, rest - LANES * narrow)
    return tuple(chunks)


# Chunks are unrolled. With more of them a kernel waits for its code and not for the memory.
_MAX_CHUNKS = 16


def split_row(hidden_size: int, warps: int, itemsize: int) -> RowSplit | None:
    """The row dealt to `warps` warps with the widest accesses, or None if that is not possible.

    Args:
      hidden_size: Size of a row, D.
      warps: Number of warps, 1 or a multiple of 4.
      itemsize: Bytes of an element of the widest array that is read or written by rows.
    """
    if hidden_size % warps:
        return None
    segment = hidden_size // warps
    vector = BYTES_PER_ACCESS // itemsize
    while vector and (segment % vector or LANES * vector > segment):
        vector //= 2
    if not vector or segment > _MAX_CHUNKS * LANES * vector:
        return None
    return RowSplit(hidden_size, warps, vector)


def splits(hidden_size: int, itemsize: int) -> list[RowSplit]:
    """All ways to deal a row, those with the fewest warps first."""
    numbers = (1, *range(WARPS_PER_WARPGROUP, MAX_WARPS + 1, WARPS_PER_WARPGROUP))
    found = (split_row(hidden_size, warps, itemsize) for warps in numbers)
    return [split for split in found if split is not None]


def column_parts(split: RowSplit) -> int | None:
    """The fewest parts of the columns, each with sums of `dweight` that fit registers.

    None if a part would not have whole chunks, all of the same width.
    """
    num_chunks = len(split.chunks)
    for parts in range(1, num_chunks + 1):
        elements = split.elements_per_lane // parts
        # As ptxas counts for sm_90a: 64 registers hold the sums of 16 elements, 128 those of 32
        # but not of 64.
        if num_chunks % parts == 0 and 3 * elements // 2 + 40 <= split.registers:
            is_uniform = split.segment % (LANES * split.vector) == 0
            return parts if parts == 1 or is_uniform else None
    return None


def ring_shapes(
    split: RowSplit, stages: int, num_operands: int, rows_per_step: int
) -> dict[int, tuple[int, ...]]:
    """Shapes of the backward's rows in shared memory.

    For each width of access there is an array of the chunks that have it.
    """
    if split.warps == 1:
        shape: tuple[int, ...] = (WARPS_PER_WARPGROUP * rows_per_step,)
    else:
        shape = rows_per_step, split.warps
    return {v: (stages, num_operands, n, *shape, LANES * v) for v, n in split.widths.items()}


def ring_bytes(
    split: RowSplit, stages: int, num_operands: int, rows_per_step: int, itemsize: int
) -> int:
    """Bytes of the arrays of `ring_shapes`."""
    elements_of_a_row = split.lanes * split.elements_per_lane  # of four rows with one warp a row
    return itemsize * stages * num_operands * rows_per_step * elements_of_a_row


def sums_shapes(split: RowSplit) -> dict[int, tuple[int, ...]]:
    """Shapes of the float32 sums of `dweight` of four warps in shared memory.

    As in `ring_shapes`, each chunk has a place of its own: Mosaic GPU reads the places of narrow
    accesses with instructions for whole 16 bytes.
    """
    return {v: (n, WARPS_PER_WARPGROUP, LANES * v) for v, n in split.widths.items()}


def sums_bytes(split: RowSplit) -> int:
    """Bytes of the arrays of `sums_shapes`."""
    return 4 * split.lanes * split.elements_per_lane


def weight_shapes(split: RowSplit) -> dict[int, tuple[int, ...]]:
    """Shapes of the weight in shared memory, as in `ring_shapes`, with several warps a row."""
    return {v: (n, split.warps, LANES * v) for v, n in split.widths.items()}


def weight_bytes(split: RowSplit, itemsize: int) -> int:
    """Bytes of the arrays of `weight_shapes`."""
    return itemsize * split.warps * LANES * split.elements_per_lane


def widest_itemsize(x: jax.Array, residual: jax.Array | None) -> int:
    """Bytes of the widest element that the forward reads by rows."""
    return x.dtype.itemsize if residual is None else max(x.dtype.itemsize, residual.dtype.itemsize)


class Rows:
    """The rows of arrays as a kernel sees them.

    A block handles a *tile* at a time: one or more rows, or a multiple of four rows with one warp a
    row. Each warpgroup has its part of every row of the tile. If a tile's number of rows does not
    divide the number of all rows, the last tile starts earlier and repeats rows of the tile before
    it. The same block handles both, in order.

    Attributes:
      split: How warps share a row.
      shape: Shape of the arrays in global memory.
      weight_shape: Shape of the weight in global memory.
      num_tiles: Number of all tiles.
      num_full_tiles: Number of tiles without the one that repeats rows.
      rows_per_step: Rows of a tile, or fours of them with one warp a row.
      exchange: Scratch memory for `sums`.
    """

    def __init__(self, split: RowSplit, num_tokens: int, rows_per_step: int = 1):
        self.split, self.rows_per_step = split, rows_per_step
        self._row_is_one_warp = split.warps == 1
        self._num_tokens = num_tokens
        warps = () if self._row_is_one_warp else (split.warps,)
        self.weight_shape = (*warps, split.segment)
        self.shape = (num_tokens, *self.weight_shape)
        self._rows_at_once = WARPS_PER_WARPGROUP if self._row_is_one_warp else 1
        self._height = rows_per_step * self._rows_at_once
        self.num_full_tiles = num_tokens // self._height
        self._ragged = num_tokens % self._height != 0
        self.num_tiles = self.num_full_tiles + self._ragged
        # Partial sums have two places, in turn: a warp that is already at the next row must not
        # overwrite the sums that a slower warp still reads.
        self.exchange = (
            plgpu.SMEM((2, rows_per_step, split.warpgroups, WARPS_PER_WARPGROUP), jnp.float32),
            plgpu.Barrier(num_arrivals=split.warpgroups),
        )

    def first(self, tile: Any) -> Any:
        """The first row of a tile."""
        row = self._height * tile
        return jnp.minimum(row, self._num_tokens - self._height) if self._ragged else row

    def of_tile(self, row: Any) -> list[Any]:
        """The rows of a tile with this first row, or each fourth one with one warp a row."""
        return [row + i * self._rows_at_once for i in range(self.rows_per_step)]

    def whole(self, ref: Any, row: Any, chunk: Chunk) -> Any:
        """A chunk of all warps, for all rows of the tile with this first row."""
        rows = pl.ds(row, self._height)
        return ref.at[(rows, *(slice(None),) * (not self._row_is_one_warp), chunk.columns)]

    def in_whole(self, ref: Any, i: int | None, warpgroup: Any) -> Any:
        """The `[4, chunk]` part of a warpgroup, for the i-th of `of_tile`, in a copy of `whole`.

        In a copy of the weight's chunk, `i` is None.
        """
        if self._row_is_one_warp:
            assert i is not None
            return ref.at[four(i)]
        return ref.at[four(warpgroup)] if i is None else ref.at[i, four(warpgroup)]

    def at(self, ref: Any, row: Any, warpgroup: Any, chunk: Chunk) -> Any:
        """The `[4, chunk]` part of a row, or of four rows with one warp a row."""
        if self._row_is_one_warp:
            return ref.at[pl.ds(row, WARPS_PER_WARPGROUP), chunk.columns]
        return ref.at[row, four(warpgroup), chunk.columns]

    def load_weight(self, ref: Any, warpgroup: Any, chunk: Chunk) -> jax.Array:
        """The weight for a chunk, in its own dtype; for `scale`."""
        if self._row_is_one_warp:
            return load(ref.at[chunk.columns], chunk.layout.reduce(0))
        return load(ref.at[four(warpgroup), chunk.columns], chunk.layout)

    def scale(self, weight: jax.Array, offset: float) -> jax.Array:
        """`weight + offset` in float32, `[4, chunk]`."""
        weight = weight.astype(jnp.float32)
        if offset:
            weight += offset
        if self._row_is_one_warp:
            shape = (WARPS_PER_WARPGROUP, *weight.shape)
            return jax.lax.broadcast_in_dim(weight, shape, (1,))
        return weight

    def sum(
        self,
        values: Sequence[jax.Array],
        warpgroup: Any,
        partial_smem: Any,
        barrier: Any,
        step: Any = 0,
    ) -> jax.Array:
        """The sum of a row: a scalar or, with one warp a row, the four sums of four rows.

        `values` are those of the chunks, in float32. The other arguments are as in `sums`.
        """
        (total,) = self.sums([values], warpgroup, partial_smem, barrier, step)
        return total

    def sums(
        self,
        values_of_rows: Sequence[Sequence[jax.Array]],
        warpgroup: Any,
        partial_smem: Any,
        barrier: Any,
        step: Any,
        *,
        has_auto_barriers: bool = True,
    ) -> list[jax.Array]:
        """`sum` of each row of a tile.

        Args:
          values_of_rows: Float32 values of the chunks of each row.
          warpgroup: Number of this warpgroup.
          partial_smem: First scratch of `exchange`.
          barrier: Second scratch of `exchange`.
          step: Number of sums that this block took before.
          has_auto_barriers: Whether Mosaic GPU puts a barrier after each store.
        """
        split = self.split
        by_warp = list(map(self._sum_by_warp, values_of_rows))
        if self._row_is_one_warp:
            return by_warp
        slot = jax.lax.rem(step, 2)
        for i, value in enumerate(by_warp):
            store(partial_smem.at[slot, i, warpgroup], value)
        if not has_auto_barriers:
            plgpu.commit_smem()  # one thread arrives for its warpgroup
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        totals = []
        for i in range(len(by_warp)):
            row_total = partial_smem[slot, i, 0, 0]
            for warp in range(1, split.warps):
                row_total += partial_smem[slot, i, *divmod(warp, WARPS_PER_WARPGROUP)]
            totals.append(row_total)
        return totals

    def _sum_by_warp(self, values: Sequence[jax.Array]) -> jax.Array:
        """The four sums of the four warps' values of the chunks."""
        split = self.split
        *most, last = values
        if split.overlap:
            layout = split.chunks[-1].layout
            column = plgpu.broadcasted_iota(jnp.int32, last.shape, 1, layout=layout)
            last = jnp.where(column >= split.overlap, last, 0.0)
        # Values of one width are added lane by lane; others have other layouts.
        totals = {split.chunks[-1].vector: last}
        for chunk, value in zip(split.chunks, most, strict=False):
            vector = chunk.vector
            totals[vector] = totals[vector] + value if vector in totals else value
        return functools.reduce(jnp.add, (jnp.sum(total, axis=1) for total in totals.values()))

    def spread(self, value: jax.Array, chunk: Chunk) -> jax.Array:
        """One number a row, in a shape that can be multiplied with the chunk."""
        if self._row_is_one_warp:
            return jax.lax.broadcast_in_dim(value, (WARPS_PER_WARPGROUP, chunk.size), (0,))
        return value

    def load_scalar(self, ref: Any, row: Any) -> jax.Array:
        """A number for each row, from the tile's first row on; for `spread`."""
        if self._row_is_one_warp:
            layout = self.split.chunks[0].layout.reduce(1)
            return load(ref.at[pl.ds(row, WARPS_PER_WARPGROUP)], layout)
        return ref[row]

    def store_scalar(self, ref: Any, row: Any, warpgroup: Any, value: jax.Array) -> None:
        """Stores a number for each row: a result of `sum`, or a function of one."""
        if self._row_is_one_warp:
            store(ref.at[pl.ds(row, WARPS_PER_WARPGROUP)], value)
        else:

            @pl.when(warpgroup == 0)
            def _store():
                ref[row] = value

    # The rest is for the backward, where block b has tiles b, b + num_blocks, b + 2·num_blocks, ...

    def num_steps(self, block: Any, num_blocks: int) -> Any:
        """Tiles of a block. The block of the last full tile also has the one that repeats rows.

        The number of that tile may exceed `num_full_tiles`; `first` and `unseen` allow for it.
        """
        full = (self.num_full_tiles - block + num_blocks - 1) // num_blocks
        if not self._ragged:
            return full
        owner = (self.num_full_tiles - 1) % num_blocks
        return full + jnp.where(block == owner, 1, 0)

    def max_steps(self, num_blocks: int) -> int:
        """The largest `num_steps` of a block."""
        return -(-self.num_full_tiles // num_blocks) + self._ragged

    def unseen(self, value: jax.Array, row: Any, tile: Any) -> jax.Array:
        """A number for each row, as of `load_scalar`; 0 for rows that the tile before has, too."""
        if not self._ragged:
            return value
        rows = row
        if self._row_is_one_warp:
            layout = self.split.chunks[0].layout.reduce(1)
            rows += plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=layout)
        return jnp.where(rows >= self._height * jnp.minimum(tile, self.num_full_tiles), value, 0.0)


def four(i: Any) -> Any:
    """The i-th four of an axis: the four warps of a warpgroup, or their four rows."""
    return pl.ds(WARPS_PER_WARPGROUP * i, WARPS_PER_WARPGROUP)


def as_scaled(x_hat: jax.Array, casting: str, dtype: jnp.dtype) -> jax.Array:
    """`x · rstd` as it is multiplied with the weight, in float32."""
    return x_hat.astype(dtype).astype(jnp.float32) if casting == "llama" else x_hat


def zeros(chunk: Chunk) -> jax.Array:
    """Float32 zeros in the place of a chunk's values."""
    value = jnp.zeros((WARPS_PER_WARPGROUP, chunk.size), jnp.float32)
    return plgpu.layout_cast(value, chunk.layout)
