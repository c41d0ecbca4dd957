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

The kernel can also take several arrays, and compute the tensors to quantize from a piece of each
(`quantize_computed`).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.fp8.types import BLOCK, BlockwiseInt8, dequantized
from pallas_kernels.gpu.arrays import at_aligned_addresses, unsupported_dtype
from pallas_kernels.gpu.device import target_device
from pallas_kernels.gpu.kernel import gpu_kernel, shared
from pallas_kernels.gpu.layouts import load
from pallas_kernels.gpu.math import APPROXIMATE, rounded

PIECE = 64  # rows and columns, as wgmma's layout has them
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
    if (reason := unsupported_dtype("x", x.dtype)) is not None:
        return reason
    if x.size == 0:
        return f"x of shape {x.shape} is empty"
    if x.ndim != 2 or any(size % PIECE for size in x.shape):
        return (
            f"x has shape {x.shape}; the kernel takes two axes of multiples of {PIECE}, so pad x "
            "with zeros"
        )
    return None


def quantize(
    x: Float[Array, "M K"],
    scale: Array | None,
    turned_scale: Array | None,
    dtype: DTypeLike,
    *,
    config: Config | None = None,
) -> tuple[Array | None, Array | None]:
    """`x · (1 / scale)`, and the same of `x.T`, rounded to `dtype`; None where a scale is None.

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
    wanted = [Wanted(scale, turned_scale, dtype)]
    return quantize_computed((x,), unchanged, wanted, name="fp8_quantize", config=config)[0]


def unchanged(x: jax.Array) -> tuple[jax.Array]:
    """The array, as a function that computes the tensors to quantize."""
    return (x,)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """The copies of a tensor to make. Two scales of shape `[]` must be the same number.

    Attributes:
      scale: Scale or scales of the copy as it is, as in `quantize`; None for no such copy.
      turned_scale: Scale or scales of the transposed copy; None for no such copy.
      dtype: Dtype of the copies.
    """

    scale: Array | None
    turned_scale: Array | None
    dtype: DTypeLike = dataclasses.field(metadata={"static": True})


@shared("compute", "name", "config")
def quantize_computed(
    arrays: Sequence[Float[Array, "M K"] | BlockwiseInt8],
    compute: Callable[..., Sequence[jax.Array]],
    wanted: Sequence[Wanted],
    *,
    name: str,
    config: Config | None = None,
) -> list[tuple[Array | None, Array | None]]:
    """`quantize` of tensors that an elementwise function makes of arrays, in the same pass.

    Args:
      arrays: Arguments of the function, of one shape.
      compute: Function of a module, of a piece of each array, in float32 where the array is in
        int8; it returns a piece of each tensor.
      wanted: Copies to make of each tensor.
      name: Name of the kernel.
      config: Tile of a block; None for the default.
    """
    config = config or Config()
    leaves, structure = jax.tree.flatten(at_aligned_addresses(list(arrays)))
    in_tiles = [a.values if isinstance(a, BlockwiseInt8) else a for a in arrays]
    num_rows, num_columns = leaves[0].shape
    # A tile divides the array. So no copy ends outside of it, and none lies beside a block of TMA
    # that is the only one of a dimension, whose index Mosaic drops.
    tile = math.gcd(config.rows, num_rows), math.gcd(config.columns, num_columns)
    column_tiles = num_columns // tile[1]
    # The tensor's number, whether the copy is turned, and its scale, for each copy.
    copies = [
        (i, turned, scale)
        for i, w in enumerate(wanted)
        for turned, scale in ((False, w.scale), (True, w.turned_scale))
        if scale is not None
    ]
    turn = lambda shape, turned: shape[::-1] if turned else shape
    out = gpu_kernel(
        functools.partial(_kernel, tile, column_tiles, compute, structure, [c[:2] for c in copies]),
        kernel_name=name,
        compiler_params=APPROXIMATE,
        out_type=tuple(
            jax.ShapeDtypeStruct(turn((num_rows, num_columns), turned), wanted[i].dtype)
            for i, turned, _ in copies
        ),
        grid=(num_rows // tile[0] * column_tiles,),
        grid_names=("tile",),
        scratch_types=(
            *(plgpu.SMEM(tile, a.dtype) for a in in_tiles),
            plgpu.SMEM((PIECE, PIECE), jnp.float16),
            *(plgpu.SMEM(turn(tile, turned), wanted[i].dtype) for i, turned, _ in copies),
            plgpu.Barrier(num_arrivals=len(arrays)),
        ),
    )(*leaves, *((1 / scale).reshape(-1) for _, _, scale in copies))
    made = iter(at_aligned_addresses(out))
    return [
        (
            None if w.scale is None else next(made),
            None if w.turned_scale is None else next(made),
        )
        for w in wanted
    ]


def _kernel(
    shape: tuple[int, int],
    column_tiles: int,
    compute: Callable[..., Sequence[jax.Array]],
    structure: Any,
    copies: Sequence[tuple[int, bool]],
    *refs: Any,
) -> None:
    """Computes and quantizes the tile of a block."""
    rest = iter(refs)
    take = lambda count: list(itertools.islice(rest, count))
    gmems = jax.tree.unflatten(structure, take(structure.num_leaves))
    inverses, outs = take(len(copies)), take(len(copies))
    smems, turn_smem, out_smems, barrier = (
        take(len(gmems)),
        next(rest),
        take(len(copies)),
        next(rest),
    )
    tile = jax.lax.axis_index("tile")
    row = jax.lax.div(tile, column_tiles) * shape[0]
    column = jax.lax.rem(tile, column_tiles) * shape[1]
    rows, columns = pl.ds(row, shape[0]), pl.ds(column, shape[1])
    for gmem, smem in zip(gmems, smems, strict=True):
        matrix: Any = gmem.values if isinstance(gmem, BlockwiseInt8) else gmem
        plgpu.copy_gmem_to_smem(matrix.at[rows, columns], smem, barrier)
    plgpu.barrier_wait(barrier)

    def inverse(ref, first, axis):
        """The reciprocal scales of a piece, or of all."""
        if ref.shape == (1,):
            return ref[0]
        vector = load(ref.at[pl.ds(first, PIECE)], _ROWS if axis == 0 else _COLUMNS)
        return jax.lax.broadcast_in_dim(vector, (PIECE, PIECE), (axis,))

    def piece_of(gmem, smem, i, j):
        piece = smem.at[pl.ds(i * PIECE, PIECE), pl.ds(j * PIECE, PIECE)]
        values = plgpu.load(piece, layout=plgpu.Layout.WGMMA)
        if not isinstance(gmem, BlockwiseInt8):
            return values
        first = jax.lax.div(column + j * PIECE, BLOCK)
        return dequantized(values, load(gmem.scale.at[first, pl.ds(row + i * PIECE, PIECE)], _ROWS))

    pieces_of_row = shape[1] // PIECE

    # A loop, because code for each piece takes twice as long to compile.
    @pl.loop(0, shape[0] // PIECE * pieces_of_row)
    def quantize_piece(piece):
        i, j = jax.lax.div(piece, pieces_of_row), jax.lax.rem(piece, pieces_of_row)
        in_rows, in_columns = pl.ds(i * PIECE, PIECE), pl.ds(j * PIECE, PIECE)
        inputs = zip(gmems, smems, strict=True)
        computed = compute(*(piece_of(*a, i, j) for a in inputs))
        pieces = [rounded(p, p.dtype).astype(jnp.float32) for p in computed]
        of_tensor = {}  # values that serve both orders, because they have one scale
        for (k, turned), inverse_ref, out, smem in zip(
            copies, inverses, outs, out_smems, strict=True
        ):
            first, axis = (column + j * PIECE, 1) if turned else (row + i * PIECE, 0)
            values = of_tensor.get(k)
            if values is None or inverse_ref.shape != (1,):
                values = (pieces[k] * inverse(inverse_ref, first, axis)).astype(out.dtype)
                of_tensor[k] = values
            if not turned:
                smem[in_rows, in_columns] = values
                continue
            turn_smem[...] = values.astype(jnp.float16)
            back = plgpu.load(turn_smem.transpose((1, 0)), layout=plgpu.Layout.WGMMA)
            smem[in_columns, in_rows] = back.astype(out.dtype)

    plgpu.commit_smem()
    for (_, turned), out, smem in zip(copies, outs, out_smems, strict=True):
        plgpu.copy_smem_to_gmem(smem, out.at[columns, rows] if turned else out.at[rows, columns])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
