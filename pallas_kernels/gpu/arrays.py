"""A kernel's arrays in device memory: their dtypes and their alignment."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# Dtypes that kernels without matrix products read. They compute in float32.
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_ALIGNMENT = 256  # bytes, of the addresses of operands and results


def unsupported_dtype(name: str, dtype: DTypeLike, remedy: str | None = None) -> str | None:
    """Why a kernel without matrix products does not read an array, or None if it does.

    Args:
      name: Name of the array.
      dtype: Dtype of the array.
      remedy: Words before "one of these dtypes" in the message; None says to cast the array.
    """
    if dtype in _DTYPES:
        return None
    remedy = remedy or f"cast {name} to"
    return f"{name} is {dtype}, not bfloat16, float16 or float32; {remedy} one of these dtypes"


def at_aligned_addresses(arrays: Any) -> Any:
    """The arrays, kept apart from larger arrays in which they might not be aligned.

    XLA lets a kernel read and write a part of an array in place: `x[1:]`, or a layer of a stack. It
    does so if the size of the part is a multiple of 256 bytes, and does not ask where the part
    begins (JAX 0.11.2 and 0.12). The kernel does ask: "Input buffer 4 is not 256-byte aligned". If
    the rows of an array are no such multiple, a barrier keeps the array apart. The barrier costs a
    copy if the array is a part, and nothing otherwise.

    Args:
      arrays: Pytree of operands or results of a kernel, in the shapes that its caller knows; None
        is no array.
    """

    def apart(a: jax.Array) -> jax.Array:
        # A single row may lie anywhere in a longer row.
        row = a.shape[-1] if a.size > a.shape[-1] else 1
        return jax.lax.optimization_barrier(a) if row * a.dtype.itemsize % _ALIGNMENT else a

    return jax.tree.map(apart, arrays)


def apart_from_stacks(results: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of a kernel, where the backward of the layer that reads them needs them, too.

    The loop of a `jax.lax.scan` over layers writes what the backward needs into stacks. XLA lets a
    kernel write its result into the stack in place. It runs the kernel a second time for the layer,
    which reads the same result (JAX 0.11.2 and 0.12). Behind a barrier it runs the kernel once, and
    copies the result into the stack. The copies of all results of a norm move as many bytes as a
    second run. For attention and products, the copy takes less time than a second run. A result
    that only the stack needs is copied, too.
    """
    return [jax.lax.optimization_barrier(a) for a in results]
