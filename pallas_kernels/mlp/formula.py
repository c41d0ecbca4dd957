"""SwiGLU and its gradients for float32 values, inside and outside of kernels."""

import jax


def product(gate: jax.Array, up: jax.Array) -> jax.Array:
    """`silu(gate) · up` with `silu(z) = z · sigmoid(z)`; -0 where exp(-gate) overflows."""
    return gate * jax.lax.logistic(gate) * up


def gradients(
    gate: jax.Array, up: jax.Array, dproduct: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(dgate, dup, product)`, the product with the bits of `product`."""
    sigmoid = jax.lax.logistic(gate)
    silu = gate * sigmoid
    # Half of the derivative of silu, which is at most 0.55. With the whole one, at most 1.1, its
    # product with the largest number would overflow, and be NaN times a zero.
    half = 0.5 * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return 2.0 * (dproduct * half * up), dproduct * silu, silu * up
