"""Quantization to FP8 as a Mosaic GPU kernel for Hopper: both memory orders in one pass.

Device memory bounds the kernel: it reads an element once and writes it twice, a byte each. A block
is one warpgroup, which goes along a strip of up to 4 tiles of 64 x 64:

1. TMA brings tiles of `x` into three slots of shared memory: the tile in use and the next two.
2. The warpgroup loads a tile in the layout of wgmma's results, multiplies, and rounds to 8 bits.
3. It stores the tile for the row-major copy.
4. It transposes the tile by `ldmatrix`, which takes 16-bit elements only. Every 8-bit number is a
   float16 number, so the tile is transposed as float16, and no number changes. (A bfloat16 tile of
   `x` could be transposed before it is rounded. That saves 0.3 %, and is not possible in float32.)
5. TMA stores both copies, while the warpgroup handles the next tile.

Strips go along the rows of `x`. Blocks of one tile took 3 to 4 % longer in the order of columns
(H100, docs/lab/2026-11-24-fp8-quantization.md). Scales come from another pass over `x`, because the
first tile needs the maximum of all tiles.

The kernel can also take several arrays, and compute the tensors to quantize from a tile of each
(`quantize_computed`). With SwiGLU's backward it takes 1.3 to 1.5 times as long as a copy of its
bytes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.fp8.inputs import Inputs, slot_types, tiles_of_block
from pallas_kernels.fp8.types import BlockwiseInt8
from pallas_kernels.gpu.arrays import at_aligned_addresses, unsupported_dtype
from pallas_kernels.gpu.device import target_device
from pallas_kernels.gpu.kernel import gpu_kernel, in_groups, shared
from pallas_kernels.gpu.layouts import load
from pallas_kernels.gpu.math import APPROXIMATE, rounded

TILE = 64  # rows and columns, as wgmma's layout has them
_LAYOUT = plgpu.Layout.WGMMA
_ROWS, _COLUMNS = _LAYOUT.reduce(1), _LAYOUT.reduce(0)
_MOST_TILES = 4  # of a block; with 8, one array takes up to 4 % longer
# Slots for tiles of the arrays, and buffers for tiles of the copies. With 2 and 1, the copies of
# SwiGLU's backward take 430 us in place of 421 (16384 x 8192, `rowwise`, H200, 2026-11-29).
_SLOTS, _BUFFERS = 3, 2


def unsupported_reason(x: jax.Array) -> str | None:
    """Why the kernel does not take the array, or None if it does."""
    device = target_device()
    if device.capability is not None and device.capability[0] != 9:
        return f"the kernel is for compute capability (9, x), {device.kind} has {device.capability}"
    if (reason := unsupported_dtype("x", x.dtype)) is not None:
        return reason
    if x.size == 0:
        return f"x of shape {x.shape} is empty"
    if x.ndim != 2 or any(size % TILE for size in x.shape):
        return (
            f"x has shape {x.shape}; the kernel takes two axes of multiples of {TILE}, so pad x "
            "with zeros"
        )
    return None


def quantize(
    x: Float[Array, "M K"],
    scale: Array | None,
    transposed_scale: Array | None,
    dtype: DTypeLike,
) -> tuple[Array | None, Array | None]:
    """`x · (1 / scale)`, and the same of `x.T`, rounded to `dtype`; None where a scale is None.

    The caller has asked `unsupported_reason`, which is None. A scale must come from a maximum over
    `x`: the GPU's cast clips larger numbers, and an infinity over a finite scale would become the
    largest number of `dtype`.

    Args:
      x: Array to quantize.
      scale: Float32 scale `[]`, or scales `[M, 1]` of the rows of `x`.
      transposed_scale: Float32 scale `[]`, or scales `[K, 1]` of the columns of `x`.
      dtype: `float8_e4m3fn` or `float8_e5m2`.
    """
    scales = [(scale, transposed_scale)]
    return quantize_computed((x,), unchanged, scales, (dtype,), name="fp8_quantize")[0]


def unchanged(x: jax.Array) -> tuple[jax.Array]:
    """The array, as a function that computes the tensors to quantize."""
    return (x,)


@shared("compute", "dtypes", "name")
def quantize_computed(
    arrays: Sequence[Float[Array, "M K"] | BlockwiseInt8],
    compute: Callable[..., Sequence[jax.Array]],
    scales: Sequence[tuple[Array | None, Array | None]],
    dtypes: tuple[DTypeLike, ...],
    *,
    name: str,
) -> Sequence[tuple[Array | None, Array | None]]:
    """`quantize` of tensors that an elementwise function makes of arrays, in the same pass.

    Args:
      arrays: Arguments of the function, of one shape.
      compute: Function of a module, of a tile of each array, in float32 where the array is in int8;
        it returns a tile of each tensor.
      scales: Scales of each tensor's row-major copy and of its transposed copy, as in `quantize`;
        None for no such copy. Two scales `[]` of a tensor must be the same number.
      dtypes: Dtype of each tensor's copies.
      name: Name of the kernel.
    """
    given, structure_of_scales = jax.tree.flatten(scales)  # None is no leaf
    if not given:
        return scales
    leaves, structure = jax.tree.flatten(at_aligned_addresses(list(arrays)))
    num_rows, num_columns = leaves[0].shape
    copies = [
        _Copy(i, transposed, scale.size == 1, dtype)
        for i, (of_tensor, dtype) in enumerate(zip(scales, dtypes, strict=True))
        for transposed, scale in zip((False, True), of_tensor, strict=True)
        if scale is not None
    ]
    column_tiles = num_columns // TILE
    num_tiles = tiles_of_block(column_tiles, num_rows // TILE, _MOST_TILES)
    strips = column_tiles // num_tiles
    num_slots, num_buffers = min(_SLOTS, num_tiles), min(_BUFFERS, num_tiles)
    num_of_columns = sum(c.has_scale_of_column for c in copies)
    shape_of = lambda shape, c: shape[::-1] if c.transposed else shape
    out = gpu_kernel(
        functools.partial(_kernel, strips, num_tiles, compute, structure, copies),
        kernel_name=name,
        compiler_params=APPROXIMATE,
        out_type=tuple(
            jax.ShapeDtypeStruct(shape_of((num_rows, num_columns), c), c.dtype) for c in copies
        ),
        grid=(num_rows // TILE * strips,),
        grid_names=("block",),
        scratch_types=(
            *slot_types(arrays, (TILE, TILE), num_slots),
            *(plgpu.SMEM((num_slots, TILE), jnp.float32) for _ in range(num_of_columns)),
            *(plgpu.SMEM((num_buffers, TILE, TILE), c.dtype) for c in copies),
            plgpu.SMEM((TILE, TILE), jnp.float16),
            plgpu.Barrier(num_arrivals=len(leaves) + num_of_columns, num_barriers=num_slots),
        ),
    )(*leaves, *((1 / scale).reshape(-1) for scale in given))
    return jax.tree.unflatten(structure_of_scales, at_aligned_addresses(out))


@dataclasses.dataclass(frozen=True, slots=True)
class _Copy:
    """A copy that the kernel makes.

    Attributes:
      tensor: Number of the tensor.
      transposed: Whether the copy is transposed.
      one_scale: Whether the tensor has one scale.
      dtype: Dtype of the copy.
    """

    tensor: int
    transposed: bool
    one_scale: bool
    dtype: DTypeLike

    @property
    def has_scale_of_column(self) -> bool:
        """Whether each column of the tensor has a scale."""
        return self.transposed and not self.one_scale


def _kernel(
    strips: int,
    num_tiles: int,
    compute: Callable[..., Sequence[jax.Array]],
    structure: Any,
    copies: Sequence[_Copy],
    *refs: Any,
) -> None:
    """Computes and quantizes the tiles of a strip."""
    n, m = structure.num_leaves, len(copies)
    with_scales = [i for i, c in enumerate(copies) if c.has_scale_of_column]
    gmems, inverses, outs, smems, scale_smems, out_smems, (tile_smem, arrived) = in_groups(
        refs, n, m, m, n, len(with_scales), m, 2
    )
    of_columns = dict(zip(with_scales, scale_smems, strict=True))
    inputs = Inputs(structure.unflatten(gmems), structure.unflatten(smems), arrived)
    num_slots, num_buffers = smems[0].shape[0], out_smems[0].shape[0]
    block = jax.lax.axis_index("block")
    row = jax.lax.div(block, strips) * TILE
    first_column = jax.lax.rem(block, strips) * (num_tiles * TILE)
    rows = pl.ds(row, TILE)

    def fetch(tile: Any, slot: Any) -> None:
        column = first_column + tile * TILE
        inputs.fetch(row, column, slot)
        for i, smem in of_columns.items():
            plgpu.copy_gmem_to_smem(
                inverses[i].at[pl.ds(column, TILE)], smem.at[slot], arrived.at[slot]
            )

    for slot in range(num_slots):
        fetch(slot, slot)

    def inverse(i: int, slot: Any) -> jax.Array:
        """The reciprocal scales of a copy's tile, or of all tiles."""
        if copies[i].one_scale:
            return inverses[i][0]
        if i in of_columns:
            vector, axis = load(of_columns[i].at[slot], _COLUMNS), 1
        else:
            vector, axis = load(inverses[i].at[rows], _ROWS), 0
        return jax.lax.broadcast_in_dim(vector, (TILE, TILE), (axis,))

    @pl.loop(0, num_tiles)
    def quantize_tile(tile):
        slot, buffer = jax.lax.rem(tile, num_slots), jax.lax.rem(tile, num_buffers)
        columns = pl.ds(first_column + tile * TILE, TILE)
        plgpu.barrier_wait(arrived.at[slot])
        computed = compute(*inputs.load(slot, pl.ds(0, TILE), _LAYOUT))
        tensors = [rounded(t, t.dtype).astype(jnp.float32) for t in computed]
        plgpu.wait_smem_to_gmem(num_buffers - 1, wait_read_only=True)
        of_tensor = {}  # values that serve both orders, because they have one scale
        for i, (copy, smem) in enumerate(zip(copies, out_smems, strict=True)):
            values = of_tensor.get(copy.tensor) if copy.one_scale else None
            if values is None:
                values = (tensors[copy.tensor] * inverse(i, slot)).astype(copy.dtype)
                if copy.one_scale:
                    of_tensor[copy.tensor] = values
            if copy.transposed:
                tile_smem[...] = values.astype(jnp.float16)
                values = plgpu.load(tile_smem.transpose((1, 0)), layout=_LAYOUT).astype(copy.dtype)
            smem[buffer] = values

        plgpu.commit_smem()  # all warps have also read the slot
        for i, (copy, out, smem) in enumerate(zip(copies, outs, out_smems, strict=True)):
            to = out.at[columns, rows] if copy.transposed else out.at[rows, columns]
            # The copies of a tile are one group, so that a wait counts tiles.
            plgpu.copy_smem_to_gmem(smem.at[buffer], to, commit_group=i == len(copies) - 1)
        if num_tiles > num_slots:
            pl.when(tile + num_slots < num_tiles)(lambda: fetch(tile + num_slots, slot))

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
