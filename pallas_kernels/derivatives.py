"""Derivatives that an operation does not have, refused with a message."""

import functools
from typing import Any

import jax


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def not_differentiable(message: str, arrays: Any) -> Any:
    """The arrays; differentiating what is made of them raises NotImplementedError(message)."""
    return arrays


@not_differentiable.defjvp
def _refuse(message, primals, tangents):
    raise NotImplementedError(message)
