"""Quantization to FP8 as a Mosaic GPU kernel for Hopper: both memory orders in one pass.

Device memory bounds the kernel: it reads an element once and writes it twice, a byte each. A block
is one warpgroup with a tile of `x`, which TMA brings into shared memory. The warpgroup goes through
pieces of 64 x 64:

1. It loads a piece in the layout of wgmma's results, multiplies, and rounds to 8 bits.
2. It stores the piece for the row-major copy.
3. It turns the piece by `ldmatrix`, which transposes 16-bit elements only. Every 8-bit number is a
   float16 number, so the piece takes this way as float16, and no number changes. (For bfloat16,
   `ldmatrix` can turn the piece of `x` itself. That saves 0.3 %, and float32 cannot go this way.)

TMA stores both copies of the tile. Blocks go along the rows of `x`; down the columns they take 3 to
4 % longer. Scales come from another pass over `x`, because the first tile needs the maximum of all
tiles.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.gpu.arrays import at_aligned_addresses
from pallas_kernels.gpu.device import target_device
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.layouts import load

PIECE = 64  # rows and columns, as wgmma's layout has them
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_ROWS, _COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The tile of a block.

    Speeds of six tiles from 64 x 64 to 256 x 64 differ by 1.5 % on an H100 (2026-11-24, jax
    0.11.2): 187 to 190 us for 16384 x 8192 bfloat16, where a copy of as many bytes takes 178.

    Attributes:
      rows: Most rows of `x`, a multiple of 64 up to 256; a tile has the largest number of them that
        divides both this number and that of all rows.
      columns: Most columns of `x`, in the same way.
    """

    rows: int = 64
    columns: int = 128

    def __post_init__(self):
        for name in ("rows", "columns"):
            size = getattr(self, name)
            if size % PIECE or not PIECE <= size <= 256:
                raise ValueError(f"{name}={size} must be a multiple of {PIECE} up to 256")


def unsupported_reason(x: jax.Array) -> str | None:
    """Why the kernel does not take the array, or None if it does."""
    device = target_device()
    if device.capability is not None and device.capability[0] != 9:
        return f"the kernel is for compute capability (9, x), {device.kind} has {device.capability}"
    if x.dtype not in _DTYPES:
        return f"x is {x.dtype}, not bfloat16, float16 or float32; cast it to one of these dtypes"
    if x.size == 0:
        return f"x of shape {x.shape} is empty"
    if x.ndim != 2 or any(size % PIECE for size in x.shape):
        return f"x has shape {x.shape}; the kernel takes two axes of multiples of {PIECE}"
    return None


def quantize(
    x: Float[Array, "M K"],
    scale: Array | None,
    turned_scale: Array | None,
    dtype: DTypeLike,
    *,
    config: Config | None = None,
) -> tuple[Array | None, Array | None]:
    """`x / scale` and `x.T / turned_scale`, rounded to `dtype`; None where the scale is None.

    The caller has asked `unsupported_reason`, which is None. A scale must come from a maximum over
    `x`: the GPU's cast clips larger numbers, and an infinity over a finite scale would become the
    largest number of `dtype`.

    Args:
      x: Array to quantize.
      scale: Float32 scale `[]`, or scales `[M, 1]` of the rows of `x`.
      turned_scale: Float32 scale `[]`, or scales `[K, 1]` of the columns of `x`.
      dtype: `float8_e4m3fn` or `float8_e5m2`.
      config: Tile of a block; None for the default.
    """
    config = config or Config()
    x = at_aligned_addresses(x)
    num_rows, num_columns = x.shape
    # A tile divides the array. So no copy ends outside of it, and none lies beside a block of TMA
    # that is the only one of a dimension, whose index Mosaic drops.
    tile = math.gcd(config.rows, num_rows), math.gcd(config.columns, num_columns)
    scales = [s for s in (scale, turned_scale) if s is not None]
    column_tiles = num_columns // tile[1]
    shapes = (x.shape, tile), (x.shape[::-1], tile[::-1])
    wanted = [
        shape for shape, s in zip(shapes, (scale, turned_scale), strict=True) if s is not None
    ]
    out = gpu_kernel(
        functools.partial(_kernel, tile, column_tiles, scale is not None, turned_scale is not None),
        kernel_name="fp8_quantize",
        out_type=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, _ in wanted),
        grid=(num_rows // tile[0] * column_tiles,),
        grid_names=("tile",),
        scratch_types=(
            plgpu.SMEM(tile, x.dtype),
            plgpu.SMEM((PIECE, PIECE), jnp.float16),
            *(plgpu.SMEM(shape, dtype) for _, shape in wanted),
            plgpu.Barrier(),
        ),
    )(x, *((1 / s).reshape(-1) for s in scales))
    rest = iter(at_aligned_addresses(out))
    return (None if scale is None else next(rest)), (None if turned_scale is None else next(rest))


def _kernel(
    shape: tuple[int, int],
    column_tiles: int,
    has_plain: bool,
    has_turned: bool,
    x_gmem: Any,
    *refs: Any,
) -> None:
    """Quantizes the tile of a block."""
    num = has_plain + has_turned
    inverses, outs, (x_smem, turn_smem, *smems, barrier) = (
        refs[:num],
        refs[num : 2 * num],
        refs[2 * num :],
    )
    tile = jax.lax.axis_index("tile")
    row = jax.lax.div(tile, column_tiles) * shape[0]
    column = jax.lax.rem(tile, column_tiles) * shape[1]
    rows, columns = pl.ds(row, shape[0]), pl.ds(column, shape[1])
    plgpu.copy_gmem_to_smem(x_gmem.at[rows, columns], x_smem, barrier)
    plgpu.barrier_wait(barrier)

    def inverse(ref, first, axis):
        """The reciprocal scales of a piece, or of all."""
        if ref.shape == (1,):
            return ref[0]
        vector = load(ref.at[pl.ds(first, PIECE)], _ROWS if axis == 0 else _COLUMNS)
        return jax.lax.broadcast_in_dim(vector, (PIECE, PIECE), (axis,))

    def quantize_piece(i, j):
        in_rows, in_columns = pl.ds(i * PIECE, PIECE), pl.ds(j * PIECE, PIECE)
        piece = plgpu.load(x_smem.at[in_rows, in_columns], layout=plgpu.Layout.WGMMA)
        piece = piece.astype(jnp.float32)
        dtype = outs[0].dtype
        values = None
        if has_plain:
            values = (piece * inverse(inverses[0], row + i * PIECE, 0)).astype(dtype)
            smems[0][in_rows, in_columns] = values
        if has_turned:
            if values is None or inverses[-1].shape != (1,):
                values = (piece * inverse(inverses[-1], column + j * PIECE, 1)).astype(dtype)
            turn_smem[...] = values.astype(jnp.float16)
            turned = plgpu.load(turn_smem.transpose((1, 0)), layout=plgpu.Layout.WGMMA)
            smems[-1][in_columns, in_rows] = turned.astype(dtype)

    for i in range(shape[0] // PIECE):
        for j in range(shape[1] // PIECE):
            quantize_piece(i, j)
    plgpu.commit_smem()
    if has_plain:
        plgpu.copy_smem_to_gmem(smems[0], outs[0].at[rows, columns])
    if has_turned:
        plgpu.copy_smem_to_gmem(smems[-1], outs[-1].at[columns, rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
