"""Linear cross-entropy in plain JAX over all logits, differentiated by JAX: the oracle."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.loss.token_loss import LossOptions, TokenLosses, token_losses


def linear_token_losses(
    x: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " T"],
    coefficients: Float[Array, " T"],
    options: LossOptions,
) -> TokenLosses:
    """Losses from `[T, V]` logits in memory, with float32 operands in all steps and the GEMM.

    A token whose coefficient is 0 and whose `x` is not finite has losses and gradients of 0.
    """
    # Left out before and after: `jnp.where` gives such values the gradient 0, and 0 · NaN is NaN.
    is_left_out = (coefficients == 0) & ~jnp.all(jnp.isfinite(x), axis=1)
    x = jnp.where(is_left_out[:, None], 0, x)
    logits = jnp.einsum(
        "td,vd->tv",
        x.astype(jnp.float32),
        weight.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    if bias is not None:
        logits += bias.astype(jnp.float32)
    losses = token_losses(logits, labels, options)
    return TokenLosses(*(jnp.where(is_left_out, 0.0, a) for a in losses))
