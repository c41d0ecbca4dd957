"""The loss of one token as a function of its logits: the formula and its derivative.

Shared by every implementation that has the logits of some tokens in memory.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.partition import unsupported_reason

# Labels that are no column of the vocabulary become one of these numbers.
IGNORED, OUT_OF_RANGE = -1, -2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """The options of the loss that do not change while a program runs."""

    label_smoothing: float
    z_loss: float
    logit_softcap: float | None


class TokenLosses(NamedTuple):
    """Losses and metrics of each token, float32; 0 where the label is ignored."""

    loss: Float[Array, "*T"]
    nll: Float[Array, "*T"]
    z_loss: Float[Array, "*T"]
    correct: Float[Array, "*T"]
    lse: Float[Array, "*T"]


class LogitStatistics(NamedTuple):
    """Statistics of each token's logits that its loss needs, after bias and softcap; float32.

    Statistics of parts of the vocabulary combine: `lse` by logsumexp, the next three by maximum,
    `total` by sum.

    Attributes:
      lse: Logsumexp of the logits.
      label_logit: Logit of the label; -inf if the label is not in this part.
      largest: Maximum of the logits.
      largest_before: Maximum over the columns before the label's; -inf if there are none.
      total: Sum of the logits. Only label smoothing uses it, and without smoothing it may be 0.
    """

    lse: Float[Array, " T"]
    label_logit: Float[Array, " T"]
    largest: Float[Array, " T"]
    largest_before: Float[Array, " T"]
    total: Float[Array, " T"]


@jax.custom_jvp
def coefficients_of_mean(
    weights: Float[Array, "*T"],
) -> tuple[Float[Array, "*T"], Float[Array, ""]]:
    """`(weights / Σ weights, 1 / Σ weights)`; zeros if all weights are 0.

    The gradient of a mean in the weight of token `i` is `(loss_i - mean) / Σ weights`. At the start
    of training all losses are nearly equal, so the rounding of the mean may dominate the gradient.
    JAX's own derivative divides both by `Σ weights` and rounds the mean four times, and all tokens
    have the same error. This derivative subtracts the mean a second time, and so that error.
    """
    total = jnp.sum(weights)
    per_weight = jnp.where(total == 0, 0.0, 1 / jnp.where(total == 0, 1.0, total))
    return weights * per_weight, per_weight


@coefficients_of_mean.defjvp
def _coefficients_of_mean_jvp(primals, tangents):
    coefficients, per_weight = coefficients_of_mean(*primals)
    tangent = tangents[0] * per_weight

    # The transpose subtracts a mean. To do so twice changes nothing but the rounding.
    def centered(a: Float[Array, "*T"]) -> Float[Array, "*T"]:
        return a - coefficients * jnp.sum(a)

    of_coefficients = centered(centered(tangent))
    return (coefficients, per_weight), (of_coefficients, -per_weight * jnp.sum(tangent))


def finite_where_not_counted[T](losses: T, coefficients: Float[Array, "*T"]) -> T:
    """Losses, with 0 in place of infinities and NaN of tokens whose coefficient is 0.

    Infinity or NaN times 0 is NaN, and would make a sum over all tokens NaN. `losses` is an array
    or a pytree of arrays.
    """
    finite = lambda a: jnp.where((coefficients == 0) & ~jnp.isfinite(a), 0.0, a)
    return jax.tree.map(finite, losses)


def with_bias(
    logits: Float[Array, "*T V"], bias: Float[Array, " V"] | None
) -> Float[Array, "*T V"]:
    """Float32 logits plus their bias, or the logits themselves without one."""
    if bias is None:
        return logits
    return logits + jax.lax.broadcast_to_rank(bias.astype(jnp.float32), logits.ndim)


def softcapped(logits: Float[Array, "..."], softcap: float | None) -> Float[Array, "..."]:
    """`c · tanh(logits / c)`, or the logits themselves without a cap."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def token_losses(
    logits: Float[Array, "*T V"], labels: Int[Array, "*T"], options: LossOptions
) -> TokenLosses:
    """Losses of tokens from their float32 logits, before the softcap.

    A label that is neither `IGNORED` nor in `[0, V)` gives NaN.
    """
    capped = softcapped(logits, options.logit_softcap)
    lse = jax.nn.logsumexp(capped, axis=-1)
    in_range, label_logit = at_labels(capped, labels)
    # NaN is a factor, so that the gradient is NaN as well.
    nll = (lse - label_logit) * jnp.where((labels != IGNORED) & ~in_range, jnp.nan, 1.0)
    correct = jnp.argmax(capped, axis=-1).astype(labels.dtype) == labels
    return _losses(labels, nll, lse, jnp.mean(capped, axis=-1), correct, options)


def is_column(labels: Int[Array, "*T"], num_columns: int) -> Bool[Array, "*T"]:
    """Whether labels are in `[0, num_columns)`."""
    return (labels >= 0) & (labels < num_columns)


def at_labels(
    logits: Float[Array, "*T V"], labels: Int[Array, "*T"]
) -> tuple[Bool[Array, "*T"], Float[Array, "*T"]]:
    """`(in_range, logits)`: whether labels are columns, and their logits; column 0's if not."""
    in_range = is_column(labels, logits.shape[-1])
    column = jnp.where(in_range, labels, 0)[..., None]
    if unsupported_reason() is not None:
        # Inside of a `jax.shard_map` that leaves axes to XLA, XLA aborts the process when it splits
        # the gather over a vocabulary that is split (JAX 0.11.2 and 0.12).
        columns = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
        return in_range, jnp.sum(jnp.where(columns == column, logits, 0), axis=-1)
    return in_range, jnp.take_along_axis(logits, column, axis=-1)[..., 0]


def _losses(
    labels: Int[Array, "*T"],
    nll: Float[Array, "*T"],
    lse: Float[Array, "*T"],
    mean: Float[Array, "*T"],
    correct: Bool[Array, "*T"],
    options: LossOptions,
) -> TokenLosses:
    """The losses; `mean` is that of a token's logits, which only label smoothing uses."""
    loss = nll
    if options.label_smoothing:
        loss = (1 - options.label_smoothing) * nll + options.label_smoothing * (lse - mean)
    z_loss = options.z_loss * jnp.square(lse)
    values = loss + z_loss, nll, z_loss, correct.astype(jnp.float32), lse
    return TokenLosses(*(jnp.where(labels != IGNORED, a, 0.0) for a in values))


def statistics(
    logits: Float[Array, "T V"], labels: Int[Array, " T"], options: LossOptions
) -> LogitStatistics:
    """Statistics of float32 logits before the softcap, for all or a part of the vocabulary.

    A label outside of `[0, V)` is not in these columns.
    """
    capped = softcapped(logits, options.logit_softcap)
    in_range, label_logit = at_labels(capped, labels)
    columns = jax.lax.broadcasted_iota(labels.dtype, logits.shape, 1)
    before = jnp.where(columns < labels[:, None], capped, -jnp.inf)
    return LogitStatistics(
        lse=jax.nn.logsumexp(capped, axis=-1),
        label_logit=jnp.where(in_range, label_logit, -jnp.inf),
        largest=jnp.max(capped, axis=-1),
        largest_before=jnp.max(before, axis=-1),
        total=jnp.sum(capped, axis=-1),
    )


def combine(parts: LogitStatistics) -> LogitStatistics:
    """Statistics of the whole vocabulary from the statistics of its parts along axis 0."""
    return LogitStatistics(
        lse=jax.nn.logsumexp(parts.lse, axis=0),
        label_logit=jnp.max(parts.label_logit, axis=0),
        largest=jnp.max(parts.largest, axis=0),
        largest_before=jnp.max(parts.largest_before, axis=0),
        total=jnp.sum(parts.total, axis=0),
    )


def losses_of(
    statistics: LogitStatistics, labels: Int[Array, " T"], options: LossOptions, vocab_size: int
) -> TokenLosses:
    """The same as `token_losses`, from the statistics of the whole vocabulary."""
    lse, label_logit = statistics.lse, statistics.label_logit
    nll = jnp.where(is_column(labels, vocab_size), lse - label_logit, jnp.nan)
    is_first_largest = (label_logit >= statistics.largest) & (
        label_logit > statistics.largest_before
    )
    # If all logits are -inf, the first column is the first largest.
    correct = is_first_largest | ((labels == 0) & (label_logit >= statistics.largest))
    return _losses(labels, nll, lse, statistics.total / vocab_size, correct, options)


def dlogits(
    logits: Float[Array, "T V"],
    lse: Float[Array, " T"],
    labels: Int[Array, " T"],
    coefficients: Float[Array, " T"],
    options: LossOptions,
    vocab_size: int,
) -> Float[Array, "T V"]:
    """`coefficients[t] · d loss[t] / d logits[t, v]`, float32; 0 where the coefficient is 0.

    The label's entry is formed as `p - 1` in float32 before any rounding, which keeps its digits
    where p is close to 1. A label that is no column changes no entry. `vocab_size` is the size of
    the whole vocabulary, of which the logits may be a part.
    """
    capped = softcapped(logits, options.logit_softcap)
    probabilities = jnp.exp(capped - lse[:, None])
    smoothing = options.label_smoothing
    columns = jax.lax.broadcasted_iota(labels.dtype, logits.shape, 1)
    target = jnp.where(columns == labels[:, None], 1.0 - smoothing, 0.0) + smoothing / vocab_size
    gradient = probabilities - target
    if options.z_loss:
        gradient += 2 * options.z_loss * lse[:, None] * probabilities
    if options.logit_softcap is not None:
        gradient *= 1 - jnp.square(capped / options.logit_softcap)
    row = coefficients[:, None]
    return jnp.where(row == 0, 0.0, row * gradient)
