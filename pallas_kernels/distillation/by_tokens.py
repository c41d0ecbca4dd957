"""Losses and gradients by chunks of tokens, with products by XLA's libraries.

While the logits of a chunk exist, its losses, its `dx` and its share of `dweight` are formed from
them, as in Liger-Kernel's fused losses (https://arxiv.org/abs/2410.10989). The passes over the
logits between the products are our kernels (`passes.py`), or fusions of XLA.

With our kernels the teacher's logits exist for a part of a chunk at a time. They are not needed any
more once the part's gradient is written over the student's logits. The memory saved goes to longer
chunks, because each chunk reads and writes all of `dweight`. In the memory of both logits of 1024
tokens, 1536 tokens are a chunk of three parts. At 8192 tokens `dweight` is then added up 6 times in
place of 8.

Numerics. The products take operands of the dtype of the hidden states (a weight of another dtype
is rounded to it once) and accumulate in float32. Logits in memory have `Settings.logits_dtype`.
Softmax, losses and derivatives are float32. Coefficients, which include a mean's 1/N, are
multiplied in float32 before dlogits are rounded once, to `x.dtype`, as the operand of two products.
`dweight` is added up in float32, and rounded once, as `dx` is. `dbias` adds up the rounded dlogits.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.choices import fall_back_on_a_part
from pallas_kernels.distillation import passes
from pallas_kernels.distillation.divergence import RowReductions, Statistics, derivative, statistics
from pallas_kernels.distillation.logits import Logits, times_slope
from pallas_kernels.distillation.settings import Settings, TeacherEmbedding
from pallas_kernels.distillation.top_k import statistics_of_classes
from pallas_kernels.folding import fold_chunks
from pallas_kernels.gpu.kernel import vary, varying_axes
from pallas_kernels.loss.columns import (
    product,
    rescaled,
    rows_that_count,
    scale_for,
    weight_product,
)
from pallas_kernels.loss.layout import Embedding, sizes
from pallas_kernels.loss.token_loss import softcapped
from pallas_kernels.mapping import Mask


def losses_and_gradients(
    settings: Settings,
    axes: tuple[str, ...],
    x: Float[Array, "T D"],
    weight: Embedding,
    bias: Float[Array, " V"] | None,
    coefficients: Float[Array, " T"],
    of_tokens: Sequence[Array],
    of_vocabulary: Sequence[Array],
    *,
    wanted: Mask,
) -> tuple[Float[Array, " T"], list[Array]]:
    """The losses, and the wanted gradients of `sum(coefficients · loss)` in `x`, `weight`, `bias`.

    `dweight` and `dbias` are before their last rounding.

    Args:
      settings: Static settings.
      axes: Mesh axes that split the vocabulary. `dx` is then the summand of this device.
      x: Hidden states of the student.
      weight: Output embedding of the student, in the dtype of `x`.
      bias: Bias of the student's logits, if there is one.
      coefficients: Factors of the losses.
      of_tokens: Hidden states of the teacher; or its log-probabilities and their columns.
      of_vocabulary: Output embedding of the teacher, in the dtype of its hidden states, and its
        bias if there is one. Empty for log-probabilities.
      wanted: Whether the gradient of each of the three is wanted.
    """
    vocab_size, _ = sizes(weight, settings.weight_layout)
    has_kernels = _has_kernels(settings, x, of_tokens[0], vocab_size)
    settings = dataclasses.replace(settings, kernels=has_kernels)
    size, part = settings.chunk(x, of_tokens, vocab_size, has_dweight=wanted[1])
    if (scale := scale_for(x.dtype, coefficients)) is not None:
        coefficients = coefficients / scale
    layout, rows = settings.weight_layout, RowReductions(axes)
    if settings.tail is not None:
        of_logits = _of_top_k
    else:
        of_logits = _by_kernels if has_kernels else _of_teacher_logits
    dx_dtype = x.dtype if scale is None else jnp.float32

    def one_chunk(chunk: Any, _: Any) -> tuple[Any, Any]:
        num_tokens = len(chunk[0])
        if has_kernels:
            # Rows of zeros up to equal parts of whole blocks, which do not count.
            num_parts = max(1, math.ceil(num_tokens / part))
            missing = -num_tokens % (num_parts * passes.ROWS)
            in_parts = num_parts, (num_tokens + missing) // num_parts
            pad = lambda a: jnp.pad(a, ((0, missing), *((0, 0),) * (a.ndim - 1)))
            x, coefficients, teacher_x = map(pad, chunk)
            teacher = [teacher_x.reshape(*in_parts, teacher_x.shape[1])]
        else:
            x, coefficients, *teacher = chunk
        logits = product(f"td,{layout}->tv", x, weight, settings.dtype_of_logits(x))
        factors = coefficients / settings.temperature if any(wanted) else None
        student = Logits(logits, bias, settings.logit_softcap, settings.temperature)
        losses, dz = of_logits(settings, rows, student, factors, x.dtype, *teacher, *of_vocabulary)
        dx = dweight = dbias = None
        if wanted[0]:
            dx = product(f"tv,{layout}->td", dz, weight, dx_dtype)
        if wanted[1]:
            counted = rows_that_count(x, coefficients)
            dweight = weight_product(dz, counted, weight, layout, jnp.float32)
        if wanted[2]:
            assert dz is not None
            dbias = jnp.sum(dz.astype(jnp.float32), axis=0)
        return (dweight, dbias), (losses[:num_tokens], None if dx is None else dx[:num_tokens])

    arrays = (x, coefficients, *of_tokens)
    (dweight, dbias), (losses, dx) = fold_chunks(one_chunk, arrays, size)
    gradients = [rescaled(a, scale) for a in (dx, dweight, dbias) if a is not None]
    return losses, gradients


def _has_kernels(settings: Settings, x: Array, teacher_x: Array, vocab_size: int) -> bool:
    """Whether our kernels pass over the logits of a device's part of the arrays.

    Raises:
      NotImplementedError: The kernels are required, and do not take the device's part.
    """
    if not (settings.kernels and len(x)):  # no kernel has a grid of no blocks
        return False
    dtypes = (settings.dtype_of_logits(a) for a in (x, teacher_x))
    reason = passes.unsupported_reason(vocab_size, *dtypes)
    if reason is not None:
        fall_back_on_a_part(
            "linear_distillation_loss",
            settings.required_by,
            reason,
            instead="XLA passes over the logits",
        )
    return reason is None


def _of_teacher_logits(
    settings: Settings,
    rows: RowReductions,
    student: Logits,
    factors: Float[Array, " T"] | None,
    dtype: Any,
    teacher_x: Float[Array, "T Dt"],
    *teacher_layer: Array,
) -> tuple[Float[Array, " T"], Float[Array, "T V"] | None]:
    """`(losses, dlogits)`; dlogits, in `dtype`, include `factors`, and are None without them.

    `teacher_layer` is the teacher's output embedding, and its bias if there is one.
    """
    teacher = _teacher_logits(settings, teacher_x, *teacher_layer)
    student, teacher = student.stored(), teacher.stored()
    found = statistics(settings.divergence, student.scaled(), teacher.scaled(), rows)
    if factors is None:
        return found.loss, None

    def dlogits(values: Any, teacher_values: Any, factors: Any, found: Statistics) -> Array:
        of_student = student._replace(values=values)
        of_teacher = teacher._replace(values=teacher_values)
        logits = of_student.scaled(), of_teacher.scaled()
        gradient = derivative(settings.divergence, *logits, found)
        return _times(factors, of_student.times_slope(gradient)).astype(dtype)

    return found.loss, _in_place(dlogits, dtype, student.values, teacher.values, factors, found)


def _by_kernels(
    settings: Settings,
    rows: RowReductions,
    student: Logits,
    factors: Float[Array, " T"] | None,
    dtype: Any,
    teacher_x: Float[Array, "parts tokens Dt"],
    *teacher_layer: Array,
) -> tuple[Float[Array, " T"], Float[Array, "T V"] | None]:
    """The same as `_of_teacher_logits`, with the teacher's logits of one part at a time."""
    num_parts, size, _ = teacher_x.shape

    def one_part(values: Array, part: Any) -> tuple[Array, Float[Array, " tokens"]]:
        first_row, teacher_x, factors = part
        teacher = _teacher_logits(settings, teacher_x, *teacher_layer)
        both = student._replace(values=values), teacher, first_row
        found = passes.statistics(settings.divergence, *both, rows)
        if factors is None:
            return values, found.loss
        # All logits are read before their memory changes, or XLA would copy them.
        found, values = jax.lax.optimization_barrier((found, values))
        both = student._replace(values=values), teacher, first_row
        dz = passes.dlogits(settings.divergence, *both, factors, found, dtype)
        return dz, found.loss

    first_rows = size * jnp.arange(num_parts, dtype=jnp.int32)
    parts = first_rows, teacher_x, None if factors is None else factors.reshape(num_parts, size)
    if num_parts == 1:
        dz, losses = one_part(student.values, jax.tree.map(lambda a: a[0], parts))
    else:
        varying = varying_axes((student.bias, factors, teacher_x, teacher_layer))
        dz, losses = jax.lax.scan(one_part, vary(student.values, varying), parts)
    return losses.reshape(-1), None if factors is None else dz


def _teacher_logits(
    settings: Settings,
    teacher_x: Float[Array, "T Dt"],
    teacher_weight: TeacherEmbedding,
    teacher_bias: Float[Array, " V"] | None = None,
) -> Logits:
    values = product(
        f"td,{settings.teacher_weight_layout}->tv",
        teacher_x,
        teacher_weight,
        settings.dtype_of_logits(teacher_x),
    )
    return Logits(values, teacher_bias, settings.teacher_logit_softcap, settings.temperature)


def _of_top_k(
    settings: Settings,
    rows: RowReductions,
    student: Logits,
    factors: Float[Array, " T"] | None,
    dtype: Any,
    log_probs: Float[Array, "T k"],
    columns: Int[Array, "T k"],
) -> tuple[Float[Array, " T"], Float[Array, "T V"] | None]:
    """The same as `_of_teacher_logits` for stored log-probabilities.

    The logits of the `k` columns leave the array of all logits, which is then that of the tail.
    Their derivatives come back to the same places. So the tail's probability is a sum, and never 1
    minus a sum, which would have lost its digits where the `k` tokens have nearly all probability.
    """
    logits, bias, softcap, temperature = student.stored()
    num_columns = logits.shape[-1]
    first, vocab_size = 0, num_columns
    if rows.axes:
        first = jax.lax.axis_index(rows.axes) * num_columns
        vocab_size *= jax.lax.axis_size(rows.axes)
    local = columns - first
    # A column that this device does not have gets an index out of bounds, where reads give 0 and
    # writes are dropped. Each has an index of its own, because the writes say that indices differ.
    outside = num_columns + jnp.arange(local.shape[-1], dtype=local.dtype)
    local = jnp.where((local >= 0) & (local < num_columns), local, outside)
    place: Any = jnp.arange(len(logits))[:, None], local
    own = logits.at[place].get(mode="fill", fill_value=0).astype(jnp.float32)
    if bias is not None:
        own += bias.at[local].get(mode="fill", fill_value=0).astype(jnp.float32)
    own = jax.lax.psum(own, rows.axes)
    top = jnp.where(columns < vocab_size, softcapped(own, softcap), -jnp.inf) / temperature
    # All logits are read before their memory changes, or XLA would copy them.
    top, logits = jax.lax.optimization_barrier((top, logits))
    # A softcap would make -inf finite. With one, the lowest finite number marks an absent column. A
    # product is this number only by chance.
    absent = -jnp.inf if softcap is None else float(jnp.finfo(logits.dtype).min)
    remaining = logits.at[place].set(absent, mode="drop", unique_indices=True)

    def tail_of(values: Any) -> tuple[Logits, Array]:
        of_tail = student._replace(values=values)
        rest = of_tail.scaled()
        return of_tail, rest if softcap is None else jnp.where(values == absent, -jnp.inf, rest)

    _, rest = tail_of(remaining)
    largest = rows.max(rest)
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)
    tail = largest + jnp.log(rows.sum(jnp.exp(rest - largest[:, None])))
    loss, of_top, of_tail = statistics_of_classes(settings, top, tail, log_probs)
    if factors is None:
        return loss, None

    def dlogits(remaining: Any, factor: Any, tail: Any) -> Array:
        of_tail, rest = tail_of(remaining)
        gradient = of_tail.times_slope(jnp.exp(rest - tail[:, None]))
        return _times(factor, gradient).astype(dtype)

    tail = jnp.where(tail == -jnp.inf, 0.0, tail)
    dz = _in_place(dlogits, dtype, remaining, jnp.where(factors == 0, 0.0, factors * of_tail), tail)
    of_top = _times(factors, times_slope(of_top, own, softcap)).astype(dtype)
    return loss, dz.at[place].set(of_top, mode="drop", unique_indices=True)


def _times(factors: Float[Array, " T"], a: Float[Array, "T C"]) -> Float[Array, "T C"]:
    """`factors[:, None] · a`, and 0 where the factor is 0, though `a` be NaN."""
    return jnp.where(factors[:, None] == 0, 0.0, factors[:, None] * a)


def _in_place(
    fn: Callable[..., Array], dtype: Any, logits: Float[Array, "T V"], *of_tokens: Any
) -> Float[Array, "T V"]:
    """`fn(logits, *of_tokens)`, a function of tokens with a result in `dtype`.

    A result of the dtype of the logits takes their memory. XLA shares memory in a loop that
    overwrites a part of it in each step, but not in one fusion, where a library's product has made
    the logits (JAX 0.11.2). The loop has the fewest steps of equal size, from 2 on. If the number
    of tokens has no divisor from 2 to 16, the result takes other memory.
    """
    num_tokens = len(logits)
    number = next((n for n in range(2, 17) if num_tokens % n == 0), None)
    if logits.dtype != dtype or number is None or num_tokens == 0:
        return fn(logits, *of_tokens)
    size = num_tokens // number
    # A loop keeps the type of its carry, and the result varies over all axes of what it is made of.
    # `fn` reads biases, too, but the statistics among `of_tokens` vary over the biases' axes.
    varying = varying_axes(of_tokens)

    def step(i: Any, logits: Any) -> Any:
        part = lambda a: jax.lax.dynamic_slice_in_dim(a, i * size, size)
        new = fn(part(logits), *jax.tree.map(part, of_tokens))
        return jax.lax.dynamic_update_slice_in_dim(logits, new, i * size, 0)

    return jax.lax.fori_loop(0, number, step, vary(logits, varying))
