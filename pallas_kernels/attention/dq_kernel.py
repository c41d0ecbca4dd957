"""Gradient of the queries of attention within documents: the kernel, for Hopper.

A warpgroup computes a unit: 64 neighbouring queries of a head. It computes `s = q · k` and
`dp = dout · v` by wgmma, `p` and `ds` in registers, and by wgmma the sum of `ds · k`. A block has
consecutive units of one group, first by the queries and then by the head. So its warpgroups share
tiles of keys and values. The first warpgroup loads them by TMA.

- No warpgroup only loads. So a multiprocessor has four computing warpgroups if a lane needs at most
  128 registers, and three if it needs at most 168. While one waits for its first tiles, for a
  product or for its results to leave, the others compute.
- The products `s` and `dp` are in flight together, and exponentials are computed beside `dp`.
- The first query of a block sees the earliest key of the block. The block begins with the tile of
  this key, and ends with the tile of its own last query.
- A tile needs a mask only if it has keys before a document's beginning or after a query. Both are
  known from two scalars, since the beginnings rise along the row.
- The last queries of a row come first, because they have the most keys.

TMA fills in zeros for tokens past the end of a row. No query sees such a key. Queries past the end
compute numbers that are not stored. If the units do not divide by the warpgroups, the last block
computes the first unit several times and stores it once.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.config import QueriesConfig
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.math import APPROXIMATE, LOG2_E

_PIECE = 8  # columns that are masked at a time
_PART = 16  # columns whose p or ds is computed at a time
_QUERIES = 64  # of a unit, the rows of a wgmma
_KEYS = 64  # of a tile; a wgmma with `ds` takes 64 at a time
_TILE = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)  # a value for each row of a tile


def gradient_of_queries(
    q, k, v, dout, log2_sum, delta, begins, *, scale: float, config: QueriesConfig
) -> jax.Array:
    """The gradient of the queries; `backward.py` has the formula."""
    batch, length, num_heads, head_size = q.shape
    group = num_heads // k.shape[2]
    num_units = pl.cdiv(length, _QUERIES) * group  # of a head of keys
    units, stages = config.warpgroups, config.stages
    sums = lambda columns: plgpu.WGMMAAccumulatorRef((_QUERIES, columns), jnp.float32)

    def kernel(q_gmem, k_gmem, v_gmem, dout_gmem, log2_gmem, delta_gmem, begins_gmem, dq_gmem, *s):
        q_smem, dout_smem, *of_rows, k_smem, v_smem, own_filled, filled, freed = s
        # References, and the number of the first barrier. A group of barriers takes a register.
        keys, values = (k_gmem, k_smem, 0), (v_gmem, v_smem, stages)
        row, kv_head, warpgroup = map(jax.lax.axis_index, ("row", "head", "warpgroup"))

        def unit_of(warpgroup):
            return num_units - 1 - jax.lax.axis_index("block") * units - warpgroup

        def first_of(warpgroup):
            """The first query of a warpgroup."""
            return jax.lax.div(jnp.maximum(unit_of(warpgroup), 0), group) * _QUERIES

        # If all warpgroups have the same queries, fewer numbers are in registers.
        have_same = group % units == 0
        first = first_of(0 if have_same else warpgroup)
        head = kv_head * group + jax.lax.rem(jnp.maximum(unit_of(warpgroup), 0), group)
        queries = pl.ds(first, _QUERIES)
        own_q, own_dout = (a.at[warpgroup] for a in (q_smem, dout_smem))
        own_log2, own_delta, own_begins = (a.at[warpgroup] for a in of_rows)
        for gmem, smem in (
            (q_gmem.at[row, queries, head], own_q),
            (dout_gmem.at[row, queries, head], own_dout),
            (log2_gmem.at[row, head, queries], own_log2),
            (delta_gmem.at[row, head, queries], own_delta),
            (begins_gmem.at[row, queries], own_begins),
        ):
            plgpu.copy_gmem_to_smem(gmem, smem, own_filled.at[warpgroup])

        def begin_of(token):
            # A beginning after its token would be wrong; with it the warpgroups would wait forever.
            token = jnp.minimum(token, length - 1)
            return jnp.minimum(begins_gmem[row, token], token)

        begin_tile_of = lambda first: jax.lax.div(begin_of(first), _KEYS)
        end_tile_of = lambda first: pl.cdiv(jnp.minimum(first + _QUERIES, length), _KEYS)
        # Tiles before `first_whole` have keys of earlier documents, those from `end_whole` on have
        # keys after a query.
        first_whole = pl.cdiv(begin_of(first + _QUERIES - 1), _KEYS)
        end_whole = jax.lax.div(first + 1, _KEYS)
        # The tiles of the block, from the first to the one after the last, and those of the unit.
        own_begin, own_end = begin_tile_of(first), end_tile_of(first)
        first_tile, end_tile = own_begin, own_end
        if not have_same:
            first_tile, end_tile = begin_tile_of(first_of(units - 1)), end_tile_of(first_of(0))
        slot_of = lambda tile: jax.lax.rem(tile - first_tile, stages)

        def bring(tile, gmem, smem, first_barrier):
            part = (row, pl.ds(tile * _KEYS, _KEYS), kv_head)
            slot = slot_of(tile)
            barrier = filled.at[first_barrier + slot]
            plgpu.copy_gmem_to_smem(gmem.at[part], smem.at[slot], barrier)

        @pl.when(warpgroup == 0)
        def _bring_first():
            def bring_both(tile, _):
                bring(tile, *keys)
                bring(tile, *values)

            first_tiles = jnp.minimum(first_tile + stages, end_tile)
            jax.lax.fori_loop(first_tile, first_tiles, bring_both, None)

        def free(tile, gmem, smem, first_barrier):
            # Only a slot that is filled again has someone who waits for it.
            @pl.when(tile + stages < end_tile)
            def _arrive():
                plgpu.barrier_arrive(freed.at[first_barrier + slot_of(tile)])

        def refill(tile, gmem, smem, first_barrier):
            """Fills the slot of a tile again, once all warpgroups have freed it."""

            @pl.when((warpgroup == 0) & (first_tile <= tile) & (tile + stages < end_tile))
            def _bring():
                plgpu.barrier_wait(freed.at[first_barrier + slot_of(tile)])
                bring(tile + stages, gmem, smem, first_barrier)

        plgpu.barrier_wait(own_filled.at[warpgroup])
        of_row = lambda smem: plgpu.load(smem, layout=_ROW, optimized=False)
        over = lambda vector, tile: jax.lax.broadcast_in_dim(vector, tile.shape, (0,))

        def masked(scores, tile, is_seen):
            # By pieces, so that few columns' numbers are in registers at a time. The barrier keeps
            # LLVM from carrying the numbers through the loop.
            pieces = []
            for i in range(0, _KEYS, _PIECE):
                piece = scores[:, i : i + _PIECE]
                first_column = jax.lax.optimization_barrier(tile * _KEYS + i)
                column = plgpu.broadcasted_iota(jnp.int32, piece.shape, 1, layout=_TILE)
                lowest = plgpu.layout_cast(jnp.full(piece.shape, -jnp.inf, jnp.float32), _TILE)
                pieces.append(jnp.where(is_seen(first_column, column), piece, lowest))
            return jnp.concatenate(pieces, axis=1)

        def from_begin(first_column, column):
            # Few tiles need it, so it is in no register meanwhile.
            return over(of_row(own_begins) - first_column, column) <= column

        def up_to_query(first_column, column):
            query = plgpu.broadcasted_iota(jnp.int32, column.shape, 0, layout=_TILE)
            return column <= query + (first - first_column)

        def by_parts(compute, *tiles):
            # So that few numbers are in registers both before and after.
            parts = [
                jax.lax.optimization_barrier(compute(*(a[:, i : i + _PART] for a in tiles)))
                for i in range(0, _KEYS, _PART)
            ]
            return jnp.concatenate(parts, axis=1)

        def compute(dq_sum):
            log2, delta = of_row(own_log2), of_row(own_delta)

            def gradient_of_scores(tile, slot, s_sum, dp_sum):
                # With the barrier each step computes the addresses of the operands. Otherwise they
                # are in registers throughout the loop: 55 of a lane, where heads have 128 numbers.
                own = jax.lax.optimization_barrier(warpgroup + tile) - tile
                plgpu.wgmma(s_sum, q_smem.at[own], k_smem.at[slot].transpose((1, 0)))
                plgpu.wgmma(dp_sum, dout_smem.at[own], v_smem.at[slot].transpose((1, 0)))
                refill(tile - 1, *keys)
                # LLVM may otherwise compute with the sums before the waits.
                scores = plgpu.wgmma_accumulator_load(s_sum, wait_n=1)
                scores = jax.lax.optimization_barrier(scores)
                for is_whole, is_seen in (
                    (first_whole <= tile, from_begin),
                    (tile < end_whole, up_to_query),
                ):
                    mask = functools.partial(masked, tile=tile, is_seen=is_seen)
                    scores = jax.lax.cond(is_whole, lambda s: s, mask, scores)
                p = by_parts(lambda s: jnp.exp2(s * (scale * LOG2_E) - over(log2, s)), scores)
                dp = jax.lax.optimization_barrier(dp_sum[...])
                ds = lambda p, dp: (p * (dp - over(delta, dp))).astype(q.dtype)
                return by_parts(ds, p, dp)

            def add(tile, slot):
                run = functools.partial(gradient_of_scores, tile, slot)
                ds = pl.run_scoped(run, sums(_KEYS), sums(_KEYS))
                free(tile, *values)
                plgpu.wgmma(dq_sum, ds, k_smem.at[slot])
                refill(tile, *values)
                plgpu.wgmma_wait(0)
                free(tile, *keys)

            def skip(tile, slot):
                refill(tile - 1, *keys)
                free(tile, *values)
                refill(tile, *values)
                free(tile, *keys)

            def step(tile, _):
                slot = slot_of(tile)
                plgpu.barrier_wait(filled.at[slot])
                plgpu.barrier_wait(filled.at[stages + slot])
                if have_same:
                    return add(tile, slot)
                is_own = (own_begin <= tile) & (tile < own_end)
                jax.lax.cond(is_own, add, skip, tile, slot)

            jax.lax.fori_loop(first_tile, end_tile, step, None)
            return jax.lax.optimization_barrier(dq_sum[...])

        own_q[...] = (pl.run_scoped(compute, sums(head_size)) * scale).astype(q.dtype)
        plgpu.commit_smem()

        @pl.when(unit_of(warpgroup) >= 0)
        def _store():
            plgpu.copy_smem_to_gmem(own_q, dq_gmem.at[row, queries, head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    of_queries = plgpu.SMEM((units, _QUERIES, head_size), q.dtype)
    of_keys = plgpu.SMEM((stages, _KEYS, head_size), q.dtype)
    return gpu_kernel(
        kernel,
        out_type=q,
        grid=(batch, pl.cdiv(num_units, units), k.shape[2]),
        grid_names=("row", "block", "head"),
        num_threads=units,
        thread_name="warpgroup",
        scratch_types=[
            *[of_queries] * 2,
            *[plgpu.SMEM((units, _QUERIES), jnp.float32)] * 2,
            plgpu.SMEM((units, _QUERIES), jnp.int32),
            *[of_keys] * 2,
            plgpu.Barrier(num_arrivals=5, num_barriers=units),
            plgpu.Barrier(num_barriers=2 * stages),
            plgpu.Barrier(num_arrivals=units, num_barriers=2 * stages),
        ],
        kernel_name="attention_backward_dq",
        compiler_params=APPROXIMATE,
    )(q, k, v, dout, log2_sum, delta, begins)
