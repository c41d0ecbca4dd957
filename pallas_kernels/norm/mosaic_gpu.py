"""RMSNorm and residual-add RMSNorm as Mosaic GPU kernels, forward and backward.

Both are bound by device memory, so each array goes through it once. Bytes moved, in units of one
array `[T, D]`: `rms_norm` forward 2 (x; y) and backward 3 (dy, x; dx), `add_rms_norm` forward 4
(x, residual; y, residual_out) and backward 4 (dy, dresidual_out, residual_out; dx, which is the
gradient of x and of residual). Beside them the weight, 4 bytes a token for `rstd`, and the partial
sums of `dweight`.

Kept for the backward: what was normalized (`x`, or `residual_out`) and `rstd`. `x · rstd` is
computed again.

The gradient of the weight is a sum over all tokens, taken in two levels: each block of a grid
that fills the GPU once walks over rows and keeps a float32 row of partial sums in registers, then
XLA adds up the few partial rows. No atomics: the order of the additions is fixed, so repeated runs
agree bit by bit. A partial row covers at most `_ROWS_PER_PARTIAL` rows, so the rounding error does
not grow with the number of tokens.

Arithmetic is float32. Rounded: `residual_out` and `y` to the dtype of `x`, with
`casting="llama"` also `x · rstd`; `dx` once, after `dresidual_out` was added; `dweight` once.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.gpu.arrays import at_aligned_addresses
from pallas_kernels.gpu.device import BYTES_PER_ACCESS, WARPS_PER_WARPGROUP, target_device
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.layouts import load, store
from pallas_kernels.norm.config import Config, default_config
from pallas_kernels.norm.rows import Rows, as_scaled, column_parts, ring_shape, split_row, splits

_MIN_HIDDEN_SIZE = 64
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)

# 256 additions of float32 numbers of random sign err by about 8e-7 of the sum. A partial row is
# then 4 bytes an element to 256 rows of 6: 0.3 % more traffic, and none up to 256 rows a block.
_ROWS_PER_PARTIAL = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What is not an array; hashable, as `jax.custom_vjp` wants it."""

    eps: float
    weight_offset: float
    casting: str
    config: Config


def unsupported_reason(
    x: jax.Array, weight: jax.Array, residual: jax.Array | None = None
) -> str | None:
    """Why the kernels cannot run these arguments on the default device, or None if they can."""
    hidden_size = x.shape[-1]
    for name, array in (("x", x), ("weight", weight), ("residual", residual)):
        if array is not None and array.dtype not in _DTYPES:
            return f"{name} is {array.dtype}, not bfloat16, float16 or float32"
    if hidden_size < _MIN_HIDDEN_SIZE:
        return f"hidden_size={hidden_size} is below {_MIN_HIDDEN_SIZE}, two elements a lane"
    if not splits(hidden_size, _itemsize(x, residual)) or not any(
        column_parts(split) for split in splits(hidden_size, x.dtype.itemsize)
    ):
        return f"no number of warps divides hidden_size={hidden_size} into parts that fit registers"
    return None


def norm(
    x: Float[Array, "*T D"],
    residual: Float[Array, "*T D"] | None,
    weight: Float[Array, " D"],
    *,
    eps: float,
    weight_offset: float,
    casting: str,
    config: Config | None,
) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"] | None]:
    """`(y, residual_out)` of `pallas_kernels.add_rms_norm`, or `(y, None)` without a residual.

    Raises:
      NotImplementedError: `unsupported_reason` has one.
      ValueError: the configuration does not fit the hidden size or the device.
    """
    if (reason := unsupported_reason(x, weight, residual)) is not None:
        raise NotImplementedError(f"implementation='mosaic_gpu': {reason}")
    if config is None:
        config = default_config(target_device(), x.shape[-1], x.dtype, add=residual is not None)
    _check_config(config, x, residual)
    options = Options(float(eps), float(weight_offset), casting, config)
    if x.size == 0:
        # Nothing to launch; the gradients of these are zeros.
        total = x if residual is None else x + residual.astype(x.dtype)
        return total * weight.astype(x.dtype), None if residual is None else total
    num_tokens = x.size // x.shape[-1]
    # Where a warp has a row for itself, four rows are the least.
    num_missing = 0
    if 1 in (options.config.fwd_warps, options.config.bwd_warps):
        num_missing = max(0, WARPS_PER_WARPGROUP - num_tokens)

    def to_rows(a):
        # Ones, not zeros, which have no norm if eps is 0.
        rows = a.reshape(num_tokens, -1)
        return jnp.pad(rows, ((0, num_missing), (0, 0)), constant_values=1)

    def from_rows(rows):
        return rows[:num_tokens].reshape(x.shape)

    if residual is None:
        return from_rows(_norm(options, to_rows(x), None, weight)[0]), None
    y, residual_out = _norm(options, to_rows(x), to_rows(residual), weight)
    return from_rows(y), from_rows(residual_out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(options, x, residual, weight):
    y, residual_out, _ = _forward(options, x, residual, weight)
    return y, residual_out


def _norm_fwd(options, x, residual, weight):
    residual = None if residual is None else residual.value
    y, residual_out, rstd = _forward(options, x.value, residual, weight.value)
    # Named here, where a `jax.checkpoint` policy sees the values that the backward reads.
    rstd = checkpoint_name(rstd, "rstd")
    y = checkpoint_name(y, "normed")
    source = x.value
    if residual_out is not None:
        source = residual_out = checkpoint_name(residual_out, "residual")
    # Of the residual only its dtype is needed, which an empty array carries.
    like_residual = None if residual is None else jnp.empty((0,), residual.dtype)
    return (y, residual_out), (source, weight.value, rstd, like_residual)


def _norm_bwd(options, saved, cotangents):
    source, weight, rstd, like_residual = saved
    dy, dresidual_out = cotangents
    if isinstance(dresidual_out, SymbolicZero):
        dresidual_out = None  # one array less to read
    if isinstance(dy, SymbolicZero):
        dx = jnp.zeros_like(source) if dresidual_out is None else dresidual_out
        dweight = jnp.zeros_like(weight)
    else:
        dx, dweight = _backward(options, dy, dresidual_out, source, weight, rstd)
    dresidual = None if like_residual is None else dx.astype(like_residual.dtype)
    return dx, dresidual, dweight.astype(weight.dtype)


_norm.defvjp(_norm_fwd, _norm_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _forward(
    options: Options,
    x: Float[Array, "T D"],
    residual: Float[Array, "T D"] | None,
    weight: Float[Array, " D"],
) -> tuple[Float[Array, "T D"], Float[Array, "T D"] | None, Float[Array, " T"]]:
    """`(y, residual_out, rstd)`."""
    x, residual, weight = at_aligned_addresses((x, residual, weight))
    num_tokens, hidden_size = x.shape
    split = split_row(hidden_size, options.config.fwd_warps, _itemsize(x, residual))
    assert split is not None  # _check_config
    rows = Rows(split, num_tokens)
    # Narrow rows: enough of them in a block that each lane has some 16 elements on their way.
    tiles_per_block = max(1, min(8, 16 // split.elements_per_lane)) if split.warps == 1 else 1
    tiles_per_block = min(tiles_per_block, rows.num_full_tiles)
    num_blocks = rows.num_full_tiles // tiles_per_block
    has_residual = residual is not None

    def kernel(*refs):
        x_gmem, *refs = refs
        residual_gmem, *refs = refs if has_residual else (None, *refs)
        weight_gmem, y_gmem, *refs = refs
        residual_out_gmem, *refs = refs if has_residual else (None, *refs)
        rstd_gmem, partial_smem, barrier = refs
        block = jax.lax.axis_index("block")
        warpgroup = jax.lax.axis_index("warpgroup")
        load_weight = functools.partial(rows.load_weight, weight_gmem, warpgroup)

        def total(row, start):
            """What is normalized, as stored."""
            chunk = load(rows.at(x_gmem, row, warpgroup, start), rows.layout)
            if residual_gmem is None:
                return chunk
            added = load(rows.at(residual_gmem, row, warpgroup, start), rows.layout)
            return (chunk.astype(jnp.float32) + added.astype(jnp.float32)).astype(x.dtype)

        def normalize(tiles):
            first_rows = [rows.first(tile) for tile in tiles]
            # All loads first, so that they are on their way together.
            chunks = [[total(row, start) for start in split.starts] for row in first_rows]
            weights = [] if reread else [load_weight(start) for start in split.starts]
            for row, values in zip(first_rows, chunks, strict=True):
                if residual_out_gmem is not None:
                    for start, value in zip(split.starts, values, strict=True):
                        store(rows.at(residual_out_gmem, row, warpgroup, start), value)
                squares = [jnp.square(value.astype(jnp.float32)) for value in values]
                mean = rows.sum(squares, warpgroup, partial_smem, barrier) * (1 / hidden_size)
                rstd = jax.lax.rsqrt(mean + options.eps)
                rows.store_scalar(rstd_gmem, row, warpgroup, rstd)
                rstd = rows.spread(rstd)
                for i, start in enumerate(split.starts):
                    if reread:
                        source_gmem = x_gmem if residual_out_gmem is None else residual_out_gmem
                        value = load(rows.at(source_gmem, row, warpgroup, start), rows.layout)
                        weight = load_weight(start)
                    else:
                        value, weight = values[i], weights[i]
                    x_hat = as_scaled(value.astype(jnp.float32) * rstd, options.casting, x.dtype)
                    y = (x_hat * rows.scale(weight, options.weight_offset)).astype(x.dtype)
                    store(rows.at(y_gmem, row, warpgroup, start), y)

        reread = options.config.fwd_reread
        first = block * tiles_per_block
        normalize([first + i for i in range(tiles_per_block)])
        num_left = rows.num_tiles - num_blocks * tiles_per_block
        if num_left:

            @pl.when(block == num_blocks - 1)
            def _rest():
                jax.lax.fori_loop(
                    0, num_left, lambda i, _: normalize([first + tiles_per_block + i]), None
                )

    row_shape = jax.ShapeDtypeStruct(rows.shape, x.dtype)
    outputs = gpu_kernel(
        kernel,
        out_type=(
            *(row_shape,) * (2 if has_residual else 1),
            jax.ShapeDtypeStruct((num_tokens,), jnp.float32),
        ),
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=split.warpgroups,
        thread_name="warpgroup",
        scratch_types=rows.exchange,
        kernel_name="add_rms_norm_fwd" if has_residual else "rms_norm_fwd",
    )(
        x.reshape(rows.shape),
        *(() if residual is None else (residual.reshape(rows.shape),)),
        weight.reshape(rows.weight_shape),
    )
    *outputs, rstd = outputs
    y, residual_out = (a.reshape(x.shape) for a in outputs) if has_residual else (*outputs, None)
    return at_aligned_addresses((y.reshape(x.shape), residual_out, rstd))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(
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
    config = options.config
    split = split_row(hidden_size, config.bwd_warps, source.dtype.itemsize)
    assert split is not None  # _check_config
    arrays = [dy, source] if dresidual_out is None else [dy, source, dresidual_out]
    rows = Rows(split, num_tokens)
    num_parts = column_parts(split)
    assert num_parts
    # A block computes `dx` and `dweight` of one part of the columns: all of them, unless the sums
    # for a whole row do not fit its registers. Then the blocks with the other parts read the same
    # rows at the same time, so that they come from the cache.
    reread = config.bwd_reread or num_parts > 1
    stages = config.bwd_stages if num_parts == 1 else 0
    # Else it is loaded where it is used, from the cache: with 32 elements a lane of 128 registers
    # (16384 wide, 16 warps) ptxas spills 100 bytes, and none without the weight.
    keep_weight = not reread or 3 * split.elements_per_lane + 40 <= split.registers
    num_blocks = min(rows.num_full_tiles, config.bwd_blocks * target_device().num_sms)
    num_partials = -(-rows.max_steps(num_blocks) // _ROWS_PER_PARTIAL)
    chunks_per_part = len(split.starts) // num_parts
    num_operands = len(arrays)
    dy_index, source_index, dresidual_index = range(3)

    def kernel(*refs):
        inputs, refs = refs[:num_operands], refs[num_operands:]
        weight_gmem, rstd_gmem, dx_gmem, dweight_gmem, partial_smem, barrier, *ring = refs
        block, part = jax.lax.axis_index("block"), jax.lax.axis_index("part")
        warpgroup = jax.lax.axis_index("warpgroup")
        steps = rows.num_steps(block, num_blocks)
        if num_parts == 1:
            own_starts: Sequence[Any] = split.starts
        else:
            first_chunk = part * chunks_per_part
            own_starts = [(first_chunk + i) * split.chunk for i in range(chunks_per_part)]
        load_weight = functools.partial(rows.load_weight, weight_gmem, warpgroup)
        # For all rows at once, in the dtype it has, which takes less registers.
        weights = [load_weight(start) for start in split.starts] if keep_weight else []

        def scale(k, start):
            weight = weights[k] if weights else load_weight(start)
            return rows.scale(weight, options.weight_offset)

        def fetch(step):
            rows_smem, arrived = ring
            slot = jax.lax.rem(step, stages)
            row = rows.first(block + step * num_blocks)
            for i, ref in enumerate(inputs):
                for k, start in enumerate(split.starts):
                    plgpu.copy_gmem_to_smem(
                        rows.at(ref, row, warpgroup, start),
                        rows_smem.at[slot, warpgroup, i, k],
                        arrived.at[slot * split.warpgroups + warpgroup],
                    )

        def refill(step):
            @pl.when(step < steps)
            def _fetch():
                plgpu.commit_smem()  # all warps have read the slot
                fetch(step)

        def one_row(step, dweight):
            tile = block + step * num_blocks
            row = rows.first(tile)
            if stages:
                rows_smem, arrived = ring
                slot = jax.lax.rem(step, stages)
                plgpu.barrier_wait(arrived.at[slot * split.warpgroups + warpgroup])
                get = lambda operand, k: load(
                    rows_smem.at[slot, warpgroup, operand, k], rows.layout
                ).astype(jnp.float32)
                get_own = get
            else:
                get_at = lambda operand, start: load(
                    rows.at(inputs[operand], row, warpgroup, start), rows.layout
                ).astype(jnp.float32)
                get = lambda operand, k: get_at(operand, split.starts[k])
                get_own = lambda operand, k: get_at(operand, own_starts[k])
            rstd = rows.load_scalar(rstd_gmem, row)
            kept, added, products = [], [], []
            for k, start in enumerate(split.starts):
                dy_chunk, x_hat = get(dy_index, k), get(source_index, k) * rstd
                products.append(dy_chunk * x_hat * scale(k, start))
                if not reread:
                    kept.append((dy_chunk, x_hat))
            if dresidual_out is not None and not reread:
                added = [get(dresidual_index, k) for k in range(len(split.starts))]
            total = rows.sum(products, warpgroup, partial_smem, barrier, step)
            mean = rows.spread(total * (1 / hidden_size))
            if stages and not reread:
                refill(step + stages)
            sums = []
            for k, start in enumerate(own_starts):
                if reread:
                    dy_chunk, x_hat = get_own(dy_index, k), get_own(source_index, k) * rstd
                else:
                    dy_chunk, x_hat = kept[k]
                dx = (dy_chunk * scale(k, start) - x_hat * mean) * rstd
                if dresidual_out is not None:
                    dx += get_own(dresidual_index, k) if reread else added[k]
                store(rows.at(dx_gmem, row, warpgroup, start), dx.astype(source.dtype))
                x_hat = as_scaled(x_hat, options.casting, source.dtype)
                sums.append(dweight[k] + rows.unseen(dy_chunk * x_hat, row, tile))
            if stages and reread:
                refill(step + stages)
            return tuple(sums)

        def partial_row(i, _):
            zeros = plgpu.layout_cast(jnp.zeros((4, split.chunk), jnp.float32), rows.layout)
            dweight = jax.lax.fori_loop(
                i * _ROWS_PER_PARTIAL,
                jnp.minimum((i + 1) * _ROWS_PER_PARTIAL, steps),
                one_row,
                (zeros,) * chunks_per_part,
            )
            for start, value in zip(own_starts, dweight, strict=True):
                if split.warps == 1:
                    ref = dweight_gmem.at[i, block, :, pl.ds(start, split.chunk)]
                else:
                    warps = pl.ds(WARPS_PER_WARPGROUP * warpgroup, WARPS_PER_WARPGROUP)
                    ref = dweight_gmem.at[i, block, warps, pl.ds(start, split.chunk)]
                store(ref, value)

        for step in range(stages):
            pl.when(step < steps)(functools.partial(fetch, step))
        if num_partials == 1:
            partial_row(0, None)
        else:
            jax.lax.fori_loop(0, num_partials, partial_row, None)

    scratch = list(rows.exchange)
    if stages:
        num_copies = num_operands * len(split.starts)
        scratch += [
            plgpu.SMEM(ring_shape(split, stages, num_operands), source.dtype),
            plgpu.Barrier(num_arrivals=num_copies, num_barriers=stages * split.warpgroups),
        ]
    # With one warp a row, each of the four warps of a block has a partial row of its own.
    partial_shape = (max(split.warps, WARPS_PER_WARPGROUP), split.segment)
    dx, dweight = gpu_kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(rows.shape, source.dtype),
            jax.ShapeDtypeStruct((num_partials, num_blocks, *partial_shape), jnp.float32),
        ),
        grid=(num_blocks, num_parts),
        grid_names=("block", "part"),
        num_threads=split.warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name="rms_norm_bwd" if dresidual_out is None else "add_rms_norm_bwd",
    )(*(a.reshape(rows.shape) for a in arrays), weight.reshape(rows.weight_shape), rstd)
    dx = at_aligned_addresses(dx.reshape(source.shape))
    return dx, jnp.sum(dweight.reshape(-1, hidden_size), axis=0)


@_forward.defjvp
@_backward.defjvp
def _no_second_derivative(options, primals, tangents):
    raise NotImplementedError(
        "implementation='mosaic_gpu' of RMSNorm has no second derivative; differentiate "
        "implementation='reference' twice"
    )


def _check_config(config: Config, x: jax.Array, residual: jax.Array | None) -> None:
    hidden_size = x.shape[-1]
    fwd = split_row(hidden_size, config.fwd_warps, _itemsize(x, residual))
    bwd = split_row(hidden_size, config.bwd_warps, x.dtype.itemsize)
    if fwd is None or bwd is None or not column_parts(bwd):
        forward = [split.warps for split in splits(hidden_size, _itemsize(x, residual))]
        backward = [s.warps for s in splits(hidden_size, x.dtype.itemsize) if column_parts(s)]
        raise ValueError(
            f"{config}: {hidden_size=} can be dealt to {forward} warps in the forward and to "
            f"{backward} in the backward"
        )
    if not config.bwd_stages or column_parts(bwd) != 1:
        return
    device = target_device()
    if not device.has_tma:
        raise ValueError(
            f"{config.bwd_stages=} needs the tensor memory accelerator of Hopper and later, "
            f"{device.kind} has capability {device.capability}; use bwd_stages=0"
        )
    if bwd.segment * x.dtype.itemsize % BYTES_PER_ACCESS:
        raise ValueError(
            f"{config.bwd_stages=} needs parts of rows of a multiple of {BYTES_PER_ACCESS} bytes, "
            f"got {bwd.segment} elements of {x.dtype}; use bwd_stages=0"
        )
    num_operands = 2 if residual is None else 3
    num_bytes = math.prod(ring_shape(bwd, config.bwd_stages, num_operands)) * x.dtype.itemsize
    if num_bytes > device.smem_bytes:
        raise ValueError(
            f"{config.bwd_stages=} rows of {hidden_size=} take {num_bytes} bytes of shared memory, "
            f"a block of {device.kind} can have {device.smem_bytes}; use less stages"
        )


def _itemsize(x: jax.Array, residual: jax.Array | None) -> int:
    """Bytes of the widest element that the forward reads by rows."""
    return x.dtype.itemsize if residual is None else max(x.dtype.itemsize, residual.dtype.itemsize)
