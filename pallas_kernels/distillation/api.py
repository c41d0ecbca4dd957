"""The public distillation losses of a linear layer."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer

from pallas_kernels.arguments import BITS_OF_PRODUCTS, as_array, check_choice, floating_arrays
from pallas_kernels.choices import record, required_by
from pallas_kernels.distillation import differentiable, passes, reference
from pallas_kernels.distillation.arguments import checked_settings, weights_of_tokens
from pallas_kernels.distillation.divergence import DivergenceName
from pallas_kernels.distillation.settings import Settings, Tail, TeacherEmbedding
from pallas_kernels.distillation.top_k import checked_classes
from pallas_kernels.implementation import (
    Chosen,
    Implementation,
    by_name,
    check_implementation,
    choose_implementation,
    symbolic_reason,
)
from pallas_kernels.loss.arguments import (
    Reduction,
    check_layer,
    check_may_be_split,
    checked_bias,
    checked_layer,
    num_parts,
)
from pallas_kernels.loss.layout import Embedding, WeightLayout, sizes
from pallas_kernels.loss.low_rank import LoRA, TwoParts
from pallas_kernels.loss.token_loss import coefficients_of_mean

type TokenWeights = Float[Array, "*T"] | Integer[Array, "*T"] | Bool[Array, "*T"]

_NO_KERNEL = (
    "no kernel computes a loss of stored log-probabilities: XLA makes the matrix products, by "
    "cuBLAS on a GPU, and fuses the passes over a chunk of logits"
)


def linear_distillation_loss(
    x: Float[Array, "*T D"],
    weight: Embedding | LoRA,
    teacher_x: Float[Array, "*T Dt"],
    teacher_weight: TeacherEmbedding,
    *,
    divergence: DivergenceName = "forward_kl",
    beta: float | None = None,
    temperature: float = 1.0,
    bias: Float[Array, " V"] | None = None,
    teacher_bias: Float[Array, " V"] | None = None,
    logit_softcap: float | None = None,
    teacher_logit_softcap: float | None = None,
    token_weights: TokenWeights | None = None,
    reduction: Reduction = "mean",
    counted_fraction: float = 1.0,
    chunk_size: int | None = None,
    max_logits_bytes: int | None = None,
    vocab_axis: str | None = None,
    weight_layout: WeightLayout = "vd",
    teacher_weight_layout: WeightLayout = "vd",
    logits_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "..."]:
    """Divergence of a student's next-token distribution from a teacher's, without all logits.

    The student has hidden size D and the teacher Dt. Both have the same vocabulary.

    **Formula.** Let `z` be the student's logits `x @ weight.T + bias`, or `c·tanh(logits / c)` if
    `logit_softcap` is a bound `c`. Let `t` be the teacher's logits, from the arguments that begin
    with `teacher_`. With `p = softmax(z / temperature)`, `q = softmax(t / temperature)` and the
    mixture `M = beta·q + (1 - beta)·p`, the loss of a token in nats is

        "forward_kl"       KL(q ‖ p) = Σ_v q·(log q - log p)
        "reverse_kl"       KL(p ‖ q) = Σ_v p·(log p - log q)
        "jensen_shannon"   beta·KL(q ‖ M) + (1 - beta)·KL(p ‖ M)

    `"jensen_shannon"` is the generalized Jensen-Shannon divergence of GKD
    (https://arxiv.org/abs/2306.13649), with `beta` as in TRL's `GKDTrainer` and in Liger-Kernel.
    The divergence goes to 0 as `beta` goes to 0 or to 1. Divided by `beta`, it goes to the forward
    KL as `beta` goes to 0. Divided by `1 - beta`, it goes to the reverse KL as `beta` goes to 1.
    For `beta=0` the function computes the forward KL, and for `beta=1` the reverse KL, as TRL and
    Liger-Kernel do.

    Like TRL and Liger-Kernel, the function does not multiply the loss by `temperature²`. To keep
    the size of the gradients at any temperature, multiply it yourself
    (https://arxiv.org/abs/1503.02531).

    The loss of a token is multiplied by its token weight. `reduction="sum"` adds up the losses.
    `"mean"` divides this sum by the sum of the weights, or by the number of tokens without
    `token_weights`. `"none"` returns the losses. If no token counts, loss and gradients are 0.
    Losses are float32.

    **Tokens that count.** A token does not count if its weight is exactly 0. Pass
    `token_weights=(labels != -100)` to leave out the tokens that a cross-entropy would ignore. A
    token that does not count adds nothing to loss and gradients, and its row of `dx` is 0, even if
    its hidden states hold NaN or infinities. A NaN in the hidden states of a token that counts
    makes its loss and the gradients NaN.

    **Zeros.** An entry `v` of the vocabulary with the probability 0 adds nothing: `0·log 0` is 0.
    The reverse KL is infinite if the teacher's probability of an entry is 0 and the student's is
    not. The forward KL is infinite in the opposite case.

    **Gradients.** The loss is differentiable in `x`, `weight`, `bias` and `token_weights`. The
    teacher is constant: the gradients of its arrays are 0, as after `jax.lax.stop_gradient`. A call
    that is not differentiated computes no gradients. `dweight` has the dtype of `weight`; for a
    float32 gradient of a bfloat16 weight, differentiate with respect to
    `weight.astype(jnp.float32)` inside of the compiled function. Only `"reference"` has second
    derivatives and forward mode (`jax.jvp`).

    **Cost.** The logits of student and teacher are in memory for one chunk of tokens at a time. A
    loss takes two products, `2·T·V·(D + Dt)` FLOPs. The gradients take two more products of
    `2·T·V·D` FLOPs. With `reduction="none"` the backward computes the logits again.
    `docs/kernels/distillation.md` has more.

    **Rounding.** Products take operands in the dtype of `x` or `teacher_x`, and accumulate in
    float32. Logits in memory are rounded to `logits_dtype`. Bias, softcap, softmax and losses are
    float32. The gradient in the logits is rounded once, to the dtype of `x`, and each gradient
    once. The operands of `"reference"` are float32.

    **Meshes.** Each device computes the losses of its own tokens. A mesh axis that splits no tokens
    may split the vocabulary of both weights. Its devices exchange 20 bytes a token for a KL and 24
    for the Jensen-Shannon divergence, and add up `dx`. On Auto and Explicit axes a sum or mean is
    over the tokens of all devices. Inside of `jax.shard_map` a sum or mean is over the tokens of
    one device, and `vocab_axis` names the axis that splits both weights.

    Args:
      x: Hidden states of the student, of a floating dtype of 16 bits or more. The leading axes are
        tokens.
      weight: Output embedding of the student, of the layout `weight_layout` and a floating dtype of
        16 bits or more; or a `LoRA`, whose `weight` has this layout and no gradient.
      teacher_x: Hidden states of the teacher for the same tokens.
      teacher_weight: Output embedding of the teacher, of the layout `teacher_weight_layout`.
      divergence: `"forward_kl"`, `"reverse_kl"` or `"jensen_shannon"`.
      beta: Share of the teacher in the mixture, in [0, 1]. Only `"jensen_shannon"` takes it, and
        `None` is 0.5 there.
      temperature: Divisor of both logits after the softcap, a positive number of float32.
      bias: Bias of the student's logits, of a floating dtype of 16 bits or more.
      teacher_bias: Bias of the teacher's logits.
      logit_softcap: Bound `c` of the student's logits (Gemma 2, https://arxiv.org/abs/2408.00118),
        a positive number of float32. `None` sets no bound.
      teacher_logit_softcap: Bound of the teacher's logits.
      token_weights: Factor for each token's loss, taken as float32. A mask of integers or bools
        will do. If their sum is 0, the mean and its gradients are 0. For weights of both signs,
        such as advantages, take `reduction="sum"`.
      reduction: `"mean"`, `"sum"` or `"none"`.
      counted_fraction: Largest share of a device's tokens that is expected to count, in (0, 1].
        Only this share of the rows is computed. If more tokens count, all rows are computed. So the
        fraction changes only the order of sums. It has no effect with `"reference"`, or if the
        gradient of `token_weights` is wanted, because all tokens have one. It has none either if
        the vocabulary is split, and the log says so.
      chunk_size: Largest number of a device's tokens whose logits exist at a time. If this size
        makes two chunks, three are made: XLA would keep the logits of both in memory.
      max_logits_bytes: Limit in bytes for the logits of student and teacher in a chunk of tokens. A
        chunk has at least 128 tokens. There are as few chunks as possible, because each chunk reads
        and writes all of `dweight`. With kernels the teacher's logits exist for a part of the chunk
        at a time, so that a chunk has more tokens. `None` means 512 MiB, and at least 768 tokens.
        At most one of `chunk_size` and `max_logits_bytes` may be given.
      vocab_axis: Name of the Manual mesh axis over which both weights and both biases are split by
        vocabulary inside of `jax.shard_map`, in equal parts. Every device of the axis returns the
        same loss. All devices of the axis must have the same tokens, as `linear_cross_entropy`
        says.
      weight_layout: Order of the axes of `weight` and of its gradient: `"vd"` for `[V, D]`, `"dv"`
        for `[D, V]`.
      teacher_weight_layout: Order of the axes of `teacher_weight`.
      logits_dtype: Dtype of logits in memory: floating, of 16 bits or more. `None` takes the dtype
        of `x` for the student and of `teacher_x` for the teacher. Rounding a logit between 8 and 16
        to bfloat16 makes an error of up to 2^-5. Errors of this size add about 3e-4 nats to a KL.
        Logits in float32 take twice the memory.
      implementation: Name of the program.

        - `None`, the default: the kernels where they take the arguments, `"reference"` for symbolic
          sizes (`jax.export.symbolic_shape`), and `"xla"` elsewhere.
        - `"mosaic_gpu"`: chunks of tokens. XLA computes the products, with cuBLAS, and our kernels
          pass over the logits. V must be a multiple of 32. Where the kernels do not run, the call
          raises, with one exception: if a mesh splits V and a device's part is no multiple of 32,
          XLA makes the passes, and a warning is logged.
        - `"require"`: the same as `None`, but the call raises where XLA would run in place of the
          kernels, also for a device's part.
        - `"xla"`: the same chunks, in which XLA also makes the passes.
        - `"reference"`: all logits, in float32. It ignores chunks and `logits_dtype`, and takes no
          `vocab_axis`.

    Returns:
      The loss, a scalar or of the shape of the tokens.

    Raises:
      ValueError: Shapes disagree, an option is out of its range, or a name is unknown.
      TypeError: An array is of a dtype that is not described here, or an option is of a wrong type.
      NotImplementedError: The caller asks for kernels that do not take the arguments; or anything
        but `"reference"` is differentiated twice or in forward mode, or has symbolic sizes.
    """
    # Above 80 lines, because most of them are documentation.
    x, weight = checked_layer(x, weight, weight_layout)
    teacher_x, teacher_weight = floating_arrays(
        teacher_x=teacher_x, teacher_weight=teacher_weight, least_bits=BITS_OF_PRODUCTS
    )
    check_layer("teacher_", teacher_x, teacher_weight, teacher_weight_layout)
    if teacher_x.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"teacher_x must have the tokens of x, {x.shape[:-1]}, got {teacher_x.shape}"
        )
    vocab_size, _ = sizes(weight, weight_layout)
    teacher_vocab_size, _ = sizes(teacher_weight, teacher_weight_layout)
    if teacher_vocab_size != vocab_size:
        raise ValueError(
            f"student and teacher must have one vocabulary, got V = {vocab_size} of weight and "
            f"{teacher_vocab_size} of teacher_weight; slice or pad one weight"
        )
    bias = checked_bias("", bias, vocab_size)
    teacher_bias = checked_bias("teacher_", teacher_bias, vocab_size)
    settings = checked_settings(
        divergence=divergence,
        beta=beta,
        temperature=temperature,
        logit_softcap=logit_softcap,
        teacher_logit_softcap=teacher_logit_softcap,
        chunk_size=chunk_size,
        max_logits_bytes=max_logits_bytes,
        vocab_axis=vocab_axis,
        weight_layout=weight_layout,
        teacher_weight_layout=teacher_weight_layout,
        has_teacher_bias=teacher_bias is not None,
        logits_dtype=logits_dtype,
        counted_fraction=counted_fraction,
    )
    # The statistics of the teacher are gathered, so `teacher_x` may be of any type.
    num_parts(vocab_axis, "linear_distillation_loss", weight, x=x, token_weights=token_weights)
    of_teacher = (teacher_x, teacher_weight)
    return _loss(
        "linear_distillation_loss",
        settings,
        (x, weight, bias),
        of_teacher if teacher_bias is None else (*of_teacher, teacher_bias),
        token_weights,
        reduction,
        implementation,
    )


def linear_distillation_loss_top_k(
    x: Float[Array, "*T D"],
    weight: Embedding | LoRA,
    teacher_log_probs: Float[Array, "*T k"],
    teacher_ids: Integer[Array, "*T k"],
    *,
    tail: Tail = "one_bucket",
    divergence: DivergenceName = "forward_kl",
    beta: float | None = None,
    temperature: float = 1.0,
    bias: Float[Array, " V"] | None = None,
    logit_softcap: float | None = None,
    token_weights: TokenWeights | None = None,
    reduction: Reduction = "mean",
    counted_fraction: float = 1.0,
    chunk_size: int | None = None,
    max_logits_bytes: int | None = None,
    vocab_axis: str | None = None,
    weight_layout: WeightLayout = "vd",
    logits_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "..."]:
    """`linear_distillation_loss` with `k` stored log-probabilities a token in place of a teacher.

    **Teacher.** `teacher_log_probs` are logarithms of the teacher's softmax over its whole
    vocabulary. They must be computed at the same temperature as the loss, because here
    `temperature` divides only the student's logits. To pad a list of fewer than `k` entries, use
    log-probabilities of -inf, with any id.

    **Tail.** The tail is all tokens of the vocabulary without a stored log-probability.

    - `"one_bucket"`: the tail is one class, beside `k` classes. The teacher's probability of the
      tail is 1 minus the sum of the `k` probabilities, and the student's is the sum over the tail.
      The loss is the divergence of both distributions over the `k + 1` classes, for each
      `divergence`. It is never larger than the divergence of the whole distributions. The student's
      distribution within the tail has no effect. The teacher's probability of the tail is at least
      2^-24, because a float32 sum near 1 errs by that much. All probabilities are then divided by
      their sum.
    - `"ignore"`: the sum of the forward KL over only the `k` tokens, `Σ_k q·(log q - log p)`, where
      `p` is from the softmax over the whole vocabulary. Its gradient in the logits, times
      `temperature`, is `(Σ_k q)·p - q`, which moves the student's probability out of the tail. It
      is no divergence and may be negative. Only `"forward_kl"` has it.

    **Wrong entries.** The loss of a token is NaN if an id is not in `[0, V)`, or if an id appears
    twice. It is also NaN if the probabilities have a sum above 1.05, for example if logits are
    passed as log-probabilities. If the token counts, the reduced loss and the gradients are NaN,
    too.

    **Cost.** One product for a loss, and three with its gradients.

    Everything else is as in `linear_distillation_loss`. The stored arrays have no gradient.

    Args:
      x: Hidden states of the student. The leading axes are tokens.
      weight: Output embedding of the student.
      teacher_log_probs: Log-probabilities of the teacher, of any floating dtype.
      teacher_ids: Tokens that have them, of any integer dtype. Their order is free.
      tail: Treatment of the tail: `"one_bucket"` or `"ignore"`.
      divergence: Name of the divergence. This argument and the following ones are as in
        `linear_distillation_loss`.
      beta: Share of the teacher in the mixture.
      temperature: Divisor of the student's logits.
      bias: Bias of the student's logits.
      logit_softcap: Bound of the student's logits.
      token_weights: Factor for each token's loss.
      reduction: Name of the reduction: `"mean"`, `"sum"` or `"none"`.
      counted_fraction: Largest share of a device's tokens that is expected to count.
      chunk_size: Largest number of a device's tokens whose logits exist at a time.
      max_logits_bytes: Limit in bytes for the logits of a chunk of tokens.
      vocab_axis: Name of the Manual mesh axis over which `weight` and `bias` are split. It must not
        split the arrays of tokens. `teacher_ids` are indices into the whole vocabulary.
      weight_layout: Order of the axes of `weight`.
      logits_dtype: Dtype of logits in memory.
      implementation: Name of the program. There is no kernel. `None`, the default, runs `"xla"`, or
        `"reference"` for symbolic sizes, also under `require_kernels`. `"mosaic_gpu"` and
        `"require"` always raise.

    Returns:
      The loss, a scalar or of the shape of the tokens.

    Raises:
      ValueError: Shapes disagree, an option is out of its range, or a name is unknown.
      TypeError: An array is of a dtype that is not described here, or an option is of a wrong type.
      NotImplementedError: As in `linear_distillation_loss`.
    """
    x, weight = checked_layer(x, weight, weight_layout)
    (teacher_log_probs,) = floating_arrays(teacher_log_probs=teacher_log_probs)
    as_array("teacher_ids", teacher_ids)
    if not jnp.issubdtype(teacher_ids.dtype, jnp.integer):
        raise TypeError(f"teacher_ids must be integers, got {teacher_ids.dtype}; cast them")
    num_columns, _ = sizes(weight, weight_layout)
    bias = checked_bias("", bias, num_columns)
    of_teacher = {"teacher_log_probs": teacher_log_probs, "teacher_ids": teacher_ids}
    of_tokens = {"x": x, "token_weights": token_weights} | of_teacher
    vocab_size = num_columns * num_parts(
        vocab_axis, "linear_distillation_loss_top_k", weight, **of_tokens
    )
    for name, a in of_teacher.items():
        if a.ndim != x.ndim or a.shape[:-1] != x.shape[:-1]:
            raise ValueError(f"{name} must be {(*x.shape[:-1], 'k')}, got {a.shape}")
    k = teacher_ids.shape[-1]
    if teacher_log_probs.shape[-1] != k or not 1 <= k <= vocab_size:
        raise ValueError(
            f"teacher_log_probs {teacher_log_probs.shape} and teacher_ids {teacher_ids.shape} must "
            f"have one k in [1, V = {vocab_size}]"
        )
    check_choice("tail", tail, Tail)
    settings = checked_settings(
        divergence=divergence,
        beta=beta,
        temperature=temperature,
        logit_softcap=logit_softcap,
        chunk_size=chunk_size,
        max_logits_bytes=max_logits_bytes,
        vocab_axis=vocab_axis,
        weight_layout=weight_layout,
        logits_dtype=logits_dtype,
        counted_fraction=counted_fraction,
        tail=tail,
    )
    if tail == "ignore" and settings.divergence.name != "forward_kl":
        raise ValueError(
            f"{tail=} is the sum of the forward KL alone, got {divergence=} and {beta=}: without "
            "the tail another sum would reward probability there; use tail='one_bucket'"
        )
    log_probs, columns = checked_classes(teacher_log_probs, teacher_ids, vocab_size)
    return _loss(
        "linear_distillation_loss_top_k",
        settings,
        (x, weight, bias),
        (log_probs, columns),
        token_weights,
        reduction,
        implementation,
    )


def _loss(
    name: str,
    settings: Settings,
    student: tuple[Array, Embedding, Array | None],
    teacher: tuple[Array, ...],
    token_weights: Any,
    reduction: Any,
    implementation: Implementation | None,
) -> Float[Array, "..."]:
    """The loss of checked arrays, by the implementation that the caller asks for."""
    x, weight, bias = student
    check_choice("reduction", reduction, Reduction)
    weights = weights_of_tokens(token_weights, x)
    vocab_size, _ = sizes(weight, settings.weight_layout)
    chosen, reason = _choose(implementation, settings, x, teacher, vocab_size)
    for vocab_axis in settings.vocab_axes:
        check_may_be_split(vocab_axis, chosen, symbolic_reason(x))
    # Stored log-probabilities have no kernel on purpose, so `require_kernels` refuses nothing.
    asked_for = implementation if settings.tail is None else implementation or chosen
    settings = dataclasses.replace(
        settings,
        kernels=chosen == "mosaic_gpu",
        is_low_rank=isinstance(weight, TwoParts),
        has_bias=bias is not None,
        required_by=required_by(asked_for),
    )
    is_planned = chosen != "reference" and x.size > 0
    describe = lambda: settings.describe(x, teacher, vocab_size)
    record(
        name,
        (*student, *teacher, token_weights),
        asked_for,
        chosen,
        reason,
        plan=describe if is_planned else None,
    )
    teacher = tuple(map(jax.lax.stop_gradient, teacher))
    coefficients = coefficients_of_mean(weights)[0] if reduction == "mean" else weights
    num_axes = weights.ndim if reduction == "none" else 0
    module = reference if chosen == "reference" else differentiable
    return module.sum_of_losses(
        settings, x, weight, bias, coefficients, *teacher, num_axes=num_axes
    )


def _choose(
    implementation: Any, settings: Settings, x: Array, teacher: Sequence[Array], vocab_size: int
) -> tuple[Chosen, str | None]:
    """The implementation that runs, and why it is no kernel."""
    check_implementation(implementation)
    if settings.tail is not None and implementation in ("mosaic_gpu", "require"):
        raise NotImplementedError(
            f"{implementation=}: {_NO_KERNEL}; leave implementation=None, which takes 'xla'"
        )
    open_sizes = symbolic_reason(x)
    if open_sizes is not None:
        if implementation in ("xla", "mosaic_gpu"):
            raise NotImplementedError(f"{implementation=}: {open_sizes}, or with 'reference'")
        return "reference", by_name("reference") if implementation == "reference" else open_sizes
    if settings.tail is not None:
        return implementation or "xla", _NO_KERNEL
    dtypes = (settings.dtype_of_logits(a) for a in (x, teacher[0]))
    unsupported = passes.unsupported_reason(vocab_size, *dtypes)
    return choose_implementation(implementation, unsupported, fallback="xla")
