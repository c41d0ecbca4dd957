"""Linear cross-entropy in plain JAX over all logits, differentiated by JAX: the oracle."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.linear_cross_entropy.token_loss import (
    LossOptions,
    TokenLosses,
    token_losses,
)


def linear_token_losses(
    x: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " T"],
    options: LossOptions,
) -> TokenLosses:
    """Every operand in float32, GEMM included, with a `[T, V]` buffer."""
    logits = jnp.einsum(
        "td,vd->tv",
        x.astype(jnp.float32),
        weight.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    if bias is not None:
        logits += bias.astype(jnp.float32)
    return token_losses(logits, labels, options)
