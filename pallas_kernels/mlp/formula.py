"""SwiGLU and its gradients for float32 values, inside and outside of kernels.

`logistic` is the sigmoid to take: JAX's, or `pallas_kernels.gpu.math.logistic` in kernels that
round to 16 bits.
"""

from collections.abc import Callable

import jax

type Logistic = Callable[[jax.Array], jax.Array]


def product(gate: jax.Array, up: jax.Array, *, logistic: Logistic = jax.lax.logistic) -> jax.Array:
    """`silu(gate) · up` with `silu(z) = z · sigmoid(z)`; -0 where exp(-gate) overflows."""
    return gate * logistic(gate) * up


def gradients(
    gate: jax.Array, up: jax.Array, dproduct: jax.Array, *, logistic: Logistic = jax.lax.logistic
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(dgate, dup, product)`, the product with the bits of `product`."""
    sigmoid = logistic(gate)
    silu = gate * sigmoid
    # Half of the derivative of silu, which is at most 0.55. With the whole one, at most 1.1, its
    # product with the largest number would overflow, and be NaN times a zero.
    half_sigmoid = 0.5 * sigmoid
    half = half_sigmoid + silu * (0.5 - half_sigmoid)
    return 2.0 * (dproduct * half * up), dproduct * silu, silu * up
