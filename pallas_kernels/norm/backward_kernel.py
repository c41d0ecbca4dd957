"""The backward kernel of RMSNorm, with or without a gradient of the residual stream to add."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.gpu.arrays import at_aligned_addresses
from pallas_kernels.gpu.device import WARPS_PER_WARPGROUP, target_device
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.layouts import load, store
from pallas_kernels.norm.config import Options, registers_with_weight
from pallas_kernels.norm.rows import (
    Chunk,
    Rows,
    as_scaled,
    column_parts,
    ring_shapes,
    split_row,
    zeros,
)

# 256 additions of float32 numbers of random sign err by about 8e-7 of the sum. A partial row is
# then 4 bytes an element to 256 rows of 6: 0.3 % more traffic, and none up to 256 rows a block.
_ROWS_PER_PARTIAL = 256

# Tiles that a block has at least, if there is a block on each multiprocessor.
_ROWS_PER_BLOCK = 4

# Order of the kernel's operands that have rows.
_DY, _SOURCE, _DRESIDUAL_OUT = range(3)


def backward(
    options: Options,
    dy: Float[Array, "T D"],
    dresidual_out: Float[Array, "T D"] | None,
    source: Float[Array, "T D"],
    weight: Float[Array, " D"],
    rstd: Float[Array, " T"],
) -> tuple[Float[Array, "T D"], Float[Array, " D"]]:
    """`(dx, dweight)`; `dx` is also the gradient of the residual, `dweight` is float32.

    With `x_hat = source · rstd` and `dx_hat = dy · (weight + weight_offset)`:
    `dx = rstd · (dx_hat - x_hat · mean(dx_hat · x_hat)) + dresidual_out`, `dweight = Σ dy · x_hat`.
    """
    dy, dresidual_out, source, weight, rstd = at_aligned_addresses(
        (dy, dresidual_out, source, weight, rstd)
    )
    num_tokens, hidden_size = source.shape
    arrays = [dy, source] if dresidual_out is None else [dy, source, dresidual_out]
    plan = _plan(options, num_tokens, hidden_size, source.dtype, num_operands=len(arrays))
    rows, split = plan.rows, plan.rows.split
    scratch = list(rows.exchange)
    if plan.stages:
        num_copies = len(arrays) * len(split.chunks)
        scratch += [
            {
                vector: plgpu.SMEM(shape, source.dtype)
                for vector, shape in ring_shapes(split, plan.stages, len(arrays)).items()
            },
            plgpu.Barrier(num_arrivals=num_copies, num_barriers=plan.stages * split.warpgroups),
        ]
    # With one warp a row, each of the four warps of a block has a partial row of its own.
    partial_shape = (max(split.warps, WARPS_PER_WARPGROUP), split.segment)
    dx, dweight = gpu_kernel(
        lambda *refs: _Block(plan, *refs).run(),
        out_type=(
            jax.ShapeDtypeStruct(rows.shape, source.dtype),
            jax.ShapeDtypeStruct((plan.num_partials, plan.num_blocks, *partial_shape), jnp.float32),
        ),
        grid=(plan.num_blocks, plan.num_parts),
        grid_names=("block", "part"),
        num_threads=split.warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name="rms_norm_bwd" if dresidual_out is None else "add_rms_norm_bwd",
    )(*(a.reshape(rows.shape) for a in arrays), weight.reshape(rows.weight_shape), rstd)
    dx = at_aligned_addresses(dx.reshape(source.shape))
    return dx, jnp.sum(dweight.reshape(-1, hidden_size), axis=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """How the backward deals its rows.

    Attributes:
      options: Options of the norm.
      rows: Rows of the arrays, and how warps share one.
      num_operands: Number of arrays with rows: dy, the source and, if it is added, dresidual_out.
      num_parts: Parts of the columns, each of which has blocks of its own.
      num_blocks: Blocks of each part.
      num_partials: Partial rows of `dweight` that a block writes, one for every
        `rows_per_partial` rows.
      rows_per_partial: Rows whose `dweight` one partial row adds up.
      stages: Rows that shared memory holds ahead of the computation, 0 for direct loads.
      reread: Whether a row is read a second time instead of kept in registers.
      keep_weight: Whether the weight is loaded once for all rows.
    """

    options: Options
    rows: Rows
    num_operands: int
    num_parts: int
    num_blocks: int
    num_partials: int
    rows_per_partial: int
    stages: int
    reread: bool
    keep_weight: bool


def _plan(
    options: Options, num_tokens: int, hidden_size: int, dtype: jnp.dtype, *, num_operands: int
) -> _Plan:
    config = options.config
    split = split_row(hidden_size, config.bwd_warps, dtype.itemsize)
    assert split is not None  # `check_config` has refused other sizes
    rows = Rows(split, num_tokens)
    # A block computes `dx` and `dweight` of one part of the columns: all of them, unless the sums
    # for a whole row do not fit its registers. Then the blocks with the other parts read the same
    # rows at the same time, so that the rows come from the cache.
    num_parts = column_parts(split)
    assert num_parts
    reread = config.bwd_reread or num_parts > 1
    # A partial row is as much to write and read again as four rows of 16 bits. So a block has at
    # least a few rows, if all multiprocessors have one, and all blocks have about as many.
    num_sms = target_device().num_sms
    most_blocks = max(num_sms, rows.num_full_tiles // _ROWS_PER_BLOCK)
    most_blocks = min(rows.num_full_tiles, config.bwd_blocks * num_sms, most_blocks)
    num_blocks = -(-rows.num_full_tiles // -(-rows.num_full_tiles // most_blocks))
    return _Plan(
        options=options,
        rows=rows,
        num_operands=num_operands,
        num_parts=num_parts,
        num_blocks=num_blocks,
        num_partials=-(-rows.max_steps(num_blocks) // _ROWS_PER_PARTIAL),
        rows_per_partial=_ROWS_PER_PARTIAL,
        stages=config.bwd_stages if num_parts == 1 else 0,
        reread=reread,
        # Otherwise each row loads it from the cache: with 32 elements a lane of 128 registers
        # (16384 wide, 16 warps) ptxas spills 100 bytes, and none without the weight.
        keep_weight=not reread or registers_with_weight(split) <= split.registers,
    )


class _Block:
    """The body of the kernel: one block and the references that it has."""

    def __init__(self, plan: _Plan, *refs: Any):
        self.plan = plan
        self.inputs, others = refs[: plan.num_operands], refs[plan.num_operands :]
        self.weight_gmem, self.rstd_gmem, self.dx_gmem, self.dweight_gmem, *scratch = others
        self.partial_smem, self.barrier, *self.ring = scratch
        self.block, part = jax.lax.axis_index("block"), jax.lax.axis_index("part")
        self.warpgroup = jax.lax.axis_index("warpgroup")
        self.steps = plan.rows.num_steps(self.block, plan.num_blocks)
        self.split = split = plan.rows.split
        # The chunks whose `dx` and `dweight` this block computes.
        self.own_chunks: Sequence[Chunk] = split.chunks
        if plan.num_parts > 1:
            per_part, size = len(split.chunks) // plan.num_parts, split.chunks[0].size
            first_chunk = part * per_part
            self.own_chunks = [
                Chunk((first_chunk + i) * size, split.vector) for i in range(per_part)
            ]
        # For all rows at once, in its own dtype, which takes less registers.
        self.weights = [self.load_weight(c) for c in split.chunks] if plan.keep_weight else []

    def run(self) -> None:
        """Walks over the rows of this block."""
        plan = self.plan
        for step in range(plan.stages):
            pl.when(step < self.steps)(functools.partial(self.fetch, step))
        if plan.num_partials == 1:
            self.partial_row(0, None)
        else:
            jax.lax.fori_loop(0, plan.num_partials, self.partial_row, None)

    def partial_row(self, i: Any, _: None) -> None:
        """The gradients of up to `rows_per_partial` rows; stores one partial row of `dweight`."""
        split, per_partial = self.split, self.plan.rows_per_partial
        dweight = jax.lax.fori_loop(
            i * per_partial,
            jnp.minimum((i + 1) * per_partial, self.steps),
            self.one_row,
            tuple(map(zeros, self.own_chunks)),
        )
        for chunk, value in zip(self.own_chunks, dweight, strict=True):
            if split.warps == 1:
                ref = self.dweight_gmem.at[i, self.block, :, chunk.columns]
            else:
                warps = pl.ds(WARPS_PER_WARPGROUP * self.warpgroup, WARPS_PER_WARPGROUP)
                ref = self.dweight_gmem.at[i, self.block, warps, chunk.columns]
            store(ref, value)

    def one_row(self, step: Any, dweight: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Stores `dx` of a tile, and adds its part of `dweight`."""
        plan, rows, split, options = self.plan, self.plan.rows, self.split, self.plan.options
        tile = self.block + step * plan.num_blocks
        row = rows.first(tile)
        get, get_own = self.readers(step, row)
        rstd = rows.load_scalar(self.rstd_gmem, row)
        has_residual = plan.num_operands > _DRESIDUAL_OUT
        kept, added, products = [], [], []
        for k, chunk in enumerate(split.chunks):
            dy_chunk, x_hat = get(_DY, k), get(_SOURCE, k) * rows.spread(rstd, chunk)
            products.append(dy_chunk * x_hat * self.scale(k, chunk))
            if not plan.reread:
                kept.append((dy_chunk, x_hat))
        if has_residual and not plan.reread:
            added = [get(_DRESIDUAL_OUT, k) for k in range(len(split.chunks))]
        total = rows.sum(products, self.warpgroup, self.partial_smem, self.barrier, step)
        mean = total * (1 / split.hidden_size)
        if plan.stages and not plan.reread:
            self.refill(step + plan.stages)
        sums = []
        for k, chunk in enumerate(self.own_chunks):
            row_rstd, row_mean = rows.spread(rstd, chunk), rows.spread(mean, chunk)
            if plan.reread:
                dy_chunk, x_hat = get_own(_DY, k), get_own(_SOURCE, k) * row_rstd
            else:
                dy_chunk, x_hat = kept[k]
            dx = (dy_chunk * self.scale(k, chunk) - x_hat * row_mean) * row_rstd
            if has_residual:
                dx += get_own(_DRESIDUAL_OUT, k) if plan.reread else added[k]
            dtype = self.dx_gmem.dtype
            store(rows.at(self.dx_gmem, row, self.warpgroup, chunk), dx.astype(dtype))
            x_hat = as_scaled(x_hat, options.casting, dtype)
            sums.append(dweight[k] + rows.unseen(dy_chunk * x_hat, chunk, row, tile))
        if plan.stages and plan.reread:
            self.refill(step + plan.stages)
        return tuple(sums)

    def readers(self, step: Any, row: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Two functions of an operand and k: its float32 k-th chunk, and the k-th of the own."""
        if stages := self.plan.stages:
            slot = jax.lax.rem(step, stages)
            plgpu.barrier_wait(self.ring[1].at[slot * self.split.warpgroups + self.warpgroup])
            get = lambda operand, k: load(
                self.in_ring(slot, operand, k), self.split.chunks[k].layout
            ).astype(jnp.float32)
            return get, get
        get_at = lambda operand, chunk: load(
            self.plan.rows.at(self.inputs[operand], row, self.warpgroup, chunk), chunk.layout
        ).astype(jnp.float32)
        return (
            lambda operand, k: get_at(operand, self.split.chunks[k]),
            lambda operand, k: get_at(operand, self.own_chunks[k]),
        )

    def in_ring(self, slot: Any, operand: int, k: int) -> Any:
        """Chunk k of an operand in a slot of shared memory, which has one array for each width."""
        *before, vector = (chunk.vector for chunk in self.split.chunks[: k + 1])
        place = before.count(vector)
        return self.ring[0][vector].at[slot, self.warpgroup, operand, place]

    def fetch(self, step: Any) -> None:
        """Starts the copies of a step's rows into their slot of shared memory."""
        slot = jax.lax.rem(step, self.plan.stages)
        row = self.plan.rows.first(self.block + step * self.plan.num_blocks)
        for i, ref in enumerate(self.inputs):
            for k, chunk in enumerate(self.split.chunks):
                plgpu.copy_gmem_to_smem(
                    self.plan.rows.at(ref, row, self.warpgroup, chunk),
                    self.in_ring(slot, i, k),
                    self.ring[1].at[slot * self.split.warpgroups + self.warpgroup],
                )

    def refill(self, step: Any) -> None:
        """Fetches the rows of a step, if there is one, into the slot that has just been read."""

        @pl.when(step < self.steps)
        def _fetch():
            plgpu.commit_smem()  # all warps have read the slot
            self.fetch(step)

    def load_weight(self, chunk: Chunk) -> jax.Array:
        """A chunk of the weight, in its own dtype."""
        return self.plan.rows.load_weight(self.weight_gmem, self.warpgroup, chunk)

    def scale(self, k: int, chunk: Chunk) -> jax.Array:
        """`weight + weight_offset` for `chunk`, which is chunk k if the weight is kept."""
        weight = self.weights[k] if self.weights else self.load_weight(chunk)
        return self.plan.rows.scale(weight, self.plan.options.weight_offset)
