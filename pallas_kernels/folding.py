"""A computation on chunks of an axis, one after the other, in the memory of one chunk."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpu.arrays import at_aligned_addresses

# Sizes of which chunks should be multiples: two of our blocks that share operands; one block, or a
# tile of XLA's GEMMs; any size.
_TILES = (256, 128, 1)


def even_chunk_size(size: int, chunk_size: int) -> int:
    """The size of the chunks of `fold_chunks`.

    It is `chunk_size`, or about a third of the axis if `chunk_size` would make two chunks.
    """
    if not size > chunk_size >= size / 2:
        return chunk_size
    third = math.ceil(size / 3)
    sizes = [tile * math.ceil(third / tile) for tile in _TILES]
    # An axis of 2 or 4 elements cannot have three such chunks; it has chunks of 1.
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

    The first chunk is short, so that all others are full. Its results start the sums, which saves
    writing zeros. Two chunks would take as much memory as one: the loop over the second has one
    step, so XLA unrolls it, merges it with the first chunk, and has both in memory. So an axis of
    two chunks gets three, of whole tiles where they are that long.

    Args:
      body: Function `(chunk, start) -> (summands, parts)`.
      arrays: Pytree of arrays; None is no array.
      chunk_size: Largest size of a chunk.
      axis: Axis of all arrays, and of the parts; -1 is the last of each.
      stack: Whether to stack parts along a new axis. Otherwise a part is written where its chunk
        was.
      first: Size of the first chunk, and a function to run on it in place of `body`, before the
        others. The other chunks must then be full.

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
        # The loop must wait for the first chunk, or both would be in memory.
        sums, part, arrays = jax.lax.optimization_barrier((sums, part, arrays))
    length = num_chunks if stack else size

    # GEMMs read and write chunks in place, as kernels do. So a chunk that might not be aligned is
    # kept apart. Arrays of one number a row are for XLA's own code, which takes any address.
    apart = lambda a: at_aligned_addresses(a) if a.ndim > 1 else a

    def put(all_parts, part, start):
        part = jnp.expand_dims(part, axis) if stack else apart(part)
        return jax.lax.dynamic_update_slice_in_dim(all_parts, part, start, axis)

    def buffer_of(part):
        shape = list((jnp.expand_dims(part, axis) if stack else part).shape)
        shape[axis] = length
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

    # A scan over starts would be slower: XLA for GPUs does not see that the starts follow from the
    # number of the iteration, and so it copies the slices for GEMMs and kernels, and their results.
    carry = sums, jax.tree.map(buffer_of, part)
    return jax.lax.fori_loop(0, num_chunks - 1, step, carry)
