"""The losses as differentiable functions: when their gradients are made.

Losses that are added up have one cotangent, which is 1 for a loss. So `sum_by_tokens` makes the
gradients in the forward, while the logits exist, and its backward only multiplies them: three
GEMMs. A cotangent other than 1 multiplies them in float32, and they are rounded again.

Losses that are not added up have a cotangent each, which the forward does not know. So the forward
of `losses_by_tokens` and `losses_by_columns` makes the losses alone, and the backward computes the
logits again: four GEMMs.

Only the losses carry a gradient. The other fields of `TokenLosses` are metrics, which the caller
must not differentiate.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.loss import by_columns, by_tokens
from pallas_kernels.loss.columns import Gradients
from pallas_kernels.loss.plan import ColumnChunks, InPlace, Settings, TokenChunks
from pallas_kernels.loss.token_loss import TokenLosses, finite_where_not_counted


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sum_by_tokens(
    settings: Settings,
    plan: TokenChunks | InPlace,
    x: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    coefficients: Float[Array, " T"],
    labels: Int[Array, " T"],
) -> tuple[Float[Array, ""], TokenLosses]:
    """`sum(coefficients · loss)`, float32, and the losses.

    A token whose coefficient is 0 adds nothing to sum and gradients, whatever its `x` holds. The
    coefficients of ignored tokens must be 0.
    """
    losses = by_tokens.losses(settings, plan, x, weight, bias, labels)
    losses = finite_where_not_counted(losses, coefficients)
    return jnp.sum(coefficients * losses.loss), losses


def _sum_by_tokens_fwd(settings, plan, *primals):
    x, weight, bias, coefficients, labels = _values(primals)
    # Symbolic zeros, here and below, say whether the gradient of the weight is asked for.
    plan = plan if primals[1].perturbed else plan.without_dweight
    losses, gradients = by_tokens.losses_and_gradients(
        settings, plan, x, weight, bias, coefficients, labels
    )
    losses = finite_where_not_counted(losses, coefficients)
    # Empty arrays carry the dtypes of the gradients.
    like = jax.tree.map(lambda a: a[:0], (x, weight, bias))
    return (jnp.sum(coefficients * losses.loss), losses), (losses.loss, gradients, like)


def _sum_by_tokens_bwd(settings, plan, saved, cotangents):
    of_sum = _array(cotangents[0])
    loss, gradients, like = saved
    cotangent = _whole_cotangent(settings, of_sum)
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32) * cotangent, gradients)
    # The coefficients' gradient is no sum over parts of the vocabulary: it takes the share.
    return *_cast(gradients, *like), of_sum * loss, None


sum_by_tokens.defvjp(_sum_by_tokens_fwd, _sum_by_tokens_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def losses_by_tokens(
    settings: Settings,
    plan: TokenChunks | InPlace,
    x: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " T"],
) -> TokenLosses:
    """The loss of every token, for any cotangent, by chunks of tokens."""
    return by_tokens.losses(settings, plan, x, weight, bias, labels)


def _losses_by_tokens_fwd(settings, plan, *primals):
    x, weight, bias, labels = _values(primals)
    of_weight = () if primals[1].perturbed else None  # as the structure of what is saved
    losses = by_tokens.losses(settings, plan, x, weight, bias, labels)
    return losses, (x, weight, bias, labels, of_weight)


def _losses_by_tokens_bwd(settings, plan, saved, cotangents):
    x, weight, bias, labels, of_weight = saved
    plan = plan if of_weight is not None else plan.without_dweight
    coefficients = _coefficients(settings, cotangents, labels)
    _, gradients = by_tokens.losses_and_gradients(
        settings, plan, x, weight, bias, coefficients, labels
    )
    return *_cast(gradients, x, weight, bias), None


losses_by_tokens.defvjp(_losses_by_tokens_fwd, _losses_by_tokens_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def losses_by_columns(
    settings: Settings,
    plan: ColumnChunks,
    x: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " T"],
) -> TokenLosses:
    """The loss of every token, for any cotangent, by chunks of columns."""
    return by_columns.losses(settings, plan, x, weight, bias, labels)


def _losses_by_columns_fwd(settings, plan, *primals):
    x, weight, bias, labels = _values(primals)
    losses = by_columns.losses(settings, plan, x, weight, bias, labels)
    return losses, (x, weight, bias, labels, losses.lse)


def _losses_by_columns_bwd(settings, plan, saved, cotangents):
    x, weight, bias, labels, lse = saved
    coefficients = _coefficients(settings, cotangents, labels)
    gradients = by_columns.gradients(settings, plan, x, weight, bias, coefficients, labels, lse)
    return *gradients, None


losses_by_columns.defvjp(_losses_by_columns_fwd, _losses_by_columns_bwd, symbolic_zeros=True)


def _values(primals: Any) -> Any:
    return jax.tree.map(lambda a: a.value, primals)


def _array(cotangent: Any) -> jax.Array:
    """The cotangent of losses, which are float32; zeros for a symbolic zero."""
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(cotangent.shape, jnp.float32)
    return cotangent


def _whole_cotangent(settings: Settings, cotangent: jax.Array) -> jax.Array:
    """The cotangent of the loss: each device of the axis has the same loss, and a share of it."""
    if settings.vocab_axis is None:
        return cotangent
    return jax.lax.psum(cotangent, settings.vocab_axis)


def _coefficients(settings: Settings, cotangents: Any, labels: jax.Array) -> jax.Array:
    """Factors of the losses in the sum whose gradients are asked for; 0 for an ignored token."""
    coefficients = _whole_cotangent(settings, _array(cotangents.loss))
    return jnp.where(labels == settings.options.ignore_index, 0.0, coefficients)


def _cast(gradients: Gradients, x, weight, bias) -> Gradients:
    """The gradients in the dtypes of the arguments."""
    dbias = None if gradients.dbias is None else gradients.dbias.astype(bias.dtype)
    return Gradients(gradients.dx.astype(x.dtype), gradients.dweight.astype(weight.dtype), dbias)
