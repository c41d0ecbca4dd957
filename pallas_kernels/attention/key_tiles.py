"""Tiles of keys and values for the kernels whose blocks compute queries: the forward and `dq`.

A group is the heads of queries that share a head of keys. A warpgroup computes a unit: `QUERIES`
neighbouring queries of a head. Unit u of a group has the queries of number `u // group`, and the
head `u % group`. A block has consecutive units, so its warpgroups share tiles of keys and values.
The first warpgroup loads the tiles by TMA. The last queries of a row come first, because they may
have the most keys.

If the number of units is no multiple of a block's warpgroups, several warpgroups of the last block
compute unit 0, and one of them stores it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.wgmma import ROW, TILE, over, splat

QUERIES = 64  # queries of a warpgroup: the rows of a wgmma
KEYS, VALUES = 0, 1
_PIECE = 8  # columns that are masked at a time


@dataclasses.dataclass(frozen=True)
class Documents:
    """The beginnings of the documents or windows of a row.

    Attributes:
      begins: Index of the first token that each token attends to, in global memory `[B, S]`.
      row: Number of the row.
      length: Number of tokens of a row, S.
    """

    begins: Any
    row: Any
    length: int

    def tiles(self, first: Any, size: int) -> tuple[Any, Any]:
        """The first tile of `size` keys that a warpgroup needs, and the tile after the last one.

        Args:
          first: First query of the warpgroup.
          size: Number of keys of a tile.
        """
        last = jnp.minimum(first + QUERIES, self.length)
        return jax.lax.div(self._begin_of(first), size), pl.cdiv(last, size)

    def whole_tiles(self, first: Any, size: int) -> tuple[Any, Any]:
        """The tiles that need no mask, from the first number up to the second without it.

        Tiles before the first number have keys that come before the document of some query. Tiles
        from the second number on have keys after some query. `tiles` describes the arguments. The
        beginnings rise along a row, so the beginning of the last query's document is the latest.
        """
        begin = self._begin_of(first + QUERIES - 1)
        return pl.cdiv(begin, size), jax.lax.div(first + 1, size)

    def _begin_of(self, token: Any) -> Any:
        # If a caller's beginning is after its token, which is wrong, the warpgroups would wait
        # forever. The second minimum prevents that.
        token = jnp.minimum(token, self.length - 1)
        return jnp.minimum(self.begins[self.row, token], token)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """The unit of this warpgroup, in a grid with the axes "row", "block" and "head" (of keys).

    Attributes:
      length: Number of tokens of a row, S.
      group: Number of heads of queries that read the same keys.
      warpgroups: Number of warpgroups of a block.
    """

    length: int
    group: int
    warpgroups: int

    @property
    def num_units(self) -> int:
        """Number of units of a head of keys."""
        return pl.cdiv(self.length, QUERIES) * self.group

    @property
    def num_blocks(self) -> int:
        """Number of blocks of a row and a head of keys."""
        return pl.cdiv(self.num_units, self.warpgroups)

    @property
    def have_same_queries(self) -> bool:
        """Whether all warpgroups of a block have the same queries, of different heads."""
        return self.group % self.warpgroups == 0

    @property
    def stores(self) -> Any:
        """Whether this warpgroup stores its results. If not, another one stores the same unit."""
        return self._number(jax.lax.axis_index("warpgroup")) >= 0

    @property
    def head(self) -> Any:
        """The head of queries."""
        number = jnp.maximum(self._number(jax.lax.axis_index("warpgroup")), 0)
        return jax.lax.axis_index("head") * self.group + jax.lax.rem(number, self.group)

    @property
    def first(self) -> Any:
        """The first query."""
        # With one number for the block, fewer numbers are in registers.
        return self._first(0 if self.have_same_queries else jax.lax.axis_index("warpgroup"))

    def tiles_of_block(self, documents: Documents, size: int) -> tuple[Any, Any]:
        """The first tile of `size` keys that the block needs, and the tile after the last one."""
        first_tile, _ = documents.tiles(self._first(self.warpgroups - 1), size)
        _, end_tile = documents.tiles(self._first(0), size)
        return first_tile, end_tile

    def _number(self, warpgroup: Any) -> Any:
        return self.num_units - 1 - jax.lax.axis_index("block") * self.warpgroups - warpgroup

    def _first(self, warpgroup: Any) -> Any:
        return jax.lax.div(jnp.maximum(self._number(warpgroup), 0), self.group) * QUERIES


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyTiles:
    """The tiles of a block, in slots of shared memory. Keys and values have separate slots.

    Attributes:
      gmem: Keys and values in global memory.
      smem: Slots of the keys, and slots of the values, each `[stages, size, H]`.
      filled: Barriers that TMA completes when it has filled a slot. The barriers of the keys come
        first.
      freed: Barriers that the warpgroups complete when all of them have read a slot, in the same
        order.
      row: Number of the row.
      head: A head of queries that reads the keys.
      group: Number of heads of queries that read the same keys.
      first: First tile of the block.
      end: Tile after the last one of the block.
      loads: Whether this warpgroup loads the tiles.
    """

    gmem: tuple[Any, Any]
    smem: tuple[Any, Any]
    filled: Any
    freed: Any
    row: Any
    head: Any
    group: int
    first: Any
    end: Any
    loads: Any

    @property
    def size(self) -> int:
        """Number of keys of a tile."""
        return self.smem[KEYS].shape[1]

    @property
    def stages(self) -> int:
        """Number of slots of the keys, and of the values."""
        return self.smem[KEYS].shape[0]

    def slot(self, tile: Any) -> Any:
        """The slot of a tile."""
        return jax.lax.rem(tile - self.first, self.stages)

    def bring_first(self) -> None:
        """Loads the first tiles, as many as there are slots."""

        @pl.when(self.loads)
        def _bring_first():
            def bring_both(tile, _):
                self._bring(KEYS, tile)
                self._bring(VALUES, tile)

            first_tiles = jnp.minimum(self.first + self.stages, self.end)
            jax.lax.fori_loop(self.first, first_tiles, bring_both, None)

    def wait(self, which: int, tile: Any) -> None:
        """Waits for the keys or the values of a tile."""
        plgpu.barrier_wait(self.filled.at[which * self.stages + self.slot(tile)])

    def free(self, which: int, tile: Any) -> None:
        """Says that this warpgroup has read the keys or the values of a tile."""

        # Nobody waits for a slot that is not filled again.
        @pl.when(tile + self.stages < self.end)
        def _arrive():
            plgpu.barrier_arrive(self.freed.at[which * self.stages + self.slot(tile)])

    def refill(self, which: int, tile: Any) -> None:
        """Fills the slot of a tile again, once all warpgroups have freed it."""

        @pl.when(self.loads & (self.first <= tile) & (tile + self.stages < self.end))
        def _bring():
            plgpu.barrier_wait(self.freed.at[which * self.stages + self.slot(tile)])
            self._bring(which, tile + self.stages)

    def _bring(self, which: int, tile: Any) -> None:
        # The division is here and not before the loop. This takes one register less, with fewer
        # spills for heads of 128.
        head = jax.lax.div(self.head, self.group)
        part = (self.row, pl.ds(tile * self.size, self.size), head)
        slot = self.slot(tile)
        barrier = self.filled.at[which * self.stages + slot]
        plgpu.copy_gmem_to_smem(self.gmem[which].at[part], self.smem[which].at[slot], barrier)


def masked(
    scores: jax.Array, tile: Any, *, first: Any, begins: Any, whole_tiles: tuple[Any, Any]
) -> jax.Array:
    """The scores of a tile, with -inf for keys that a query does not see.

    A tile needs a mask only if it has keys before the beginning of a query's document, or keys
    after a query. Each of the two masks takes two instructions a score.

    Args:
      scores: Products of queries and keys.
      tile: Number of the tile.
      first: First query of the warpgroup.
      begins: Beginnings of the queries' documents, in shared memory.
      whole_tiles: Numbers from `Documents.whole_tiles`.
    """
    size = scores.shape[1]

    def from_begin(first_column, column):
        # Few tiles need the beginnings. They are loaded here, and take no registers elsewhere.
        begin = plgpu.load(begins, layout=ROW, optimized=False)
        return over(begin - first_column, column) <= column

    def up_to_query(first_column, column):
        query = plgpu.broadcasted_iota(jnp.int32, column.shape, 0, layout=TILE)
        return column <= query + (first - first_column)

    def with_mask(scores, is_seen):
        # In pieces, so that the numbers of few columns are in registers at a time. The barrier
        # keeps LLVM from holding the numbers in registers throughout the loop.
        pieces = []
        for i in range(0, size, _PIECE):
            piece = scores[:, i : i + _PIECE]
            first_column = jax.lax.optimization_barrier(tile * size + i)
            column = plgpu.broadcasted_iota(jnp.int32, piece.shape, 1, layout=TILE)
            seen = is_seen(first_column, column)
            pieces.append(jnp.where(seen, piece, splat(-jnp.inf, piece.shape)))
        return jnp.concatenate(pieces, axis=1)

    first_whole, end_whole = whole_tiles
    scores = jax.lax.cond(
        first_whole <= tile, lambda s: s, lambda s: with_mask(s, from_begin), scores
    )
    return jax.lax.cond(tile < end_whole, lambda s: s, lambda s: with_mask(s, up_to_query), scores)
