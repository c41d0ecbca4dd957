"""A computation on chunks of an axis, one after the other, in the memory of one."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpu.arrays import at_aligned_addresses

# Of two of our blocks that share operands, of one and of XLA's GEMMs, of none.
_TILES = (256, 128, 1)


def even_chunk_size(size: int, chunk_size: int) -> int:
    """Elements of a chunk of `fold_chunks`: `chunk_size`, or a third where that would make two."""
    if not size > chunk_size >= size / 2:
        return chunk_size
    third = math.ceil(size / 3)
    sizes = [tile * math.ceil(third / tile) for tile in _TILES]
    # Of 2 or 4 elements no chunks make three.
    return next((s for s in sizes if s <= chunk_size and 2 * s < size), 1)


def fold_chunks(
    body: Callable[[Any, Any], tuple[Any, Any]],
    arrays: Any,
    chunk_size: int,
    *,
    axis: int = 0,
    stack: bool = False,
    first: tuple[int, Callable[[Any], tuple[Any, Any]]] | None = None,
) -> tuple[Any, Any]:
    """Runs `body` on chunks of an axis.

    The first chunk is as short as it has to be for the others to be full; what it returns starts
    the sums, which saves writing zeros. Two chunks would be no less than one: after the first, a
    loop of one step is left, which XLA unrolls, merges with the first, and has both in memory. So
    there are three then, of whole tiles where they are that long.

    Args:
      body: `(chunk, start) -> (summands, parts)`.
      arrays: a pytree; None is no array.
      chunk_size: of the axis, at most.
      axis: of all arrays, and of the parts.
      stack: whether parts are stacked along a new axis there, or written where their chunk was.
      first: size of the first chunk, of which the others are full then, and what is done with it
        instead, before the others.

    Returns:
      The sums of the summands, and the parts.
    """
    size = jax.tree.leaves(arrays)[0].shape[axis]
    if first is not None:
        first_size, first_body = first
        num_chunks = 1 + math.ceil((size - first_size) / chunk_size)
    else:
        chunk_size = even_chunk_size(size, chunk_size)
        num_chunks = max(1, math.ceil(size / chunk_size))
        first_size = size - (num_chunks - 1) * chunk_size
        first_body = lambda chunk: body(chunk, 0)
    sums, part = first_body(
        jax.tree.map(lambda a: jax.lax.slice_in_dim(a, 0, first_size, axis=axis), arrays)
    )
    if num_chunks == 1:
        return sums, jax.tree.map(lambda a: jnp.expand_dims(a, axis), part) if stack else part
    if first is not None:
        # Not before the first is done, or both would be in memory.
        sums, part, arrays = jax.lax.optimization_barrier((sums, part, arrays))
    length = num_chunks if stack else size

    # GEMMs read and write chunks where they lie, too. What is one number a row comes from and goes
    # to XLA's own code, which does so anywhere.
    apart = lambda a: at_aligned_addresses(a) if a.ndim > 1 else a

    def put(all_parts, part, start):
        part = jnp.expand_dims(part, axis) if stack else apart(part)
        return jax.lax.dynamic_update_slice_in_dim(all_parts, part, start, axis)

    def buffer_of(part):
        shape = list(part.shape)
        shape[axis : axis if stack else axis + 1] = [length]
        return put(jnp.zeros(shape, part.dtype), part, 0)  # XLA pads it

    def step(i, carry):
        sums, parts = carry
        start = first_size + i * chunk_size
        slice_of = lambda a: apart(jax.lax.dynamic_slice_in_dim(a, start, chunk_size, axis))
        summands, part = body(jax.tree.map(slice_of, arrays), start)
        sums = jax.tree.map(jnp.add, sums, summands)
        place = i + 1 if stack else start
        parts = jax.tree.map(lambda all_parts, p: put(all_parts, p, place), parts, part)
        return sums, parts

    # Not a scan over starts: of these XLA for GPUs does not see that they follow from the number of
    # the iteration, and then it copies slices for GEMMs and kernels, and what these make of them.
    carry = sums, jax.tree.map(buffer_of, part)
    return jax.lax.fori_loop(0, num_chunks - 1, step, carry)
