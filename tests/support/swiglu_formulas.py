"""SwiGLU in float64 numpy, and arguments for it."""

import jax.numpy as jnp
import numpy as np

NAMES = ("y", "dgate", "dup")


def formula(gate, up, dy):
    """`(y, dgate, dup)`, with the derivative worked out by hand."""
    gate, up, dy = (np.asarray(a, np.float64) for a in (gate, up, dy))
    # exp(-|z|) cannot overflow; sigmoid(-z) = 1 - sigmoid(z).
    small = np.exp(-np.abs(gate))
    sigmoid = np.where(gate >= 0, 1.0, small) / (1 + small)
    silu = gate * sigmoid
    return silu * up, dy * up * (sigmoid + silu * (1 - sigmoid)), dy * silu


def make_args(shape, dtype, seed=0):
    """`(gate, up, dy)`."""
    rng = np.random.default_rng(seed)
    gate, up, dy = (jnp.asarray(2 * rng.normal(size=shape), dtype) for _ in range(3))
    return gate, up, dy
