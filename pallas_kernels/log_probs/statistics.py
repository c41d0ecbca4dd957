"""Log-probabilities and entropies of tokens without a gradient: one GEMM."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.folding import fold_chunks
from pallas_kernels.gpu.kernel import varying_axes
from pallas_kernels.loss.arguments import IGNORED
from pallas_kernels.loss.columns import Columns, place_in_vocabulary
from pallas_kernels.loss.layout import Embedding
from pallas_kernels.loss.mosaic_gpu import statistics as kernels
from pallas_kernels.loss.plan import Settings

_LEAST = -1e4  # finite logarithm of a probability of 0, whose exponential is 0


class Distribution(NamedTuple):
    """Each token's softmax, over all or a part of the vocabulary; float32.

    Attributes:
      lse: Logsumexp of the logits after softcap and temperature.
      label_logit: Logit of the label; -inf if the label is no column of this part.
      entropy: Entropy of the softmax of this part in nats; None if it was not asked for.
    """

    lse: Float[Array, " T"]
    label_logit: Float[Array, " T"]
    entropy: Float[Array, " T"] | None


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
    """
    first_column, _ = place_in_vocabulary(settings, weight)
    labels, weight = labels - first_column, weight.astype(x.dtype)
    softcap = settings.options.logit_softcap
    if settings.implementation == "mosaic_gpu":
        columns = Columns.make(settings, weight, bias)
        is_readable = kernels.unsupported_reason(x, weight, columns.layout) is None
        found, entropy = kernels.linear_entropy(
            x,
            weight if is_readable else columns.weight,
            bias,
            labels,
            num_columns=columns.num_columns,
            softcap=softcap,
            temperature=temperature,
            with_entropy=with_entropy,
            weight_layout=columns.layout,
            config=settings.config.linear,
        )
        return _over_axes(settings, Distribution(found.lse, found.label_logit, entropy))

    columns = Columns.make(settings, weight, bias)

    def one_chunk(chunk, _):
        x, labels = chunk
        logits = columns.logits(x)
        if bias is not None:
            logits += bias.astype(jnp.float32)
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        return None, distribution_of_logits(logits / temperature, labels, with_entropy)

    return _over_axes(settings, fold_chunks(one_chunk, (x, labels), chunk_size)[1])


def distribution_of_logits(
    logits: Float[Array, "*T V"], labels: Int[Array, "*T"], with_entropy: bool
) -> Distribution:
    """The distribution of float32 logits, after softcap and temperature; in plain JAX."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    in_range = (labels >= 0) & (labels < logits.shape[-1])
    column = jnp.where(in_range, labels, 0)[..., None]
    label_logit = jnp.take_along_axis(logits, column, axis=-1)[..., 0]
    entropy = None
    if with_entropy:
        log_p = logits - lse[..., None]
        # A column of probability 0 adds nothing, though its logarithm is -inf. Where all logits are
        # -inf, the logarithms are NaN, and there is no distribution.
        finite = jnp.where(jnp.isneginf(logits), _LEAST, log_p)
        entropy = -jnp.sum(jnp.exp(finite) * finite, axis=-1)
    return Distribution(lse, jnp.where(in_range, label_logit, -jnp.inf), entropy)


def _over_axes(settings: Settings, found: Distribution) -> Distribution:
    """The distribution over the whole vocabulary from those over the parts of devices."""
    if not settings.vocab_axes:
        return found
    stacked = jnp.stack(jax.tree.leaves(found))
    # Where types say over which axes an array varies, they say that the result does not.
    to = "invarying" if varying_axes(stacked) else "varying"
    parts = jax.lax.all_gather(stacked, settings.vocab_axes, axis=1, to=to)
    return combine(Distribution(parts[0], parts[1], parts[2] if len(parts) > 2 else None))


def combine(parts: Distribution) -> Distribution:
    """The distribution over the whole vocabulary from those over its parts along axis 0.

    A part has the probability `p`. The whole entropy is the sum of `p · (entropy - log p)`.
    """
    lse = jax.nn.logsumexp(parts.lse, axis=0)
    entropy = None
    if parts.entropy is not None:
        log_p = jnp.where(jnp.isneginf(parts.lse), _LEAST, parts.lse - lse)
        entropy = jnp.sum(jnp.exp(log_p) * (parts.entropy - log_p), axis=0)
    return Distribution(lse, jnp.max(parts.label_logit, axis=0), entropy)


def of_labels(
    found: Distribution, labels: Int[Array, "*T"], vocab_size: int
) -> tuple[Float[Array, "*T"], ...]:
    """Log-probability of each label, and the entropy if there is one; 0 for ignored labels.

    The log-probability of a label that is neither ignored nor a column is NaN.
    """
    is_ignored = labels == IGNORED
    is_right = is_ignored | (labels >= 0) & (labels < vocab_size)
    # A factor, so that JAX's own gradient is NaN as well.
    log_probs = (found.label_logit - found.lse) * jnp.where(is_right, 1.0, jnp.nan)
    values = [log_probs] + ([] if found.entropy is None else [found.entropy])
    return tuple(jnp.where(is_ignored, 0.0, a) for a in values)
