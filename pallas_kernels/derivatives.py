"""A message for a derivative that an operation does not have."""

import functools
from typing import Any

import jax


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def not_differentiable(message: str, arrays: Any) -> Any:
    """The same arrays. Differentiating through them raises NotImplementedError(message)."""
    return arrays


@not_differentiable.defjvp
def _refuse(message, primals, tangents):
    raise NotImplementedError(message)
