"""Gradient of the queries of attention within documents: the kernel, for Hopper.

A warpgroup computes a unit, which is 64 neighbouring queries of a head (`key_tiles.py`). The
warpgroup computes `s = q · k` and `dp = dout · v` by wgmma, `p` and `ds` in registers, and the sum
of `ds · k` by wgmma. `backward.py` has the formulas. The warpgroups of a block share tiles of keys
and values.

- All warpgroups compute, also the one that loads. So a multiprocessor has four computing warpgroups
  if a lane needs at most 128 registers, and three if it needs at most 168. While one warpgroup
  waits for its first tiles, for a product or for its results to leave, the others compute.
- The products `s` and `dp` run at the same time. The exponentials of `s` are computed while `dp`
  still runs.
- The first query of a block sees the earliest key of the block. The block begins with the tile of
  this key, and ends with the tile of its own last query.
- A tile needs a mask only if it has keys before the beginning of a query's document, or keys after
  a query. Two scalars tell which tiles these are, since the beginnings rise along the row.

TMA fills in zeros for tokens past the end of a row. No query sees such a key. Queries past the end
compute numbers that are not stored.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.attention.config import QueriesConfig
from pallas_kernels.attention.key_tiles import (
    KEYS,
    QUERIES,
    VALUES,
    Documents,
    KeyTiles,
    Unit,
    masked,
)
from pallas_kernels.gpu.kernel import check_fits, gpu_kernel
from pallas_kernels.gpu.math import APPROXIMATE, LOG2_E
from pallas_kernels.gpu.wgmma import ROW, completed, over

_PART = 16  # columns whose p or ds is computed at a time
_KEYS = 64  # keys of a tile; a wgmma with `ds` takes 64 at a time


def queries_scratch(config: QueriesConfig, head_size: int, dtype: DTypeLike) -> list[Any]:
    """The types of a block's scratch memory."""
    units, stages = config.warpgroups, config.stages
    of_queries = plgpu.SMEM((units, QUERIES, head_size), dtype)
    of_keys = plgpu.SMEM((stages, _KEYS, head_size), dtype)
    return [
        *[of_queries] * 2,
        *[plgpu.SMEM((units, QUERIES), jnp.float32)] * 2,
        plgpu.SMEM((units, QUERIES), jnp.int32),
        *[of_keys] * 2,
        plgpu.Barrier(num_arrivals=5, num_barriers=units),
        plgpu.Barrier(num_barriers=2 * stages),
        plgpu.Barrier(num_arrivals=units, num_barriers=2 * stages),
    ]


def check_queries(config: QueriesConfig, q: Any, head_size: int) -> None:
    """Raises ValueError if the scratch memory does not fit the shared memory of a block."""
    scratch = queries_scratch(config, head_size, q.dtype)
    what = f"{config} with heads of {head_size} numbers"
    check_fits(what, scratch, remedy="take fewer stages or warpgroups")


def gradient_of_queries(
    q, k, v, dout, log2_sum, delta, begins, *, scale: float, config: QueriesConfig
) -> jax.Array:
    """The gradient of the queries; `backward.py` has the formula."""
    batch, length, num_heads, head_size = q.shape
    unit = Unit(length=length, group=num_heads // k.shape[2], warpgroups=config.warpgroups)
    sums = lambda columns: plgpu.WGMMAAccumulatorRef((QUERIES, columns), jnp.float32)

    def kernel(q_gmem, k_gmem, v_gmem, dout_gmem, log2_gmem, delta_gmem, begins_gmem, dq_gmem, *s):
        q_smem, dout_smem, *of_rows, k_smem, v_smem, own_filled, filled, freed = s
        row, warpgroup = jax.lax.axis_index("row"), jax.lax.axis_index("warpgroup")
        first, head = unit.first, unit.head
        queries = pl.ds(first, QUERIES)
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

        documents = Documents(begins_gmem, row, length)
        whole_tiles = documents.whole_tiles(first, _KEYS)
        # The tiles of the unit, and the tiles of the block: the first, and the one after the last.
        own_begin, own_end = documents.tiles(first, _KEYS)
        first_tile, end_tile = own_begin, own_end
        if not unit.have_same_queries:
            first_tile, end_tile = unit.tiles_of_block(documents, _KEYS)
        tiles = KeyTiles(
            gmem=(k_gmem, v_gmem),
            smem=(k_smem, v_smem),
            filled=filled,
            freed=freed,
            row=row,
            head=head,
            group=unit.group,
            first=first_tile,
            end=end_tile,
            loads=warpgroup == 0,
        )
        tiles.bring_first()
        plgpu.barrier_wait(own_filled.at[warpgroup])
        of_row = lambda smem: plgpu.load(smem, layout=ROW, optimized=False)

        def by_parts(compute, *tiles):
            # In parts, so that few numbers are in registers both as argument and as result.
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
                tiles.refill(KEYS, tile - 1)
                scores = completed(s_sum, in_flight=1)
                scores = masked(
                    scores, tile, first=first, begins=own_begins, whole_tiles=whole_tiles
                )
                p = by_parts(lambda s: jnp.exp2(s * (scale * LOG2_E) - over(log2, s)), scores)
                dp = completed(dp_sum)
                ds = lambda p, dp: (p * (dp - over(delta, dp))).astype(q.dtype)
                return by_parts(ds, p, dp)

            def add(tile, slot):
                run = functools.partial(gradient_of_scores, tile, slot)
                ds = pl.run_scoped(run, sums(_KEYS), sums(_KEYS))
                tiles.free(VALUES, tile)
                plgpu.wgmma(dq_sum, ds, k_smem.at[slot])
                tiles.refill(VALUES, tile)
                plgpu.wgmma_wait(0)
                tiles.free(KEYS, tile)

            def skip(tile, slot):
                tiles.refill(KEYS, tile - 1)
                tiles.free(VALUES, tile)
                tiles.refill(VALUES, tile)
                tiles.free(KEYS, tile)

            def step(tile, _):
                slot = tiles.slot(tile)
                tiles.wait(KEYS, tile)
                tiles.wait(VALUES, tile)
                if unit.have_same_queries:
                    return add(tile, slot)
                is_own = (own_begin <= tile) & (tile < own_end)
                jax.lax.cond(is_own, add, skip, tile, slot)

            jax.lax.fori_loop(first_tile, end_tile, step, None)
            return completed(dq_sum)

        own_q[...] = (pl.run_scoped(compute, sums(head_size)) * scale).astype(q.dtype)
        plgpu.commit_smem()

        @pl.when(unit.stores)
        def _store():
            plgpu.copy_smem_to_gmem(own_q, dq_gmem.at[row, queries, head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return gpu_kernel(
        kernel,
        out_type=q,
        grid=(batch, unit.num_blocks, k.shape[2]),
        grid_names=("row", "block", "head"),
        num_threads=unit.warpgroups,
        thread_name="warpgroup",
        scratch_types=queries_scratch(config, head_size, q.dtype),
        kernel_name="attention_backward_dq",
        compiler_params=APPROXIMATE,
    )(q, k, v, dout, log2_sum, delta, begins)
