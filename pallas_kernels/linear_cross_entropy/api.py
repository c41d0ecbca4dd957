"""The public linear cross-entropy."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer

from pallas_kernels.linear_cross_entropy import chunks, in_place, logits_kernel, reference
from pallas_kernels.linear_cross_entropy.config import Config, chunk_sizes, copied_bytes
from pallas_kernels.linear_cross_entropy.token_loss import LossOptions, TokenLosses
from pallas_kernels.mosaic_gpu import runs_here, sharded_over_devices

# Not "Implementation": beartype takes aliases of one name for one type, whatever their module.
type LossImplementation = Literal["reference", "xla", "mosaic_gpu"]
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
    vocab_chunk_size: int | None = None,
    max_logits_bytes: int | None = None,
    vocab_axis: str | None = None,
    accum_dtype: DTypeLike = jnp.float32,
    check_labels: bool = False,
    return_metrics: bool = False,
    implementation: LossImplementation | None = None,
    config: Config | None = None,
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
    gradients during the forward, of all tokens or a chunk at a time (three GEMMs, the backward only
    scales them); `"none"` takes four, and so does `vocab_chunk_size`, but five with `"none"` and
    both sizes. A call that is not differentiated takes one and does no gradient work. Algorithms,
    dtypes and rounding: `pallas_kernels/linear_cross_entropy/chunks.py`. Twice it can be
    differentiated with `"reference"` only.

    `dweight` has the dtype of `weight`, so a bfloat16 weight gets a rounded gradient. For a float32
    gradient of a bfloat16 weight, differentiate with respect to `weight.astype(jnp.float32)` inside
    of the compiled function: XLA drops the cast and its inverse, and makes no copy. (Not with
    `vocab_chunk_size` alone, which casts a chunk at a time, as suits weights that are stored in
    float32.)

    On a mesh, call it inside of `jax.shard_map(check_vma=False)` with each device's tokens
    (`pallas_kernels.sharding`), and with `vocab_axis` where the weight is split. Each device of
    that axis gets the same loss, and the part of `dx` that its columns make: the transpose of
    `shard_map` adds these up.

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
      chunk_size: tokens whose logits exist at a time, at most: what would be two chunks is three.
        `None` takes what `max_logits_bytes` allows.
      vocab_chunk_size: columns whose logits exist at a time, for all tokens: `dweight` is then
        written once, and not added up. With `chunk_size`, which then is for losses and `dx`, the
        way to the smallest memory of many tokens; without, `dx` is added up in float32, and a
        weight that is stored in float32 is cast a chunk at a time, not copied. `None`: all columns,
        in chunks of tokens.
      max_logits_bytes: what logits may take beside those that are where `dweight` will be. With
        `"mosaic_gpu"`, a bfloat16 `x`, and neither bias, label smoothing, softcap nor `vocab_axis`
        these are, as exponentials, all logits of the first `2D` tokens (`D` if `dweight` has 16
        bits), where D is a multiple of 128 or 192 and V of 128 (`in_place.py`); if that is all
        tokens, the limit is one on the rows of `dweight` that are made at a time. The other tokens
        go through in the largest chunks that fit. If that is less than 768 tokens, both sizes are
        chosen, where the limit is that of vocabulary chunks, and nothing is in place but the logits
        of a token chunk. (Vocabulary chunks alone for `"none"`, or where fewer than 256 tokens fit
        there.) `None`: 512 MiB (`"mosaic_gpu"`) or 1 GiB (`"xla"`, whose logits are float32), and
        96 MiB for those rows. It depends on sizes alone, not on what is free on the device, so that
        all processes of a run compile the same program.
      vocab_axis: name of the mesh axis over which `weight` and `bias` are split by vocabulary, in
        equal parts; `labels` are numbers in the whole vocabulary.
      accum_dtype: dtype in which the chunks' contributions to `dweight` are added up, where there
        are several.
      check_labels: raise on a label out of range, with its value: at once outside of `jax.jit`,
        through `jax.experimental.checkify.checkify` inside.
      return_metrics: also return `LossMetrics`.
      implementation: `"mosaic_gpu"` uses kernels for Hopper and later and 16-bit `x`, `"xla"` the
        same algorithms with float32 logits, `"reference"` keeps all logits, in float32, and ignores
        chunks and `accum_dtype`. `None` picks the kernels where they run, unless the arguments may
        be split over devices, which XLA cannot do with a kernel. A name is binding.
      config: launch parameters of the kernels; `None` takes measured ones.

    Returns:
      The loss, a scalar or of the shape of `labels`; with `return_metrics`, `(loss, LossMetrics)`.

    Raises:
      ValueError: shapes disagree, an option is out of its range, or a name is unknown.
      TypeError: labels are not integers.
      NotImplementedError: the kernels were asked for by name and do not take the arguments; or a
        second derivative was.
      jax.experimental.checkify.JaxRuntimeError: `check_labels` found a label out of range.
    """
    _check_arguments(x, weight, labels, bias, token_weights)
    implementation = _check_and_choose(x, implementation, config)
    if reduction not in get_args(Reduction.__value__):
        raise ValueError(f"{reduction=} must be one of {get_args(Reduction.__value__)}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{label_smoothing=} must lie in [0, 1]")
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(f"{logit_softcap=} must be above 0; None turns the cap off")
    for name, size in (
        ("chunk_size", chunk_size),
        ("vocab_chunk_size", vocab_chunk_size),
        ("max_logits_bytes", max_logits_bytes),
    ):
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    if max_logits_bytes is not None and (chunk_size, vocab_chunk_size) != (None, None):
        raise ValueError(
            f"{max_logits_bytes=} chooses the sizes of chunks; give it or {chunk_size=} and "
            f"{vocab_chunk_size=}"
        )
    if vocab_axis is not None and implementation == "reference":
        raise ValueError(f"{vocab_axis=}: implementation='reference' has the whole vocabulary")
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
        num_parts = 1 if vocab_axis is None else jax.lax.axis_size(vocab_axis)
        _check_labels(labels, num_parts * vocab_size, ignore_index)
    counts = labels != ignore_index
    weights = counts.astype(jnp.float32)
    if token_weights is not None:
        weights *= token_weights.reshape(-1).astype(jnp.float32)

    total = jnp.sum(weights)
    per_weight = jnp.where(total == 0, 0.0, 1 / jnp.where(total == 0, 1.0, total))
    # A mean's factor goes in here and not around the loss, or it would have to be multiplied with
    # the finished gradients, `dweight` among them.
    coefficients = weights * per_weight if reduction == "mean" else weights

    if implementation == "reference":
        losses = reference.linear_token_losses(x, weight, bias, labels, options)
        loss = coefficients * losses.loss
        if reduction != "none":
            loss = jnp.sum(loss)
    else:
        logits_dtype = x.dtype if implementation == "mosaic_gpu" else jnp.dtype("float32")
        extent = None
        if chunk_size is None and vocab_chunk_size is None:
            chunk_size, vocab_chunk_size = chunk_sizes(
                len(labels),
                vocab_size,
                logits_dtype,
                max_logits_bytes,
                # Both sizes would take `"none"` a GEMM more.
                dweight_bytes=None if reduction == "none" else weight.size * weight.dtype.itemsize,
            )
            if implementation == "mosaic_gpu" and bias is None and vocab_axis is None:
                extent = in_place.extent(
                    x,
                    weight,
                    options,
                    accum_dtype=accum_dtype,
                    copied_bytes=copied_bytes(max_logits_bytes),
                    chunk_size=chunk_size if vocab_chunk_size is None else None,
                )
        plan = chunks.Plan(
            options=options,
            implementation=implementation,
            chunk_size=chunk_size,
            vocab_chunk_size=vocab_chunk_size,
            in_place=extent,
            accum_dtype=jnp.dtype(accum_dtype),
            vocab_axis=vocab_axis,
            config=config or Config(),
        )
        if reduction == "none":
            losses = chunks.token_losses(plan, x, weight, bias, labels)
            loss = coefficients * losses.loss
        else:
            loss, losses = chunks.weighted_loss_sum(plan, x, weight, bias, coefficients, labels)
    if reduction == "none":
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


def _check_arguments(x, weight, labels, bias, token_weights) -> None:
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


def _check_and_choose(
    x: Array, implementation: LossImplementation | None, config: Config | None
) -> LossImplementation:
    """The implementation to run."""
    names = get_args(LossImplementation.__value__)
    if implementation is not None and implementation not in names:
        raise ValueError(f"{implementation=} must be None or one of {names}")
    reason = logits_kernel.unsupported_reason(x.dtype)
    if implementation == "mosaic_gpu" and reason is not None:
        raise NotImplementedError(f"{implementation=}: {reason}")
    if implementation is None:
        fallback = runs_here() is not None or sharded_over_devices(x) or reason is not None
        implementation = "xla" if fallback else "mosaic_gpu"
    if config is not None and implementation != "mosaic_gpu":
        raise ValueError(f"{config=}: {implementation=} has no launch parameters")
    return implementation


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
