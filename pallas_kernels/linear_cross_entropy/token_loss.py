"""The loss of one token as a function of its logits: the formula and its derivative.

Shared by every implementation that has the logits of some tokens in memory.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """The options of the loss that do not change while a program runs."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    logit_softcap: float | None


class TokenLosses(NamedTuple):
    """What is known of each token after the forward; float32, 0 where the label is ignored."""

    loss: Float[Array, " T"]
    nll: Float[Array, " T"]
    z_loss: Float[Array, " T"]
    correct: Float[Array, " T"]
    lse: Float[Array, " T"]


def is_valid(labels: Int[Array, " T"], options: LossOptions) -> Bool[Array, " T"]:
    """Which tokens count: those whose label is not `ignore_index`."""
    return labels != options.ignore_index


def softcap(logits: Float[Array, "T V"], options: LossOptions) -> Float[Array, "T V"]:
    """`c · tanh(logits / c)`, or the logits themselves without a cap."""
    if options.logit_softcap is None:
        return logits
    return options.logit_softcap * jnp.tanh(logits / options.logit_softcap)


def token_losses(
    logits: Float[Array, "T V"], labels: Int[Array, " T"], options: LossOptions
) -> TokenLosses:
    """Losses of tokens from their float32 logits, before the softcap.

    A label that is neither `ignore_index` nor in `[0, V)` gives NaN.
    """
    vocab_size = logits.shape[-1]
    capped = softcap(logits, options)
    lse = jax.nn.logsumexp(capped, axis=-1)
    valid = is_valid(labels, options)
    in_range = (labels >= 0) & (labels < vocab_size)
    column = jnp.where(in_range, labels, 0)[:, None]
    label_logit = jnp.take_along_axis(capped, column, axis=-1)[:, 0]
    # A factor, so that the gradient is NaN as well.
    nll = (lse - label_logit) * jnp.where(valid & ~in_range, jnp.nan, 1.0)
    loss = nll
    if options.label_smoothing:
        uniform = lse - jnp.mean(capped, axis=-1)
        loss = (1 - options.label_smoothing) * nll + options.label_smoothing * uniform
    z_loss = options.z_loss * jnp.square(lse)
    correct = (jnp.argmax(capped, axis=-1).astype(labels.dtype) == labels).astype(jnp.float32)
    zero_if_ignored = lambda a: jnp.where(valid, a, 0.0)
    return TokenLosses(*map(zero_if_ignored, (loss + z_loss, nll, z_loss, correct, lse)))


def dlogits(
    logits: Float[Array, "T V"],
    lse: Float[Array, " T"],
    labels: Int[Array, " T"],
    coefficients: Float[Array, " T"],
    options: LossOptions,
) -> Float[Array, "T V"]:
    """`coefficients[t] · d loss[t] / d logits[t, v]`, float32; 0 where the coefficient is 0.

    The label's own entry is formed as `p - 1` in float32 before anything is rounded, which keeps
    its digits when p is close to 1. A label out of range gives a row of NaN.
    """
    vocab_size = logits.shape[-1]
    capped = softcap(logits, options)
    probabilities = jnp.exp(capped - lse[:, None])
    smoothing = options.label_smoothing
    columns = jax.lax.broadcasted_iota(labels.dtype, logits.shape, 1)
    target = jnp.where(columns == labels[:, None], 1.0 - smoothing, 0.0) + smoothing / vocab_size
    gradient = probabilities - target
    if options.z_loss:
        gradient += 2 * options.z_loss * lse[:, None] * probabilities
    if options.logit_softcap is not None:
        gradient *= 1 - jnp.square(capped / options.logit_softcap)
    in_range = (labels >= 0) & (labels < vocab_size)
    wrong = is_valid(labels, options) & ~in_range
    row = jnp.where(wrong, jnp.nan, coefficients)[:, None]
    return jnp.where(row == 0, 0.0, row * gradient)
