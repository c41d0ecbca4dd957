"""The two kernels of the gradients of attention; `backward.py` describes them."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.backward_steps import (
    COLUMN,
    ROW,
    PassConfig,
    launch,
    masked_products,
    next_in_cycle,
    p_and_dp,
    row_numbers,
    run_warpgroups,
    slot_to_fill,
    sums_type,
    to_tile,
    visit,
    wait_until_freed,
)
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.math import LOG2_E, rounded


def gradient_of_queries(
    q, k, v, dout, log2_sum, delta, begins, *, scale: float, config: PassConfig
) -> jax.Array:
    """The gradient of the queries: a block has some queries of a head."""
    batch_size, num_tokens, num_heads, head_size = q.shape
    group = num_heads // k.shape[2]
    c = config

    def kernel(q_gmem, k_gmem, v_gmem, dout_gmem, log2_gmem, delta_gmem, begins_gmem, dq_gmem, *s):
        q_smem, dout_smem, log2_smem, delta_smem, begins_smem, k_smem, v_smem = s[:7]
        ready, filled, freed = s[7:]
        row, head = jax.lax.axis_index("row"), jax.lax.axis_index("head")
        first = jax.lax.axis_index("block") * c.block
        bound = lambda token: begins_gmem[row, jnp.minimum(token, num_tokens - 1)]
        tiles_of = lambda first, size: (
            jax.lax.div(bound(first), c.tile),
            pl.cdiv(jnp.minimum(first + size, num_tokens), c.tile),
        )

        def load():
            begin, end = tiles_of(first, c.block)
            own = pl.ds(first, c.block)
            plgpu.copy_gmem_to_smem(q_gmem.at[row, own, head], q_smem, ready)
            plgpu.copy_gmem_to_smem(dout_gmem.at[row, own, head], dout_smem, ready)
            plgpu.copy_gmem_to_smem(log2_gmem.at[row, head, own], log2_smem, ready)
            plgpu.copy_gmem_to_smem(delta_gmem.at[row, head, own], delta_smem, ready)
            plgpu.copy_gmem_to_smem(begins_gmem.at[row, own], begins_smem, ready)

            def bring(tile, step):
                slot = slot_to_fill(step, c, freed)
                keys = pl.ds(tile * c.tile, c.tile), jax.lax.div(head, group)
                plgpu.copy_gmem_to_smem(k_gmem.at[row, *keys], k_smem.at[slot], filled.at[slot])
                plgpu.copy_gmem_to_smem(v_gmem.at[row, *keys], v_smem.at[slot], filled.at[slot])
                return step + 1

            steps = jax.lax.fori_loop(begin, end, bring, 0)
            wait_until_freed(steps, c, freed)

        def compute(warpgroup):
            begin, end = tiles_of(first, c.block)
            own = pl.ds(warpgroup * c.rows, c.rows)
            query = first + warpgroup * c.rows
            last_bound = bound(query + c.rows - 1)
            plgpu.barrier_wait(ready)
            log2_row, delta_row, begins_row = (
                plgpu.load(smem.at[own], layout=ROW)
                for smem in (log2_smem, delta_smem, begins_smem)
            )

            def run(dq_sum):
                def add(tile, slot):
                    key = tile * c.tile
                    k_tile, v_tile = k_smem.at[slot], v_smem.at[slot]
                    attended = lambda: (begins_row - key, row_numbers(c.rows) + (query + 1 - key))
                    is_inside = (key + c.tile - 1 <= query) & (key >= last_bound)

                    def p_of(s):
                        s = masked_products(s, attended, is_inside)
                        return jnp.exp2(s * (scale * LOG2_E) - to_tile(log2_row, s.shape, 0))

                    p, dp = p_and_dp((q_smem.at[own], k_tile), (dout_smem.at[own], v_tile), p_of)
                    ds = p * (dp - to_tile(delta_row, p.shape, 0))
                    plgpu.wgmma(dq_sum, rounded(ds, q.dtype), k_tile)
                    plgpu.wgmma_wait(0)

                own_tiles = tiles_of(query, c.rows)

                def step(tile, slot):
                    visit(tile, slot, own_tiles, add, filled, freed)
                    return next_in_cycle(slot, c.stages)

                jax.lax.fori_loop(begin, end, step, 0)
                return jax.lax.optimization_barrier(dq_sum[...])

            dq_sum = pl.run_scoped(run, sums_type(c.rows, head_size))

            @pl.when(query < num_tokens)
            def _store():
                q_smem.at[own][...] = rounded(dq_sum * scale, q.dtype)
                plgpu.commit_smem()
                to = dq_gmem.at[row, pl.ds(query, c.rows), head]
                plgpu.copy_smem_to_gmem(q_smem.at[own], to)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        run_warpgroups(c, load, compute)

    of_block = plgpu.SMEM((c.block, head_size), q.dtype)
    of_step = plgpu.SMEM((c.stages, c.tile, head_size), q.dtype)
    return gpu_kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(batch_size, pl.cdiv(num_tokens, c.block), num_heads),
        grid_names=("row", "block", "head"),
        scratch_types=[
            *[of_block] * 2,
            *[plgpu.SMEM((c.block,), jnp.float32)] * 2,
            plgpu.SMEM((c.block,), jnp.int32),
            *[of_step] * 2,
            plgpu.Barrier(num_arrivals=5),
            plgpu.Barrier(num_arrivals=2, num_barriers=c.stages),
            plgpu.Barrier(num_arrivals=c.warpgroups, num_barriers=c.stages),
        ],
        kernel_name="attention_backward_dq",
        **launch(c),
    )(q, k, v, dout, log2_sum, delta, begins)


def gradients_of_keys_and_values(
    q, k, v, dout, log2_sum, delta, ends, *, scale: float, config: PassConfig
) -> tuple[jax.Array, jax.Array]:
    """The gradients of the keys and values: a block has some keys of a head."""
    batch_size, num_tokens, num_heads, head_size = q.shape
    group = num_heads // k.shape[2]
    c = config

    def kernel(q_gmem, k_gmem, v_gmem, dout_gmem, log2_gmem, delta_gmem, ends_gmem, *s):
        dk_gmem, dv_gmem, k_smem, v_smem, ends_smem = s[:5]
        q_smem, dout_smem, log2_smem, delta_smem, ready, filled, freed = s[5:]
        row, head = jax.lax.axis_index("row"), jax.lax.axis_index("head")
        first = jax.lax.axis_index("block") * c.block
        bound = lambda token: ends_gmem[row, jnp.minimum(token, num_tokens - 1)]
        tiles_of = lambda first, size: (
            jax.lax.div(first, c.tile),
            pl.cdiv(bound(first + size - 1), c.tile),
        )

        def load():
            begin, end = tiles_of(first, c.block)
            own = pl.ds(first, c.block)
            plgpu.copy_gmem_to_smem(k_gmem.at[row, own, head], k_smem, ready)
            plgpu.copy_gmem_to_smem(v_gmem.at[row, own, head], v_smem, ready)
            plgpu.copy_gmem_to_smem(ends_gmem.at[row, own], ends_smem, ready)

            def bring_head(member, step):
                of_query = head * group + member

                def bring(tile, step):
                    slot = slot_to_fill(step, c, freed)
                    queries = pl.ds(tile * c.tile, c.tile)
                    for gmem, smem in (
                        (q_gmem.at[row, queries, of_query], q_smem),
                        (dout_gmem.at[row, queries, of_query], dout_smem),
                        (log2_gmem.at[row, of_query, queries], log2_smem),
                        (delta_gmem.at[row, of_query, queries], delta_smem),
                    ):
                        plgpu.copy_gmem_to_smem(gmem, smem.at[slot], filled.at[slot])
                    return step + 1

                return jax.lax.fori_loop(begin, end, bring, step)

            steps = jax.lax.fori_loop(0, group, bring_head, 0)
            wait_until_freed(steps, c, freed)

        def compute(warpgroup):
            begin, end = tiles_of(first, c.block)
            own = pl.ds(warpgroup * c.rows, c.rows)
            key = first + warpgroup * c.rows
            first_bound = bound(key)
            plgpu.barrier_wait(ready)
            ends_row = plgpu.load(ends_smem.at[own], layout=ROW)

            def run(dk_sum, dv_sum):
                def add(tile, slot):
                    query = tile * c.tile
                    q_tile, dout_tile = q_smem.at[slot], dout_smem.at[slot]
                    attended = lambda: (row_numbers(c.rows) + (key - query), ends_row - query)
                    is_inside = (key + c.rows - 1 <= query) & (query + c.tile <= first_bound)

                    def p_of(s):
                        s = masked_products(s, attended, is_inside)
                        log2_column = plgpu.load(log2_smem.at[slot], layout=COLUMN)
                        return jnp.exp2(s * (scale * LOG2_E) - to_tile(log2_column, s.shape, 1))

                    p, dp = p_and_dp((k_smem.at[own], q_tile), (v_smem.at[own], dout_tile), p_of)
                    delta_column = plgpu.load(delta_smem.at[slot], layout=COLUMN)
                    ds = p * (dp - to_tile(delta_column, p.shape, 1))
                    # Both are rounded before the first wgmma, which frees registers.
                    p, ds = jax.lax.optimization_barrier((p.astype(q.dtype), ds.astype(q.dtype)))
                    plgpu.wgmma(dv_sum, p, dout_tile)
                    plgpu.wgmma(dk_sum, ds, q_tile)
                    # The columns are read, and TMA may overwrite them.
                    plgpu.commit_smem()
                    plgpu.wgmma_wait(0)

                own_tiles = tiles_of(key, c.rows)

                def step(_, place):
                    tile, slot = place
                    visit(tile, slot, own_tiles, add, filled, freed)
                    return next_in_cycle(tile, end, begin), next_in_cycle(slot, c.stages)

                jax.lax.fori_loop(0, group * (end - begin), step, (begin, 0))
                return jax.lax.optimization_barrier((dk_sum[...], dv_sum[...]))

            dk_sum, dv_sum = pl.run_scoped(run, *[sums_type(c.rows, head_size)] * 2)

            @pl.when(key < num_tokens)
            def _store():
                k_smem.at[own][...] = rounded(dk_sum * scale, q.dtype)
                v_smem.at[own][...] = rounded(dv_sum, q.dtype)
                plgpu.commit_smem()
                to = row, pl.ds(key, c.rows), head
                plgpu.copy_smem_to_gmem(k_smem.at[own], dk_gmem.at[to])
                plgpu.copy_smem_to_gmem(v_smem.at[own], dv_gmem.at[to])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        run_warpgroups(c, load, compute)

    of_block = plgpu.SMEM((c.block, head_size), q.dtype)
    of_step = plgpu.SMEM((c.stages, c.tile, head_size), q.dtype)
    dk, dv = gpu_kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(k.shape, k.dtype)] * 2,
        grid=(batch_size, pl.cdiv(num_tokens, c.block), k.shape[2]),
        grid_names=("row", "block", "head"),
        scratch_types=[
            *[of_block] * 2,
            plgpu.SMEM((c.block,), jnp.int32),
            *[of_step] * 2,
            *[plgpu.SMEM((c.stages, c.tile), jnp.float32)] * 2,
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_arrivals=4, num_barriers=c.stages),
            plgpu.Barrier(num_arrivals=c.warpgroups, num_barriers=c.stages),
        ],
        kernel_name="attention_backward_dkdv",
        **launch(c),
    )(q, k, v, dout, log2_sum, delta, ends)
    return dk, dv
