"""The distillation losses in plain JAX over all logits, differentiated by JAX: the oracle."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.distillation import divergence
from pallas_kernels.distillation.differentiable import roles_of
from pallas_kernels.distillation.settings import Settings
from pallas_kernels.distillation.top_k import log_probs_of_classes
from pallas_kernels.layout import Place, Roles, Tokens
from pallas_kernels.loss import low_rank
from pallas_kernels.loss.layout import Embedding
from pallas_kernels.loss.reference import float32_logits
from pallas_kernels.loss.token_loss import softcapped
from pallas_kernels.partition import split_over_explicit_axes


def sum_of_losses(
    settings: Settings,
    x: Float[Array, "*T D"],
    weight: Embedding,
    bias: Float[Array, " V"] | None,
    coefficients: Float[Array, "*T"],
    *teacher: Array,
    num_axes: int,
) -> Float[Array, "..."]:
    """The same as `differentiable.sum_of_losses`.

    The logits `[*T, V]` are in memory, with float32 operands in all steps and in the products.
    """
    first, last = low_rank.arguments(weight)
    biases = () if bias is None else (bias,)
    args = (x, first, coefficients, *biases, *teacher, *last)
    roles = Roles(tuple(roles_of(settings, args)), (Tokens(),))
    (loss,) = split_over_explicit_axes(_of_device, settings, roles, *args)
    axes = tuple(range(num_axes, coefficients.ndim))
    return jnp.sum(coefficients * loss, axis=axes)


def _of_device(settings: Settings, place: Place) -> Callable[..., Sequence[jax.Array]]:
    """The losses of a device's tokens, and 0 for those that do not count and are not finite."""
    del place

    def run(x: Any, weight: Any, coefficients: Any, *others: Any) -> list[jax.Array]:
        bias, *teacher = others if settings.has_bias else (None, *others)
        layout = settings.weight_layout
        weight, teacher = low_rank.joined(settings.is_low_rank, layout, weight, teacher)
        # Left out before and after: `jnp.where` gives such values the gradient 0, and 0 · NaN is
        # NaN.
        is_counted = coefficients != 0
        log_probs = functools.partial(_log_probs, settings.temperature, is_counted)
        student = log_probs(layout, x, weight, bias, settings.logit_softcap)
        is_finite = jnp.all(jnp.isfinite(x), axis=-1)
        if settings.tail is not None:
            loss_of = lambda log_p: _of_top_k(settings, log_p, *teacher)
        else:
            layout, softcap = settings.teacher_weight_layout, settings.teacher_logit_softcap
            teacher_x, teacher_weight, *biases = teacher
            is_finite &= jnp.all(jnp.isfinite(teacher_x), axis=-1)
            bias = biases[0] if biases else None
            of_teacher = log_probs(layout, teacher_x, teacher_weight, bias, softcap)
            loss_of = lambda log_p: divergence.losses(settings.divergence, log_p, of_teacher)
        # The gradient of a loss that is left out must not read its derivative: 0 · NaN is NaN.
        constant = jax.lax.stop_gradient(student)
        has_loss = is_counted | (is_finite & jnp.isfinite(loss_of(constant)))
        student = jnp.where(has_loss[..., None], student, constant)
        return [jnp.where(has_loss, loss_of(student), 0.0)]

    return run


def _log_probs(
    temperature: float,
    is_counted: Any,
    layout: Any,
    x: Any,
    weight: Any,
    bias: Any,
    softcap: float | None,
) -> Any:
    """Log-probabilities; of tokens that do not count only where the hidden states are finite."""
    is_left_out = ~is_counted & ~jnp.all(jnp.isfinite(x), axis=-1)
    x = jnp.where(is_left_out[..., None], 0, x)
    logits = float32_logits(layout, x, weight, () if bias is None else (bias,))
    return jax.nn.log_softmax(softcapped(logits, softcap) / temperature, axis=-1)


def _of_top_k(settings: Settings, log_p: Any, log_probs: Any, columns: Any) -> Any:
    vocab_size = log_p.shape[-1]
    is_class = columns < vocab_size
    found = jnp.take_along_axis(log_p, jnp.where(is_class, columns, 0), axis=-1)
    top = jnp.where(is_class, found, -jnp.inf)
    if settings.tail == "ignore":
        q = jnp.exp(log_probs)
        has = is_class | jnp.isnan(log_probs)
        log_q = jnp.where(has, log_probs, 0.0)
        return jnp.sum(jnp.where(has, q * (log_q - jnp.where(has, found, 0.0)), 0.0), axis=-1)
    # One row for each token, with the classes merged.
    shape = math.prod(columns.shape[:-1]), columns.shape[-1]
    place = jnp.arange(shape[0])[:, None], columns.reshape(shape)
    is_top = jnp.zeros((shape[0], vocab_size), bool).at[place].set(True, mode="drop")
    is_top = is_top.reshape(log_p.shape)
    has_tail = ~jnp.all(is_top, axis=-1)
    # Without a tail its logsumexp would be -inf, and its derivative NaN.
    tail = jax.nn.logsumexp(jnp.where(is_top & has_tail[..., None], -jnp.inf, log_p), axis=-1)
    tail = jnp.where(has_tail, tail, -jnp.inf)
    student = jnp.concatenate([top, tail[..., None]], axis=-1)
    teacher = log_probs_of_classes(settings, log_probs, has_tail)
    teacher = jax.nn.log_softmax(teacher, axis=-1)
    return divergence.losses(settings.divergence, student, teacher)
