"""Shards of tokens on several devices, and reads of the other devices' memory."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.device import blocks_per_sm, target_device
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.layouts import load, store
from pallas_kernels.norm.rows import Rows, RowSplit

# The most registers of a lane that ptxas for sm_90a counts with 16 elements a lane (`tests/aot`).
# From them follows the number of blocks that a multiprocessor holds at a time for certain.
FORWARD_REGISTERS, BACKWARD_REGISTERS = 128, 168
_MAX_BLOCKS_PER_SM = 2
# Rows of a shard for each multiprocessor from which one block there is faster than two: fewer reads
# at a time keep the links busy. On four H200s, 8192 x 4096 tokens (15.5 rows) take 0.359 ms with
# one and 0.373 with two, 1024 x 8192 (1.9 rows) 0.142 and 0.130.
_MANY_ROWS = 8


class Shards:
    """The rows of each device's shard, and the ways to the other devices.

    A block has the rows `block, block + num_blocks, ...` of every shard. It makes the rows of its
    own device and reads the rows of the others.

    Attributes:
      split: How warps share a row.
      num_devices: Number of devices of the axis, n.
      num_rows: Rows of a shard, over all sequences.
      num_blocks: Blocks of each device; all run at the same time.
      whole: Rows of arrays with all tokens.
      own: Rows of arrays with a device's tokens.
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
        num_sms = target_device().num_sms
        most = 1 if self.num_rows >= _MANY_ROWS * num_sms else _MAX_BLOCKS_PER_SM
        blocks = max(1, min(most, blocks_per_sm(registers, split.lanes)))
        self.num_blocks = min(self.num_rows, blocks * num_sms)
        self.whole = Rows(split, num_sequences * num_tokens)
        self.own = Rows(split, self.num_rows)

    def launch(
        self,
        kernel: Callable[..., None],
        operands: tuple[jax.Array, ...],
        out_type: tuple[jax.ShapeDtypeStruct, ...],
        kernel_name: str,
    ) -> Sequence[jax.Array]:
        """The results of a kernel, which XLA does not fuse with slices of its arrays."""
        run = gpu_kernel(
            kernel,
            out_type=out_type,
            grid=(self.num_blocks,),
            grid_names=("block",),
            num_threads=self.split.warpgroups,
            thread_name="warpgroup",
            scratch_types=self.own.exchange,
            kernel_name=kernel_name,
        )
        barrier = jax.lax.optimization_barrier
        return barrier(run(*barrier(operands)))

    def flags(self) -> Any:
        """Two counters of arrived peers for each warpgroup, which are zero between kernels."""
        shape = 2, self.num_blocks, self.split.warpgroups
        return pl.get_global(plgpu.SemaphoreType.REGULAR(shape))

    def token(self, row: Any, device: Any) -> Any:
        """The number, among all tokens, of a row of a device's shard."""
        sequence, token = jax.lax.div(row, self._shard), jax.lax.rem(row, self._shard)
        return sequence * self._tokens + device * self._shard + token

    def remote(self, ref: Any, device: Any) -> Any:
        """The same array as `ref` in the memory of a device of the axis."""
        return plgpu.remote_ref(ref, self._id(device))

    def _id(self, device: Any) -> tuple[Any, ...]:
        names = jax.sharding.get_abstract_mesh().axis_names
        return tuple(
            device if name == self.axis_name else jax.lax.axis_index(name) for name in names
        )

    def others(self) -> list[Any]:
        """The other devices, in an order that differs by device, so that not all ask one."""
        me = jax.lax.axis_index(self.axis_name)
        return [jax.lax.rem(me + k, self.num_devices) for k in range(1, self.num_devices)]

    def for_rows(self, body: Callable[[Any, Any, Any], Any], init: Any) -> Any:
        """Runs `carry = body(step, row, carry)` for all rows of this block."""
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
                for chunk in self.split.chunks:
                    here = self.whole.at(ref, token, warpgroup, chunk)
                    found.append((here, load(self.remote(here, device), chunk.layout)))
            for here, value in found:
                store(here, value)
            return carry

        self.for_rows(fetch, None)

    def sum_of_all(self, ref: Any, token: Any, warpgroup: Any) -> list[jax.Array]:
        """The chunks of a token, added up in float32 in the order of the devices."""
        values = [
            [
                load(
                    self.remote(self.whole.at(ref, token, warpgroup, chunk), device),
                    chunk.layout,
                )
                for chunk in self.split.chunks
            ]
            for device in range(self.num_devices)
        ]
        total = [value.astype(jnp.float32) for value in values[0]]
        for of_device in values[1:]:
            total = [a + b.astype(jnp.float32) for a, b in zip(total, of_device, strict=True)]
        return total
