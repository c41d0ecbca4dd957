"""Whether what is timed beside each other computes the same."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

LIMIT = 2e-2  # of sums of products of 16-bit numbers


@jax.jit
def _relative_error(got: jax.Array, expected: jax.Array) -> jax.Array:
    got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected)


def relative_error(got: Sequence[jax.Array], expected: Sequence[jax.Array]) -> float:
    """The largest of the arrays that both have, by norms; NaN if one has a NaN."""
    return float(np.max([_relative_error(*pair) for pair in zip(got, expected, strict=False)]))
