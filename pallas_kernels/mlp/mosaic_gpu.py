"""Elementwise SwiGLU as Mosaic GPU kernels, forward and backward.

Device memory bounds both, so each array goes through it once. Bytes moved, in units of one array
`[T, F]`: forward 3 (gate, up; the product), backward 5 (gate, up, dy; dgate, dup). XLA moves as
many where it fuses the formula.

Kept for the backward: the arguments `gate` and `up`. The backward computes sigmoid and product
again.

Arithmetic is float32, and each result is rounded once to the dtype of the arguments. Nothing is
added up, so results depend neither on the launch parameters nor on the order of blocks.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.gpu.arrays import (
    apart_from_stacks,
    at_aligned_addresses,
    unsupported_dtype,
)
from pallas_kernels.gpu.device import BYTES_PER_ACCESS, LANES, WARPS_PER_WARPGROUP, target_device
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.layouts import load, store
from pallas_kernels.layout import Place, Roles, Tokens
from pallas_kernels.mapping import Mask
from pallas_kernels.mlp import formula
from pallas_kernels.mlp.config import Config, default_config
from pallas_kernels.operation import call
from pallas_kernels.partition import partitioned
from pallas_kernels.protocol import Arrays, Cotangents, Operation, with_members

_LANES_PER_BLOCK = WARPS_PER_WARPGROUP * LANES
# Mosaic GPU computes indices in 32 bits, and the offset of a row in 64.
_MAX_INDEX = 2**31


def unsupported_reason(gate: jax.Array, up: jax.Array) -> str | None:
    """Why the kernels do not take these arguments, or None if they do."""
    if (reason := unsupported_dtype("gate", gate.dtype, "cast gate and up to")) is not None:
        return reason
    if gate.dtype != up.dtype:
        return (
            f"gate is {gate.dtype} and up is {up.dtype}; the kernels take one dtype, so cast one "
            "of them"
        )
    return None


def swiglu(
    gate: Float[Array, "*T F"], up: Float[Array, "*T F"], *, config: Config | None
) -> Float[Array, "*T F"]:
    """`silu(gate) · up` of `pallas_kernels.swiglu`.

    `unsupported_reason` must be None for the arguments.

    Raises:
      NotImplementedError: The result is differentiated in forward mode, or twice.
    """
    config = config or default_config(target_device(), gate.shape[-1], gate.dtype)
    return call(_SwiGLU(config), gate, up)[0]


_ARRAY = Tokens()  # no axis has a meaning, so a mesh may split all of them


@dataclasses.dataclass(frozen=True, slots=True)
class _SwiGLU:
    """`silu(gate) · up` of `(gate, up)`."""

    config: Config

    name = "swiglu"

    def forward(self, wanted: Mask | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        return partitioned(_forward_of, self.config, Roles((_ARRAY,) * 2, (_ARRAY,)), *args)

    def num_residuals(self, wanted: Mask) -> int:
        return 0

    def saved(
        self, wanted: Mask, args: Arrays, results: Arrays, residuals: Arrays
    ) -> tuple[Arrays, Arrays]:
        return apart_from_stacks(results), args

    def backward(self, wanted: Mask, saved: Arrays, cotangents: Cotangents) -> Arrays:
        (dy,) = cotangents
        assert dy is not None  # JAX asks for no gradient of a result without one
        roles = Roles((_ARRAY,) * 3, (_ARRAY,) * 2)
        gradients = partitioned(_backward_of, self.config, roles, *saved, dy)
        return [g for g, is_wanted in zip(gradients, wanted, strict=True) if is_wanted]

    def fold(self, wanted: Mask | None, args: Arrays, is_batched: Mask) -> tuple[Operation, Arrays]:
        return self, with_members(args, is_batched)


def _forward_of(config: Config, place: Place) -> Callable[..., tuple[jax.Array, ...]]:
    """The forward of a device's arrays: `(product,)`."""
    return lambda *args: _elementwise(
        lambda gate, up: (formula.product(gate, up),),
        args,
        num_results=1,
        accesses=config.fwd_accesses,
        name="swiglu_fwd",
    )


def _backward_of(config: Config, place: Place) -> Callable[..., tuple[jax.Array, ...]]:
    """The backward of a device's arrays: `(dgate, dup)`."""
    return lambda *args: _elementwise(
        lambda gate, up, dy: formula.gradients(gate, up, dy)[:2],
        args,
        num_results=2,
        accesses=config.bwd_accesses,
        name="swiglu_bwd",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """A flat array, dealt to blocks.

    The lanes of a block access a *chunk* of 128 vectors together. Most blocks have a *tile* of
    several chunks. If tiles do not divide the array, a *tail* of at least one chunk follows the
    last tile, and each chunk of the tail has a block. If chunks do not divide the tail, the last
    block has one more chunk. It ends with the array and repeats elements of the chunk before it,
    which the same block has: no element belongs to two blocks.

    Attributes:
      num_elements: Size of the array, a multiple of `vector` and at least a chunk.
      vector: Elements in one access of a lane.
      accesses: Chunks in a tile.
    """

    num_elements: int
    vector: int
    accesses: int

    @property
    def chunk(self) -> int:
        """Elements that the lanes of a block access together."""
        return _LANES_PER_BLOCK * self.vector

    @property
    def tile(self) -> int:
        """Elements of most blocks."""
        return self.accesses * self.chunk

    @property
    def num_tiles(self) -> int:
        """Blocks with a tile."""
        if self.num_elements % self.tile == 0:
            return self.num_elements // self.tile
        return (self.num_elements - self.chunk) // self.tile

    @property
    def num_tail_chunks(self) -> int:
        """Blocks with a chunk of the tail."""
        return (self.num_elements - self.num_tiles * self.tile) // self.chunk

    @property
    def is_ragged(self) -> bool:
        """Whether the last block has a second chunk."""
        return self.num_elements % self.chunk != 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that the kernel sees: a row for each tile, or flat if there is a tail."""
        return (self.num_elements,) if self.num_tail_chunks else (self.num_tiles, self.tile)


def deal(num_elements: int, itemsize: int, accesses: int) -> tuple[Tiles, int]:
    """The tiles of a flat array, and the number of elements to pad the array with first.

    Vectors are 16 bytes if that divides the array, and shorter otherwise: under `jax.vmap` an array
    starts at a multiple of its own size, and an access must start at a multiple of the vector's.

    Args:
      num_elements: Size of the array, at least 1.
      itemsize: Bytes of an element.
      accesses: Accesses of 16 bytes that a lane makes to an array; it makes more of shorter ones,
        for as many bytes.
    """
    vector = widest = BYTES_PER_ACCESS // itemsize
    if num_elements < _MAX_INDEX:
        padded = max(num_elements, _LANES_PER_BLOCK)
        while padded % vector or padded < _LANES_PER_BLOCK * vector:
            vector //= 2
        accesses *= widest // vector
    else:
        # Only rows have offsets beyond 32 bits, so tiles must divide the array. They do in any
        # model, where F is a multiple of 64. For other sizes a padded copy is simple and right.
        chunk = _LANES_PER_BLOCK * vector
        padded = -(-num_elements // chunk) * chunk
        accesses = math.gcd(accesses, padded // chunk)
    return Tiles(padded, vector, accesses), padded - num_elements


def _elementwise(
    compute: Callable[..., tuple[jax.Array, ...]],
    arrays: tuple[jax.Array, ...],
    *,
    num_results: int,
    accesses: int,
    name: str,
) -> tuple[jax.Array, ...]:
    """A function of float32 chunks, applied to arrays of one shape and dtype, in one pass.

    Args:
      compute: Function of one chunk of each array, which returns one chunk of each result.
      arrays: Arrays to read.
      num_results: Number of arrays to write, of the same shape and dtype.
      accesses: Accesses of 16 bytes that a lane makes to each array.
      name: Name of the kernel.
    """
    shape, dtype, size = arrays[0].shape, arrays[0].dtype, arrays[0].size
    if size == 0:
        return (jnp.zeros(shape, dtype),) * num_results
    arrays = at_aligned_addresses(arrays)
    tiles, padding = deal(size, dtype.itemsize, accesses)
    num_arrays, num_blocks = len(arrays), tiles.num_tiles + tiles.num_tail_chunks

    def kernel(*refs):
        block = jax.lax.axis_index("block")

        def apply(part, num_elements):
            layout = plgpu.Layout.WG_STRIDED((num_elements,), vec_size=tiles.vector)
            # All loads come first, so that they are on their way together.
            chunks = [load(ref.at[part], layout) for ref in refs[:num_arrays]]
            results = compute(*(chunk.astype(jnp.float32) for chunk in chunks))
            for ref, result in zip(refs[num_arrays:], results, strict=True):
                store(ref.at[part], result.astype(dtype))

        if not tiles.num_tail_chunks:
            apply(block, tiles.tile)
            return
        if tiles.num_tiles:

            @pl.when(block < tiles.num_tiles)
            def _tile():
                apply(pl.ds(block * tiles.tile, tiles.tile), tiles.tile)

        @pl.when(block >= tiles.num_tiles)
        def _tail():
            first = tiles.num_tiles * (tiles.tile - tiles.chunk)
            apply(pl.ds(first + block * tiles.chunk, tiles.chunk), tiles.chunk)

        if tiles.is_ragged:

            @pl.when(block == num_blocks - 1)
            def _end():
                apply(pl.ds(tiles.num_elements - tiles.chunk, tiles.chunk), tiles.chunk)

    flat = [a.reshape(-1) for a in arrays]
    if padding:
        flat = [jnp.pad(a, (0, padding)) for a in flat]
    results = gpu_kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct(tiles.shape, dtype),) * num_results,
        grid=(num_blocks,),
        grid_names=("block",),
        # The kernel reads nothing that it has written, so the warps of a block need not wait for
        # each other around every store.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name=name,
    )(*(a.reshape(tiles.shape) for a in flat))
    if padding:
        results = [a.reshape(-1)[:size] for a in results]
    return at_aligned_addresses(tuple(a.reshape(shape) for a in results))
