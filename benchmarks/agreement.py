"""The check that implementations compute the same before they are timed."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# The largest relative error that is accepted, for sums of products of 16-bit numbers.
LIMIT = 2e-2


@jax.jit
def _relative_error(got: jax.Array, expected: jax.Array) -> jax.Array:
    got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected)


def relative_error(got: Sequence[jax.Array], expected: Sequence[jax.Array]) -> float:
    """The largest relative error of the arrays that both sequences have; NaN if one has a NaN.

    The error of an array is the Frobenius norm of the difference over that of `expected`.
    """
    return float(np.max([_relative_error(*pair) for pair in zip(got, expected, strict=False)]))
