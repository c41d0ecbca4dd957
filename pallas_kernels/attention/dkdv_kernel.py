"""Gradients of the keys and values of attention within documents: a kernel for Hopper.

`backward.py` has the formulas. A block has 64 keys of a head for each of its computing warpgroups.
Another warpgroup loads the block's keys and values once, and then tiles of queries by TMA, up to
`stages` tiles ahead.

- Keys are the rows (M) of each wgmma. So a wgmma leaves its result in registers, and `p` and `ds`
  go into the next wgmma from registers. The sums `dk` and `dv` also stay in registers.
- A group is the heads of queries that share a head of keys. A block goes over the queries of one
  head of the group after the other. So `dk` and `dv` become sums over the group in registers. If
  the keys are too few to give each multiprocessor a block, blocks share the heads of a group. Then
  each block writes its sums in float32, and XLA adds them up and rounds them.
- The queries that see a key go from the key's own token to the end of its document. The first key
  of a block and the end of its last key's document give the range of tiles. Only tiles with queries
  before a key, or after a key's document, need a mask.
- Three computing warpgroups without a loading one were not faster. Blocks of one computing
  warpgroup were not faster, either: see docs/lab/2026-11-30-attention-kernels-on-h200.md. They
  were slower than parts of a group, too.

TMA fills in zeros for tokens past the end of a row. A query past the end comes after all documents,
so the mask hides it. The ends of documents past the end of a row are zeros, too. So the mask hides
all queries from a key past the end, and the sums of this key are not stored.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.attention.config import KEYS_OF_A_WARPGROUP as _KEYS
from pallas_kernels.attention.config import LOADER_REGISTERS, KeysConfig
from pallas_kernels.gpu.device import LANES, WARPS_PER_WARPGROUP
from pallas_kernels.gpu.kernel import check_fits, gpu_kernel
from pallas_kernels.gpu.math import APPROXIMATE, LOG2_E
from pallas_kernels.gpu.wgmma import COLUMN, ROW, TILE, completed, over, splat


def keys_scratch(config: KeysConfig, head_size: int, dtype: DTypeLike) -> list[Any]:
    """The types of a block's scratch memory."""
    size, stages = config.tile, config.stages
    return [
        *[plgpu.SMEM((config.keys, head_size), dtype)] * 2,
        plgpu.SMEM((config.keys,), jnp.int32),
        *[plgpu.SMEM((stages, size, head_size), dtype)] * 2,
        *[plgpu.SMEM((stages, size), jnp.float32)] * 2,
        plgpu.Barrier(num_arrivals=3),
        plgpu.Barrier(num_arrivals=4, num_barriers=stages),
        plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=stages),
    ]


def check_keys(config: KeysConfig, q: Any, head_size: int, group: int) -> None:
    """Raises ValueError if the kernel cannot be launched with the parameters.

    Args:
      config: Launch parameters, as the caller gave them.
      q: Queries.
      head_size: Numbers of a head in the kernel.
      group: Number of heads of queries that share a head of keys.
    """
    if config.parts > group:
        raise ValueError(
            f"{config} divides {group} heads of queries that share a head of keys into "
            f"{config.parts} parts; take up to {group}"
        )
    scratch = keys_scratch(config, head_size, q.dtype)
    what = f"{config} with heads of {head_size} numbers"
    check_fits(what, scratch, remedy="take a smaller tile, fewer stages or fewer warpgroups")
    # The sums of `s`, `dp`, `dk` and `dv`. Where they do not fit, ptxas fails (4 warpgroups, heads
    # of 64 numbers, 256 queries), or spills at least 1680 bytes of a lane.
    sums = 2 * _KEYS * (config.tile + head_size) // (WARPS_PER_WARPGROUP * LANES)
    if sums > config.registers:
        raise ValueError(
            f"{what} has {sums} sums in each lane, and each lane of {config.warpgroups} computing "
            f"warpgroups has {config.registers} registers; take a smaller tile or fewer warpgroups"
        )


def gradients_of_keys_and_values(
    q, k, v, dout, log2_sum, delta, ends, *, scale: float, config: KeysConfig
) -> tuple[jax.Array, jax.Array]:
    """The gradients of the keys and values; `attention_backward` describes the arguments."""
    batch, length, num_heads, head_size = q.shape
    group, parts = num_heads // k.shape[2], config.parts
    size, stages, block = config.tile, config.stages, config.keys
    sums = lambda columns: plgpu.WGMMAAccumulatorRef((_KEYS, columns), jnp.float32)
    after = lambda number, end, first: jnp.where(number + 1 < end, number + 1, first)

    def kernel(q_gmem, k_gmem, v_gmem, dout_gmem, log2_gmem, delta_gmem, ends_gmem, *refs):
        dk_gmem, dv_gmem, k_smem, v_smem, ends_smem = refs[:5]
        q_smem, dout_smem, log2_smem, delta_smem, ready, filled, freed = refs[5:]
        row, number, warpgroup = map(jax.lax.axis_index, ("row", "head and part", "warpgroup"))
        head, part = jax.lax.div(number, parts), jax.lax.rem(number, parts)
        begin_member, end_member = (jax.lax.div(p * group, parts) for p in (part, part + 1))
        first = jax.lax.axis_index("block") * block
        end_of = lambda token: ends_gmem[row, jnp.minimum(token, length - 1)]
        tiles_of = lambda first, number: (
            jax.lax.div(first, size),
            pl.cdiv(end_of(first + number - 1), size),
        )
        begin, end = tiles_of(first, block)

        @pl.when(warpgroup == config.warpgroups)
        def _load():
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
            keys = pl.ds(first, block)
            plgpu.copy_gmem_to_smem(k_gmem.at[row, keys, head], k_smem, ready)
            plgpu.copy_gmem_to_smem(v_gmem.at[row, keys, head], v_smem, ready)
            plgpu.copy_gmem_to_smem(ends_gmem.at[row, keys], ends_smem, ready)
            wait_until_freed = lambda step: plgpu.barrier_wait(freed.at[jax.lax.rem(step, stages)])

            def bring_head(member, step):
                of_query = head * group + member

                def bring(tile, step):
                    slot = jax.lax.rem(step, stages)
                    pl.when(step >= stages)(lambda: wait_until_freed(step))
                    queries = pl.ds(tile * size, size)
                    for gmem, smem in (
                        (q_gmem.at[row, queries, of_query], q_smem),
                        (dout_gmem.at[row, queries, of_query], dout_smem),
                        (log2_gmem.at[row, of_query, queries], log2_smem),
                        (delta_gmem.at[row, of_query, queries], delta_smem),
                    ):
                        plgpu.copy_gmem_to_smem(gmem, smem.at[slot], filled.at[slot])
                    return step + 1

                return jax.lax.fori_loop(begin, end, bring, step)

            steps = jax.lax.fori_loop(begin_member, end_member, bring_head, 0)
            # JAX's interpreter wants every phase of a barrier to be waited for (JAX 0.11.2, 0.12).
            last_steps = jnp.maximum(steps - stages, 0)
            jax.lax.fori_loop(last_steps, steps, lambda step, _: wait_until_freed(step), None)

        @pl.when(warpgroup < config.warpgroups)
        def _compute():
            plgpu.set_max_registers(config.registers, action="increase")
            own = pl.ds(warpgroup * _KEYS, _KEYS)
            key = first + warpgroup * _KEYS
            own_begin, own_end = tiles_of(key, _KEYS)
            first_end = end_of(key)
            plgpu.barrier_wait(ready)
            ends_row = plgpu.load(ends_smem.at[own], layout=ROW)

            def masked(s, query):
                own_key = plgpu.broadcasted_iota(jnp.int32, (_KEYS,), 0, layout=ROW)
                column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=TILE)
                is_seen = over(own_key + (key - query), s) <= column
                is_seen &= column < over(ends_row - query, s)
                return jnp.where(is_seen, s, splat(-jnp.inf, s.shape))

            def p_and_ds(tile, slot, s_sum, dp_sum):
                query = tile * size
                of_tile = lambda smem: plgpu.load(smem.at[slot], layout=COLUMN)
                # The products keep shared memory busy, so a load among them takes 200 clocks. Heads
                # of 128 numbers leave no registers for `delta` here.
                log2 = of_tile(log2_smem)
                delta = of_tile(delta_smem) if head_size == 64 else None
                plgpu.wgmma(s_sum, k_smem.at[own], q_smem.at[slot].transpose((1, 0)))
                plgpu.wgmma(dp_sum, v_smem.at[own], dout_smem.at[slot].transpose((1, 0)))
                s = completed(s_sum, in_flight=1)
                is_whole = (key + _KEYS - 1 <= query) & (query + size <= first_end)
                s = jax.lax.cond(is_whole, lambda s: s, lambda s: masked(s, query), s)
                p = jnp.exp2(s * (scale * LOG2_E) - over(log2, s, axis=1))
                p = jax.lax.optimization_barrier(p)
                dp = completed(dp_sum)
                delta = of_tile(delta_smem) if delta is None else delta
                ds = p * (dp - over(delta, dp, axis=1))
                # Both are rounded before the first wgmma, which frees registers.
                return jax.lax.optimization_barrier((p.astype(q.dtype), ds.astype(q.dtype)))

            def add(dk_sum, dv_sum, tile, slot):
                of_tile = lambda *accs: p_and_ds(tile, slot, *accs)
                p, ds = pl.run_scoped(of_tile, sums(size), sums(size))
                plgpu.wgmma(dv_sum, p, dout_smem.at[slot])
                plgpu.wgmma(dk_sum, ds, q_smem.at[slot])
                # `log2` and `delta` of the slot are read, and TMA may overwrite them.
                plgpu.commit_smem()
                plgpu.wgmma_wait(0)

            def run(dk_sum, dv_sum):
                def step(_, place):
                    tile, slot = place
                    plgpu.barrier_wait(filled.at[slot])
                    is_own = (own_begin <= tile) & (tile < own_end)
                    pl.when(is_own)(lambda: add(dk_sum, dv_sum, tile, slot))
                    plgpu.barrier_arrive(freed.at[slot])
                    return after(tile, end, begin), after(slot, stages, 0)

                num_steps = (end_member - begin_member) * (end - begin)
                jax.lax.fori_loop(0, num_steps, step, (begin, 0))
                return completed(dk_sum), completed(dv_sum)

            dk_sum, dv_sum = pl.run_scoped(run, sums(head_size), sums(head_size))

            @pl.when(key < length)
            def _store():
                to = row, pl.ds(key, _KEYS), head
                if parts > 1:
                    dk_gmem.at[part][to] = dk_sum * scale
                    dv_gmem.at[part][to] = dv_sum
                    return
                k_smem.at[own][...] = (dk_sum * scale).astype(q.dtype)
                v_smem.at[own][...] = dv_sum.astype(q.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(k_smem.at[own], dk_gmem.at[to])
                plgpu.copy_smem_to_gmem(v_smem.at[own], dv_gmem.at[to])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    out_type = jax.ShapeDtypeStruct(k.shape, k.dtype)
    if parts > 1:  # with room for the keys of a warpgroup past the end of a row
        whole = pl.cdiv(length, _KEYS) * _KEYS
        out_type = jax.ShapeDtypeStruct((parts, batch, whole, *k.shape[2:]), jnp.float32)
    dk, dv = gpu_kernel(
        kernel,
        out_type=[out_type] * 2,
        # A fourth axis would share the limit of 65535 blocks with another one.
        grid=(batch, pl.cdiv(length, block), k.shape[2] * parts),
        grid_names=("row", "block", "head and part"),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=keys_scratch(config, head_size, q.dtype),
        kernel_name="attention_backward_dkdv",
        compiler_params=APPROXIMATE,
    )(q, k, v, dout, log2_sum, delta, ends)
    if parts > 1:
        dk, dv = (jnp.sum(a[:, :, :length], axis=0).astype(k.dtype) for a in (dk, dv))
    return dk, dv
