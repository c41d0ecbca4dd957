"""The public linear cross-entropy."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Integer

from pallas_kernels.arguments import (
    BITS_OF_PRODUCTS,
    as_array,
    check_config,
    check_floating,
    check_integer,
    check_number,
    floating_arrays,
    number,
)
from pallas_kernels.gpu.device import runs_here
from pallas_kernels.loss import chunks, reference
from pallas_kernels.loss.config import Config, chunk_sizes, copied_bytes
from pallas_kernels.loss.mosaic_gpu import in_place
from pallas_kernels.loss.mosaic_gpu import logits as logits_kernel
from pallas_kernels.loss.token_loss import LossOptions, TokenLosses, finite_where_not_counted
from pallas_kernels.sharding import sharded_over_devices

# Not "Implementation": beartype takes aliases of one name for one type, whatever their module.
type LossImplementation = Literal["reference", "xla", "mosaic_gpu"]
type Reduction = Literal["mean", "sum", "none"]


# Labels that are no column of the vocabulary become these.
_IGNORED, _OUT_OF_RANGE = -1, -2
_DTYPES_OF_WEIGHTS = jnp.floating, jnp.integer, jnp.bool_


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
    token_weights: Float[Array, "*T"] | Integer[Array, "*T"] | Bool[Array, "*T"] | None = None,
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

    A token does not count if its label is `ignore_index` or its weight is exactly 0. It adds
    nothing to loss, metrics and gradients, and its row of `dx` is 0, even if its row of `x` holds
    NaN or infinities. The weight of an ignored token is taken as 0, whatever it is, and has no
    gradient. A weight of 0 has its token's loss as gradient, or 0 where that loss is not finite. A
    NaN weight of a token whose label counts makes loss and gradients NaN.

    Differentiable in `x`, `weight`, `bias` and `token_weights`. `"sum"` and `"mean"` form the
    gradients during the forward, of all tokens or a chunk at a time (three GEMMs, the backward only
    scales them). `"none"` takes four: it waits for the cotangents, so its backward makes the logits
    again, in the same chunks of tokens. `vocab_chunk_size` takes four with any reduction: its
    backward makes the logits again, a slice of the vocabulary at a time. `"none"` with both sizes
    takes five. A call that is not differentiated takes one and does no gradient work.
    `pallas_kernels/loss/chunks.py` describes algorithms, dtypes and rounding. Only
    `"reference"` has second derivatives.

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
    reduced loss and the gradients, unless its weight is 0; it never reads or writes out of bounds.
    `check_labels` turns it into an error. Labels are compared as the integers that they are, in
    their own dtype. (Without `jax_enable_x64`, JAX itself takes the upper half off 64-bit arrays
    that are arguments of `jax.jit`.)

    Args:
      x: hidden states, of a floating dtype of 16 bits or more; the leading axes are tokens.
      weight: output embedding, one row for each vocabulary entry (Hugging Face's layout), of such a
        dtype, too.
      labels: the token to predict at each position, any integer dtype.
      bias: added to the logits, of such a dtype.
      token_weights: a factor for each token's loss, in float32; integers and bools, as masks are,
        will do.
      ignore_index: label of the tokens that do not count; may lie inside `[0, V)`.
      reduction: `"mean"`, `"sum"` or `"none"`.
      label_smoothing: share `s` of the target spread evenly over the vocabulary
        (https://arxiv.org/abs/1512.00567), in [0, 1].
      z_loss: weight of `lse²`, which keeps the logits from drifting (PaLM,
        https://arxiv.org/abs/2204.02311), at least 0.
      logit_softcap: bound `c` of the logits (Gemma 2, https://arxiv.org/abs/2408.00118), finite and
        above 0. `None`: no bound.
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
        are several: floating, of 16 bits or more. float64 needs `jax_enable_x64`.
      check_labels: raise on a label out of range, whatever its weight, with its value: at once
        outside of `jax.jit`, through `jax.experimental.checkify.checkify` inside.
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
      TypeError: labels are not integers, another array is of a dtype that is not described here, or
        an option is of a wrong type.
      NotImplementedError: the kernels were asked for by name and do not take the arguments; or a
        second derivative was.
      jax.experimental.checkify.JaxRuntimeError: `check_labels` found a label out of range.
    """
    x, weight = floating_arrays(x=x, weight=weight, least_bits=BITS_OF_PRODUCTS)
    if bias is not None:
        (bias,) = floating_arrays(bias=bias, least_bits=BITS_OF_PRODUCTS)
    _check_arguments(x, weight, labels, bias, token_weights)
    implementation = _check_and_choose(x, implementation, config)
    _check_options(reduction, ignore_index, label_smoothing, z_loss, logit_softcap)
    _check_chunks(chunk_size, vocab_chunk_size, max_logits_bytes, accum_dtype)
    num_parts = _num_parts(vocab_axis, implementation)
    options = LossOptions(
        ignore_index=_IGNORED,
        label_smoothing=float(label_smoothing),
        z_loss=float(z_loss),
        logit_softcap=None if logit_softcap is None else float(logit_softcap),
    )
    vocab_size, hidden_size = weight.shape
    shape = labels.shape
    x = x.reshape(-1, hidden_size)
    if token_weights is not None:
        token_weights = token_weights.reshape(-1)
    labels, counts, weights = _labels_and_weights(
        labels.reshape(-1), token_weights, num_parts * vocab_size, ignore_index, check_labels
    )

    total = jnp.sum(weights)
    per_weight = jnp.where(total == 0, 0.0, 1 / jnp.where(total == 0, 1.0, total))
    # A mean's factor goes in here and not around the loss, or it would have to be multiplied with
    # the finished gradients, `dweight` among them.
    coefficients = weights * per_weight if reduction == "mean" else weights

    if implementation == "reference":
        losses = reference.linear_token_losses(x, weight, bias, labels, coefficients, options)
        losses = finite_where_not_counted(losses, coefficients)
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
            losses = finite_where_not_counted(losses, coefficients)
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
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"weight must be [V, D] with D >= 1 and V >= 1, got {weight.shape}")
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {x.shape} and weight {weight.shape} must agree in their last axis")
    as_array("labels", labels)
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"labels must have shape {x.shape[:-1]} (x is {x.shape}), got {labels.shape}"
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be integers, got {labels.dtype}; cast labels to int32")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape {weight.shape[:1]}, got {bias.shape}")
    if token_weights is None:
        return
    as_array("token_weights", token_weights)
    if token_weights.shape != labels.shape:
        raise ValueError(
            f"token_weights must have the shape of labels, {labels.shape}, got "
            f"{token_weights.shape}"
        )
    if not any(jnp.issubdtype(token_weights.dtype, t) for t in _DTYPES_OF_WEIGHTS):
        raise TypeError(
            f"token_weights is {token_weights.dtype}, not a floating dtype, integers or bools; "
            "cast token_weights to float32"
        )


def _check_options(reduction, ignore_index, label_smoothing, z_loss, logit_softcap) -> None:
    if reduction not in get_args(Reduction.__value__):
        raise ValueError(f"{reduction=} must be one of {get_args(Reduction.__value__)}")
    check_integer("ignore_index", ignore_index, remedy="a label that no token has ignores none")
    if not 0 <= number("label_smoothing", label_smoothing, remedy="0.0 is none") <= 1:
        raise ValueError(f"{label_smoothing=} must lie in [0, 1]")
    check_number("z_loss", z_loss, least=0.0, remedy="0.0 is none")
    remedy = "None turns the cap off"
    if logit_softcap is not None:
        if not number("logit_softcap", logit_softcap, remedy=remedy) > 0:
            raise ValueError(f"{logit_softcap=} must be above 0; {remedy}")
        check_number("logit_softcap", logit_softcap, remedy=remedy)


def _check_chunks(chunk_size, vocab_chunk_size, max_logits_bytes, accum_dtype) -> None:
    for name, size in (
        ("chunk_size", chunk_size),
        ("vocab_chunk_size", vocab_chunk_size),
        ("max_logits_bytes", max_logits_bytes),
    ):
        if size is None:
            continue
        check_integer(name, size, remedy="None chooses one")
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    if max_logits_bytes is not None and (chunk_size, vocab_chunk_size) != (None, None):
        raise ValueError(
            f"{max_logits_bytes=} chooses the sizes of chunks; give it or {chunk_size=} and "
            f"{vocab_chunk_size=}"
        )
    try:
        # NumPy takes None for float64.
        dtype = jnp.dtype("None" if accum_dtype is None else accum_dtype)
    except TypeError:
        raise TypeError(f"{accum_dtype=} must be a dtype, such as jnp.float32") from None
    check_floating(f"accum_dtype={dtype}", dtype, "change it", least_bits=BITS_OF_PRODUCTS)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"accum_dtype={dtype} needs jax_enable_x64; change it to float32")


def _num_parts(vocab_axis: str | None, implementation: LossImplementation) -> int:
    """Of the vocabulary, on as many devices."""
    if vocab_axis is None:
        return 1
    if not isinstance(vocab_axis, str):
        raise TypeError(f"{vocab_axis=} must be the name of a mesh axis, or None")
    if implementation == "reference":
        raise ValueError(f"{vocab_axis=}: implementation='reference' has the whole vocabulary")
    try:
        return jax.lax.axis_size(vocab_axis)
    except NameError:
        raise ValueError(
            f"{vocab_axis=} is not bound; call linear_cross_entropy inside of jax.shard_map over a "
            "mesh with this axis, or leave it out where the weight is whole"
        ) from None


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
    check_config(config, Config)
    return implementation


def _labels_and_weights(
    labels: Any, token_weights: Any, vocab_size: int, ignore_index: int, check: bool
) -> tuple[Int[Array, " T"], Bool[Array, " T"], Float[Array, " T"]]:
    """`(labels, counts, weights)`: as int32, whether they are not `ignore_index`, and the factors.

    Ignored labels are -1 then, and what is out of range is -2, but -1 where the weight is 0. They
    are compared before they are cast, NumPy's by NumPy: JAX would cut them to 32 bits, and 2^32 + 1
    be label 1.
    """
    kind = jnp.iinfo(labels.dtype)
    in_range = (labels >= 0) & (labels <= min(vocab_size - 1, int(kind.max)))
    ignored = labels != labels
    if kind.min <= ignore_index <= kind.max:
        ignored = labels == np.asarray(ignore_index, labels.dtype)
    if check:
        _check_labels(labels, ~(in_range | ignored), vocab_size, ignore_index)
    counts = jnp.asarray(~ignored)
    weights = counts.astype(jnp.float32)
    if token_weights is not None:
        weights = jnp.where(counts, jnp.asarray(token_weights).astype(jnp.float32), 0.0)
    column = jnp.where(in_range, labels, 0).astype(jnp.int32)
    outside = jnp.where(weights == 0, _IGNORED, _OUT_OF_RANGE)
    return jnp.where(counts & in_range, column, outside), counts, weights


def _check_labels(labels: Any, wrong: Any, vocab_size: int, ignore_index: int) -> None:
    if labels.size == 0:
        return
    position = jnp.argmax(wrong)
    checkify.check(
        ~jnp.any(wrong),
        "linear_cross_entropy: label {label} at token {position} is neither in "
        f"[0, {vocab_size}) nor {ignore_index=}",
        label=jnp.asarray(labels)[position],
        position=position,
    )
