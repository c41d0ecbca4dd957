"""Checks of the arguments of the distillation losses."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments import check_choice, checked_dtype, number
from pallas_kernels.distillation.divergence import Divergence, DivergenceName
from pallas_kernels.distillation.settings import Settings, Tail
from pallas_kernels.loss.arguments import (
    check_token_weights,
    checked_chunks,
    checked_fraction,
    checked_softcap,
    checked_temperature,
)
from pallas_kernels.loss.layout import WeightLayout
from pallas_kernels.partition import split_alike


def checked_settings(
    *,
    divergence: Any,
    beta: Any,
    temperature: Any,
    logit_softcap: Any,
    chunk_size: Any,
    max_logits_bytes: Any,
    vocab_axis: Any,
    weight_layout: WeightLayout,
    logits_dtype: Any,
    counted_fraction: Any,
    teacher_logit_softcap: Any = None,
    teacher_weight_layout: WeightLayout = "vd",
    has_teacher_bias: bool = False,
    tail: Tail | None = None,
) -> Settings:
    """The settings of a call. Most arguments are those of the public functions.

    Raises:
      ValueError: An option is out of its range, or a name is unknown.
      TypeError: An option is of a wrong type.
    """
    sizes = checked_chunks(chunk_size=chunk_size, max_logits_bytes=max_logits_bytes)
    return Settings(
        divergence=_divergence(divergence, beta),
        temperature=checked_temperature(temperature),
        logit_softcap=checked_softcap("logit_softcap", logit_softcap),
        teacher_logit_softcap=checked_softcap("teacher_logit_softcap", teacher_logit_softcap),
        weight_layout=weight_layout,
        teacher_weight_layout=teacher_weight_layout,
        tail=tail,
        logits_dtype=None if logits_dtype is None else checked_dtype("logits_dtype", logits_dtype),
        chunk_size=sizes["chunk_size"],
        max_logits_bytes=sizes["max_logits_bytes"],
        vocab_axes=() if vocab_axis is None else (vocab_axis,),
        counted_fraction=checked_fraction(counted_fraction),
        has_teacher_bias=has_teacher_bias,
    )


def _divergence(name: Any, beta: Any) -> Divergence:
    check_choice("divergence", name, DivergenceName)
    if beta is None:
        return Divergence(name, 0.5)
    remedy = "None is 0.5"
    beta = number("beta", beta, remedy=remedy)
    if not 0 <= beta <= 1:
        raise ValueError(f"{beta=} must lie in [0, 1]; {remedy}")
    if name != "jensen_shannon":
        raise ValueError(
            f"{beta=} is of divergence='jensen_shannon', and divergence={name!r} has no mixture; "
            "leave beta=None"
        )
    ends: dict[float, DivergenceName] = {0.0: "forward_kl", 1.0: "reverse_kl"}
    # One program for a divergence that has two spellings.
    return Divergence(ends[beta], 0.5) if beta in ends else Divergence(name, beta)


def weights_of_tokens(token_weights: Any, x: Array) -> Float[Array, "*T"]:
    """The factors of the losses in float32, which Explicit axes split as the tokens of `x`."""
    shape = x.shape[:-1]
    if token_weights is None:
        return jnp.ones(shape, jnp.float32)
    check_token_weights(token_weights, shape)
    return split_alike(x, jnp.asarray(token_weights).astype(jnp.float32))[0]
