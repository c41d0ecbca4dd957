"""Log-probabilities and entropies of tokens without a gradient: one GEMM."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.folding import fold_chunks
from pallas_kernels.loss.columns import Columns, of_all_parts, place_in_vocabulary
from pallas_kernels.loss.gradient_terms import LEAST
from pallas_kernels.loss.layout import Embedding
from pallas_kernels.loss.mosaic_gpu import linear_launch
from pallas_kernels.loss.mosaic_gpu.statistics import linear_statistics, lowest_of_largest
from pallas_kernels.loss.plan import Settings
from pallas_kernels.loss.token_loss import IGNORED, at_labels, is_column, softcapped, with_bias


class Distribution(NamedTuple):
    """Each token's softmax, over all or a part of the vocabulary; float32.

    Attributes:
      lse: Logsumexp of the logits after softcap and temperature.
      label_logit: Logit of the label; -inf if the label is no column of this part.
      entropy: Entropy of the softmax of this part in nats; None if it was not asked for.
      argmax: Lowest column with the largest logit, exact up to 2^24; 0 where all logits are -inf.
        None if it was not asked for.
      largest: Largest logit; None without the argmax.
    """

    lse: Float[Array, " T"]
    label_logit: Float[Array, " T"]
    entropy: Float[Array, " T"] | None
    argmax: Float[Array, " T"] | None
    largest: Float[Array, " T"] | None


def distribution_of_linear(
    settings: Settings,
    x: Float[Array, "T D"],
    weight: Embedding,
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " T"],
    chunk_size: int,
    *,
    temperature: float,
    with_entropy: bool,
    with_argmax: bool,
) -> Distribution:
    """The distribution of each token over the whole vocabulary.

    The kernel has no logits in memory. With `xla` those of `chunk_size` tokens are, in float32.

    Args:
      settings: Settings; of the options only the softcap is read.
      x: Hidden states.
      weight: Output embedding; this device's part of a split one.
      bias: Bias of the logits, if there is one.
      labels: Column of each token in the whole vocabulary. Another number is no column.
      chunk_size: Number of tokens whose logits may be in memory.
      temperature: Divisor of the logits after the softcap.
      with_entropy: Whether to compute the entropy.
      with_argmax: Whether to find the largest logit.
    """
    first_column, _ = place_in_vocabulary(settings, weight)
    labels, weight = labels - first_column, weight.astype(x.dtype)
    softcap = settings.options.logit_softcap
    columns = Columns.make(settings, weight, bias)
    if settings.implementation == "mosaic_gpu":
        is_readable = linear_launch.unsupported_reason(x, weight, columns.layout) is None
        found, entropy, argmax = linear_statistics(
            x,
            weight if is_readable else columns.weight,
            bias,
            labels,
            num_columns=columns.num_columns,
            softcap=softcap,
            temperature=temperature,
            with_entropy=with_entropy,
            with_argmax=with_argmax,
            weight_layout=columns.layout,
            config=settings.config.linear,
        )
        largest = found.largest if with_argmax else None
        part = Distribution(found.lse, found.label_logit, entropy, argmax, largest)
    else:

        def one_chunk(chunk, _):
            x, labels = chunk
            logits = softcapped(with_bias(columns.logits(x), bias), softcap)
            found = distribution_of_logits(logits / temperature, labels, with_entropy, with_argmax)
            return None, found

        _, part = fold_chunks(one_chunk, (x, labels), chunk_size)
    if not settings.vocab_axes:
        return part
    if part.argmax is not None:
        part = part._replace(argmax=part.argmax + jnp.float32(first_column))
    return _combine(of_all_parts(settings, part))


def distribution_of_logits(
    logits: Float[Array, "*T V"], labels: Int[Array, "*T"], with_entropy: bool, with_argmax: bool
) -> Distribution:
    """The distribution of float32 logits, after softcap and temperature; in plain JAX."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    in_range, label_logit = at_labels(logits, labels)
    entropy = None
    if with_entropy:
        log_p = logits - lse[..., None]
        # A column of probability 0 adds nothing, though its logarithm is -inf. Where all logits are
        # -inf, the logarithms are NaN, and there is no distribution.
        finite = jnp.where(jnp.isneginf(logits), LEAST, log_p)
        entropy = -jnp.sum(jnp.exp(finite) * finite, axis=-1)
    argmax = largest = None
    if with_argmax:
        argmax = jax.lax.argmax(logits, logits.ndim - 1, jnp.int32).astype(jnp.float32)
        largest = jnp.max(logits, axis=-1)
    label_logit = jnp.where(in_range, label_logit, -jnp.inf)
    return Distribution(lse, label_logit, entropy, argmax, largest)


def _combine(parts: Distribution) -> Distribution:
    """The distribution over the whole vocabulary from those over its parts along axis 0.

    A part has the probability `p`. The whole entropy is the sum of `p · (entropy - log p)`.
    """
    lse = jax.nn.logsumexp(parts.lse, axis=0)
    entropy = None
    if parts.entropy is not None:
        log_p = jnp.where(jnp.isneginf(parts.lse), LEAST, parts.lse - lse)
        entropy = jnp.sum(jnp.exp(log_p) * (parts.entropy - log_p), axis=0)
    argmax = largest = None
    if parts.argmax is not None and parts.largest is not None:
        argmax = lowest_of_largest(parts.largest, parts.argmax)
        largest = jnp.max(parts.largest, axis=0)
    return Distribution(lse, jnp.max(parts.label_logit, axis=0), entropy, argmax, largest)


def of_labels(
    found: Distribution, labels: Int[Array, "*T"], vocab_size: int
) -> tuple[Float[Array, "*T"], ...]:
    """Log-probability of each label, and what else was asked for; 0 for ignored labels.

    The log-probability of a label that is neither ignored nor a column is NaN. The entropy follows,
    if there is one. Then come the argmax, counted from 1, and its log-probability.
    """
    is_ignored = labels == IGNORED
    is_right = is_ignored | is_column(labels, vocab_size)
    # A factor, so that JAX's own gradient is NaN as well.
    log_probs = (found.label_logit - found.lse) * jnp.where(is_right, 1.0, jnp.nan)
    values = [log_probs] + ([] if found.entropy is None else [found.entropy])
    if found.argmax is not None and found.largest is not None:
        values += [found.argmax + 1, found.largest - found.lse]
    return tuple(jnp.where(is_ignored, 0.0, a) for a in values)
