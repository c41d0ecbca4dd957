"""Losses of reinforcement learning and of preferences, as plain formulas of log-probabilities.

Each function takes arrays `[B, S]` of B sequences and returns a float32 scalar, so it serves inside
of the `token_fn` of `linear_token_loss`::

    def token_fn(log_probs, entropy, data):
        return objectives.clipped_policy_loss(
            log_probs, data["old"], data["advantages"], data["mask"]
        )

A token counts where `mask` is not 0. The values of other tokens change neither loss nor gradients,
even if they are NaN. A mean over no tokens is 0. For losses of pairs, the first half of the batch
has the chosen sequences, and the second half the rejected sequences in the same order. Losses of
pairs and `kto_loss` count every sequence. A sequence without a token that counts has the reward 0,
or the mean log-probability 0, so leave such sequences out of the batch.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.arguments import check_choice, check_number

# Names of verl (https://github.com/volcengine/verl).
type Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
type Numbers = Float[Array, "B S"]
type Mask = Bool[Array, "B S"] | Int[Array, "B S"] | Float[Array, "B S"]


def aggregate(
    values: Numbers,
    mask: Mask,
    aggregation: Aggregation = "token-mean",
    *,
    max_length: int | None = None,
) -> Float[Array, ""]:
    """A scalar made of one value for each token, such as the mean over tokens.

    Args:
      values: Values of the tokens.
      mask: Tokens that count.
      aggregation: `"token-mean"` is the mean over all tokens that count (DAPO,
        https://arxiv.org/abs/2503.14476). `"seq-mean-token-mean"` takes the mean of each sequence
        over its tokens, and then the mean over the sequences (GRPO,
        https://arxiv.org/abs/2402.03300). `"seq-mean-token-sum"` takes the sum of each sequence
        over its tokens, and then the mean over the sequences. `"seq-mean-token-sum-norm"` divides
        the result of `"seq-mean-token-sum"` by `max_length` (Dr. GRPO,
        https://arxiv.org/abs/2503.20783). The means over sequences leave out each sequence without
        a token that counts.
      max_length: Divisor of `"seq-mean-token-sum-norm"`.

    Raises:
      ValueError: The aggregation is unknown, `"seq-mean-token-sum-norm"` has no `max_length` or
        another aggregation has one, it is below 1, or the mask has another shape than the values.
      TypeError: `max_length` is no number, or JAX traces it.
    """
    _check_shapes(values, "values", mask=mask)
    check_choice("aggregation", aggregation, Aggregation)
    if (max_length is None) == (aggregation == "seq-mean-token-sum-norm"):
        raise ValueError(
            f"{max_length=}: give a divisor with aggregation='seq-mean-token-sum-norm' and with no "
            f"other; got {aggregation=}"
        )
    if max_length is not None:
        check_number(
            "max_length", max_length, least=1.0, remedy="it is the longest sequence's length"
        )
    sums, lengths = _sums(values, mask), _lengths(mask)
    if aggregation == "token-mean":
        return jnp.sum(sums) / jnp.maximum(jnp.sum(lengths), 1)
    if aggregation == "seq-mean-token-mean":
        sums = sums / jnp.maximum(lengths, 1)
    mean = jnp.sum(sums) / jnp.maximum(jnp.sum(lengths > 0).astype(jnp.float32), 1)
    return mean if max_length is None else mean / max_length


def clipped_policy_loss(
    log_probs: Numbers,
    old_log_probs: Numbers | None,
    advantages: Numbers,
    mask: Mask,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    reference_log_probs: Numbers | None = None,
    kl_weight: float = 0.0,
    aggregation: Aggregation = "token-mean",
    max_length: int | None = None,
) -> Float[Array, ""]:
    """PPO's clipped loss of a policy (https://arxiv.org/abs/1707.06347), with GRPO's KL penalty.

        ratio = exp(min(log_probs - old_log_probs, 80))
        loss = -min(ratio·A, clip(ratio, 1 - clip_low, 1 + clip_high)·A) + kl_weight·kl

    `kl` is the estimate `exp(d) - d - 1` with `d = min(reference_log_probs - log_probs, 80)`
    (http://joschu.net/blog/kl-approx.html). DAPO (https://arxiv.org/abs/2503.14476) takes
    `clip_high=0.28` and no KL; GRPO (https://arxiv.org/abs/2402.03300) takes `kl_weight=0.04` and
    `aggregation="seq-mean-token-mean"`.

    Args:
      log_probs: Log-probabilities of the policy.
      old_log_probs: Log-probabilities of the policy that sampled; None if it is the same policy.
      advantages: Advantage A of each token.
      mask: Tokens that count.
      clip_low: Distance below 1 at which the ratio is clipped.
      clip_high: Distance above 1 at which the ratio is clipped.
      reference_log_probs: Log-probabilities of the reference of the KL penalty.
      kl_weight: Weight of the KL penalty; needs `reference_log_probs` unless it is 0.
      aggregation: Name of the aggregation, as for `aggregate`.
      max_length: Divisor, as for `aggregate`.

    Raises:
      ValueError: A weight without a reference, an array of another shape than `log_probs`, or as
        `aggregate` does.
    """
    _check_shapes(
        log_probs,
        old_log_probs=old_log_probs,
        advantages=advantages,
        mask=mask,
        reference_log_probs=reference_log_probs,
    )
    ratio = _ratio(_difference(log_probs, old_log_probs, mask))
    losses = _clipped_loss(ratio, advantages, clip_low, clip_high)
    if kl_weight:
        if reference_log_probs is None:
            raise ValueError(
                f"{kl_weight=} needs reference_log_probs; pass the reference's log-probabilities, "
                "or kl_weight=0.0"
            )
        difference = _bounded(-_difference(log_probs, reference_log_probs, mask))
        losses += kl_weight * (jnp.expm1(difference) - difference)
    return aggregate(losses, mask, aggregation, max_length=max_length)


def gspo_loss(
    log_probs: Numbers,
    old_log_probs: Numbers | None,
    advantages: Float[Array, " B"],
    mask: Mask,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Float[Array, ""]:
    """The clipped loss of whole sequences (GSPO, https://arxiv.org/abs/2507.18071).

    The ratio of a sequence is `exp(min(d, 80))`, where d is the mean of
    `log_probs - old_log_probs` over its tokens. The loss is the mean of
    `-min(ratio·A, clip(ratio, 1 - clip_low, 1 + clip_high)·A)` over the sequences that have a token
    that counts.

    Args:
      log_probs: Log-probabilities of the policy.
      old_log_probs: Log-probabilities of the policy that sampled; None if it is the same policy.
      advantages: Advantage A of each sequence.
      mask: Tokens that count.
      clip_low: Distance below 1 at which the ratio is clipped.
      clip_high: Distance above 1 at which the ratio is clipped.

    Raises:
      ValueError: The shape of an array is not the described one.
    """
    _check_shapes(log_probs, old_log_probs=old_log_probs, mask=mask)
    _check_sequences(log_probs, advantages=advantages)
    ratio = _ratio(_means(_difference(log_probs, old_log_probs, mask), mask))
    counts = _lengths(mask) > 0
    losses = jnp.where(counts, _clipped_loss(ratio, advantages, clip_low, clip_high), 0.0)
    return jnp.sum(losses) / jnp.maximum(jnp.sum(counts.astype(jnp.float32)), 1)


def dpo_loss(
    log_probs: Numbers,
    reference_log_probs: Numbers,
    mask: Mask,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Float[Array, ""]:
    """Direct preference optimization (https://arxiv.org/abs/2305.18290).

    With the reward `r = Σ (log_probs - reference_log_probs)` of a sequence, the loss of a pair is
    `-log σ(beta·(r_chosen - r_rejected))`. With `label_smoothing=s` the preference is wrong with
    the probability s (cDPO, https://ericmitchell.ai/cdpo.pdf).

    Args:
      log_probs: Log-probabilities of the policy.
      reference_log_probs: Log-probabilities of the reference.
      mask: Tokens that count.
      beta: Factor of the rewards.
      label_smoothing: Probability that a preference is the wrong way round.

    Raises:
      ValueError: The shape of an array is not the described one.
    """
    _check_shapes(log_probs, reference_log_probs=reference_log_probs, mask=mask)
    rewards = _sums(_difference(log_probs, reference_log_probs, mask), mask)
    margin = beta * _chosen_minus_rejected(rewards)
    right, wrong = jax.nn.log_sigmoid(margin), jax.nn.log_sigmoid(-margin)
    return -_mean((1 - label_smoothing) * right + label_smoothing * wrong)


def orpo_loss(log_probs: Numbers, mask: Mask, *, weight: float = 0.1) -> Float[Array, ""]:
    """Odds ratio preference optimization (https://arxiv.org/abs/2403.07691).

    The negative log-likelihood of the chosen sequences, averaged over their tokens, plus `weight`
    times the mean of `-log σ(log odds_chosen - log odds_rejected)`. The odds are `p / (1 - p)` with
    the geometric mean p of a sequence's probabilities.

    Args:
      log_probs: Log-probabilities of the policy.
      mask: Tokens that count.
      weight: Weight of the odds ratio.

    Raises:
      ValueError: The shape of an array is not the described one.
    """
    _check_shapes(log_probs, mask=mask)
    # A sequence that is certain has infinite odds, whose gradient is NaN.
    means = jnp.minimum(_means(log_probs, mask), -jnp.finfo(jnp.float32).eps)
    log_odds = means - jnp.log(-jnp.expm1(means))
    of_pairs = -_mean(jax.nn.log_sigmoid(_chosen_minus_rejected(log_odds)))
    half = _half(log_probs)
    return -aggregate(log_probs[:half], mask[:half]) + weight * of_pairs


def simpo_loss(
    log_probs: Numbers, mask: Mask, *, beta: float = 2.0, gamma: float = 1.0
) -> Float[Array, ""]:
    """Simple preference optimization (https://arxiv.org/abs/2405.14734), without a reference.

    With the mean log-probability m of a sequence, the loss of a pair is
    `-log σ(beta·(m_chosen - m_rejected) - gamma)`.

    Args:
      log_probs: Log-probabilities of the policy.
      mask: Tokens that count.
      beta: Factor of the means.
      gamma: Margin by which the chosen sequence should be ahead.

    Raises:
      ValueError: The shape of an array is not the described one.
    """
    _check_shapes(log_probs, mask=mask)
    margin = beta * _chosen_minus_rejected(_means(log_probs, mask)) - gamma
    return -_mean(jax.nn.log_sigmoid(margin))


def kto_loss(
    log_probs: Numbers,
    reference_log_probs: Numbers,
    mask: Mask,
    is_desirable: Bool[Array, " B"],
    kl: Float[Array, ""],
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Array, ""]:
    """Kahneman-Tversky optimization (https://arxiv.org/abs/2402.01306), without pairs.

    With the reward `r = Σ (log_probs - reference_log_probs)` of a sequence, its loss is
    `desirable_weight·(1 - σ(beta·(r - kl)))` if it is desirable, and
    `undesirable_weight·(1 - σ(beta·(kl - r)))` if not. The loss is the mean over sequences.

    Args:
      log_probs: Log-probabilities of the policy.
      reference_log_probs: Log-probabilities of the reference.
      mask: Tokens that count.
      is_desirable: Whether each sequence is desirable.
      kl: Estimate of the KL divergence of the policy from the reference, without a gradient. The
        paper takes the mean reward of mismatched prompts and answers, or 0 if the mean is negative.
      beta: Factor of the rewards.
      desirable_weight: Weight of the desirable sequences.
      undesirable_weight: Weight of the others.

    Raises:
      ValueError: The shape of an array is not the described one.
    """
    _check_shapes(log_probs, reference_log_probs=reference_log_probs, mask=mask)
    _check_sequences(log_probs, is_desirable=is_desirable)
    if jnp.shape(kl):
        raise ValueError(f"kl must be a scalar, got the shape {jnp.shape(kl)}; take its mean")
    rewards = _sums(_difference(log_probs, reference_log_probs, mask), mask)
    margin = beta * (rewards - jax.lax.stop_gradient(jnp.maximum(kl, 0.0)))
    desirable = desirable_weight * jax.nn.sigmoid(-margin)  # 1 - σ(m) is σ(-m)
    undesirable = undesirable_weight * jax.nn.sigmoid(margin)
    return _mean(jnp.where(is_desirable, desirable, undesirable))


def _check_shapes(like: Numbers, name: str = "log_probs", **arrays: Any) -> None:
    """Raises ValueError for an array that broadcasting would give another meaning."""
    for other, a in arrays.items():
        if a is not None and jnp.shape(a) != like.shape:
            raise ValueError(
                f"{other} must have the shape of {name}, {like.shape}, got {jnp.shape(a)}; give a "
                "number for each token, for instance by jnp.broadcast_to"
            )


def _check_sequences(log_probs: Numbers, **arrays: Any) -> None:
    """Raises ValueError for an array that has no number for each sequence."""
    for name, a in arrays.items():
        if jnp.shape(a) != log_probs.shape[:1]:
            raise ValueError(
                f"{name} must have a number for each of {log_probs.shape[0]} sequences, got the "
                f"shape {jnp.shape(a)}; reshape it"
            )


def _difference(log_probs: Numbers, others: Numbers | None, mask: Mask) -> Numbers:
    """The difference of log-probabilities, 0 where a token does not count.

    The others have no gradient, and None stands for the log-probabilities themselves.
    """
    others = log_probs if others is None else others
    return _where(mask, log_probs - jax.lax.stop_gradient(others))


def _ratio(difference: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The exponential of the difference, or of 80 if that is less.

    An infinite ratio is clipped, and infinity times the gradient of the clip, 0, would be NaN.
    """
    return jnp.exp(_bounded(difference))


def _clipped_loss(
    ratio: Float[Array, "*n"], advantages: Float[Array, "*n"], clip_low: float, clip_high: float
) -> Float[Array, "*n"]:
    """`-min(ratio·A, clip(ratio, 1 - clip_low, 1 + clip_high)·A)`."""
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return -jnp.minimum(ratio * advantages, clipped * advantages)


def _bounded(difference: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The difference, or 80 if that is less. Its exponential is finite."""
    return jnp.minimum(difference, 80.0)


def _mean(values: Float[Array, " n"]) -> Float[Array, ""]:
    return jnp.sum(values) / max(1, values.size)


def _where(mask: Mask, values: Numbers) -> Numbers:
    return jnp.where(mask.astype(bool), values, 0.0)


def _sums(values: Numbers, mask: Mask) -> Float[Array, " B"]:
    return jnp.sum(_where(mask, values), axis=-1)


def _lengths(mask: Mask) -> Float[Array, " B"]:
    return jnp.sum(mask.astype(bool), axis=-1).astype(jnp.float32)


def _means(values: Numbers, mask: Mask) -> Float[Array, " B"]:
    return _sums(values, mask) / jnp.maximum(_lengths(mask), 1)


def _half(a: Shaped[Array, "B *rest"]) -> int:
    if len(a) % 2:
        raise ValueError(
            f"{len(a)} sequences are no pairs; give the chosen ones, then the rejected ones"
        )
    return len(a) // 2


def _chosen_minus_rejected(a: Float[Array, " B"]) -> Any:
    half = _half(a)
    return a[:half] - a[half:]
