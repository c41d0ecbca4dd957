"""Linear cross-entropy in plain JAX over all logits, differentiated by JAX: the oracle."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.layout import Place, Roles, Tokens, Weight
from pallas_kernels.loss import low_rank
from pallas_kernels.loss.layout import Embedding, WeightLayout
from pallas_kernels.loss.plan import Request
from pallas_kernels.loss.token_loss import (
    LossOptions,
    TokenLosses,
    finite_where_not_counted,
    token_losses,
    with_bias,
)
from pallas_kernels.partition import split_over_explicit_axes


def sums_of_losses(
    request: Request,
    x: Float[Array, "*T D"],
    weight: Embedding,
    bias: Float[Array, " V"] | None,
    coefficients: Float[Array, "*T"],
    labels: Int[Array, "*T"],
    *,
    num_axes: int,
) -> tuple[Float[Array, "..."], TokenLosses]:
    """The same as `differentiable.sums_of_losses`.

    The logits `[*T, V]` are in memory, with float32 operands in all steps and in the GEMM. A token
    whose coefficient is 0 and whose `x` is not finite has losses and gradients of 0.
    """
    arrays, roles = arguments_and_roles(request, x, weight, bias, coefficients, labels)
    of_losses = Roles(roles, (Tokens(),) * len(TokenLosses._fields))
    key = request.settings.options, request.settings.weight_layout, request.is_low_rank
    losses = TokenLosses(*split_over_explicit_axes(_losses_of, key, of_losses, *arrays))
    losses = finite_where_not_counted(losses, coefficients)
    axes = tuple(range(num_axes, labels.ndim))
    return jnp.sum(coefficients * losses.loss, axis=axes), losses


def arguments_and_roles(
    request: Request,
    x: Float[Array, "*T D"],
    weight: Embedding,
    bias: Float[Array, " V"] | None,
    *numbers: Shaped[Array, "*T"],
) -> tuple[list[Array], tuple[Tokens | Weight, ...]]:
    """`(x, weight, *numbers, *bias, *frozen weight)`, and the roles of these arrays."""
    first, last = low_rank.arguments(weight)
    of_first, of_last = low_rank.roles(request.is_low_rank, request.settings.weight_layout, None)
    roles = [Tokens(("d",)), of_first, *[Tokens()] * len(numbers)]
    arrays = [x, first, *numbers]
    if bias is not None:
        roles.append(Weight(("v",)))
        arrays.append(bias)
    return [*arrays, *last], (*roles, *of_last)


def float32_logits(
    layout: WeightLayout, x: Float[Array, "*T D"], weight: Any, bias: Sequence[Any]
) -> Float[Array, "*T V"]:
    """The logits of float32 operands, before the softcap; `bias` has one array or none."""
    logits = jnp.einsum(
        f"...d,{layout}->...v",
        x.astype(jnp.float32),
        low_rank.whole(weight).astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return with_bias(logits, *bias) if bias else logits


def _losses_of(
    key: tuple[LossOptions, WeightLayout, bool], place: Place
) -> Callable[..., Sequence[jax.Array]]:
    """The losses of a device's tokens."""
    options, layout, is_low_rank = key

    def run(x: Any, weight: Any, coefficients: Any, labels: Any, *bias: Any) -> list[jax.Array]:
        weight, bias = low_rank.joined(is_low_rank, layout, weight, bias)
        # Left out before and after: `jnp.where` gives such values the gradient 0, and 0 · NaN is
        # NaN.
        is_left_out = (coefficients == 0) & ~jnp.all(jnp.isfinite(x), axis=-1)
        x = jnp.where(is_left_out[..., None], 0, x)
        losses = token_losses(float32_logits(layout, x, weight, bias), labels, options)
        return [jnp.where(is_left_out, 0.0, a) for a in losses]

    return run
