"""Gradients in the logits of tokens whose logsumexp is known.

With `p = softmax(z)`, every gradient that the loss and the log-probabilities need has the form

    dlogits[v] = p[v] · (a + b · log p[v]) + c · [v = label]

with three numbers a, b and c for each token. Cross-entropy has b = 0. The entropy of the softmax
has b != 0. A softcap multiplies the sum by its derivative.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

LEAST = -1e4  # finite logarithm of a probability of 0, whose exponential is 0


class GradientTerms(NamedTuple):
    """Terms of each token's gradient in its logits, float32.

    Attributes:
      lse: Logsumexp of the logits over the whole vocabulary.
      softmax: Factor a of the softmax.
      softmax_log: Factor b of the softmax times its logarithm; None if it is 0 for all tokens.
      label: Summand c of the label's entry.
    """

    lse: Float[Array, " T"]
    softmax: Float[Array, " T"]
    softmax_log: Float[Array, " T"] | None
    label: Float[Array, " T"]

    @property
    def counts(self) -> Bool[Array, " T"]:
        """Whether a token has a gradient at all."""
        counts = self.softmax != 0
        return counts if self.softmax_log is None else counts | (self.softmax_log != 0)

    def at_label(self, p: Float[Array, "..."], log_p: Float[Array, "..."]) -> Float[Array, "..."]:
        """The label's entry, with `a · p + c` as `(a + c) + a · (p - 1)`.

        In a cross-entropy `a + c` is small, so near p = 1 the digits of `p - 1` remain.
        """
        found = (self.softmax + self.label) + self.softmax * (p - 1)
        if self.softmax_log is not None:
            found += self.softmax_log * p * jnp.maximum(log_p, LEAST)
        return found

    def of(self, tokens: slice) -> "GradientTerms":
        """The terms of some tokens."""
        return jax.tree.map(lambda a: a[tokens], self)

    def divided(self, scale: Float[Array, ""] | None) -> "GradientTerms":
        """The terms of the gradient divided by a number; the same if it is None."""
        if scale is None:
            return self
        terms = jax.tree.map(lambda a: a / scale, self[1:])
        return GradientTerms(self.lse, *terms)


def dlogits_of_logits(
    logits: Float[Array, "T V"],
    labels: Int[Array, " T"],
    terms: GradientTerms,
    *,
    softcap: float | None,
    temperature: float,
) -> Float[Array, "T V"]:
    """The gradient in float32 logits, before softcap and temperature; 0 for rows without one.

    The temperature's own factor `1 / temperature` is a part of `terms`.
    """
    tanh, z = None, logits
    if softcap is not None:
        tanh = jnp.tanh(logits / softcap)
        z = softcap * tanh
    log_p = z / temperature - terms.lse[:, None]
    p = jnp.exp(log_p)
    of_terms = jax.tree.map(lambda a: a[:, None], terms)
    factor = of_terms.softmax
    if of_terms.softmax_log is not None:
        factor = factor + of_terms.softmax_log * jnp.maximum(log_p, LEAST)
    columns = jax.lax.broadcasted_iota(labels.dtype, logits.shape, 1)
    is_label = columns == labels[:, None]
    found = jnp.where(is_label, of_terms.at_label(p, log_p), p * factor)
    if tanh is not None:
        found *= 1 - jnp.square(tanh)
    return jnp.where(terms.counts[:, None], found, 0.0)
