"""SwiGLU in plain JAX, differentiated by JAX: the oracle for tests and the form XLA fuses."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def swiglu(gate: Float[Array, "*T F"], up: Float[Array, "*T F"]) -> Float[Array, "*T F"]:
    """`silu(gate) · up`, in float32, rounded once to `gate.dtype`."""
    product = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return product.astype(gate.dtype)
