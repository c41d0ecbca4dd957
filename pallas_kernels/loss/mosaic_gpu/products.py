"""Matrix products of the gradients, as a Mosaic GPU kernel; for Hopper.

XLA's GEMMs are as fast, but as a rule do not write into a part of a larger array. While Triton and
cuBLAS compete for a product (`xla_gpu_enable_triton_gemm`, on by default), its result is a separate
float32 array, which XLA then copies, or casts, to its place (JAX 0.11.2). In the loop of the loss
on an H100, 2048 rows of `dweight` of 4096 with 8192 tokens take 182 us, and 20 more for the copy.
XLA has a Mosaic kernel read its operands where they are, and write its result where it belongs, in
the dtype that it has there. This one takes 178 us.

`a` and `b` may be contiguous along K or not. So wgmma reads none, one or both operands transposed
from shared memory, which costs nothing for types of 16 bits. The loop is the one in
`pallas_kernels/gpu/hopper_gemm.py`. Results leave a warpgroup through shared memory, 128 bytes of
each row at a time: one piece is made while the piece before is stored.

The kernel makes no sums over chunks of tokens, although TMA can add the values that it stores. At
2048 x 128256 x 4096 such a sum takes 1.10 times a product that only stores; cuBLAS' sum takes 1.02
to 1.09. At 1024 x 256000 x 2304 it takes 1.8 times such a product; cuBLAS' sum takes 1.47.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.gpu import hopper_gemm
from pallas_kernels.gpu.arrays import at_aligned_addresses
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
)
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.layouts import load
from pallas_kernels.loss.mosaic_gpu.stored_layouts import Interleaved

_LINE_BYTES = 128  # bytes of a row that go through shared memory at a time
_TILES = (256, 192, 128)  # columns
_STAGES = {256: 4, 192: 4, 128: 6}
# Time to store a tile's result, as the number of columns of a tile that take as long to multiply.
# The warpgroup multiplies nothing while it stores.
# The results of 132 tiles of 128 x 256 float32 are 17 MB: 5.2 us at the 3.35 TB/s of an H100. In
# 5.6 us a multiprocessor does 16 columns of a tile with 8192 tokens, at 791 TF/s for all 132.
STORE_COST = 16
# 8 blocks. At a depth of 128256, fewer blocks share too little. Times over cuBLAS of dx alone:
# - 8192 tokens at D = 4096: 1.003 with 8 blocks, 1.02 with 2, 1.28 with 1.
# - 4096 tokens at D = 8192: 0.996 with 8 blocks, 1.05 with 2, 2.02 with 1.
BAND_ROWS = 1024
_ROW = plgpu.Layout.WGMMA.reduce(1)  # a value for each row of a tile
_RESULTS = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


def default_config(num_rows: int, num_columns: int, depth: int, device: Device) -> Config:
    """Launch parameters to use: derived, except the cluster of one block, which is measured.

    Pairs of blocks that share `x` are as fast as single blocks if nothing runs before and after. In
    the loop of the loss pairs take 195 us and single blocks 178 (8192 x 2048 x 4096, H100).
    """
    _, tile_n = best_tile(num_rows, num_columns, device)
    return hopper_gemm.default_config(
        num_rows,
        num_columns,
        depth,
        device,
        tile_n=tile_n,
        stages=_STAGES[tile_n],
        max_cluster=1,
        band_rows=BAND_ROWS,
    )


def best_tile(num_rows: int, num_columns: int, device: Device) -> tuple[int, int]:
    """`(cost, tile_n)` of the tiles that take the least time.

    The cost is the number of columns of all tiles of the busiest multiprocessor, and `STORE_COST`
    for each tile. An example is dx of 4096 tokens at D = 2304, which has 288 tiles of 256 columns.
    Some of the 132 multiprocessors of an H100 have three tiles, and the product takes 9.5 ms;
    cuBLAS takes 6.8. With 192 columns they have three tiles as well, which are narrower.
    """
    blocks = pl.cdiv(num_rows, BLOCK_M)
    widths = [n for n in _TILES if num_columns % n == 0] or _TILES
    tiles_each = lambda n: pl.cdiv(blocks * pl.cdiv(num_columns, n), device.num_sms)
    cost, tile_n = min((tiles_each(n) * (n + STORE_COST), -n) for n in widths)
    return cost, -tile_n


def unsupported_reason(a: Operand, b: Operand, dtype: DTypeLike) -> str | None:
    """Why the kernel cannot run these arguments on the default device, or None if it can."""
    reason = hopper_gemm.unsupported_reason(target_device(), a, b)
    for name, operand in (("a", a), ("b", b)):
        if reason is None and operand.shape[1] % TILE_K:
            reason = (
                f"{name} of shape {operand.shape}: the width of its rows is not a multiple of "
                f"{TILE_K}"
            )
    if reason is None and jnp.dtype(dtype) not in _RESULTS:
        reason = f"the result is {jnp.dtype(dtype)}, not {' or '.join(map(str, _RESULTS))}"
    return reason


def shape_of_pieces(dtype: jnp.dtype) -> tuple[int, int, int, int]:
    """Shape of the shared memory through which `store_tile` stores results of this dtype."""
    return WARPGROUPS, 2, TILE_M, _LINE_BYTES // dtype.itemsize


def store_tile(
    found: Float[Array, "64 N"], pieces_smem: Any, result_gmem: Any, row: Any, column: Any
) -> None:
    """Stores a warpgroup's sums into the result, rounded once.

    Args:
      found: Sums of the warpgroup's rows of a tile.
      pieces_smem: Shared memory of the shape of `shape_of_pieces`.
      result_gmem: Result in device memory.
      row: First row of the sums in the result.
      column: First column, known to be a multiple of the last size of `pieces_smem`.
    """
    slots = pieces_smem.at[jax.lax.axis_index("warpgroup")]
    width = pieces_smem.shape[-1]
    # `store_piece` says why no piece may lie past the only block of columns of an array.
    num_pieces = min(found.shape[1], result_gmem.shape[1]) // width
    for i in range(num_pieces):
        to = result_gmem.at[pl.ds(row, TILE_M), pl.ds(column + i * width, width)]
        piece = found[:, i * width : (i + 1) * width].astype(result_gmem.dtype)
        store_piece(i, piece, slots, to)


def product(
    a: Float[Array, "I J"] | Sequence[Float[Array, "I _"]],
    b: Float[Array, "rows columns"],
    *,
    a_layout: Literal["MK", "KM"],
    b_layout: Literal["KN", "NK"] = "KN",
    a_stored: Interleaved | None = None,
    dtype: DTypeLike,
    num_rows: int | None = None,
    row_factor: Float[Array, " M"] | None = None,
    first_row_of_b: int = 0,
    kernel_name: str = "product",
    config: Config | None = None,
) -> Float[Array, "M _"]:
    """The product of `a` and `b`, added up in float32 and rounded once.

    Above 80 lines, because it documents and checks many arguments that its kernel's body needs.

    Args:
      a: Array of layout `a_layout`, bfloat16 or float16; J is a multiple of 64. Columns past K
        (`"MK"`) or M (`"KM"`) are not read. With `"MK"` several arrays may follow each other in
        K; all except the last are read whole.
      b: Matrix of layout `b_layout`, in the dtype of `a`; its width is a multiple of 64.
      a_layout: Layout of `a`: `"MK"` for `a @ b`, `"KM"` for `a.T @ b`.
      b_layout: Layout of `b`: `"NK"` for a product with `b.T`.
      a_stored: Layout of an `a` that is `"MK"`, whose rows are tokens; None for a plain array.
      dtype: Dtype of the result: float32, bfloat16 or float16.
      num_rows: Number of rows of the result, M, if `a` is `"KM"` or there is `a_stored`; None
        takes M from `a`.
      row_factor: Factor of each row of the result, applied before rounding.
      first_row_of_b: Row of `b` that goes with the first element of K, a multiple of 64; the rows
        before it follow the last. If it is not 0, K must be a multiple of 64.
      kernel_name: Name of the kernel in profiles.
      config: Launch parameters; chosen if None.

    Raises:
      NotImplementedError: `unsupported_reason` gives a reason.
      ValueError: `a` is too small for `b` or `num_rows`, or the configuration does not fit.
    """
    parts = [a] if isinstance(a, jax.Array) else list(a)
    for part in parts:
        if (reason := unsupported_reason(part, b, dtype)) is not None:
            raise NotImplementedError(f"implementation='mosaic_gpu': {reason}")
    depth, num_columns = (b.shape[b_layout.index(axis)] for axis in "KN")
    shape = parts[0].shape
    available = sum(part.shape[a_layout.index("K")] for part in parts)
    if a_stored is not None:
        available //= a_stored.tokens_of_row
    if available < depth:
        raise ValueError(f"a has {available} of the {depth} in K that b of shape {b.shape} has")
    rows_of_a = shape[a_layout.index("M")] * (a_stored.tokens_of_row if a_stored else 1)
    if num_rows is None:
        num_rows = rows_of_a
    if num_rows > rows_of_a:
        raise ValueError(f"a has {rows_of_a} of the {num_rows=} of the result")
    dtype, device = jnp.dtype(dtype), target_device()
    if config is None:
        config = default_config(num_rows, num_columns, depth, device)
    rows = BLOCK_M * config.cluster
    groups = pl.cdiv(num_rows, rows)
    # This makes copies if K is not a multiple of 64.
    b = jnp.pad(b, [(0, -depth % TILE_K) if axis == "K" else (0, 0) for axis in b_layout])
    if a_layout == "KM":
        parts = [jnp.pad(part, ((0, -depth % TILE_K), (0, 0))) for part in parts]
    operands = [b, *parts]
    if row_factor is not None:
        operands.append(jnp.pad(row_factor, (0, groups * rows - num_rows)))
    loop = MainLoop(
        config=config,
        num_rows=num_rows,
        num_columns=num_columns,
        depth=b.shape[b_layout.index("K")],
        dtype=b.dtype,
        a_layout=a_layout,
        b_layout=b_layout,
    )
    pieces = shape_of_pieces(dtype)
    loop.check_fits(device, extra_bytes=dtype.itemsize * math.prod(pieces))

    def kernel(b_gmem, *refs):
        a_gmems, refs = list(refs[: len(parts)]), list(refs[len(parts) :])
        factor_gmem = None if row_factor is None else refs.pop(0)
        result_gmem, pieces_smem, *scratch = refs

        def stored_part(stored, row, step):
            at = stored.aligned(row, step * TILE_K)
            return [(None, a_gmems[0].at[pl.ds(at[0], BLOCK_M), pl.ds(at[1], TILE_K)])]

        def tile(row, column, multiply):
            factor = None
            if factor_gmem is not None:
                factor = load(factor_gmem.at[pl.ds(row, TILE_M)], _ROW)
            (found,) = multiply()
            if factor is not None:
                found *= jax.lax.broadcast_in_dim(factor, found.shape, (0,))
            store_tile(found, pieces_smem, result_gmem, row, column)

        loop.run(
            a_gmems,
            [[b_gmem]],
            scratch,
            tile=tile,
            end=wait_for_pieces,
            first_step_of_b=first_row_of_b // TILE_K,
            parts_of_a=None if a_stored is None else functools.partial(stored_part, a_stored),
        )

    # Whole groups of 8 rows, because TMA swizzles 8 rows together and cuts no group.
    result = gpu_kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_rows + -num_rows % 8, num_columns), dtype),
        **loop.launch,
        scratch_types=[plgpu.SMEM(pieces, dtype), *loop.scratch_types],
        kernel_name=kernel_name,
    )(*at_aligned_addresses(operands))
    return result[:num_rows]
