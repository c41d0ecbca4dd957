"""Checks of the arguments of the distillation losses."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments import (
    BITS_OF_PRODUCTS,
    as_array,
    check_floating,
    check_number,
    floating_arrays,
    number,
)
from pallas_kernels.distillation.divergence import Divergence, DivergenceName
from pallas_kernels.distillation.settings import Settings, Tail
from pallas_kernels.loss.arguments import check_softcap, checked_chunks
from pallas_kernels.loss.layout import Embedding, WeightLayout, sizes
from pallas_kernels.loss.low_rank import LoRA, extended


def student_arrays(x: Any, weight: Any, weight_layout: Any) -> tuple[Array, Embedding]:
    """`(x, weight)` of the student as JAX arrays, of shapes that agree."""
    if isinstance(weight, LoRA):
        x, whole = student_arrays(x, weight.weight, weight_layout)
        return extended(x, weight._replace(weight=whole), weight_layout)
    x, weight = floating_arrays(x=x, weight=weight, least_bits=BITS_OF_PRODUCTS)
    check_layer("", x, weight, weight_layout)
    return x, weight


def check_layer(prefix: str, x: Array, weight: Array, layout: Any) -> None:
    """Raises ValueError unless hidden states and output embedding agree.

    Args:
      prefix: Beginning of the arguments' names.
      x: Hidden states.
      weight: Output embedding.
      layout: Layout of the weight.
    """
    name = f"{prefix}weight_layout"
    if layout not in get_args(WeightLayout.__value__):
        raise ValueError(f"{name}={layout!r} must be one of {get_args(WeightLayout.__value__)}")
    axes = f"[{', '.join(layout.upper())}]"
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(
            f"{prefix}weight must be {axes} with D >= 1 and V >= 1, got {weight.shape}"
        )
    _, hidden_size = sizes(weight, layout)
    if x.ndim == 0 or x.shape[-1] != hidden_size:
        raise ValueError(
            f"{prefix}x {x.shape} and {prefix}weight {weight.shape} must agree in D: "
            f"{name}={layout!r} is {axes}"
        )


def checked_bias(prefix: str, bias: Any, vocab_size: int) -> Array | None:
    """The bias as a JAX array, if there is one.

    Raises:
      ValueError: it has another shape than `[V]`.
      TypeError: it is no array, or its dtype does not suit it.
    """
    if bias is None:
        return None
    name = f"{prefix}bias"
    (bias,) = floating_arrays(**{name: bias}, least_bits=BITS_OF_PRODUCTS)
    if bias.shape != (vocab_size,):
        raise ValueError(f"{name} must have shape {(vocab_size,)}, got {bias.shape}")
    return bias


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
    teacher_weight_layout: WeightLayout | None = None,
    tail: Tail | None = None,
) -> Settings:
    """The settings of a call. The arguments are those of the public functions.

    Raises:
      ValueError: an option is out of its range, or a name is unknown.
      TypeError: an option is of a wrong type.
    """
    remedy = "1.0 leaves the logits as they are"
    check_number("temperature", temperature, remedy=remedy)
    if temperature <= 0:
        raise ValueError(f"{temperature=} must be above 0; {remedy}")
    softcap = check_softcap("logit_softcap", logit_softcap)
    teacher_softcap = check_softcap("teacher_logit_softcap", teacher_logit_softcap)
    if not 0 < number("counted_fraction", counted_fraction, remedy="1.0 expects all tokens") <= 1:
        raise ValueError(f"{counted_fraction=} must lie in (0, 1]; 1.0 expects all tokens to count")
    sizes = checked_chunks(chunk_size=chunk_size, max_logits_bytes=max_logits_bytes)
    return Settings(
        divergence=_divergence(divergence, beta),
        temperature=float(temperature),
        logit_softcap=softcap,
        teacher_logit_softcap=teacher_softcap,
        weight_layout=weight_layout,
        teacher_weight_layout=teacher_weight_layout,
        tail=tail,
        logits_dtype=None if logits_dtype is None else _logits_dtype(logits_dtype),
        chunk_size=sizes["chunk_size"],
        max_logits_bytes=sizes["max_logits_bytes"],
        vocab_axes=() if vocab_axis is None else (vocab_axis,),
        counted_fraction=float(counted_fraction),
    )


def _divergence(name: Any, beta: Any) -> Divergence:
    names = get_args(DivergenceName.__value__)
    if name not in names:
        raise ValueError(f"divergence={name!r} must be one of {names}")
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


def _logits_dtype(dtype: Any) -> jnp.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        raise TypeError(f"logits_dtype={dtype!r} must be a dtype, such as jnp.float32") from None
    name = f"logits_dtype={found}"
    check_floating(name, found, "change it", least_bits=BITS_OF_PRODUCTS)
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise ValueError(f"{name} needs jax_enable_x64; change it to float32")
    return found


def weights_of_tokens(token_weights: Any, shape: tuple[Any, ...]) -> Float[Array, "*T"]:
    """The factors of the losses in float32, of tokens of this shape."""
    if token_weights is None:
        return jnp.ones(shape, jnp.float32)
    as_array("token_weights", token_weights)
    if token_weights.shape != shape:
        raise ValueError(
            f"token_weights must have the shape of the tokens, {shape}, got {token_weights.shape}"
        )
    if not any(jnp.issubdtype(token_weights.dtype, t) for t in (jnp.floating, jnp.integer, bool)):
        raise TypeError(
            f"token_weights is {token_weights.dtype}, not a floating dtype, integers or bools; "
            "cast token_weights to float32"
        )
    return jnp.asarray(token_weights).astype(jnp.float32)
