"""The public log-probabilities of a linear layer."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer

from pallas_kernels.implementation import Implementation
from pallas_kernels.log_probs import differentiable, reference, saved
from pallas_kernels.log_probs.arguments import check_alone, checked_options
from pallas_kernels.log_probs.kept import keeps_all, keeps_chunks
from pallas_kernels.log_probs.of_function import results_of_function
from pallas_kernels.log_probs.per_token import OfSingleTokens, sum_of_known
from pallas_kernels.log_probs.token_function import token_function
from pallas_kernels.log_probs.token_loss import OfAllTokens
from pallas_kernels.loss.arguments import check_arrays
from pallas_kernels.loss.config import Config
from pallas_kernels.loss.layout import Embedding, WeightLayout
from pallas_kernels.loss.low_rank import LoRA
from pallas_kernels.partition import gathered

_MOST_COLUMNS = 2**24  # the kernel keeps the argmax as a float32 number


class Argmax(NamedTuple):
    """The likeliest entry of the vocabulary for each token.

    Attributes:
      ids: Lowest index with the largest logit, int32.
      log_probs: Log-probability of that index in nats, float32.
    """

    ids: Int[Array, "*T"]
    log_probs: Float[Array, "*T"]


def linear_log_probs(
    x: Float[Array, "*T D"],
    weight: Embedding | LoRA,
    labels: Integer[Array, "*T"],
    *,
    temperature: float = 1.0,
    bias: Float[Array, " V"] | None = None,
    ignore_index: int = -100,
    logit_softcap: float | None = None,
    return_entropy: bool = False,
    return_argmax: bool = False,
    keep_exponentials: bool = False,
    counted_fraction: float = 1.0,
    chunk_size: int | None = None,
    max_logits_bytes: int | None = None,
    vocab_axis: str | None = None,
    weight_layout: WeightLayout = "vd",
    accum_dtype: DTypeLike = jnp.float32,
    check_labels: bool = False,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Any:
    """Log-probabilities of `labels` under the softmax of `x @ weight.T + bias`, without all logits.

    **Formula.** Let `z` be the logits `x @ weight.T + bias`, or `c·tanh(logits / c)` if
    `logit_softcap` is a bound `c`, divided by `temperature`. With `p = softmax(z)`

        log_prob = z[label] - logsumexp(z)
        entropy = -Σ_v p[v]·log p[v]

    Both are float32, in nats, and 0 where `label == ignore_index`.

    With `return_argmax`, the argmax is the lowest `v` with the largest `z[v]`, and its
    log-probability is `max(z) - logsumexp(z)`. If `label == ignore_index`, the argmax is -1 and its
    log-probability is 0. A label out of range changes neither. If all logits of a token are -inf,
    the argmax is 0. If a logit is NaN, the argmax is any index. In both cases the log-probabilities
    of the label and of the argmax are NaN.

    **Gradients.** Log-probability and entropy are differentiable in `x`, `weight` and `bias`, with
    any cotangents. With the cotangents g of the log-probability and h of the entropy H

        dz[v] = g·([v = label] - p[v]) - h·p[v]·(log p[v] + H)

    A token does not count if its label is `ignore_index` or both of its cotangents are 0. It adds
    nothing to the gradients, and its row of `dx` is 0, even if its row of `x` holds NaN or
    infinities. With `"reference"` or `keep_exponentials` only the label decides. `dweight` has the
    dtype of `weight`; `linear_cross_entropy` says how to get a float32 gradient of a bfloat16
    weight. Only `"reference"` has second derivatives and forward mode (`jax.jvp`). The argmax and
    its log-probability have no gradient, as if by `jax.lax.stop_gradient`. For the gradient of this
    log-probability, pass the argmax as `labels` in a second call.

    **Labels.** If a label is neither `ignore_index` nor in `[0, V)`, its log-probability and the
    gradients are NaN. (If its cotangent is 0, only the gradients of `"reference"` are NaN.) The
    entropy is not affected. The label never causes a read or write out of bounds. With
    `check_labels` it raises an error.

    **Cost.** The results take one matrix product of `2·T·D·V` FLOPs, and the kernel keeps no logits
    in memory. The backward takes three more products: it computes the logits again, because the
    forward does not know the cotangents. With the kernels and a bfloat16 `x`, the gradient in the
    logits is stored in the memory of `dweight`, which is free until `dweight` is made, last. If
    this memory has room only for the first tokens, the other tokens are computed in chunks.

    Two calls need one product less. With `keep_exponentials` the backward takes two products, but
    the exponentials take 2 bytes for each token and entry of the vocabulary, from the forward on.
    `linear_token_loss` takes three products in all for a scalar that your function makes of the
    log-probabilities. `docs/kernels/log_probs.md` has more.

    **Rounding.** Products take operands in the dtype of `x` and accumulate in float32. The softmax
    is float32. The gradient in the logits is rounded once, to the dtype of `x`, and each result
    once. The operands of `"reference"` are float32.

    **Meshes.** Each device computes its own tokens. A mesh axis that splits no tokens may split the
    vocabulary. Its devices exchange 8 bytes a token, 4 more with the entropy and 8 more with the
    argmax, and add up `dx`. Inside of `jax.shard_map`, `vocab_axis` names the axis that splits
    `weight`.

    Args:
      x: Hidden states, of a floating dtype of 16 bits or more. The leading axes are tokens.
      weight: Output embedding of the layout `weight_layout`, of a floating dtype of 16 bits or
        more; or a `LoRA`, whose `weight` has this layout and no gradient.
      labels: Token whose log-probability is wanted at each position, of any integer dtype.
      temperature: Divisor of the logits after the softcap, a positive number of float32.
      bias: Bias of the logits, of a floating dtype of 16 bits or more. With a bias the backward
        computes chunks of tokens.
      ignore_index: Label of the tokens that do not count. It may lie inside `[0, V)`.
      logit_softcap: Bound `c` of the logits (Gemma 2, https://arxiv.org/abs/2408.00118), finite and
        above 0. `None` sets no bound.
      return_entropy: Whether the entropies are returned, too.
      return_argmax: Whether the argmax and its log-probability are returned, too. The vocabulary
        may then have at most 2^24 entries.
      keep_exponentials: Whether the forward keeps the exponentials of all logits for the backward,
        `[T, V]` in bfloat16. It does not go with `bias`, `logit_softcap`, `return_argmax`,
        `vocab_axis`, a `counted_fraction` below 1, or a size of chunks. The whole vocabulary must
        be on each device. If the kernels do not run or `x` is not bfloat16, it has no effect, and
        the log says so.
      counted_fraction: Largest share of a device's tokens that is expected to count, in (0, 1].
        Only this share of the rows is computed. If more tokens count, all rows are computed. So the
        fraction changes only the order of sums. With the kernels `dweight` has one more rounding,
        as in `linear_cross_entropy`. In reinforcement learning the tokens of a prompt do not count.
        It has no effect with `"reference"`. It has none either if the vocabulary is split, and the
        log says so.
      chunk_size: Largest number of a device's tokens whose logits exist at a time.
      max_logits_bytes: Limit in bytes for the logits of a chunk of tokens, as in
        `linear_cross_entropy`. At most one of `chunk_size` and `max_logits_bytes` may be given.
      vocab_axis: Name of the Manual mesh axis over which `weight` and `bias` are split by
        vocabulary inside of `jax.shard_map`, in equal parts. Every device of the axis returns the
        same results. All devices of the axis must have the same tokens, as `linear_cross_entropy`
        says. `labels` are indices into the whole vocabulary.
      weight_layout: Order of the axes of `weight` and of its gradient: `"vd"` for `[V, D]`, `"dv"`
        for `[D, V]`. The kernels take `"dv"` if V is a multiple of 128.
      accum_dtype: Dtype in which chunks of tokens add up `dweight`: floating, of 16 bits or more.
        float64 needs `jax_enable_x64`.
      check_labels: Whether a label out of range raises an error with its value: at once outside of
        `jax.jit`, through `jax.experimental.checkify.checkify` inside.
      implementation: Name of the program. `None`, the default, runs the kernels where they take the
        arguments, `"reference"` for symbolic sizes (`jax.export.symbolic_shape`), and `"xla"`
        elsewhere. `"mosaic_gpu"` uses kernels for Hopper and a 16-bit `x`, and raises where they do
        not run. `"xla"` has float32 logits of a chunk of tokens in memory. `"reference"` keeps all
        logits, in float32, and ignores chunks and `accum_dtype`. `"require"` runs the kernels, and
        raises where they do not run.
      config: Launch parameters of the kernels. `None` derives them.

    Returns:
      The log-probabilities in the shape of `labels`; with `return_entropy`, `(log_probs, entropy)`.
      With `return_argmax` an `Argmax(ids, log_probs)` follows: `(log_probs, argmax)` or
      `(log_probs, entropy, argmax)`.

    Raises:
      ValueError: Shapes disagree, an option is out of its range, or a name is unknown. Or
        `keep_exponentials` is given with an option that it does not go with or a split vocabulary,
        or `return_argmax` with a vocabulary above 2^24.
      TypeError: Labels are not integers, another array is of a dtype that is not described here, or
        an option is of a wrong type.
      NotImplementedError: The caller names the kernels or requires them, and they do not run; or
        names `"xla"`, and a size is symbolic; or V is. Or another implementation than
        `"reference"` is differentiated twice or in forward mode.
      jax.experimental.checkify.JaxRuntimeError: `check_labels` found a label out of range.
    """
    # Above 80 lines, because most of them are documentation.
    x, weight, bias = check_arrays(x, weight, labels, bias, None, weight_layout)
    if keep_exponentials:
        check_alone(
            bias=bias,
            logit_softcap=logit_softcap,
            return_argmax=return_argmax or None,
            vocab_axis=vocab_axis,
            counted_fraction=None if counted_fraction == 1 else counted_fraction,
            chunk_size=chunk_size,
            max_logits_bytes=max_logits_bytes,
        )
    request, temperature, labels, vocab_size = checked_options(
        "linear_log_probs",
        x,
        weight,
        bias,
        labels,
        keep_exponentials=bool(keep_exponentials),
        temperature=temperature,
        ignore_index=ignore_index,
        logit_softcap=logit_softcap,
        counted_fraction=counted_fraction,
        chunk_size=chunk_size,
        max_logits_bytes=max_logits_bytes,
        vocab_axis=vocab_axis,
        weight_layout=weight_layout,
        accum_dtype=accum_dtype,
        check_labels=check_labels,
        implementation=implementation,
        config=config,
    )
    if return_argmax and vocab_size > _MOST_COLUMNS:
        raise ValueError(
            f"return_argmax=True takes a vocabulary of at most {_MOST_COLUMNS} entries, got "
            f"{vocab_size}"
        )
    compute = reference.log_probs
    if request.settings.implementation != "reference":
        keeps = keep_exponentials and saved.unsupported_reason(request) is None
        kind = saved.WithExponentials if keeps else differentiable.LogProbs
        compute = functools.partial(differentiable.log_probs, kind=kind)
    found = compute(
        request,
        x,
        weight,
        bias,
        labels,
        temperature=temperature,
        with_entropy=bool(return_entropy),
        with_argmax=bool(return_argmax),
    )
    if return_argmax:
        *found, from_1, of_argmax = found
        argmax = jax.lax.stop_gradient(Argmax(from_1.astype(jnp.int32) - 1, of_argmax))
        return *found, argmax
    return found if return_entropy else found[0]


def linear_token_loss(
    x: Float[Array, "*T D"],
    weight: Embedding | LoRA,
    labels: Integer[Array, "*T"],
    token_fn: Callable[..., Any],
    token_data: Any = None,
    *,
    with_entropy: bool = False,
    has_aux: bool = False,
    per_token: bool = False,
    temperature: float = 1.0,
    bias: Float[Array, " V"] | None = None,
    ignore_index: int = -100,
    logit_softcap: float | None = None,
    counted_fraction: float = 1.0,
    chunk_size: int | None = None,
    max_logits_bytes: int | None = None,
    vocab_axis: str | None = None,
    weight_layout: WeightLayout = "vd",
    accum_dtype: DTypeLike = jnp.float32,
    check_labels: bool = False,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Any:
    """The loss that `token_fn` computes from log-probabilities, with cheaper gradients.

    Example::

        def token_fn(log_probs, entropy, data):
            return -jnp.sum(data["advantages"] * log_probs)

        loss = linear_token_loss(x, weight, labels, token_fn, {"advantages": advantages})

    **Formula.** The loss is `token_fn(log_probs, entropy, token_data)` with the results of
    `linear_log_probs`; `entropy` is None unless `with_entropy`. Arrays that the function reads must
    be in `token_data`. The function sees the tokens of all devices, or those of one device inside
    of `jax.shard_map`.

    **Single tokens.** With `per_token` the function returns the loss of each token, computed only
    from the values of this token. The result is the sum over the tokens whose labels are not
    ignored. For a mean over tokens, put the weights into `token_data`. The function then sees some
    tokens at a time, along one axis: arrays `[N]`, and leaves of `token_data` as `[N, ...]`. JAX
    cannot check that the loss of a token depends only on the values of that token.

    **Gradients.** The loss is differentiable in `x`, `weight`, `bias` and the floating leaves of
    `token_data`. The forward makes all gradients: it differentiates `token_fn` as soon as all
    log-probabilities are known. Only `"reference"` has second derivatives and forward mode. Under
    `jax.vmap`, `token_fn` is called for each element of the mapped axis. A NaN in the hidden state
    of a token makes all gradients NaN, unless its label is `ignore_index`: a mask inside of
    `token_fn` is not enough.

    **Cost.** A loss without gradients takes one matrix product of `2·T·D·V` FLOPs. With gradients
    it takes four, as `linear_log_probs` does, or three in the following cases:

    - Without `per_token`: the exponentials of all logits fit into memory. The memory of `dweight`
      has room for those of 2·D tokens if `dweight` is float32, or of D tokens if it has 16 bits.
      One more chunk, of at most `max_logits_bytes`, gets separate memory. The kernels must run,
      `x` must be bfloat16, and the weight must have a gradient. There may be no bias, softcap or
      split vocabulary.
    - With `per_token`: any number of tokens, in chunks. The other conditions are the same, but if
      the weight has no gradient, two products are enough.

    The gradient of the entropy adds a pass over the exponentials.

    **Rounding.** The loss and its gradients are rounded as in `linear_cross_entropy`. Exponentials
    are rounded once to the dtype of `x`. So is the product of `x` and a factor for each token, from
    which `dweight` is made. With the entropy's gradient, the exponentials and the gradient in the
    logits are rounded instead.

    Args:
      x: Hidden states, as in `linear_log_probs`.
      weight: Output embedding, as in `linear_log_probs`.
      labels: Tokens whose log-probabilities are wanted, as in `linear_log_probs`.
      token_fn: Function of the log-probabilities, the entropies or None, and `token_data`. It
        returns a float32 scalar, and `(scalar, aux)` with `has_aux`. It must be pure and
        hashable.
      token_data: Pytree of arrays for the function, such as advantages and masks. With `per_token`
        each begins with the axes of `labels`.
      with_entropy: Whether the function gets the entropies.
      has_aux: Whether the function also returns a pytree of arrays, which have no gradient.
      per_token: Whether the function returns a float32 number for each token. Arrays of `aux` then
        begin with the axis of tokens. The call returns them with the axes of `labels`, and zeros
        where the label is ignored.
      temperature: Divisor of the logits. This argument and the following ones, except
        `counted_fraction`, are as in `linear_log_probs`.
      bias: Bias of the logits.
      ignore_index: Label of the tokens that do not count; their log-probability is 0.
      logit_softcap: Bound of the logits.
      counted_fraction: Largest share of a device's tokens whose labels are not ignored, in (0, 1].
        Only this share of the rows is computed. If one device has more such tokens, all devices
        compute all rows; with `per_token` each device decides for itself. It has no effect with
        `"reference"`. It has none either if the vocabulary is split, and the log says so.
      chunk_size: Largest number of a device's tokens whose logits exist at a time.
      max_logits_bytes: Limit in bytes for the logits of a chunk of tokens.
      vocab_axis: Name of the Manual mesh axis that splits the vocabulary. `token_data` must be the
        same on all devices of the axis, too.
      weight_layout: Order of the axes of `weight`.
      accum_dtype: Dtype in which chunks of tokens add up `dweight`.
      check_labels: Whether a label out of range raises an error.
      implementation: Implementation to run.
      config: Launch parameters of the kernels.

    Returns:
      The loss, or `(loss, aux)` with `has_aux`.

    Raises:
      ValueError: As `linear_log_probs` does; or with `per_token` a leaf of `token_data` or of `aux`
        does not have the tokens, or `token_fn` does not take any number of them.
      NotImplementedError, jax.experimental.checkify.JaxRuntimeError: as `linear_log_probs` does.
      TypeError: As `linear_log_probs` does; or `token_fn` returns no float32 scalar, reads a traced
        array that is not in `token_data`, or has no hash.
    """
    # Above 80 lines, because most of them are documentation.
    x, weight, bias = check_arrays(x, weight, labels, bias, None, weight_layout)
    request, temperature, labels, _ = checked_options(
        "linear_token_loss",
        x,
        weight,
        bias,
        labels,
        token_data=token_data,
        keeps=keeps_chunks if per_token else keeps_all,
        temperature=temperature,
        ignore_index=ignore_index,
        logit_softcap=logit_softcap,
        counted_fraction=counted_fraction,
        chunk_size=chunk_size,
        max_logits_bytes=max_logits_bytes,
        vocab_axis=vocab_axis,
        weight_layout=weight_layout,
        accum_dtype=accum_dtype,
        check_labels=check_labels,
        implementation=implementation,
        config=config,
    )
    function, data, aux_tree = token_function(
        token_fn,
        labels.shape,
        token_data,
        with_entropy=bool(with_entropy),
        has_aux=bool(has_aux),
        per_token=bool(per_token),
    )
    if request.settings.implementation == "reference":
        found = reference.log_probs(
            request,
            x,
            weight,
            bias,
            labels,
            temperature=temperature,
            with_entropy=function.with_entropy,
            with_argmax=False,
        )
        if per_token:
            loss, aux = sum_of_known(function, found, labels, data)
        else:
            # A function may slice the tokens, which JAX refuses where Explicit axes split them.
            loss, aux = function(gathered(found), gathered(data))
    else:
        kind = OfSingleTokens if per_token else OfAllTokens
        loss, *aux = results_of_function(
            kind, request, x, weight, bias, labels, function, data, temperature=temperature
        )
    if not has_aux:
        return loss
    return loss, jax.lax.stop_gradient(jax.tree.unflatten(aux_tree, aux))
