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
from pallas_kernels.gpu.device import BYTES_PER_ACCESS, WARPS_PER_WARPGROUP, target_device
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.layouts import load, store
from pallas_kernels.norm.config import Config, keeps_rows, keeps_weight, smem_for_rows
from pallas_kernels.norm.reference import Options
from pallas_kernels.norm.rows import (
    Chunk,
    Rows,
    as_scaled,
    column_parts,
    four,
    ring_bytes,
    ring_shapes,
    split_row,
    sums_shapes,
    weight_bytes,
    weight_shapes,
    zeros,
)

# 256 additions of float32 numbers of random sign err by about 8e-7 of the sum. A partial row has 4
# bytes an element, and the 256 rows that it adds up move 6 bytes an element each (in 16 bits,
# without a residual): 0.3 % more traffic. A block of up to 256 rows has one partial row anyway.
_ROWS_PER_PARTIAL = 256

# Fewest rows of a block, as long as each multiprocessor has a block; fours of rows with one warp a
# row.
_ROWS_PER_BLOCK = 4

# Order of the kernel's operands that have rows.
_DY, _SOURCE, _DRESIDUAL_OUT = range(3)


def backward(
    options: Options,
    config: Config,
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
    dtypes = source.dtype, weight.dtype
    plan = _plan(config, num_tokens, hidden_size, *dtypes, num_operands=len(arrays))
    rows, split = plan.rows, plan.rows.split
    scratch: list[Any] = list(rows.exchange)
    in_smem = lambda shapes, dtype: {v: plgpu.SMEM(shape, dtype) for v, shape in shapes.items()}
    if split.warps == 1:
        scratch.append(in_smem(sums_shapes(split), jnp.float32))
    if plan.stages:
        shapes = ring_shapes(split, plan.stages, len(arrays), rows.rows_per_step)
        num_copies = len(arrays) * len(split.chunks)
        scratch += [
            in_smem(shapes, source.dtype),
            plgpu.Barrier(num_arrivals=num_copies, num_barriers=plan.stages),
            plgpu.Barrier(num_arrivals=split.warpgroups),
        ]
    if plan.weight_in_smem:
        scratch += [
            in_smem(weight_shapes(split), weight.dtype),
            plgpu.Barrier(num_arrivals=len(split.chunks)),
        ]
    dx, dweight = gpu_kernel(
        lambda *refs: _Block(options, plan, *refs).run(),
        out_type=(
            jax.ShapeDtypeStruct(rows.shape, source.dtype),
            jax.ShapeDtypeStruct(
                (plan.num_partials, plan.num_blocks, *rows.weight_shape), jnp.float32
            ),
        ),
        grid=(plan.num_blocks, plan.num_parts),
        grid_names=("block", "part"),
        num_threads=split.warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch,
        # With copies to shared memory, automatic barriers around each store and before each copy
        # would be fifteen for a row of 2304. Without automatic barriers, stores need `commit_smem`,
        # which GPUs before Hopper do not have. So direct loads keep them.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=plan.stages > 0, reduction_scratch_bytes=0
        ),
        kernel_name="rms_norm_bwd" if dresidual_out is None else "add_rms_norm_bwd",
    )(*(a.reshape(rows.shape) for a in arrays), weight.reshape(rows.weight_shape), rstd)
    dx = at_aligned_addresses(dx.reshape(source.shape))
    return dx, jnp.sum(dweight.reshape(-1, hidden_size), axis=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """How the backward deals its rows.

    Attributes:
      rows: Rows of the arrays, and how warps share one.
      num_operands: Number of arrays with rows: dy, the source and, if it is added, dresidual_out.
      num_parts: Parts of the columns, each of which has blocks of its own.
      num_blocks: Blocks of each part.
      num_partials: Partial rows of `dweight` that a block writes, one for every
        `steps_per_partial` tiles.
      steps_per_partial: Tiles whose `dweight` one partial row adds up.
      stages: Tiles that shared memory holds, 0 for direct loads.
      reread: Whether a row is read a second time instead of kept in registers.
      keep_weight: Whether registers hold the weight.
      weight_in_smem: Whether shared memory holds the weight.
    """

    rows: Rows
    num_operands: int
    num_parts: int
    num_blocks: int
    num_partials: int
    steps_per_partial: int
    stages: int
    reread: bool
    keep_weight: bool
    weight_in_smem: bool


def _plan(
    config: Config,
    num_tokens: int,
    hidden_size: int,
    dtype: jnp.dtype,
    weight_dtype: jnp.dtype,
    *,
    num_operands: int,
) -> _Plan:
    split = split_row(hidden_size, config.bwd_warps, dtype.itemsize)
    assert split is not None  # `check_config` has refused other sizes
    # A block computes `dx` and `dweight` of one part of the columns: all of them, unless the sums
    # for a whole row do not fit its registers. Then the blocks with the other parts read the same
    # rows at the same time, so that the rows come from the cache.
    num_parts = column_parts(split)
    assert num_parts
    device = target_device()
    num_sms = device.num_sms
    # With few tokens a tile has fewer rows, so that all multiprocessors have some.
    fours = 1 if split.warps > 1 else WARPS_PER_WARPGROUP
    most_rows = max(1, num_tokens // (fours * num_sms * config.bwd_blocks))
    rows = Rows(split, num_tokens, min(config.bwd_rows, most_rows))
    # To write a partial row and read it again moves as many bytes as four rows of 16 bits. So there
    # are no more blocks than multiprocessors, unless each block has a few rows. Every block counts:
    # at 4096 x 8192 on an H200 this kernel takes 58 us with 128 blocks of 32 rows, and 54 us with
    # 132 blocks, most of which have 31.
    tiles_per_block = max(1, _ROWS_PER_BLOCK // rows.rows_per_step)
    num_blocks = max(num_sms, rows.num_full_tiles // tiles_per_block)
    num_blocks = min(rows.num_full_tiles, config.bwd_blocks * num_sms, num_blocks)
    steps_per_partial = max(1, _ROWS_PER_PARTIAL // rows.rows_per_step)
    stages = config.bwd_stages if num_parts == 1 else 0
    return _Plan(
        rows=rows,
        num_operands=num_operands,
        num_parts=num_parts,
        num_blocks=num_blocks,
        num_partials=-(-rows.max_steps(num_blocks) // steps_per_partial),
        steps_per_partial=steps_per_partial,
        stages=stages,
        reread=stages > 0
        or num_parts > 1
        or config.bwd_rows > 1
        or not keeps_rows(split, num_operands),
        keep_weight=keeps_weight(split),
        # Otherwise each tile loads it from the cache.
        weight_in_smem=stages > 0
        and split.warps > 1
        and not keeps_weight(split)
        and split.segment * weight_dtype.itemsize % BYTES_PER_ACCESS == 0
        and weight_bytes(split, weight_dtype.itemsize)
        + ring_bytes(split, stages, num_operands, rows.rows_per_step, dtype.itemsize)
        <= smem_for_rows(device, split, num_operands, config.bwd_blocks),
    )


class _Block:
    """The body of the kernel: one block and the references that it has."""

    def __init__(self, options: Options, plan: _Plan, *refs: Any):
        self.options, self.plan = options, plan
        self.inputs, others = refs[: plan.num_operands], refs[plan.num_operands :]
        self.weight_gmem, self.rstd_gmem, self.dx_gmem, self.dweight_gmem, *scratch = others
        self.partial_smem, self.barrier, *scratch = scratch
        if plan.rows.split.warps == 1:
            self.sums_smem, *scratch = scratch
        if plan.stages:
            self.ring, self.arrived, self.read, *scratch = scratch
        if plan.weight_in_smem:
            self.weight_smem, self.weight_arrived = scratch
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
        self.weights: Sequence[jax.Array] = []

    def run(self) -> None:
        """Walks over the rows of this block."""
        plan = self.plan

        @pl.when(self.warpgroup == 0)
        def _first():
            if plan.weight_in_smem:
                for k, chunk in enumerate(self.split.chunks):
                    plgpu.copy_gmem_to_smem(
                        self.weight_gmem.at[:, chunk.columns],
                        self.in_smem(self.weight_smem, k),
                        self.weight_arrived,
                    )
            for step in range(plan.stages):
                pl.when(step < self.steps)(functools.partial(self.fetch, step))

        if plan.weight_in_smem:
            plgpu.barrier_wait(self.weight_arrived)
        if plan.keep_weight:
            # For all rows at once, in its own dtype, which takes less registers.
            self.weights = [self.load_weight(chunk) for chunk in self.split.chunks]
        if plan.num_partials == 1:
            self.partial_row(0, None)
        else:
            jax.lax.fori_loop(0, plan.num_partials, self.partial_row, None)

    def partial_row(self, i: Any, _: None) -> None:
        """The gradients of up to `steps_per_partial` tiles; stores one partial row of `dweight`."""
        split, per_partial = self.split, self.plan.steps_per_partial
        dweight = jax.lax.fori_loop(
            i * per_partial,
            jnp.minimum((i + 1) * per_partial, self.steps),
            self.one_tile,
            tuple(map(zeros, self.own_chunks)),
        )
        if split.warps > 1:
            for chunk, value in zip(self.own_chunks, dweight, strict=True):
                place = i, self.block, four(self.warpgroup), chunk.columns
                store(self.dweight_gmem.at[place], value)
            return
        # The four warps have sums of their own rows. Each warp adds up all four, and stores them.
        for k, value in enumerate(dweight):
            store(self.in_smem(self.sums_smem, k), value)
        if self.plan.stages:
            plgpu.commit_smem()
        for k, chunk in enumerate(split.chunks):
            of_warps = [
                load(self.in_smem(self.sums_smem, k, after=(warp,)), chunk.layout.reduce(0))
                for warp in range(WARPS_PER_WARPGROUP)
            ]
            total = functools.reduce(jnp.add, of_warps)
            store(self.dweight_gmem.at[i, self.block, chunk.columns], total)
        if self.plan.stages:
            plgpu.commit_smem()  # before the next partial row

    def one_tile(self, step: Any, dweight: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Stores `dx` of a tile, and adds its part of `dweight`."""
        plan, rows, split = self.plan, self.plan.rows, self.split
        tile = self.block + step * plan.num_blocks
        of_tile = rows.of_tile(rows.first(tile))
        get = self.reader(step, of_tile)
        # These loads come after the wait for the rows (in `reader`). With the loads before it,
        # 16384 x 4096 on an H100 is at 0.93 of a copy and not at 0.97.
        rstds = [rows.load_scalar(self.rstd_gmem, row) for row in of_tile]
        products: list[list[jax.Array]] = [[] for _ in of_tile]
        for k, chunk in enumerate(split.chunks):
            scale = self.scale(k, chunk)
            for i, of_row in enumerate(products):
                of_row.append(get(_DY, i, chunk, k) * get(_SOURCE, i, chunk, k) * scale)
        has_residual = plan.num_operands > _DRESIDUAL_OUT
        # Loads dresidual_out, too, before the wait for the sums.
        if has_residual and not plan.reread:
            for k, chunk in enumerate(split.chunks):
                get(_DRESIDUAL_OUT, 0, chunk, k)
        totals = rows.sums(
            products,
            self.warpgroup,
            self.partial_smem,
            self.barrier,
            step,
            has_auto_barriers=not plan.stages,
        )
        means = [
            total * rstd * (1 / split.hidden_size)
            for total, rstd in zip(totals, rstds, strict=True)
        ]
        unseen = [rows.unseen(rstd, row, tile) for rstd, row in zip(rstds, of_tile, strict=True)]
        dtype, sums = self.dx_gmem.dtype, []
        for k, (chunk, added) in enumerate(zip(self.own_chunks, dweight, strict=True)):
            scale = self.scale(k, chunk)
            for i, row in enumerate(of_tile):
                dy, source = get(_DY, i, chunk, k), get(_SOURCE, i, chunk, k)
                rstd, mean = rows.spread(rstds[i], chunk), rows.spread(means[i], chunk)
                dx = (dy * scale - source * rstd * mean) * rstd
                if has_residual:
                    dx += get(_DRESIDUAL_OUT, i, chunk, k)
                store(rows.at(self.dx_gmem, row, self.warpgroup, chunk), dx.astype(dtype))
                x_hat = source * rows.spread(unseen[i], chunk)
                added += dy * as_scaled(x_hat, self.options.casting, dtype)
            sums.append(added)
        if plan.stages:
            self.refill(step + plan.stages)
        return tuple(sums)

    def reader(self, step: Any, of_tile: Sequence[Any]) -> Callable[..., jax.Array]:
        """A function that gives an operand's float32 values of a row of the tile, in a chunk.

        The chunk is the k-th of the row, or of those whose gradients this block computes.
        """
        plan, kept, slot = self.plan, {}, None
        if plan.stages:
            slot = jax.lax.rem(step, plan.stages)
            plgpu.barrier_wait(self.arrived.at[slot])

        def get(operand: int, i: int, chunk: Chunk, k: int) -> jax.Array:
            if (operand, i, k) in kept:
                return kept[operand, i, k]
            if plan.stages:
                rows = self.in_smem(self.ring, k, before=(slot, operand))
                ref = plan.rows.in_whole(rows, i, self.warpgroup)
            else:
                ref = plan.rows.at(self.inputs[operand], of_tile[i], self.warpgroup, chunk)
            value = load(ref, chunk.layout).astype(jnp.float32)
            if not plan.reread:
                kept[operand, i, k] = value
            return value

        return get

    def in_smem(
        self,
        arrays: dict[int, Any],
        k: int,
        before: tuple[Any, ...] = (),
        after: tuple[Any, ...] = (),
    ) -> Any:
        """Chunk k in shared memory, which has an array for each width of access.

        Args:
          arrays: The arrays, by width.
          k: Number of the chunk among those of all widths.
          before: Index of the axes before that of the chunks.
          after: Index of the axes after it.
        """
        *others, vector = (chunk.vector for chunk in self.split.chunks[: k + 1])
        return arrays[vector].at[*before, others.count(vector), *after]

    def fetch(self, step: Any) -> None:
        """Starts the copies of a step's tile into its slot of shared memory."""
        slot = jax.lax.rem(step, self.plan.stages)
        row = self.plan.rows.first(self.block + step * self.plan.num_blocks)
        for operand, ref in enumerate(self.inputs):
            for k, chunk in enumerate(self.split.chunks):
                plgpu.copy_gmem_to_smem(
                    self.plan.rows.whole(ref, row, chunk),
                    self.in_smem(self.ring, k, before=(slot, operand)),
                    self.arrived.at[slot],
                )

    def refill(self, step: Any) -> None:
        """Fetches the tile of a step, if there is one, into the slot that has just been read."""
        plgpu.commit_smem()  # all warps of the warpgroup have read the slot
        plgpu.barrier_arrive(self.read)

        @pl.when(self.warpgroup == 0)
        def _fetch():
            plgpu.barrier_wait(self.read)
            pl.when(step < self.steps)(functools.partial(self.fetch, step))

    def load_weight(self, chunk: Chunk) -> jax.Array:
        """A chunk of the weight, in its own dtype."""
        return self.plan.rows.load_weight(self.weight_gmem, self.warpgroup, chunk)

    def scale(self, k: int, chunk: Chunk) -> jax.Array:
        """`weight + weight_offset` for `chunk`, the k-th that this block reads or computes."""
        rows = self.plan.rows
        if self.plan.keep_weight:
            weight = self.weights[k]
        elif self.plan.weight_in_smem:
            ref = self.in_smem(self.weight_smem, k)
            weight = load(rows.in_whole(ref, None, self.warpgroup), chunk.layout)
        else:
            weight = self.load_weight(chunk)
        return rows.scale(weight, self.options.weight_offset)
