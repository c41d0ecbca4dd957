"""The loss of a chunk of logits, by XLA: three passes over float32 logits."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.loss import token_loss
from pallas_kernels.loss.token_loss import LogitStatistics, LossOptions


def loss_of_logits(
    logits: Float[Array, "T V"],
    labels: Int[Array, " T"],
    options: LossOptions,
    *,
    num_columns: int,
    coefficients: Float[Array, " T"] | None = None,
    lse: Float[Array, " T"] | None = None,
    vocab_size: int | None = None,
    bias: Float[Array, " V"] | None = None,
) -> tuple[LogitStatistics | None, Float[Array, "T V"] | None]:
    """Statistics of rows of logits, and `coefficients[t] · d loss[t] / d logits[t, v]`, float32.

    `mosaic_gpu/logits.py` describes the arguments. Here rows are not padded.
    """
    logits = token_loss.with_bias(logits.astype(jnp.float32), bias)
    found = None
    if lse is None:
        found = token_loss.statistics(logits, labels, options)
        lse = found.lse
    if coefficients is None:
        return found, None
    vocab_size = num_columns if vocab_size is None else vocab_size
    return found, token_loss.dlogits(logits, lse, labels, coefficients, options, vocab_size)
