"""Attention of each token to its own document: the forward kernel, for Hopper.

A warpgroup computes a unit, which is 64 neighbouring queries of a head (`key_tiles.py`). It
multiplies queries and keys by wgmma (Hopper's matrix product), computes the softmax in registers,
and multiplies by the values with wgmma. The warpgroups of a block share tiles of keys and values,
which the first of them loads by TMA (the tensor memory accelerator, which copies while the
warpgroups compute).

- With heads of 64 a multiprocessor has two blocks, since a lane needs at most 128 registers. While
  one block waits for its first tiles, for a product or for its results to leave, the other
  computes. In a document of 512 tokens, 64 queries see 4.5 tiles of 64 keys on average, so a block
  is short.
- The scores never leave the registers. The softmax is online: a query has a running maximum of its
  scores, a running sum of exponentials and a running sum of values. Whenever the maximum grows,
  both sums are scaled down. The four lanes of a row add their exponentials apart, and exchange
  their sums once, after the last tile.
- Documents are contiguous, so the first token of a block sees the earliest key of the block. The
  block begins with the tile of this key, and ends with the tile of its own last token. It visits no
  tile that lies wholly in earlier documents.
- A tile needs a mask only if it has keys before the beginning of a query's document, or keys after
  a query. Two scalars tell which tiles these are, since the beginnings rise along the row. Each of
  the two masks takes two instructions a score. The softmax takes 5.6.

TMA fills in zeros for tokens past the end of a row. No query sees such a key, since it comes after
all queries. Queries past the end compute numbers that are not stored.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.config import ForwardConfig
from pallas_kernels.attention.key_tiles import (
    KEYS,
    QUERIES,
    VALUES,
    Documents,
    KeyTiles,
    Unit,
    masked,
)
from pallas_kernels.gpu.arrays import at_aligned_addresses
from pallas_kernels.gpu.device import (
    LANES,
    MAX_REGISTERS_PER_LANE,
    REGISTERS_PER_SM,
    WARPS_PER_WARPGROUP,
)
from pallas_kernels.gpu.kernel import check_fits, gpu_kernel, shared
from pallas_kernels.gpu.math import LN_2, LOG2_E
from pallas_kernels.gpu.wgmma import ROW, completed, over, splat

DTYPES = (jnp.bfloat16, jnp.float16)
HEAD_SIZES = (64, 128)
# The running maximum begins here and not at -inf, because -inf minus itself is NaN. A query may see
# no key of the first tiles of its block.
_LOWEST = -1e30

# With approx_math exp2 is one instruction. Sums and maxima of a row stay in a warp, so they need no
# shared memory.
_COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0)
_PART = 32  # columns whose exponentials are computed at a time
_COLUMNS = 8  # columns of the partial maxima and sums of a row; a lane has two of them


def launched(config: ForwardConfig, q: Any) -> ForwardConfig:
    """The parameters for these arrays: no more stages than a row has tiles."""
    stages = min(config.max_stages, pl.cdiv(q.shape[1], config.block_kv))
    return dataclasses.replace(config, max_stages=stages)


def forward_scratch(config: ForwardConfig, head_size: int, dtype: DTypeLike) -> list[Any]:
    """The types of a block's scratch memory, for parameters from `launched`."""
    warpgroups, stages = config.warpgroups, config.max_stages
    of_keys = plgpu.SMEM((stages, config.block_kv, head_size), dtype)
    return [
        plgpu.SMEM((warpgroups, QUERIES, head_size), dtype),
        *[of_keys] * 2,
        plgpu.SMEM((warpgroups, QUERIES), jnp.int32),
        plgpu.SMEM((warpgroups, QUERIES), jnp.float32),
        plgpu.Barrier(num_arrivals=2, num_barriers=warpgroups),
        plgpu.Barrier(num_barriers=2 * stages),
        plgpu.Barrier(num_barriers=2 * stages, num_arrivals=warpgroups),
    ]


def check_forward(config: ForwardConfig, q: Any, head_size: int) -> None:
    """Raises ValueError if a block has too little memory or too few registers for the parameters.

    Args:
      config: Launch parameters, as the caller gave them.
      q: Queries.
      head_size: Numbers of a head in the kernel.
    """
    launch, what = launched(config, q), f"{config} with heads of {head_size} numbers"
    remedy = "take a smaller block_kv, fewer max_stages or fewer warpgroups"
    check_fits(what, forward_scratch(launch, head_size, q.dtype), remedy=remedy)
    # The sums of scores and of values. Where they do not fit, ptxas fails, or spills 4912 bytes of
    # a lane (3 warpgroups, heads of 128 numbers, 256 keys).
    lanes = WARPS_PER_WARPGROUP * LANES
    sums = QUERIES * (launch.block_kv + head_size) // lanes
    registers = min(REGISTERS_PER_SM // (launch.warpgroups * lanes), MAX_REGISTERS_PER_LANE)
    if sums > registers:
        raise ValueError(
            f"{what} has {sums} sums in each lane, and each lane of {launch.warpgroups} warpgroups "
            f"has {registers} registers; take a smaller block_kv or fewer warpgroups"
        )


@shared("scale", "config")
def attention_forward(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    begins: Int[Array, "B S"],
    *,
    scale: float,
    config: ForwardConfig,
) -> tuple[Float[Array, "B S N H"], Float[Array, "B N S"]]:
    """Attention of token t to the tokens from `begins[t]` to t, and its logsumexp in float32.

    The logsumexp is the natural logarithm of the sum of `exp(scale · q·k)` over these tokens. The
    kernel takes every `scale · q·k · log2(e)` to be above -1e30.

    Args:
      q: Queries in one of `DTYPES`; H is one of `HEAD_SIZES`, and S is a multiple of 8.
      k: Keys in the dtype of `q`; head n of the queries reads head `n // (N // K)`.
      v: Values in the dtype of `q`.
      begins: Index in its row of the first token that each token attends to, int32. It does not
        fall along a row, and is no larger than the token's own index.
      scale: Positive factor of the products of queries and keys.
      config: Launch parameters.
    """
    batch, length, num_heads, head_size = q.shape
    config = launched(config, q)
    warpgroups, block_kv = config.warpgroups, config.block_kv
    unit = Unit(length=length, group=num_heads // k.shape[2], warpgroups=warpgroups)
    piece = math.gcd(length, QUERIES)  # tokens whose logsumexp is stored at a time
    scores_acc = plgpu.WGMMAAccumulatorRef((QUERIES, block_kv), jnp.float32)

    def kernel(q_gmem, k_gmem, v_gmem, begins_gmem, out_gmem, lse_gmem, *scratch):
        q_smem, k_smem, v_smem, begins_smem, lse_smem, q_filled, kv_filled, kv_freed = scratch
        row, warpgroup = jax.lax.axis_index("row"), jax.lax.axis_index("warpgroup")
        first, head = unit.first, unit.head
        tokens = pl.ds(first, QUERIES)
        own_q, own_begins, own_lse = (a.at[warpgroup] for a in (q_smem, begins_smem, lse_smem))
        own_filled = q_filled.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_gmem.at[row, tokens, head], own_q, own_filled)
        plgpu.copy_gmem_to_smem(begins_gmem.at[row, tokens], own_begins, own_filled)

        documents = Documents(begins_gmem, row, length)
        # The tiles of the unit, and the tiles of the block: the first, and the one after the last.
        own_begin, own_end = documents.tiles(first, block_kv)
        first_tile, end_tile = own_begin, own_end
        if not unit.have_same_queries:
            first_tile, end_tile = unit.tiles_of_block(documents, block_kv)
        whole_tiles = documents.whole_tiles(first, block_kv)
        tiles = KeyTiles(
            gmem=(k_gmem, v_gmem),
            smem=(k_smem, v_smem),
            filled=kv_filled,
            freed=kv_freed,
            row=row,
            head=head,
            group=unit.group,
            first=first_tile,
            end=end_tile,
            loads=warpgroup == 0,
        )
        tiles.bring_first()
        plgpu.barrier_wait(own_filled)

        def by_columns(combine, tile):
            # It combines only numbers of the same lane, so lanes exchange nothing. A lane has four
            # independent chains of instructions: two rows of two columns.
            parts = [tile[:, i : i + _COLUMNS] for i in range(0, tile.shape[1], _COLUMNS)]
            return functools.reduce(combine, parts)

        def softmax(scores, tile, largest, total):
            """The new maximum and sum of a row, what the old sum shrinks by, and p."""
            scores = masked(scores, tile, first=first, begins=own_begins, whole_tiles=whole_tiles)
            of_tile = jnp.max(by_columns(jnp.maximum, scores), axis=1) * (scale * LOG2_E)
            new_largest = jnp.maximum(largest, of_tile)
            shrink = jnp.exp2(largest - new_largest)
            # In parts, so that few exponentials are in registers in float32. The barriers also keep
            # the exponentials before the wgmmas that follow.
            total, rounded_parts = total * over(shrink, total), []
            for i in range(0, block_kv, _PART):
                part = scores[:, i : i + _PART]
                p = jnp.exp2(part * (scale * LOG2_E) - over(new_largest, part))
                total, p = jax.lax.optimization_barrier(
                    (total + by_columns(operator.add, p), p.astype(q.dtype))
                )
                rounded_parts.append(p)
            p = jnp.concatenate(rounded_parts, axis=1)
            return jax.lax.optimization_barrier((new_largest, total, shrink, p))

        def add(tile, values, largest, total):
            slot = tiles.slot(tile)

            def multiply_keys(acc):
                tiles.wait(KEYS, tile)
                plgpu.wgmma(acc, own_q, k_smem.at[slot].transpose((1, 0)))
                tiles.refill(VALUES, tile - 1)
                return completed(acc)

            scores = pl.run_scoped(multiply_keys, scores_acc)
            tiles.free(KEYS, tile)
            largest, total, shrink, p = softmax(scores, tile, largest, total)

            def multiply_values(acc):
                tiles.wait(VALUES, tile)
                plgpu.wgmma(acc, p, v_smem.at[slot])
                tiles.refill(KEYS, tile)
                plgpu.wgmma_wait(0)

            values = jax.lax.optimization_barrier(values * over(shrink, values))
            values = pl.run_state(multiply_values)(plgpu.WGMMAAccumulatorRef.init(values))
            values = jax.lax.optimization_barrier(values)
            tiles.free(VALUES, tile)
            return values, largest, total

        def skip(tile, *running):
            tiles.wait(KEYS, tile)
            tiles.refill(VALUES, tile - 1)
            tiles.free(KEYS, tile)
            tiles.wait(VALUES, tile)
            tiles.refill(KEYS, tile)
            tiles.free(VALUES, tile)
            return running

        def step(tile, running):
            if unit.have_same_queries:
                return add(tile, *running)
            is_own = (own_begin <= tile) & (tile < own_end)
            return jax.lax.cond(is_own, add, skip, tile, *running)

        values = splat(0.0, (QUERIES, head_size))
        largest = splat(_LOWEST, (QUERIES,), ROW)
        total = splat(0.0, (QUERIES, _COLUMNS))
        values, largest, total = jax.lax.fori_loop(
            first_tile, end_tile, step, (values, largest, total)
        )
        total = jnp.sum(total, axis=1)
        own_q[...] = (values * over(1 / total, values)).astype(q.dtype)
        own_lse[...] = (largest + jnp.log2(total)) * LN_2
        plgpu.commit_smem()

        # Mosaic stores consecutive numbers without a tensor map. Such a copy stops at the end of
        # the array, and not at the end of a row. So it may only have numbers of this row.
        def store_piece(i, _):
            to = lse_gmem.at[row, head, pl.ds(first + i * piece, piece)]
            plgpu.copy_smem_to_gmem(own_lse.at[pl.ds(i * piece, piece)], to)

        @pl.when(unit.stores)
        def _store():
            plgpu.copy_smem_to_gmem(own_q, out_gmem.at[row, tokens, head])
            in_row = jnp.minimum(QUERIES, length - first)
            jax.lax.fori_loop(0, jax.lax.div(in_row, piece), store_piece, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    out, logsumexp = gpu_kernel(
        kernel,
        out_type=[q, jax.ShapeDtypeStruct((batch, num_heads, length), jnp.float32)],
        grid=(batch, unit.num_blocks, k.shape[2]),
        grid_names=("row", "block", "head"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=forward_scratch(config, head_size, q.dtype),
        kernel_name="attention_forward",
        compiler_params=_COMPILER_PARAMS,
    )(*at_aligned_addresses((q, k, v, begins)))
    return at_aligned_addresses((out, logsumexp))
