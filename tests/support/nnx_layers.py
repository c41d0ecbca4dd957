"""Sizes, inputs and parameters for the tests of the NNX layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

B, S, D, F, V = 2, 8, 16, 24, 37
BF16, F32 = jnp.bfloat16, jnp.float32
in_both_modes = pytest.mark.usefixtures("nnx_mode")


def make_inputs(dtype=F32):
    rng = np.random.default_rng(0)
    x, residual = (jnp.asarray(rng.normal(size=(B, S, D)), dtype) for _ in range(2))
    labels = rng.integers(V, size=(B, S)).astype(np.int32)
    labels[0, 3:5] = -100
    return x, residual, jnp.asarray(labels)


def params(module):
    """Parameters by path, as plain arrays."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): variable[...] for path, variable in flat}


def shuffled(module, seed=1):
    """The module with changed parameters, because initial constants hide mistakes."""
    rng = np.random.default_rng(seed)
    change = lambda a: (a + jnp.asarray(rng.normal(size=a.shape) / 8, F32)).astype(a.dtype)
    nnx.update(module, jax.tree.map(change, nnx.state(module)))
    return module
