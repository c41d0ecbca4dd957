"""The public linear cross-entropy, and the plan that it follows."""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Integer

from pallas_kernels.choices import record, refuse_fallback
from pallas_kernels.implementation import Implementation, symbolic_reason
from pallas_kernels.loss import differentiable, reference
from pallas_kernels.loss.arguments import (
    Reduction,
    check_arrays,
    checked_request,
    labels_and_weights,
    num_parts,
)
from pallas_kernels.loss.config import Config
from pallas_kernels.loss.description import LossPlan, describe
from pallas_kernels.loss.layout import Embedding, WeightLayout
from pallas_kernels.loss.low_rank import LoRA
from pallas_kernels.loss.token_loss import TokenLosses, coefficients_of_mean

_NAME = "linear_cross_entropy"


class LossMetrics(NamedTuple):
    """Metrics of one call, scalars without gradients: `num_tokens` is int32, the others float32.

    The means are over the tokens that count, weighted by `token_weights`. A mean is 0 if no token
    counts.

    Attributes:
      num_tokens: Number of labels that differ from `ignore_index`.
      nll: Mean negative log-likelihood in nats, without smoothing and z-loss.
      z_loss: Mean of `z_loss · lse²`.
      accuracy: Share of tokens whose label is the first largest logit.
      lse: Mean logsumexp of the logits.
    """

    num_tokens: Int[Array, ""]
    nll: Float[Array, ""]
    z_loss: Float[Array, ""]
    accuracy: Float[Array, ""]
    lse: Float[Array, ""]


def linear_cross_entropy(
    x: Float[Array, "*T D"],
    weight: Embedding | LoRA,
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
    counted_fraction: float = 1.0,
    vocab_axis: str | None = None,
    weight_layout: WeightLayout = "vd",
    accum_dtype: DTypeLike = jnp.float32,
    check_labels: bool = False,
    return_metrics: bool = False,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Any:
    """Cross-entropy of `x @ weight.T + bias` against `labels`, without all logits in memory.

    **Formula.** Let `z` be the logits, or `c·tanh(logits / c)` if `logit_softcap` is a bound `c`.
    With `lse = logsumexp(z)` and `s = label_smoothing` the loss of a token is

        loss = (1 - s)·(lse - z[label]) + s·(lse - mean(z)) + z_loss·lse²

    times its token weight, and 0 where `label == ignore_index`. `reduction="sum"` adds the losses
    up. `"mean"` divides this sum by the sum of the weights of the tokens that count. Without
    `token_weights` it divides by their number. `"none"` returns the losses. If no token counts,
    loss and gradients are 0, never NaN. Losses are float32.

    **Tokens that count.** A token does not count if its label is `ignore_index` or its weight is
    exactly 0. It adds nothing to loss, metrics and gradients, and its row of `dx` is 0, even if its
    row of `x` holds NaN or infinities. The weight of an ignored token counts as 0, whatever it is,
    and has no gradient. The gradient of a weight of 0 is the loss of its token, or 0 if this loss
    is not finite. If the label of a token counts and its weight is NaN, loss and gradients are NaN.

    **Labels.** If a label is neither `ignore_index` nor in `[0, V)`, the loss of its token is NaN.
    The reduced loss and the gradients are then NaN, too, unless the weight of the token is 0. The
    label never causes a read or write out of bounds. With `check_labels` it raises an error. Labels
    are compared in their own dtype. (Without `jax_enable_x64`, JAX itself truncates 64-bit
    arguments of `jax.jit` to 32 bits.)

    **Gradients.** The loss is differentiable in `x`, `weight`, `bias` and `token_weights`. A call
    that is not differentiated computes no gradients. `dweight`, the gradient of `weight`, has the
    dtype of `weight`, so it is rounded for a bfloat16 weight. For a float32 gradient of a bfloat16
    weight, differentiate with respect to `weight.astype(jnp.float32)` inside of the compiled
    function: XLA drops this cast and the cast back to bfloat16, and makes no copy. With
    `vocab_chunk_size`, however, XLA keeps a float32 copy of the weight. Only `"reference"` has
    second derivatives and forward mode (`jax.jvp`).

    **Plans.** A plan decides which part of the logits is in memory at a time. By default the
    kernels store exponentials of the logits in the memory of `dweight`, which is free until
    `dweight` is made, last. If this memory has room only for the first tokens, the other tokens are
    computed in chunks. Loss and gradients take three matrix products of `2·T·D·V` FLOPs, or four
    with `reduction="none"`. With `vocab_chunk_size` they are computed in chunks of columns (slices
    of the vocabulary), and take four products.
    `linear_cross_entropy_plan` says which plan a call has and why; `docs/kernels/loss.md` describes
    the plans.

    **Rounding.** Products take operands in the dtype of `x` and accumulate in float32. In memory,
    `"mosaic_gpu"` has logits or their exponentials rounded to the dtype of `x`, and `"xla"` has
    float32 logits. Softmax and losses are float32. The gradient in the logits is rounded once, to
    the dtype of `x`. Plans that store exponentials round the exponentials instead. Every gradient
    is rounded once. The operands of `"reference"` are float32. `pallas_kernels/loss/by_tokens.py`
    has the details.

    **Meshes.** Each device computes the losses of its own tokens, by a plan for its own arrays. A
    mesh axis that splits no tokens may split the vocabulary; its devices exchange 20 bytes a token
    and add up `dx`. On Auto and Explicit axes a sum or mean is over the tokens of all devices.
    Inside of `jax.shard_map` a sum or mean is over the tokens of one device. There, for the mean
    over all tokens, take `reduction="sum"`, and divide the `jax.lax.psum` of the losses by the
    `jax.lax.psum` of the numbers of tokens; `vocab_axis` names the axis that splits `weight`.

    Args:
      x: Hidden states, of a floating dtype of 16 bits or more. The leading axes are tokens.
      weight: Output embedding of the layout `weight_layout`, of a floating dtype of 16 bits or
        more; or a `LoRA`, whose `weight` has this layout and no gradient.
      labels: Token to predict at each position, of any integer dtype.
      bias: Bias of the logits, of a floating dtype of 16 bits or more.
      token_weights: Factor for each token's loss, taken as float32. A mask of integers or bools
        will do. If their sum is 0, the mean and its gradients are 0. For weights of both signs,
        such as advantages, take `reduction="sum"`.
      ignore_index: Label of the tokens that do not count. It may lie inside `[0, V)`.
      reduction: Name of the reduction: `"mean"`, `"sum"` or `"none"`.
      label_smoothing: Share `s` of the target that is spread evenly over the vocabulary
        (https://arxiv.org/abs/1512.00567), in [0, 1].
      z_loss: Weight of `lse²`, which keeps the logits from drifting (PaLM,
        https://arxiv.org/abs/2204.02311), at least 0.
      logit_softcap: Bound `c` of the logits (Gemma 2, https://arxiv.org/abs/2408.00118), finite and
        above 0. `None` sets no bound.
      chunk_size: Largest number of a device's tokens whose logits exist at a time. If this size
        makes two chunks, three are made: XLA would keep the logits of both in memory.
      vocab_chunk_size: Largest number of columns whose logits exist at a time, for all tokens. Each
        row of `dweight` is then written once and not added up, and `dx` is added up in float32. A
        weight that is stored in float32 is cast a chunk at a time and not copied. For a weight
        `[D, V]` the kernels take multiples of 128 below it, and at least 128.
      max_logits_bytes: Limit in bytes for the logits, or exponentials, of a chunk of tokens. The
        fastest plan within the limit runs, by an estimate. Small chunks are slow, because each
        chunk reads and writes all of `dweight`. So a chunk has at least 128 tokens, even above the
        limit. A plan in place also copies some exponentials: at most 96 MiB at a time, or the limit
        if that is less, beside the chunk. The plan depends on the sizes and the kind of device, and
        not on free memory, so all processes of a run compile the same program. At most one of
        `chunk_size`, `vocab_chunk_size` and `max_logits_bytes` may be given. `None` means

        - 1 GiB for `"xla"`, whose logits are float32;
        - 1.5 GiB for the kernels, if `weight` is a `LoRA` and logits are in memory, as with a bias;
        - 512 MiB for the kernels otherwise.
      counted_fraction: Largest share of a device's tokens that you expect to count, in (0, 1]. With
        0.5, the tokens that count are gathered into half of the rows, and only these rows are
        computed. If more tokens of a batch count, all rows are computed, in the time and memory of
        1.0. Both programs are compiled. Results differ only by rounding: sums have another order,
        and the kernels round a device's `dweight` once more, before the sum over devices and
        before the product with a cotangent. `"reference"` computes all tokens. So do devices that
        split the vocabulary, and the log says so.
      vocab_axis: Name of the Manual mesh axis over which `weight` and `bias` are split by
        vocabulary inside of `jax.shard_map`, in equal parts. Every device of the axis returns the
        same loss. All devices of the axis must have the same tokens: the axis must not split `x` or
        `labels`, too. By default that is an error. With `check_vma=False` no type shows it, and the
        numbers are wrong. Gather tokens with `jax.lax.all_gather(..., to="invarying")`; without
        `to`, the type of the result says that it differs between devices. `labels` are indices into
        the whole vocabulary.
      weight_layout: Order of the axes of `weight` and of its gradient. `"vd"` is `[V, D]`, as in
        Hugging Face's models and `flax.nnx.Embed`. `"dv"` is `[D, V]`, the kernel of a
        `flax.nnx.Linear`; it stands for `weight.T` in the formula. Neither is ever transposed in
        memory. The kernels take `"dv"` if V is a multiple of 128, and are faster with `"vd"`. If V
        on a device is no multiple of 128, they may read a copy of the weight, padded with zeros.
      accum_dtype: Dtype in which chunks of tokens add up `dweight`: floating, of 16 bits or more.
        float64 needs `jax_enable_x64`.
      check_labels: Whether a label out of range raises an error with its value, whatever its
        weight: at once outside of `jax.jit`, through `jax.experimental.checkify.checkify` inside.
      return_metrics: Whether `LossMetrics` are returned, too.
      implementation: Name of the program.

        - `None`, the default: the kernels where they take the arguments, `"reference"` for symbolic
          sizes (`jax.export.symbolic_shape`), and `"xla"` elsewhere, for example inside of a
          `jax.shard_map` whose `axis_names` omit an Auto axis.
        - `"mosaic_gpu"`: kernels for Hopper and later and a 16-bit `x`. It raises where they do not
          run.
        - `"require"`: the same as `None`, but it raises where the kernels do not run.
        - `"xla"`: the same algorithms with float32 logits.
        - `"reference"`: all logits, in float32. It ignores chunks and `accum_dtype`.
      config: Launch parameters of the kernels, where they run. `None` takes the defaults that
        `Config` describes.

    Returns:
      The loss, a scalar or of the shape of `labels`; with `return_metrics`, `(loss, LossMetrics)`.

    Raises:
      ValueError: Shapes disagree, an option is out of its range, or a name is unknown.
      TypeError: Labels are not integers, another array is of a dtype that is not described here, or
        an option is of a wrong type.
      NotImplementedError: The caller names the kernels or requires them, and they do not run; or
        names `"xla"`, and a size is symbolic; or V is symbolic. Or another implementation than
        `"reference"` is differentiated twice or in forward mode.
      jax.experimental.checkify.JaxRuntimeError: `check_labels` found a label out of range.
    """
    # Above 80 lines, because most of them are documentation.
    x, weight, bias = check_arrays(x, weight, labels, bias, token_weights, weight_layout)
    request, why_no_kernel = checked_request(
        x,
        weight,
        bias,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logit_softcap=logit_softcap,
        chunk_size=chunk_size,
        vocab_chunk_size=vocab_chunk_size,
        max_logits_bytes=max_logits_bytes,
        counted_fraction=counted_fraction,
        vocab_axis=vocab_axis,
        weight_layout=weight_layout,
        accum_dtype=accum_dtype,
        implementation=implementation,
        config=config,
    )
    of_tokens = {"x": x, "labels": labels, "token_weights": token_weights}
    parts = num_parts(vocab_axis, _NAME, weight, **of_tokens)
    describe_plan = lambda: str(describe(request, why_no_kernel, _num_products(reduction)))
    record(
        _NAME,
        (x, weight, labels, bias, token_weights),
        implementation,
        request.settings.implementation,
        why_no_kernel,
        plan=describe_plan if symbolic_reason(x) is None else None,
    )
    labels, counts, weights = labels_and_weights(
        x,
        labels,
        token_weights,
        parts * request.sizes[0],
        ignore_index,
        check_labels,
        _NAME,
    )
    # A mean's factor goes in here and not around the loss, or it would have to be multiplied with
    # the finished gradients, `dweight` among them.
    of_mean, per_weight = coefficients_of_mean(weights)
    coefficients = of_mean if reduction == "mean" else weights
    arrays = x, weight, bias, coefficients, labels
    num_axes = labels.ndim if reduction == "none" else 0
    if request.settings.implementation == "reference":
        loss, losses = reference.sums_of_losses(request, *arrays, num_axes=num_axes)
    else:
        loss, losses = differentiable.sums_of_losses(request, *arrays, num_axes=num_axes)
    if not return_metrics:
        return loss
    return loss, jax.lax.stop_gradient(_metrics(losses, weights, counts, per_weight))


def linear_cross_entropy_plan(x: Any, weight: Any, labels: Any, **options: Any) -> LossPlan:
    """The plan of `linear_cross_entropy` for these arguments, without running it.

        print(linear_cross_entropy_plan(x, weight, labels, max_logits_bytes=2**28))

    Args:
      x: Hidden states, or a `jax.ShapeDtypeStruct`.
      weight: Output embedding, or a `jax.ShapeDtypeStruct`.
      labels: Token to predict at each position, or a `jax.ShapeDtypeStruct`.
      **options: Keyword arguments of `linear_cross_entropy`; arrays may be
        `jax.ShapeDtypeStruct`, too. With `vocab_axis`, call it inside of `jax.shard_map`.

    Returns:
      The plan, its matrix products, its memory and the reason for it. It is for JAX's default
      device and the given shapes. On a mesh, give the shapes of the arrays of one device.

    Raises:
      ValueError, TypeError, NotImplementedError: A call of `linear_cross_entropy` would raise the
        same error.
      NotImplementedError: A size of `x` is symbolic (`jax.export.symbolic_shape`); there is no
        plan.
    """
    signature = inspect.signature(linear_cross_entropy)
    if unknown := ", ".join(sorted(options.keys() - signature.parameters.keys())):
        raise TypeError(
            f"{unknown}: not among the arguments of linear_cross_entropy, which are "
            f"{', '.join(signature.parameters)}"
        )
    bound = signature.bind(x, weight, labels, **options)
    bound.apply_defaults()
    given = {name: a for name, a in bound.arguments.items() if name not in _WITHOUT_A_PLAN}
    arrays = {name: given.pop(name) for name in _ARRAYS}
    plans = []

    def trace(arrays):
        if (reason := symbolic_reason(arrays["x"])) is not None:
            raise NotImplementedError(f"there is no plan: {reason}")
        x, weight, bias = check_arrays(**arrays, weight_layout=given["weight_layout"])
        request, why_no_kernel = checked_request(x, weight, bias, **given)
        refuse_fallback(
            _NAME,
            x,
            given["implementation"],
            request.settings.implementation,
            why_no_kernel,
        )
        of_tokens = {name: arrays[name] for name in ("labels", "token_weights")}
        num_parts(given["vocab_axis"], _NAME, weight, x=x, **of_tokens)
        plans.append(describe(request, why_no_kernel, _num_products(given["reduction"])))

    jax.eval_shape(trace, arrays)
    return plans[0]


_ARRAYS = ("x", "weight", "labels", "bias", "token_weights")
_WITHOUT_A_PLAN = {"check_labels", "return_metrics"}


def _num_products(reduction: Reduction) -> int:
    return 4 if reduction == "none" else 3  # losses that are not added up have a cotangent each


def _metrics(losses: TokenLosses, weights, counts, per_weight) -> LossMetrics:
    mean = lambda values: jnp.sum(weights * values) * per_weight
    return LossMetrics(
        num_tokens=jnp.sum(counts, dtype=jnp.int32),
        nll=mean(losses.nll),
        z_loss=mean(losses.z_loss),
        accuracy=mean(losses.correct),
        lse=mean(losses.lse),
    )
