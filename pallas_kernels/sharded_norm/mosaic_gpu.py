"""Reduce-scatter, residual-add RMSNorm and all-gather as one kernel over NVLink peer memory.

Each device owns the tokens of its shard. Of each it reads the partial sums of all n devices where
they are, in the memory of these devices, adds them up in float32 in the order of the devices, adds
the residual, norms, and stores. When the other devices have done the same with theirs, it reads
their normed tokens. So a device reads `2·(n-1)/n` arrays `[T, D]` from its peers, as a
reduce-scatter and an all-gather send, but neither sums nor normed shards go through its own memory
once more, and there is one launch where there were three. Peers are read, not written to: on four
H200s a pull reached 300 GB/s, a push 37.

*Who waits for whom.* XLA starts the kernel on no device before its operands are there on all. In
it, the warpgroup w of block b works on the same columns of the same rows of every shard as the
warpgroup w of block b of every other device, so these n wait for each other and for nobody else:
once after the norm, before they read what the others wrote, and once at the end. A device that is
through the first wait is no longer read for partial sums, one that is through the second not at
all: XLA may use its buffers again as soon as its kernel ends.

*Where arrays are.* XLA puts the kernel's arrays where peers can read them, but those that it would
read from or write to a stack of layers it leaves there: it fuses the slice with the kernel, which
then fails as it starts (https://github.com/openxla/xla/issues/47461). Barriers keep them apart.

All blocks of a device must run at the same time, because those of the others wait for them; there
are no more than fit. That holds while nothing else runs on the devices. A collective of NCCL that
XLA runs beside the kernel could take the place of blocks on one device and wait there for another
device, whose blocks leave NCCL no place and wait for those. XLA does that with collectives that it
has made asynchronous (`xla_gpu_enable_latency_hiding_scheduler`); it was not seen to happen.

Backward, the mirror: the sum of `dy` over the devices, the norm's backward at the tokens of the
shard, and the gradient of `partial`, which is the same for all devices, read from those who made
it. The gradient of the weight is a partial sum a block, added up by XLA, as in `rms_norm`.

Rounding: float32 sums, rounded once: `residual_out`, `y` (of the rounded `residual_out`), `dx`
(after `dresidual_out` was added), `dweight`. The order of all sums is fixed: repeated runs agree
bit by bit.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.derivatives import not_differentiable
from pallas_kernels.gpu.device import (
    LANES,
    REGISTERS_PER_SM,
    WARPS_PER_WARPGROUP,
    runs_here,
    target_device,
)
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.layouts import load, store
from pallas_kernels.norm.rows import Rows, RowSplit, as_scaled, splits

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_MAX_DEVICES = 8  # of one host
_ELEMENTS_PER_LANE = 16
# What ptxas for sm_90a counts at most with 16 elements a lane (`tests/aot`), forward and backward:
# so many blocks are on a multiprocessor at a time for certain.
_FORWARD_REGISTERS, _BACKWARD_REGISTERS = 128, 168
_MAX_BLOCKS_PER_SM = 2
# Rows of a shard for each multiprocessor from which one block there is faster than two: fewer reads
# at a time keep the links busy. On four H200s, 8192 x 4096 tokens (15.5 rows) take 0.359 ms with
# one and 0.373 with two, 1024 x 8192 (1.9 rows) 0.142 and 0.130.
_MANY_ROWS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class _Options:
    axis_name: str
    eps: float
    weight_offset: float
    casting: str
    gather: bool


def unsupported_reason(partial: jax.Array, residual: jax.Array, weight: jax.Array) -> str | None:
    """Why the kernel cannot run, or None if it can. To be called inside of `jax.shard_map`."""
    for name, array in (("partial", partial), ("residual", residual), ("weight", weight)):
        if array.dtype not in _DTYPES:
            return f"{name} is {array.dtype}, not bfloat16, float16 or float32"
    if partial.dtype != residual.dtype:
        return f"partial is {partial.dtype} and residual {residual.dtype}, which must be the same"
    if _split(partial.shape[-1], partial.dtype.itemsize) is None:
        return f"hidden_size={partial.shape[-1]} cannot be dealt to 4 warps or more, 16 a lane"
    if (reason := runs_here()) is not None:
        return reason
    if jax.process_count() != 1:
        return f"it reads peers within one process, there are {jax.process_count()} processes"
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size > _MAX_DEVICES:
        return f"the mesh has {mesh.size} devices, one host has at most {_MAX_DEVICES}"
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
    *,
    axis_name: str,
    eps: float,
    weight_offset: float,
    casting: str,
    gather: bool,
) -> tuple[Float[Array, "*B tokens D"], Float[Array, "*B shard D"]]:
    """See `pallas_kernels.sharded_add_rms_norm`.

    Raises:
      NotImplementedError: `unsupported_reason` has one.
    """
    if (reason := unsupported_reason(partial, residual, weight)) is not None:
        raise NotImplementedError(f"implementation='mosaic_gpu': {reason}")
    options = _Options(axis_name, float(eps), float(weight_offset), casting, gather)
    return _norm(options, partial, residual, weight)


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


class _Shards:
    """Whose row is where, and the ways to the other devices.

    A block has the rows `block, block + num_blocks, ...` of every shard: of its own it makes them,
    of the others it reads them.

    Attributes:
      split: how a row is dealt to warps.
      num_devices: n.
      num_rows: of a shard, over all sequences.
      num_blocks: of each device; all run at the same time.
      whole: the rows of arrays with all tokens.
      own: the rows of arrays with a device's tokens.
    """

    def __init__(
        self,
        axis_name: str,
        batch: Sequence[int],
        num_tokens: int,
        split: RowSplit,
        registers: int,
    ):
        self.axis_name = axis_name
        self.split = split
        self.num_devices = jax.lax.axis_size(axis_name)
        num_sequences = math.prod(batch)
        self._tokens = num_tokens
        self._shard = num_tokens // self.num_devices
        self.num_rows = num_sequences * self._shard
        lanes = split.warpgroups * WARPS_PER_WARPGROUP * LANES
        blocks_per_sm = max(1, min(_MAX_BLOCKS_PER_SM, REGISTERS_PER_SM // (registers * lanes)))
        num_sms = target_device().num_sms
        if self.num_rows >= _MANY_ROWS * num_sms:
            blocks_per_sm = 1
        self.num_blocks = min(self.num_rows, blocks_per_sm * num_sms)
        self.whole = Rows(split, num_sequences * num_tokens)
        self.own = Rows(split, self.num_rows)

    @property
    def launch(self) -> dict[str, Any]:
        """Keyword arguments of `plgpu.kernel`."""
        return {
            "grid": (self.num_blocks,),
            "grid_names": ("block",),
            "num_threads": self.split.warpgroups,
            "thread_name": "warpgroup",
            "scratch_types": self.own.exchange,
        }

    def flags(self) -> Any:
        """Two counters of arrived peers for each warpgroup, all zero between kernels."""
        shape = 2, self.num_blocks, self.split.warpgroups
        return pl.get_global(plgpu.SemaphoreType.REGULAR(shape))

    def token(self, row: Any, device: Any) -> Any:
        """Which of all tokens a row of a device's shard is."""
        sequence, token = jax.lax.div(row, self._shard), jax.lax.rem(row, self._shard)
        return sequence * self._tokens + device * self._shard + token

    def remote(self, ref: Any, device: Any) -> Any:
        """`ref` in the memory of a device of the axis."""
        return plgpu.remote_ref(ref, self._id(device))

    def _id(self, device: Any) -> tuple[Any, ...]:
        names = jax.sharding.get_abstract_mesh().axis_names
        return tuple(
            device if name == self.axis_name else jax.lax.axis_index(name) for name in names
        )

    def others(self) -> list[Any]:
        """The other devices, each device's in another order, so that no one is asked by all."""
        me = jax.lax.axis_index(self.axis_name)
        return [jax.lax.rem(me + k, self.num_devices) for k in range(1, self.num_devices)]

    def for_rows(self, body: Callable[[Any, Any, Any], Any], init: Any) -> Any:
        """`carry = body(step, row, carry)` for all rows of this block."""
        block = jax.lax.axis_index("block")
        steps = jax.lax.div(self.num_rows - block + self.num_blocks - 1, self.num_blocks)
        step_of = lambda step, carry: body(step, block + step * self.num_blocks, carry)
        return jax.lax.fori_loop(0, steps, step_of, init)

    def wait_for_others(self, flags: Any, index: int) -> None:
        """Waits until the same warpgroup of every other device is here."""
        block, warpgroup = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")
        flag = flags.at[index, block, warpgroup]
        for device in self.others():
            pl.semaphore_signal(flag, device_id=self._id(device))
        pl.semaphore_wait(flag, self.num_devices - 1)

    def fetch_from_others(self, ref: Any) -> None:
        """Copies the other devices' rows of an array with all tokens into this device's."""
        warpgroup = jax.lax.axis_index("warpgroup")

        def fetch(_, row, carry):
            found = []
            for device in self.others():
                token = self.token(row, device)
                for start in self.split.starts:
                    here = self.whole.at(ref, token, warpgroup, start)
                    found.append((here, load(self.remote(here, device), self.whole.layout)))
            for here, chunk in found:
                store(here, chunk)
            return carry

        self.for_rows(fetch, None)

    def sum_of_all(self, ref: Any, token: Any, warpgroup: Any) -> list[jax.Array]:
        """The chunks of a token, added up over the devices in float32, in their order."""
        chunks = [
            [
                load(
                    self.remote(self.whole.at(ref, token, warpgroup, start), device),
                    self.whole.layout,
                )
                for start in self.split.starts
            ]
            for device in range(self.num_devices)
        ]
        total = [chunk.astype(jnp.float32) for chunk in chunks[0]]
        for of_device in chunks[1:]:
            total = [a + b.astype(jnp.float32) for a, b in zip(total, of_device, strict=True)]
        return total


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
    assert split is not None  # unsupported_reason
    shards = _Shards(options.axis_name, batch, num_tokens, split, _FORWARD_REGISTERS)
    own, whole = shards.own, shards.whole
    y_rows = whole if options.gather else own

    def kernel(
        partial_gmem,
        residual_gmem,
        weight_gmem,
        y_gmem,
        residual_out_gmem,
        rstd_gmem,
        sums_smem,
        barrier,
    ):
        warpgroup = jax.lax.axis_index("warpgroup")
        me = jax.lax.axis_index(options.axis_name)
        flags = shards.flags()
        weights = [own.load_weight(weight_gmem, warpgroup, start) for start in split.starts]

        def normalize(step, row, carry):
            token = shards.token(row, me)
            added = [
                load(own.at(residual_gmem, row, warpgroup, start), own.layout)
                for start in split.starts
            ]
            sums = shards.sum_of_all(partial_gmem, token, warpgroup)
            values = [
                (total + chunk.astype(jnp.float32)).astype(dtype)
                for total, chunk in zip(sums, added, strict=True)
            ]
            squares = [jnp.square(value.astype(jnp.float32)) for value in values]
            mean = own.sum(squares, warpgroup, sums_smem, barrier, step) * (1 / hidden_size)
            rstd = jax.lax.rsqrt(mean + options.eps)
            own.store_scalar(rstd_gmem, row, warpgroup, rstd)
            for value, weight, start in zip(values, weights, split.starts, strict=True):
                store(own.at(residual_out_gmem, row, warpgroup, start), value)
                x_hat = as_scaled(value.astype(jnp.float32) * rstd, options.casting, dtype)
                y = (x_hat * own.scale(weight, options.weight_offset)).astype(dtype)
                y_row = token if options.gather else row
                store(y_rows.at(y_gmem, y_row, warpgroup, start), y)
            return carry

        shards.for_rows(normalize, None)
        shards.wait_for_others(flags, 0)
        if options.gather:
            shards.fetch_from_others(y_gmem)
            shards.wait_for_others(flags, 1)

    run = gpu_kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(y_rows.shape, dtype),
            jax.ShapeDtypeStruct(own.shape, dtype),
            jax.ShapeDtypeStruct((shards.num_rows,), jnp.float32),
        ),
        kernel_name="sharded_add_rms_norm_fwd",
        **shards.launch,
    )
    operands = (
        partial.reshape(whole.shape),
        residual.reshape(own.shape),
        weight.reshape(own.weight_shape),
    )
    barrier = jax.lax.optimization_barrier
    y, residual_out, rstd = barrier(run(*barrier(operands)))
    y_shape = partial.shape if options.gather else residual.shape
    return y.reshape(y_shape), residual_out.reshape(residual.shape), rstd


def _backward(
    options: _Options,
    dy: Float[Array, "*B tokens D"],
    dresidual_out: Float[Array, "*B shard D"],
    source: Float[Array, "*B shard D"],
    rstd: Float[Array, " rows"],
    weight: Float[Array, " D"],
) -> tuple[Float[Array, "*B T D"], Float[Array, "*B shard D"], Float[Array, " D"]]:
    """`(dpartial, dresidual, dweight)`, the last in float32 and of this device's tokens.

    With `x_hat = source · rstd` and `dx_hat = Σ_devices dy · (weight + weight_offset)`:
    `dx = rstd · (dx_hat - x_hat · mean(dx_hat · x_hat)) + dresidual_out` are the rows of
    `dpartial` and of `dresidual`; `dweight = Σ_tokens Σ_devices dy · x_hat`.
    """
    *batch, shard, hidden_size = source.shape
    dtype = source.dtype
    split = _split(hidden_size, dtype.itemsize)
    assert split is not None  # unsupported_reason
    num_tokens = shard * jax.lax.axis_size(options.axis_name)
    shards = _Shards(options.axis_name, batch, num_tokens, split, _BACKWARD_REGISTERS)
    own, whole = shards.own, shards.whole

    def kernel(
        dy_gmem,
        dresidual_out_gmem,
        source_gmem,
        rstd_gmem,
        weight_gmem,
        dpartial_gmem,
        dresidual_gmem,
        dweight_gmem,
        sums_smem,
        barrier,
    ):
        block = jax.lax.axis_index("block")
        warpgroup = jax.lax.axis_index("warpgroup")
        me = jax.lax.axis_index(options.axis_name)
        flags = shards.flags()
        weights = [own.load_weight(weight_gmem, warpgroup, start) for start in split.starts]

        def own_chunks(ref, row):
            return [
                load(own.at(ref, row, warpgroup, start), own.layout).astype(jnp.float32)
                for start in split.starts
            ]

        def differentiate(step, row, dweight):
            token = shards.token(row, me)
            added = own_chunks(dresidual_out_gmem, row)
            row_rstd = own.load_scalar(rstd_gmem, row)
            x_hats = [chunk * row_rstd for chunk in own_chunks(source_gmem, row)]
            if options.gather:
                dys = shards.sum_of_all(dy_gmem, token, warpgroup)
            else:
                dys = own_chunks(dy_gmem, row)
            scaled = [
                chunk * own.scale(weight, options.weight_offset)
                for chunk, weight in zip(dys, weights, strict=True)
            ]
            products = [a * b for a, b in zip(scaled, x_hats, strict=True)]
            mean = own.sum(products, warpgroup, sums_smem, barrier, step) * (1 / hidden_size)
            sums = []
            for k, start in enumerate(split.starts):
                dx = (scaled[k] - x_hats[k] * mean) * row_rstd + added[k]
                dx = dx.astype(dtype)
                store(own.at(dresidual_gmem, row, warpgroup, start), dx)
                store(whole.at(dpartial_gmem, token, warpgroup, start), dx)
                x_hat = as_scaled(x_hats[k], options.casting, dtype)
                sums.append(dweight[k] + dys[k] * x_hat)
            return tuple(sums)

        zeros = plgpu.layout_cast(jnp.zeros((4, split.chunk), jnp.float32), own.layout)
        dweight = shards.for_rows(differentiate, (zeros,) * len(split.starts))
        for start, value in zip(split.starts, dweight, strict=True):
            warps = pl.ds(WARPS_PER_WARPGROUP * warpgroup, WARPS_PER_WARPGROUP)
            store(dweight_gmem.at[block, warps, pl.ds(start, split.chunk)], value)
        shards.wait_for_others(flags, 0)
        shards.fetch_from_others(dpartial_gmem)
        shards.wait_for_others(flags, 1)

    run = gpu_kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(whole.shape, dtype),
            jax.ShapeDtypeStruct(own.shape, dtype),
            jax.ShapeDtypeStruct((shards.num_blocks, *own.weight_shape), jnp.float32),
        ),
        kernel_name="sharded_add_rms_norm_bwd",
        **shards.launch,
    )
    operands = (
        dy.reshape((whole if options.gather else own).shape),
        dresidual_out.reshape(own.shape),
        source.reshape(own.shape),
        rstd,
        weight.reshape(own.weight_shape),
    )
    barrier = jax.lax.optimization_barrier
    dpartial, dresidual, dweight = barrier(run(*barrier(operands)))
    return (
        dpartial.reshape(*batch, num_tokens, hidden_size),
        dresidual.reshape(source.shape),
        jnp.sum(dweight.reshape(-1, hidden_size), axis=0),
    )
