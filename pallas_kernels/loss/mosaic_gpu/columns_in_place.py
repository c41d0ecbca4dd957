"""Columns of a `dweight [D, V]`, made from exponentials that lay in its own memory; for Hopper.

A column of `[D, V]` is no contiguous memory. But the layout `Interleaved` (`stored_layouts.py`)
keeps the exponentials of each 256 columns in the memory of 256 columns of `dweight`. So `dweight`
is made a band of columns at a time: XLA copies the exponentials of the band, and a kernel writes
the band over them.

`in_place.py` makes bands of rows without these copies. XLA then has one kernel read and write
parts of one array, which must be contiguous. Here the kernel gets the whole `dweight` to write in
place. If it gets it a second time, to read the exponentials, XLA copies `dweight` twice in each
iteration (JAX 0.11.2). The copies of bands read and write 4 bytes for each token and column. For
8192 tokens and V = 128256 that is 4.2 GB, 1.3 ms of an H100's memory time (computed). The loss with
gradients takes 38.1 ms there at D = 4096, chunks of 2048 tokens take 37.2, and both take 34.6 for
`[V, D]`, where three GEMMs take 33.8 (`docs/lab/2026-11-24-weights-of-columns.md`).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.gpu import hopper_gemm
from pallas_kernels.gpu.device import Device, target_device
from pallas_kernels.gpu.hopper_gemm import (
    BLOCK_M,
    TILE_K,
    Config,
    MainLoop,
    wait_for_pieces,
)
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.loss.mosaic_gpu import products
from pallas_kernels.loss.mosaic_gpu.stored_layouts import Interleaved

TILE = 256  # columns of a tile of `Interleaved`, and of the kernel's widest tile


class Part(NamedTuple):
    """Exponentials of some tokens.

    Attributes:
      values: Array of the layout `stored`.
      stored: Layout of the array.
      first: Column in the array's layout that is the first of the result.
    """

    values: Float[Array, "rows columns"]
    stored: Interleaved
    first: Any


def default_config(num_rows: int, num_columns: int, depth: int, device: Device) -> Config:
    """Launch parameters to use: derived from those of the other products."""
    return hopper_gemm.default_config(
        num_rows,
        num_columns,
        depth,
        device,
        tile_n=TILE,
        stages=4,
        max_cluster=1,
        band_rows=products.BAND_ROWS,
    )


def num_tiles(num_rows: int, num_columns: int, device: Device) -> int:
    """Number of tiles that the busiest multiprocessor makes."""
    return pl.cdiv(num_rows // BLOCK_M * (num_columns // TILE), device.num_sms)


def with_columns(
    dweight: Float[Array, "D V"],
    parts: Sequence[Part],
    x: Float[Array, "T D"],
    first: Any,
    *,
    num_columns: int,
    config: Config | None = None,
) -> Float[Array, "D V"]:
    """`dweight` with the product of `x.T` and exponentials in some columns, rounded once.

    Above 80 lines, because the kernel's body needs what is prepared before it.

    Args:
      dweight: Array to write into, float32 or of 16 bits; D is a multiple of 128.
      parts: Exponentials, whose tokens follow each other; all except the last are read whole.
      x: Hidden states times the factors of their tokens, in the dtype of the exponentials.
      first: First column to write.
      num_columns: Number of columns, a multiple of 256.
      config: Launch parameters; chosen if None.

    Raises:
      ValueError: The configuration does not fit the device or the layout.
    """
    device = target_device()
    num_tokens, hidden_size = x.shape
    if config is None:
        config = default_config(hidden_size, num_columns, num_tokens, device)
    if TILE % config.tile_n or config.cluster > 1:
        raise ValueError(f"{config}: {TILE} columns must have whole tiles, and a cluster one block")
    x = jnp.pad(x, ((0, -num_tokens % TILE_K), (0, 0)))
    loop = MainLoop(
        config=config,
        num_rows=hidden_size,
        num_columns=num_columns,
        depth=len(x),
        dtype=x.dtype,
        a_layout="KM",
        b_layout="KN",
    )
    pieces = products.shape_of_pieces(dweight.dtype)
    loop.check_fits(device, extra_bytes=dweight.dtype.itemsize * math.prod(pieces))
    firsts = jnp.stack([jnp.asarray(i, jnp.int32) for i in (first, *(p.first for p in parts))])

    def kernel(x_gmem, firsts_gmem, *refs):
        of_parts, (dweight_gmem, pieces_smem, *scratch) = refs[: len(parts)], refs[len(parts) :]
        to_column, *from_columns = [firsts_gmem[i] for i in range(1 + len(parts))]

        def exponentials(column, step):
            end, found = 0, []
            for part, gmem, from_column in zip(parts, of_parts, from_columns, strict=True):
                start, end = end, end + part.stored.height * part.stored.tokens_of_row // TILE_K
                is_here = (start <= step) & (step < end) if len(parts) > 1 else None
                token = (step - start) * TILE_K
                row, place = part.stored.aligned(token, from_column + column)
                found.append((is_here, gmem.at[pl.ds(row, TILE_K), pl.ds(place, config.tile_n)]))
            return found

        def tile(row, column, multiply):
            (found,) = multiply()
            column = pl.multiple_of(to_column + column, pieces[-1])
            products.store_tile(found, pieces_smem, dweight_gmem, row, column)

        loop.run([x_gmem], [], scratch, tile=tile, end=wait_for_pieces, parts_of_b=exponentials)

    (written,) = gpu_kernel(
        kernel,
        out_type=[],
        **loop.launch,
        scratch_types=[plgpu.SMEM(pieces, dweight.dtype), *loop.scratch_types],
        kernel_name="weight_gradient_columns",
        in_place=2 + len(parts),
    )(x, firsts, *(part.values for part in parts), dweight)
    return written
