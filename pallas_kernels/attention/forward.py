"""Attention of each token to its own document: the forward kernel, for Hopper.

A block computes one head of `config.rows` neighbouring tokens. One warpgroup loads their queries
once, and tiles of keys and values by TMA, up to `max_stages` tiles ahead. The others compute
`block_q` tokens each: scores by wgmma, the softmax in registers, and by wgmma the sum of values.

- The scores never leave the registers. The softmax is online: a row has a running maximum, a
  running sum and a sum of values, and both sums shrink whenever the maximum grows.
- Documents are contiguous, so the first token of a block sees the earliest key of the block. The
  block begins with the tile of this key, and ends with the tile of its own last token. It visits no
  tile that lies wholly in earlier documents.
- A tile needs a mask only if it has keys before a document's beginning or after a token. Both are
  known from two scalars, since the beginnings rise along the row. The mask takes 4.5
  instructions a score, beside the 5.6 of the softmax.
- With heads of 64, a tile's exponentials take as long as its products: for 128 x 128 scores, 1024
  clocks of 16 exponentials, and 1024 clocks of the tensor cores. So the warpgroups take turns at
  the tensor cores: one computes its softmax while another multiplies. With `overlap` a warpgroup
  issues all products of its turn at once, so that the tensor cores need not wait for it.
- Blocks that run together have the heads of the same tokens, and the heads of a group share their
  keys and values in the L2. The last tokens of a row come first, because they have the most keys.

TMA fills in zeros for tokens past the end of a row. No query sees such a key, since it comes after
all queries. Queries past the end compute finite numbers from zeros, and are not stored.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.config import Config
from pallas_kernels.gpu.arrays import at_aligned_addresses
from pallas_kernels.gpu.kernel import gpu_kernel, shared
from pallas_kernels.gpu.math import LN_2, LOG2_E, rounded

DTYPES = (jnp.bfloat16, jnp.float16)
HEAD_SIZES = (64, 128)
# The running maximum begins here and not at -inf, because -inf minus itself is NaN. A row may see
# no key of its first tiles.
_LOWEST = -1e30
# Registers of a lane by number of computing warpgroups, of the 65536 of a block: those of the
# warpgroup that loads, and those of the others.
_REGISTERS = {1: (40, 240), 2: (40, 232), 3: (32, 160)}

_PIECE = 32  # columns that are masked at a time
# With approx_math exp2 is one instruction. Sums and maxima of a row stay in a warp, so they need no
# shared memory; Mosaic would keep 2 KiB, and three stages of heads of 128 leave 1 KiB.
_COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0)
_TILE = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)  # a value for each row of a tile


@shared("scale", "config")
def attention_forward(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    begins: Int[Array, "B S"],
    *,
    scale: float,
    config: Config,
) -> tuple[Float[Array, "B S N H"], Float[Array, "B N S"]]:
    """Attention of token t to the tokens from `begins[t]` to t, and its logsumexp in float32.

    The logsumexp is the natural logarithm of the sum of `exp(scale · q·k)` over these tokens. The
    kernel takes every `scale · q·k · log2(e)` to be above -1e30.

    Args:
      q: Queries, bfloat16 or float16; H is 64 or 128, and S a multiple of 8.
      k: Keys in the dtype of `q`; head n of the queries reads head `n // (N // K)`.
      v: Values in the dtype of `q`.
      begins: Index in its row of the first token of each token's document, int32. It does not fall
        along a row, and is no larger than the token's own index.
      scale: Positive factor of the products of queries and keys.
      config: Launch parameters.

    Raises:
      ValueError: The kernel does not compute arrays of these shapes and dtypes, or the scale is not
        positive.
    """
    _check(q, k, v, begins, scale)
    batch, length, heads, head_size = q.shape
    group = heads // k.shape[2]
    rows, block_q, block_kv = config.rows, config.block_q, config.block_kv
    stages = min(config.max_stages, pl.cdiv(length, block_kv))
    num_tiles = pl.cdiv(length, rows)
    loader = config.warpgroups
    piece = math.gcd(length, block_q)  # tokens whose logsumexp is stored at a time
    scores_acc = plgpu.WGMMAAccumulatorRef((block_q, block_kv), jnp.float32)
    values_acc = plgpu.WGMMAAccumulatorRef((block_q, head_size), jnp.float32)

    def kernel(q_gmem, k_gmem, v_gmem, begins_gmem, out_gmem, lse_gmem, *scratch):
        q_smem, k_smem, v_smem, begins_smem, lse_smem, *barriers = scratch
        q_filled, k_filled, v_filled, k_freed, v_freed, *turns = barriers
        row, head = jax.lax.axis_index("row"), jax.lax.axis_index("head")
        warpgroup = jax.lax.axis_index("warpgroup")
        first = (num_tiles - 1 - jax.lax.axis_index("tile")) * rows

        def begin_of(token):
            # A beginning after its token would be wrong; with it the warpgroups would wait forever.
            token = jnp.minimum(token, length - 1)
            return jnp.minimum(begins_gmem[row, token], token)

        # The tiles of keys from the first to the one after the last.
        first_tile = jax.lax.div(begin_of(first), block_kv)
        end_tile = pl.cdiv(jnp.minimum(first + rows, length), block_kv)
        slot_of = lambda tile: jax.lax.rem(tile - first_tile, stages)

        @pl.when(warpgroup == loader)
        def _load():
            plgpu.set_max_registers(_REGISTERS[config.warpgroups][0], action="decrease")
            tokens = pl.ds(first, rows)
            plgpu.copy_gmem_to_smem(q_gmem.at[row, tokens, head], q_smem, q_filled)
            plgpu.copy_gmem_to_smem(begins_gmem.at[row, tokens], begins_smem, q_filled)

            def bring(tile, _):
                slot = slot_of(tile)
                part = (row, pl.ds(tile * block_kv, block_kv), jax.lax.div(head, group))
                for gmem, smem, filled, freed in (
                    (k_gmem, k_smem, k_filled, k_freed),
                    (v_gmem, v_smem, v_filled, v_freed),
                ):

                    @pl.when(tile - first_tile >= stages)
                    def _wait(freed=freed):
                        plgpu.barrier_wait(freed.at[slot])

                    plgpu.copy_gmem_to_smem(gmem.at[part], smem.at[slot], filled.at[slot])

            jax.lax.fori_loop(first_tile, end_tile, bring, None)

            # JAX's interpreter wants every phase of a barrier to be waited for (JAX 0.11.2).
            def wait_until_freed(tile, _):
                for freed in (k_freed, v_freed):
                    plgpu.barrier_wait(freed.at[slot_of(tile)])

            last_tiles = jnp.maximum(end_tile - stages, first_tile)
            jax.lax.fori_loop(last_tiles, end_tile, wait_until_freed, None)

        @pl.when(warpgroup < loader)
        def _compute():
            plgpu.set_max_registers(_REGISTERS[config.warpgroups][1], action="increase")
            own = pl.ds(warpgroup * block_q, block_q)
            own_first = first + warpgroup * block_q
            own_tokens = pl.ds(own_first, block_q)
            take_turn, pass_turn = _turns(turns, warpgroup, config.warpgroups)
            # The tiles that have keys of these tokens, and among them the tiles without a mask.
            own_first_tile = jnp.maximum(jax.lax.div(begin_of(own_first), block_kv), first_tile)
            own_end_tile = pl.cdiv(jnp.minimum(own_first + block_q, length), block_kv)
            first_whole = pl.cdiv(begin_of(own_first + block_q - 1), block_kv)
            end_whole = jax.lax.div(own_first + 1, block_kv)

            plgpu.barrier_wait(q_filled)
            begin = plgpu.load(begins_smem.at[own], layout=_ROW, optimized=False)

            def masked(scores, tile):
                # By pieces, so that few columns' numbers are in registers at a time. The barrier
                # keeps LLVM from carrying the numbers through the loop.
                pieces = []
                for i in range(0, block_kv, _PIECE):
                    piece = scores[:, i : i + _PIECE]
                    first_column = jax.lax.optimization_barrier(tile * block_kv + i)
                    column = plgpu.broadcasted_iota(jnp.int32, piece.shape, 1, layout=_TILE)
                    token = plgpu.broadcasted_iota(jnp.int32, piece.shape, 0, layout=_TILE)
                    is_seen = _over(begin - first_column, piece) <= column
                    is_seen &= column <= token + (own_first - first_column)
                    pieces.append(jnp.where(is_seen, piece, _filled(-jnp.inf, piece.shape, _TILE)))
                return jnp.concatenate(pieces, axis=1)

            def softmax(scores, tile, largest, total):
                """The new maximum and sum of a row, what the old sum shrinks by, and p."""
                is_whole = (first_whole <= tile) & (tile < end_whole)
                scores = jax.lax.cond(is_whole, lambda s: s, lambda s: masked(s, tile), scores)
                new_largest = jnp.maximum(largest, jnp.max(scores, axis=1) * (scale * LOG2_E))
                p = jnp.exp2(scores * (scale * LOG2_E) - _over(new_largest, scores))
                shrink = jnp.exp2(largest - new_largest)
                total = total * shrink + jnp.sum(p, axis=1)
                # The barrier keeps all of it before the wgmmas that follow.
                return jax.lax.optimization_barrier(
                    (new_largest, total, shrink, rounded(p, q.dtype))
                )

            def multiply_keys(acc, tile):
                slot = slot_of(tile)
                plgpu.barrier_wait(k_filled.at[slot])
                plgpu.wgmma(acc, q_smem.at[own], k_smem.at[slot].transpose((1, 0)))

            def multiply_values(acc, p, tile):
                slot = slot_of(tile)
                plgpu.barrier_wait(v_filled.at[slot])
                plgpu.wgmma(acc, p, v_smem.at[slot])

            def scores_of(tile):
                """The scores of a tile; it ends the turn."""

                def compute(acc):
                    multiply_keys(acc, tile)
                    pass_turn()
                    return _completed(acc)

                scores = pl.run_scoped(compute, scores_acc)
                plgpu.barrier_arrive(k_freed.at[slot_of(tile)])
                return scores

            def with_values(values, shrink, p, tile):
                def compute(acc):
                    multiply_values(acc, p, tile)
                    return _completed(acc)

                # The sum has registers of its own, so that one fma scales and adds.
                added = pl.run_scoped(compute, values_acc)
                plgpu.barrier_arrive(v_freed.at[slot_of(tile)])
                return values * _over(shrink, values) + added

            def step(tile, running):
                """A whole tile. It begins in a turn and ends in the next."""
                values, largest, total = running
                largest, total, shrink, p = softmax(scores_of(tile), tile, largest, total)
                take_turn()
                return with_values(values, shrink, p, tile), largest, total

            def overlapped_step(tile, running):
                """The values of the tile before, and the scores and the softmax of this tile."""
                values, largest, total, shrink, p = running
                take_turn()

                def compute(of_values, of_keys):
                    multiply_values(of_values, p, tile - 1)
                    multiply_keys(of_keys, tile)
                    pass_turn()
                    added = _completed(of_values, in_flight=1)
                    plgpu.barrier_arrive(v_freed.at[slot_of(tile - 1)])
                    scores = _completed(of_keys)
                    plgpu.barrier_arrive(k_freed.at[slot_of(tile)])
                    return added, softmax(scores, tile, largest, total)

                added, found = pl.run_scoped(compute, values_acc, scores_acc)
                return values * _over(shrink, values) + added, *found

            def skip(tile, _):
                """Takes part in the turns, for a tile that only other warpgroups need."""
                take_turn()
                pass_turn()
                slot = slot_of(tile)
                for filled, freed in ((k_filled, k_freed), (v_filled, v_freed)):
                    plgpu.barrier_wait(filled.at[slot])
                    plgpu.barrier_arrive(freed.at[slot])

            # Each warpgroup has a turn more than the block has tiles. The first warpgroup begins.
            pl.when(warpgroup == config.warpgroups - 1)(pass_turn)
            jax.lax.fori_loop(first_tile, own_first_tile, skip, None)
            take_turn()
            values = _filled(0.0, (block_q, head_size), _TILE)
            largest, total = _filled(_LOWEST, (block_q,), _ROW), _filled(0.0, (block_q,), _ROW)
            if config.overlap:
                found = softmax(scores_of(own_first_tile), own_first_tile, largest, total)
                values, largest, total, shrink, p = jax.lax.fori_loop(
                    own_first_tile + 1, own_end_tile, overlapped_step, (values, *found)
                )
                take_turn()
                values = with_values(values, shrink, p, own_end_tile - 1)
            else:
                values, largest, total = jax.lax.fori_loop(
                    own_first_tile, own_end_tile, step, (values, largest, total)
                )
            # The last warpgroup has the last tile, and no turn follows its last.
            pl.when(warpgroup < config.warpgroups - 1)(pass_turn)
            jax.lax.fori_loop(own_end_tile, end_tile, skip, None)

            # A warpgroup may lie wholly past the end of the row. Mosaic would store its tokens over
            # others where a row has a single block of 8 tokens.
            @pl.when(own_first < length)
            def _store():
                q_smem[own] = (values * _over(1 / total, values)).astype(q.dtype)
                lse_smem[own] = (largest + jnp.log2(total)) * LN_2
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(q_smem.at[own], out_gmem.at[row, own_tokens, head])

                # Mosaic stores consecutive numbers without a tensor map. The copy ends at the
                # end of the array, and not at that of a row.
                def store_piece(i, _):
                    of_own, token = warpgroup * block_q + i * piece, own_first + i * piece
                    to = lse_gmem.at[row, head, pl.ds(token, piece)]
                    plgpu.copy_smem_to_gmem(lse_smem.at[pl.ds(of_own, piece)], to)

                in_row = jnp.minimum(block_q, length - own_first)
                jax.lax.fori_loop(0, jax.lax.div(in_row, piece), store_piece, None)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    barrier_of_slots = functools.partial(plgpu.Barrier, num_barriers=stages)
    out, logsumexp = gpu_kernel(
        kernel,
        out_type=[q, jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)],
        grid=(batch, num_tiles, heads),
        grid_names=("row", "tile", "head"),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((rows, head_size), q.dtype),
            plgpu.SMEM((stages, block_kv, head_size), q.dtype),
            plgpu.SMEM((stages, block_kv, head_size), q.dtype),
            plgpu.SMEM((rows,), jnp.int32),
            plgpu.SMEM((rows,), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            barrier_of_slots(),
            barrier_of_slots(),
            barrier_of_slots(num_arrivals=config.warpgroups),
            barrier_of_slots(num_arrivals=config.warpgroups),
            *([plgpu.Barrier(num_barriers=config.warpgroups)] if config.in_turns else []),
        ],
        kernel_name="attention_forward",
        compiler_params=_COMPILER_PARAMS,
    )(*at_aligned_addresses((q, k, v, begins)))
    return at_aligned_addresses((out, logsumexp))


def _check(q: Any, k: Any, v: Any, begins: Any, scale: float) -> None:
    """Raises ValueError for arguments that the kernel does not compute."""
    batch, length, heads, head_size = q.shape
    dtypes = (q.dtype, k.dtype, v.dtype)
    if q.dtype not in DTYPES or len(set(dtypes)) > 1 or begins.dtype != jnp.int32:
        raise ValueError(
            f"q, k, v are {', '.join(map(str, dtypes))} and begins is {begins.dtype}; they must be "
            "all bfloat16 or all float16, and int32"
        )
    if head_size not in HEAD_SIZES or length % 8 or not q.size:
        raise ValueError(
            f"q has shape {q.shape}; heads must have 64 or 128 numbers, and the number of tokens "
            "of a row must be a multiple of 8"
        )
    if k.shape != v.shape or k.shape != (batch, length, k.shape[2], head_size):
        raise ValueError(f"k and v have shapes {k.shape} and {v.shape}, and q has {q.shape}")
    if heads % k.shape[2]:
        raise ValueError(f"{heads} heads of q are no multiple of the {k.shape[2]} heads of k")
    if begins.shape != (batch, length):
        raise ValueError(f"begins has shape {begins.shape}, and q has {q.shape}")
    if scale <= 0:
        raise ValueError(f"scale={scale} must be positive")


def _turns(turns: list[Any], warpgroup: Any, num_warpgroups: int) -> tuple[Any, Any]:
    """Functions that wait for the warpgroup's turn, and that give it to the next warpgroup."""
    if not turns:
        return (lambda: None), (lambda: None)
    following = jax.lax.rem(warpgroup + 1, num_warpgroups)
    return (
        lambda: plgpu.barrier_wait(turns[0].at[warpgroup]),
        lambda: plgpu.barrier_arrive(turns[0].at[following]),
    )


def _completed(acc: Any, in_flight: int = 0) -> jax.Array:
    """The sums of a wgmma, after it has ended, with so many later wgmmas in flight.

    LLVM takes the sums for complete once the wgmma is issued. Without the barrier it may compute
    with them before the wait.
    """
    return jax.lax.optimization_barrier(plgpu.wgmma_accumulator_load(acc, wait_n=in_flight))


def _over(row: jax.Array, tile: jax.Array) -> jax.Array:
    """A value for each row, repeated over the columns of a tile."""
    return jax.lax.broadcast_in_dim(row, tile.shape, (0,))


def _filled(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
