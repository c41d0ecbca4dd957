"""The GEMMs of a gated MLP with the elementwise work in their epilogues; for Hopper.

*Forward*, `silu(x @ w_gate) · (x @ w_up)`: both products of a tile are wgmma accumulators of the
same warpgroup, so that their activation needs no memory. At T=8192, D=4096, F=14336 in bfloat16
that is 1.92 Tflop, 2.4 ms at the 808 TF/s of the two bare GEMMs on an H100. XLA's GEMMs write gate
and up (470 MB). Another kernel reads both and writes the product: 705 MB, 0.24 ms at 3 TB/s.

*Backward*, from `dy` to `dgate`, `dup` and the product again: `dproduct = dy @ w_down.T` exists as
an accumulator only. The warpgroups of a block take turns: one reads gate and up and writes three
results while the other multiplies. That takes 0.90 to 0.92 of the time of warpgroups that share a
tile (`docs/lab/2026-11-23-mlp-epilogues.md`). XLA writes `dproduct`, and then a kernel reads three
arrays and writes three.

The loop is in `pallas_kernels/gpu/hopper_gemm.py`. The epilogues go through the tile in pieces of
columns by way of shared memory. The reason: a lane holds pairs of neighbouring columns of a row,
and TMA makes whole lines of them.

Rounding: gate and up are rounded to the dtype of `x` before anything is computed from them, as if
they had been stored. So the results equal, bit by bit, those that are computed from stored ones
later. All other numbers are float32, rounded once. `dproduct` is not rounded.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.gpu import hopper_gemm
from pallas_kernels.gpu.device import Device, target_device
from pallas_kernels.gpu.hopper_gemm import (
    BLOCK_M,
    TILE_K,
    TILE_M,
    WARPGROUPS,
    Config,
    MainLoop,
    Operand,
    store_piece,
    wait_for_pieces,
    whole_tiles,
)
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.math import APPROXIMATE, logistic, rounded
from pallas_kernels.mlp import formula

# D and F are multiples of this, because Mosaic copies whole blocks of 8 rows by 64 columns.
_MULTIPLE = TILE_K
# Columns of a piece of the forward. A piece goes through shared memory, 128 bytes of a row.
_PIECE = 64
# Columns of a piece of the backward, which has pieces of three arrays in shared memory.
_BACKWARD_PIECE = 32
_SLOTS = 3  # places for pieces in shared memory: one at work, one arriving, one leaving


def default_config(
    num_tokens: int, intermediate_size: int, hidden_size: int, device: Device, *, keep: bool
) -> Config:
    """Launch parameters of the forward: the best of a sweep at two sizes on an H100.

    With gate and up, three stages leave room for five of a warpgroup's six pieces. Their stores
    then run beside the next tile (docs/lab/2026-11-29-instructions-of-epilogues.md).
    """
    return hopper_gemm.default_config(
        num_tokens, intermediate_size, hidden_size, device, tile_n=128, stages=3 if keep else 4
    )


def default_backward_config(
    num_tokens: int, intermediate_size: int, hidden_size: int, device: Device
) -> Config:
    """Launch parameters of the backward: the best of a sweep at two sizes on an H100."""
    return hopper_gemm.default_config(
        num_tokens,
        intermediate_size,
        hidden_size,
        device,
        tile_n=192,
        stages=4,
        max_cluster=1,
    )


def unsupported_reason(activations: Sequence[Operand], weights: Sequence[Operand]) -> str | None:
    """Why these kernels cannot run, or None if they can.

    Args:
      activations: Arrays `[..., D]` or `[..., F]`.
      weights: Arrays `[D, F]` or `[F, D]`.
    """
    reason = hopper_gemm.unsupported_reason(target_device(), *activations, *weights)
    fitting = lambda size: size + -size % _MULTIPLE
    sizes = dict.fromkeys(size for w in weights for size in w.shape if size != fitting(size))
    if reason is not None or not sizes:
        return reason
    padded = " and ".join(f"{size} to {fitting(size)}" for size in sizes)
    return (
        f"weights of shapes {', '.join(str(w.shape) for w in weights)} have sizes that are not "
        f"multiples of {_MULTIPLE}; pad {padded} with zeros"
    )


def gated_matmul(
    x: Float[Array, "T D"],
    w_gate: Float[Array, "D F"],
    w_up: Float[Array, "D F"],
    *,
    keep: bool,
    config: Config | None = None,
) -> tuple[Float[Array, "T F"], ...]:
    """`(silu(gate) · up,)` with `gate = x @ w_gate` and `up = x @ w_up`.

    `unsupported_reason` must be None for the arguments.

    Args:
      x: Input, bfloat16 or float16.
      w_gate: First weight, of the dtype of `x`; D and F are multiples of 64.
      w_up: Second weight, of the same shape and dtype.
      keep: Whether to return gate and up, too: `(product, gate, up)`.
      config: Launch parameters; chosen if None.

    Raises:
      ValueError: The configuration does not fit the device.
    """
    num_tokens, hidden_size = x.shape
    num_columns = w_gate.shape[1]
    device = target_device()
    if config is None:
        config = default_config(num_tokens, num_columns, hidden_size, device, keep=keep)
    loop = MainLoop(
        config=config,
        num_rows=num_tokens,
        num_columns=num_columns,
        depth=hidden_size,
        dtype=x.dtype,
        num_b=2,
        b_layout="KN",
    )
    num_outputs = 3 if keep else 1
    # Slots for a tile's pieces, as many as fit. With two, one is filled while the other is stored.
    slot_bytes = x.dtype.itemsize * WARPGROUPS * TILE_M * _PIECE
    free_slots = (device.smem_bytes - loop.smem_bytes) // slot_bytes
    num_slots = max(2, min(config.tile_n // _PIECE * num_outputs, free_slots))
    loop.check_fits(device, extra_bytes=num_slots * slot_bytes)
    x = whole_tiles(x)
    output = jax.ShapeDtypeStruct((x.shape[0], num_columns), x.dtype)
    outputs = gpu_kernel(
        functools.partial(_forward_kernel, loop, num_outputs),
        out_type=(output,) * num_outputs,
        **loop.launch,
        scratch_types=[
            plgpu.SMEM((WARPGROUPS, num_slots, TILE_M, _PIECE), x.dtype),
            *loop.scratch_types,
        ],
        compiler_params=APPROXIMATE,
        kernel_name="gated_matmul",
    )(x, w_gate, w_up)
    return tuple(a[:num_tokens] for a in outputs)


def _forward_kernel(
    loop: MainLoop,
    num_outputs: int,
    x_gmem: Any,
    w_gate_gmem: Any,
    w_up_gmem: Any,
    *refs: Any,
) -> None:
    """Writes the product of each tile, and gate and up if there are three outputs."""
    outputs, (piece_smem, *scratch) = refs[:num_outputs], refs[num_outputs:]
    warpgroup = jax.lax.axis_index("warpgroup")
    # `store_piece` says why no piece may lie past the only block of columns of an array.
    num_pieces = min(loop.config.tile_n, loop.num_columns) // _PIECE

    def tile(row, column, multiply):
        accumulators = multiply()
        for i in range(num_pieces):
            columns = slice(i * _PIECE, (i + 1) * _PIECE)
            gate, up = (rounded(acc[:, columns], loop.dtype) for acc in accumulators)
            in_float32 = gate.astype(jnp.float32), up.astype(jnp.float32)
            product = formula.product(*in_float32, logistic=logistic).astype(loop.dtype)
            # Gate and up leave while the product is computed.
            values = (product, gate, up)[:num_outputs]
            stores = reversed(list(zip(values, outputs, strict=True)))
            for j, (value, output) in enumerate(stores):
                to = output.at[pl.ds(row, TILE_M), pl.ds(column + i * _PIECE, _PIECE)]
                store_piece(i * num_outputs + j, value, piece_smem.at[warpgroup], to)

    loop.run([x_gmem], [[w_gate_gmem], [w_up_gmem]], scratch, tile=tile, end=wait_for_pieces)


def gated_matmul_backward(
    dy: Float[Array, "T D"],
    w_down: Float[Array, "F D"],
    gate: Float[Array, "T F"],
    up: Float[Array, "T F"],
    *,
    with_product: bool = True,
    config: Config | None = None,
) -> tuple[Float[Array, "T F"], ...]:
    """`(dgate, dup, product)` of `y = product @ w_down` with `product = silu(gate) · up`.

    `unsupported_reason` must be None for the arguments.

    Args:
      dy: Gradient of `y`, bfloat16 or float16.
      w_down: Weight, of the dtype of `dy`; D and F are multiples of 64.
      gate: Gate projection, as the forward kept it.
      up: Up projection, as the forward kept it.
      with_product: Whether to return the product. The forward may have kept it.
      config: Launch parameters; chosen if None.

    Raises:
      ValueError: The configuration does not fit the device.
    """
    num_tokens, hidden_size = dy.shape
    num_columns = w_down.shape[0]
    device = target_device()
    if config is None:
        config = default_backward_config(num_tokens, num_columns, hidden_size, device)
    loop = MainLoop(
        config=config,
        num_rows=num_tokens,
        num_columns=num_columns,
        depth=hidden_size,
        dtype=dy.dtype,
        in_turns=True,
    )
    # dgate and dup take the places of gate and up. The product only leaves, so it has fewer slots.
    pieces = (WARPGROUPS, _SLOTS, 2, TILE_M, _BACKWARD_PIECE)
    products = (WARPGROUPS, _SLOTS - 1, TILE_M, _BACKWARD_PIECE)
    num_numbers = math.prod(pieces) + math.prod(products)
    loop.check_fits(device, extra_bytes=dy.dtype.itemsize * num_numbers)
    dy, gate, up = whole_tiles(dy), whole_tiles(gate), whole_tiles(up)
    output = jax.ShapeDtypeStruct((dy.shape[0], num_columns), dy.dtype)
    num_outputs = 3 if with_product else 2
    outputs = gpu_kernel(
        functools.partial(_backward_kernel, loop, num_outputs),
        out_type=(output,) * num_outputs,
        **loop.launch,
        scratch_types=[
            plgpu.SMEM(pieces, dy.dtype),
            plgpu.SMEM(products, dy.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS * _SLOTS),
            *loop.scratch_types,
        ],
        compiler_params=APPROXIMATE,
        kernel_name="gated_matmul_backward",
    )(dy, w_down, gate, up)
    return tuple(a[:num_tokens] for a in outputs)


def _backward_kernel(
    loop: MainLoop,
    num_outputs: int,
    dy_gmem: Any,
    w_down_gmem: Any,
    gate_gmem: Any,
    up_gmem: Any,
    *refs: Any,
) -> None:
    """Reads gate and up of each tile piece by piece; writes dgate, dup and perhaps the product."""
    outputs, (piece_smem, product_smem, loaded, *scratch) = refs[:num_outputs], refs[num_outputs:]
    warpgroup = jax.lax.axis_index("warpgroup")
    halves = BLOCK_M // TILE_M
    num_pieces = halves * loop.config.tile_n // _BACKWARD_PIECE

    def tile(row, column, multiply):
        def first_of(i):
            """The first row and column of a piece in the tile; pieces past all columns are last."""
            return i % halves * TILE_M, i // halves * _BACKWARD_PIECE

        def of_piece(i, gmem):
            r, c = first_of(i)
            return gmem.at[pl.ds(row + r, TILE_M), pl.ds(column + c, _BACKWARD_PIECE)]

        def where_columns(i):
            """Decorates a function that runs only if the piece has columns."""
            if loop.num_columns % loop.config.tile_n == 0:
                return lambda do: do()
            return pl.when(column + first_of(i)[1] < loop.num_columns)

        def slot_of(i):
            slot = i % _SLOTS
            return piece_smem.at[warpgroup, slot], loaded.at[warpgroup * _SLOTS + slot]

        def fetch(i):
            smem, filled = slot_of(i)
            for j, gmem in enumerate((gate_gmem, up_gmem)):
                plgpu.copy_gmem_to_smem(of_piece(i, gmem), smem.at[j], filled)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i in range(_SLOTS - 1):
            where_columns(i)(lambda i=i: fetch(i))
        dproducts = multiply()
        for i in range(num_pieces):

            @where_columns(i)
            def _differentiate(i=i):
                smem, filled = slot_of(i)
                plgpu.barrier_wait(filled)
                c = first_of(i)[1]
                dproduct = dproducts[i % halves][:, c : c + _BACKWARD_PIECE]
                gate, up = smem[0].astype(jnp.float32), smem[1].astype(jnp.float32)
                results = formula.gradients(gate, up, dproduct, logistic=logistic)
                slots = smem.at[0], smem.at[1], product_smem.at[warpgroup, i % (_SLOTS - 1)]
                stores = list(zip(slots, results, outputs, strict=False))
                for slot, result, _ in stores:
                    slot[...] = result.astype(loop.dtype)
                plgpu.commit_smem()
                for slot, _, output in stores:
                    plgpu.copy_smem_to_gmem(slot, of_piece(i, output))
                # Waits until all stores but these have read their slots. So the slots of the piece
                # before are free.
                plgpu.wait_smem_to_gmem(num_outputs, wait_read_only=True)
                following = i + _SLOTS - 1
                if following < num_pieces:
                    where_columns(following)(lambda: fetch(following))

    loop.run([dy_gmem], [[w_down_gmem]], scratch, tile=tile, end=wait_for_pieces)
