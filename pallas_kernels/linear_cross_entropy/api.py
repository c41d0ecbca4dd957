"""The public linear cross-entropy."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer

from pallas_kernels.linear_cross_entropy import reference, xla
from pallas_kernels.linear_cross_entropy.token_loss import LossOptions, TokenLosses

type Implementation = Literal["reference", "xla"]
type Reduction = Literal["mean", "sum", "none"]


class LossMetrics(NamedTuple):
    """Figures of one call, without gradients.

    All means are weighted by `token_weights`, and are 0 if no token counts.

    Attributes:
      num_tokens: how many labels differ from `ignore_index`.
      nll: mean negative log-likelihood in nats, without smoothing and z-loss.
      z_loss: mean of `z_loss · lse²`.
      accuracy: share of tokens whose label is the first largest logit.
      lse: mean of the logsumexp of the logits.
    """

    num_tokens: Int[Array, ""]
    nll: Float[Array, ""]
    z_loss: Float[Array, ""]
    accuracy: Float[Array, ""]
    lse: Float[Array, ""]


def linear_cross_entropy(
    x: Float[Array, "*T D"],
    weight: Float[Array, "V D"],
    labels: Integer[Array, "*T"],
    *,
    bias: Float[Array, " V"] | None = None,
    token_weights: Float[Array, "*T"] | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    chunk_size: int | None = None,
    accum_dtype: DTypeLike = jnp.float32,
    check_labels: bool = False,
    return_metrics: bool = False,
    implementation: Implementation | None = None,
    config: None = None,
) -> Any:
    """Cross-entropy of `x @ weight.T + bias` against `labels`, without the logits in memory.

    Per token, with `z = c·tanh(logits / c)` where `c = logit_softcap` is given (else `z = logits`),
    `lse = logsumexp(z)` and `s = label_smoothing`:

        loss = (1 - s)·(lse - z[label]) + s·(lse - mean(z)) + z_loss·lse²

    times its token weight, and 0 where `label == ignore_index`. `"sum"` adds the losses up,
    `"mean"` divides the sum by the sum of the weights of the tokens that count (their number,
    without `token_weights`), `"none"` returns them. Where that divisor is 0 (no token counts), loss
    and gradients are 0, never NaN. Losses are float32.

    Differentiable in `x`, `weight`, `bias` and `token_weights`. `"sum"` and `"mean"` form the
    gradients during the forward (three GEMMs, the backward only scales them), `"none"` takes four
    GEMMs and any cotangent; a call that is not differentiated does no gradient work. `accum_dtype`,
    dtypes and rounding: see `pallas_kernels/linear_cross_entropy/xla.py`.

    A label that is neither `ignore_index` nor in `[0, V)` makes its token's loss NaN, and so the
    reduced loss and the gradients; it never reads or writes out of bounds. `check_labels` turns it
    into an error.

    Args:
      x: hidden states; the leading axes are tokens.
      weight: output embedding, one row for each vocabulary entry (Hugging Face's layout).
      labels: the token to predict at each position, any integer dtype.
      bias: added to the logits.
      token_weights: a factor for each token's loss.
      ignore_index: label of the tokens that do not count; may lie inside `[0, V)`.
      reduction: `"mean"`, `"sum"` or `"none"`.
      label_smoothing: share `s` of the target spread evenly over the vocabulary
        (https://arxiv.org/abs/1512.00567), in [0, 1].
      z_loss: weight of `lse²`, which keeps the logits from drifting (PaLM, https://arxiv.org/abs/2204.02311).
      logit_softcap: bound `c` of the logits (Gemma 2, https://arxiv.org/abs/2408.00118), above 0.
      chunk_size: tokens whose logits exist at a time. `None`: float32 logits of at most 1 GiB, but
        at least 1024 tokens.
      accum_dtype: dtype in which the chunks' contributions to `dweight` are added up.
      check_labels: raise on a label out of range, with its value: at once outside of `jax.jit`,
        through `jax.experimental.checkify.checkify` inside.
      return_metrics: also return `LossMetrics`.
      implementation: `None` picks the fastest one that runs here. `"xla"` is the chunked program
        described above, `"reference"` keeps all logits, in float32, and ignores `chunk_size` and
        `accum_dtype`.
      config: launch parameters of a kernel; the implementations here have none.

    Returns:
      The loss, a scalar or of the shape of `labels`; with `return_metrics`, `(loss, LossMetrics)`.

    Raises:
      ValueError: shapes disagree, an option is out of its range, or a name is unknown.
      TypeError: labels are not integers.
      jax.experimental.checkify.JaxRuntimeError: `check_labels` found a label out of range.
    """
    _check_arguments(x, weight, labels, bias, token_weights, config)
    if reduction not in get_args(Reduction.__value__):
        raise ValueError(f"{reduction=} must be one of {get_args(Reduction.__value__)}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{label_smoothing=} must lie in [0, 1]")
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(f"{logit_softcap=} must be above 0; None turns the cap off")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{chunk_size=} must be at least 1")
    options = LossOptions(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logit_softcap=logit_softcap,
    )
    vocab_size, hidden_size = weight.shape
    shape = labels.shape
    x = x.reshape(-1, hidden_size)
    labels = labels.reshape(-1)
    if labels.dtype not in (jnp.int32, jnp.int64):
        # 64 bits stay 64: no label out of range may wrap into [0, V).
        labels = labels.astype(jnp.int32 if labels.dtype.itemsize <= 4 else jnp.int64)
    if check_labels:
        _check_labels(labels, vocab_size, ignore_index)
    counts = labels != ignore_index
    weights = counts.astype(jnp.float32)
    if token_weights is not None:
        weights *= token_weights.reshape(-1).astype(jnp.float32)

    match implementation:
        case "reference":
            losses = reference.linear_token_losses(x, weight, bias, labels, options)
            loss = weights * losses.loss
            if reduction != "none":
                loss = jnp.sum(loss)
        case None | "xla":
            chunk_size = chunk_size or xla.default_chunk_size(len(labels), vocab_size)
            static = options, chunk_size, jnp.dtype(accum_dtype)
            if reduction == "none":
                losses = xla.linear_token_losses(x, weight, bias, labels, *static)
                loss = weights * losses.loss
            else:
                loss, losses = xla.weighted_loss_sum(x, weight, bias, weights, labels, *static)
        case _:
            raise ValueError(
                f"{implementation=} must be None or one of {get_args(Implementation.__value__)}"
            )

    total = jnp.sum(weights)
    per_weight = jnp.where(total == 0, 0.0, 1 / jnp.where(total == 0, 1.0, total))
    if reduction == "mean":
        loss *= per_weight
    elif reduction == "none":
        loss = loss.reshape(shape)
    if not return_metrics:
        return loss
    return loss, jax.lax.stop_gradient(_metrics(losses, weights, counts, per_weight))


def _metrics(losses: TokenLosses, weights, counts, per_weight) -> LossMetrics:
    mean = lambda values: jnp.sum(weights * values) * per_weight
    return LossMetrics(
        num_tokens=jnp.sum(counts, dtype=jnp.int32),
        nll=mean(losses.nll),
        z_loss=mean(losses.z_loss),
        accuracy=mean(losses.correct),
        lse=mean(losses.lse),
    )


def _check_arguments(x, weight, labels, bias, token_weights, config) -> None:
    if weight.ndim != 2 or weight.shape[0] < 1:
        raise ValueError(f"weight must be [V, D] with V >= 1, got {weight.shape}")
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {x.shape} and weight {weight.shape} must agree in their last axis")
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"labels must have shape {x.shape[:-1]} (x is {x.shape}), got {labels.shape}"
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape {weight.shape[:1]}, got {bias.shape}")
    if token_weights is not None and token_weights.shape != labels.shape:
        raise ValueError(
            f"token_weights must have the shape of labels, {labels.shape}, got "
            f"{token_weights.shape}"
        )
    if config is not None:
        raise ValueError(f"{config=}: the plain-XLA implementations have no launch parameters")


def _check_labels(labels: Int[Array, " T"], vocab_size: int, ignore_index: int) -> None:
    if labels.size == 0:
        return
    wrong = ((labels < 0) | (labels >= vocab_size)) & (labels != ignore_index)
    position = jnp.argmax(wrong)
    checkify.check(
        ~jnp.any(wrong),
        "linear_cross_entropy: label {label} at token {position} is neither in [0, {vocab_size}) "
        "nor ignore_index={ignore_index}",
        label=labels[position],
        position=position,
        vocab_size=jnp.asarray(vocab_size),
        ignore_index=jnp.asarray(ignore_index),
    )
