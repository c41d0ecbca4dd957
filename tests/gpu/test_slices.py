"""Kernels on parts of arrays, as XLA passes them inside of a loop on a GPU."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_rms_norm, linear_cross_entropy, swiglu

pytestmark = pytest.mark.gpu


# 512 rows of each size are a multiple of 256 bytes, even where one row is not.
@pytest.mark.parametrize("hidden_size", [64, 96, 128])
def test_parts_of_arrays_that_begin_anywhere(hidden_size):
    """XLA passes such parts to kernels in place, and the kernels write results in place."""
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (1025, hidden_size), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (hidden_size + 3,))
    head = jax.random.normal(keys[2], (1925, hidden_size), jnp.bfloat16)
    bias = jax.random.normal(keys[3], (1926,))
    tokens = jax.random.randint(keys[4], (1025,), 0, len(head))

    def compute(x, tokens, weight, head, bias):
        def loss(x):
            kernel: Any = {"implementation": "mosaic_gpu"}
            normed, total = add_rms_norm(x, swiglu(x, x, **kernel), weight, **kernel)
            loss = functools.partial(linear_cross_entropy, total, head, tokens, **kernel)
            losses = loss(bias=bias, vocab_chunk_size=512) + loss(chunk_size=128)
            return losses + jnp.sum(normed.astype(jnp.float32)), normed

        return jax.value_and_grad(loss, has_aux=True)(x)

    @jax.jit
    def by_parts(x, tokens, weight, head, bias):
        def step(i, found):
            start = 1 + 512 * i
            part = lambda a: jax.lax.dynamic_slice_in_dim(a, start, 512)
            put = lambda a, part: jax.lax.dynamic_update_slice_in_dim(a, part, start, 0)
            losses, normed, dx = found
            (loss, one), of_x = compute(part(x), part(tokens), weight[3:], head, bias[1:])
            return losses.at[i].set(loss), put(normed, one), put(dx, of_x)

        return jax.lax.fori_loop(0, 2, step, (jnp.zeros(2), jnp.zeros_like(x), jnp.zeros_like(x)))

    losses, normed, dx = by_parts(x, tokens, weight, head, bias)
    for i, rows in enumerate((slice(1, 513), slice(513, 1025))):
        (loss, one), of_x = jax.jit(compute)(x[rows], tokens[rows], weight[3:], head, bias[1:])
        # XLA may sum the loss in another order.
        np.testing.assert_allclose(losses[i], loss, rtol=1e-6)
        chex.assert_trees_all_equal((normed[rows], dx[rows]), (one, of_x))
