"""Arrays as a kernel finds and leaves them in device memory."""

from typing import Any

import jax

_ALIGNMENT = 256  # bytes, of the addresses of operands and results


def at_aligned_addresses(arrays: Any) -> Any:
    """The operands or results of a kernel, in the shapes that its caller knows.

    XLA gives a kernel a part of an array where it lies, and lets it write a part there: `x[1:]`, a
    layer of a stack. It does so if the size of the part is a multiple of 256 bytes and does not ask
    where the part begins (JAX 0.11.2 and 0.12), but the kernel does: "Input buffer 4 is not
    256-byte aligned". So those that may be part of an array whose rows are no such multiple are
    kept apart by a barrier, which costs a copy where they are one, and else nothing.

    Args:
      arrays: a pytree; None is no array.
    """

    def apart(a: jax.Array) -> jax.Array:
        # A single row may be anywhere in a longer one.
        row = a.shape[-1] if a.size > a.shape[-1] else 1
        return jax.lax.optimization_barrier(a) if row * a.dtype.itemsize % _ALIGNMENT else a

    return jax.tree.map(apart, arrays)
