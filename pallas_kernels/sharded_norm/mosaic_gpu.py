"""Reduce-scatter, residual-add RMSNorm and all-gather as one kernel over NVLink peer memory.

Each device owns the tokens of its shard. For each token it reads the partial sums of all n devices
where they are, in the memory of these devices. It adds them up in float32 in the order of the
devices, adds the residual, norms, and stores. When the other devices have done the same with their
shards, it reads their normed tokens. So a device reads `2·(n-1)/n` arrays `[T, D]` from its peers,
as many as a reduce-scatter and an all-gather send. But neither sums nor normed shards go through
its own memory once more, and there is one launch in place of three. Peers are read, not written to:
on four H200s a pull reached 300 GB/s, a push 37.

*Who waits for whom.* XLA starts the kernel on a device only when its operands are there on all
devices. In the kernel, warpgroup w of block b works on the same columns of the same rows of every
shard as warpgroup w of block b of every other device. So these n warpgroups wait for each other and
for nobody else: once after the norm, before they read what the others wrote, and once at the end.
After the first wait nobody reads a device's partial sums any more, and after the second nobody
reads any of its memory: XLA may use its buffers again as soon as its kernel ends.

*Where arrays are.* XLA puts the kernel's arrays where peers can read them, with one exception: a
slice of a stack of layers stays in the stack. XLA fuses such a slice with the kernel, which then
fails as it starts (https://github.com/openxla/xla/issues/47461). Barriers keep the two apart.

All blocks of a device must run at the same time, because the blocks of the others wait for them;
the grid has no more blocks than fit. That holds while nothing else runs on the devices. A
collective of NCCL that XLA runs beside the kernel could take the place of blocks on one device and
wait there for another device, whose blocks leave NCCL no place and wait for the first device. XLA
runs collectives that way if it has made them asynchronous
(`xla_gpu_enable_latency_hiding_scheduler`); it was not seen to happen.

The backward is the mirror. A device sums `dy` over the devices, and runs the norm's backward at the
tokens of its shard. The gradient of `partial` is the same for all devices, and each reads it from
the device that made it. The gradient of the weight is a partial sum a block, added up by XLA, as in
`rms_norm`.

Rounding: float32 sums, rounded once: `residual_out`, `y` (of the rounded `residual_out`), `dx`
(after `dresidual_out` was added), `dweight`. The order of all sums is fixed: repeated runs agree
bit by bit.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels.derivatives import not_differentiable
from pallas_kernels.gpu.arrays import unsupported_dtype
from pallas_kernels.gpu.device import WARPS_PER_WARPGROUP, reason_not_here
from pallas_kernels.gpu.layouts import load, store
from pallas_kernels.norm.reference import Options
from pallas_kernels.norm.rows import RowSplit, as_scaled, four, splits, zeros
from pallas_kernels.sharded_norm.peers import BACKWARD_REGISTERS, FORWARD_REGISTERS, Shards

_MAX_DEVICES = 8  # of one host
_ELEMENTS_PER_LANE = 16  # for which `peers.py` has the counts of registers


@dataclasses.dataclass(frozen=True, slots=True)
class _Options(Options):
    """The arguments that are no arrays."""

    axis_name: str
    gather: bool


def unsupported_reason(partial: jax.Array, residual: jax.Array, weight: jax.Array) -> str | None:
    """Why the kernel cannot run, or None if it can. To be called inside of `jax.shard_map`."""
    for name, array in (("partial", partial), ("residual", residual), ("weight", weight)):
        if (reason := unsupported_dtype(name, array.dtype)) is not None:
            return reason
    if partial.dtype != residual.dtype:
        return (
            f"partial is {partial.dtype} and residual {residual.dtype}; the kernel takes one "
            "dtype, so cast one of them"
        )
    if _split(partial.shape[-1], partial.dtype.itemsize) is None:
        return (
            f"hidden_size={partial.shape[-1]} cannot be dealt to 4 warps or more with at most "
            f"{_ELEMENTS_PER_LANE} elements a lane; implementation='xla' takes any size"
        )
    if (reason := reason_not_here()) is not None:
        return reason
    if (num_processes := jax.process_count()) != 1:
        return (
            f"the kernel reads peers within one process, and there are {num_processes} processes; "
            "start one process for all GPUs of the host"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size > _MAX_DEVICES:
        return (
            f"the mesh has {mesh.size} devices, and one host has at most {_MAX_DEVICES}; "
            "implementation='xla' takes any number"
        )
    return None


def _split(hidden_size: int, itemsize: int) -> RowSplit | None:
    """The row dealt to the fewest warps, 4 or more, with at most 16 elements a lane."""
    for split in splits(hidden_size, itemsize):
        if split.warps >= WARPS_PER_WARPGROUP and split.elements_per_lane <= _ELEMENTS_PER_LANE:
            return split
    return None


def sharded_add_rms_norm(
    partial: Float[Array, "*B T D"],
    residual: Float[Array, "*B shard D"],
    weight: Float[Array, " D"],
    options: Options,
    axis_name: str,
    *,
    gather: bool,
) -> tuple[Float[Array, "*B tokens D"], Float[Array, "*B shard D"]]:
    """The kernel of `pallas_kernels.sharded_add_rms_norm`.

    `unsupported_reason` must be None for the arguments.
    """
    of_norm = dataclasses.asdict(options)
    return _norm(_Options(**of_norm, axis_name=axis_name, gather=gather), partial, residual, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(options, partial, residual, weight):
    y, residual_out, _ = _forward(options, partial, residual, weight)
    return y, residual_out


def _norm_fwd(options, partial, residual, weight):
    y, residual_out, rstd = _forward(options, *_once((partial, residual, weight)))
    residual_out = checkpoint_name(residual_out, "residual")
    rstd = checkpoint_name(rstd, "rstd")
    return (checkpoint_name(y, "normed"), residual_out), (residual_out, rstd, weight)


def _norm_bwd(options, saved, cotangents):
    dpartial, dresidual, dweight = _backward(options, *_once((*cotangents, *saved)))
    return dpartial, dresidual, dweight.astype(saved[-1].dtype)


_norm.defvjp(_norm_fwd, _norm_bwd)


def _once(arrays: Any) -> Any:
    return not_differentiable(
        "implementation='mosaic_gpu' of the sharded RMSNorm has no second derivative; "
        "differentiate implementation='reference' twice",
        arrays,
    )


def _forward(
    options: _Options,
    partial: Float[Array, "*B T D"],
    residual: Float[Array, "*B shard D"],
    weight: Float[Array, " D"],
) -> tuple[Float[Array, "*B tokens D"], Float[Array, "*B shard D"], Float[Array, " rows"]]:
    """`(y, residual_out, rstd)`."""
    *batch, num_tokens, hidden_size = partial.shape
    dtype = partial.dtype
    split = _split(hidden_size, dtype.itemsize)
    assert split is not None  # `unsupported_reason` has refused other sizes
    shards = Shards(options.axis_name, batch, num_tokens, split, FORWARD_REGISTERS)
    own, whole = shards.own, shards.whole
    y_rows = whole if options.gather else own
    y, residual_out, rstd = shards.launch(
        functools.partial(_forward_kernel, options, shards),
        (
            partial.reshape(whole.shape),
            residual.reshape(own.shape),
            weight.reshape(own.weight_shape),
        ),
        (
            jax.ShapeDtypeStruct(y_rows.shape, dtype),
            jax.ShapeDtypeStruct(own.shape, dtype),
            jax.ShapeDtypeStruct((shards.num_rows,), jnp.float32),
        ),
        "sharded_add_rms_norm_fwd",
    )
    y_shape = partial.shape if options.gather else residual.shape
    return y.reshape(y_shape), residual_out.reshape(residual.shape), rstd


def _forward_kernel(
    options: _Options,
    shards: Shards,
    partial_gmem: Any,
    residual_gmem: Any,
    weight_gmem: Any,
    y_gmem: Any,
    residual_out_gmem: Any,
    rstd_gmem: Any,
    sums_smem: Any,
    barrier: Any,
) -> None:
    """Norms the rows of this device's shard, then fetches the rows of the others."""
    own, whole, split = shards.own, shards.whole, shards.split
    dtype = residual_out_gmem.dtype
    warpgroup = jax.lax.axis_index("warpgroup")
    me = jax.lax.axis_index(options.axis_name)
    flags = shards.flags()
    weights = [own.load_weight(weight_gmem, warpgroup, chunk) for chunk in split.chunks]

    def normalize(step, row, carry):
        token = shards.token(row, me)
        added = [
            load(own.at(residual_gmem, row, warpgroup, chunk), chunk.layout)
            for chunk in split.chunks
        ]
        sums = shards.sum_of_all(partial_gmem, token, warpgroup)
        values = [
            (total + value.astype(jnp.float32)).astype(dtype)
            for total, value in zip(sums, added, strict=True)
        ]
        squares = [jnp.square(value.astype(jnp.float32)) for value in values]
        mean = own.sum(squares, warpgroup, sums_smem, barrier, step) * (1 / split.hidden_size)
        rstd = jax.lax.rsqrt(mean + options.eps)
        own.store_scalar(rstd_gmem, row, warpgroup, rstd)
        for value, weight, chunk in zip(values, weights, split.chunks, strict=True):
            store(own.at(residual_out_gmem, row, warpgroup, chunk), value)
            x_hat = as_scaled(value.astype(jnp.float32) * rstd, options.casting, dtype)
            y = (x_hat * own.scale(weight, options.weight_offset)).astype(dtype)
            y_rows, y_row = (whole, token) if options.gather else (own, row)
            store(y_rows.at(y_gmem, y_row, warpgroup, chunk), y)
        return carry

    shards.for_rows(normalize, None)
    shards.wait_for_others(flags, 0)
    if options.gather:
        shards.fetch_from_others(y_gmem)
        shards.wait_for_others(flags, 1)


def _backward(
    options: _Options,
    dy: Float[Array, "*B tokens D"],
    dresidual_out: Float[Array, "*B shard D"],
    source: Float[Array, "*B shard D"],
    rstd: Float[Array, " rows"],
    weight: Float[Array, " D"],
) -> tuple[Float[Array, "*B T D"], Float[Array, "*B shard D"], Float[Array, " D"]]:
    """`(dpartial, dresidual, dweight)`; `dweight` is float32 and of this device's tokens.

    With `x_hat = source · rstd` and `dx_hat = Σ_devices dy · (weight + weight_offset)`:
    `dx = rstd · (dx_hat - x_hat · mean(dx_hat · x_hat)) + dresidual_out` are the rows of
    `dpartial` and of `dresidual`; `dweight = Σ_tokens Σ_devices dy · x_hat`.
    """
    *batch, shard, hidden_size = source.shape
    dtype = source.dtype
    split = _split(hidden_size, dtype.itemsize)
    assert split is not None  # `unsupported_reason` has refused other sizes
    num_tokens = shard * jax.lax.axis_size(options.axis_name)
    shards = Shards(options.axis_name, batch, num_tokens, split, BACKWARD_REGISTERS)
    own, whole = shards.own, shards.whole
    dpartial, dresidual, dweight = shards.launch(
        functools.partial(_backward_kernel, options, shards),
        (
            dy.reshape((whole if options.gather else own).shape),
            dresidual_out.reshape(own.shape),
            source.reshape(own.shape),
            rstd,
            weight.reshape(own.weight_shape),
        ),
        (
            jax.ShapeDtypeStruct(whole.shape, dtype),
            jax.ShapeDtypeStruct(own.shape, dtype),
            jax.ShapeDtypeStruct((shards.num_blocks, *own.weight_shape), jnp.float32),
        ),
        "sharded_add_rms_norm_bwd",
    )
    return (
        dpartial.reshape(*batch, num_tokens, hidden_size),
        dresidual.reshape(source.shape),
        jnp.sum(dweight.reshape(-1, hidden_size), axis=0),
    )


def _backward_kernel(
    options: _Options,
    shards: Shards,
    dy_gmem: Any,
    dresidual_out_gmem: Any,
    source_gmem: Any,
    rstd_gmem: Any,
    weight_gmem: Any,
    dpartial_gmem: Any,
    dresidual_gmem: Any,
    dweight_gmem: Any,
    sums_smem: Any,
    barrier: Any,
) -> None:
    """Makes the gradients of this device's shard, then fetches `dpartial` from the others."""
    own, whole, split = shards.own, shards.whole, shards.split
    dtype = dpartial_gmem.dtype
    block = jax.lax.axis_index("block")
    warpgroup = jax.lax.axis_index("warpgroup")
    me = jax.lax.axis_index(options.axis_name)
    flags = shards.flags()
    weights = [own.load_weight(weight_gmem, warpgroup, chunk) for chunk in split.chunks]

    def own_chunks(ref, row):
        return [
            load(own.at(ref, row, warpgroup, chunk), chunk.layout).astype(jnp.float32)
            for chunk in split.chunks
        ]

    def differentiate(step, row, dweight):
        token = shards.token(row, me)
        added = own_chunks(dresidual_out_gmem, row)
        row_rstd = own.load_scalar(rstd_gmem, row)
        x_hats = [value * row_rstd for value in own_chunks(source_gmem, row)]
        if options.gather:
            dys = shards.sum_of_all(dy_gmem, token, warpgroup)
        else:
            dys = own_chunks(dy_gmem, row)
        scaled = [
            value * own.scale(weight, options.weight_offset)
            for value, weight in zip(dys, weights, strict=True)
        ]
        products = [a * b for a, b in zip(scaled, x_hats, strict=True)]
        mean = own.sum(products, warpgroup, sums_smem, barrier, step) * (1 / split.hidden_size)
        sums = []
        for k, chunk in enumerate(split.chunks):
            dx = (scaled[k] - x_hats[k] * mean) * row_rstd + added[k]
            dx = dx.astype(dtype)
            store(own.at(dresidual_gmem, row, warpgroup, chunk), dx)
            store(whole.at(dpartial_gmem, token, warpgroup, chunk), dx)
            x_hat = as_scaled(x_hats[k], options.casting, dtype)
            sums.append(dweight[k] + dys[k] * x_hat)
        return tuple(sums)

    dweight = shards.for_rows(differentiate, tuple(map(zeros, split.chunks)))
    for chunk, value in zip(split.chunks, dweight, strict=True):
        store(dweight_gmem.at[block, four(warpgroup), chunk.columns], value)
    shards.wait_for_others(flags, 0)
    shards.fetch_from_others(dpartial_gmem)
    shards.wait_for_others(flags, 1)
