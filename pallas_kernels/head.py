"""Options of the loss and logits for sampling, which the heads of several frameworks share."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.arguments import BITS_OF_PRODUCTS, floating_arrays
from pallas_kernels.loss import linear_cross_entropy
from pallas_kernels.loss.arguments import check_hidden_size
from pallas_kernels.loss.layout import WeightLayout
from pallas_kernels.loss.token_loss import softcapped, with_bias

# All but the arrays, which a call or the layer has, and the layout, which the layer decides.
LOSS_OPTIONS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(linear_cross_entropy).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
    and name not in ("bias", "token_weights", "weight_layout")
}


def checked_options(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The loss options in the order of their names, hashable.

    Raises:
      TypeError: `linear_cross_entropy` has no such option, or a value is an array.
    """
    if unknown := sorted(options.keys() - LOSS_OPTIONS.keys()):
        raise TypeError(
            f"{', '.join(unknown)}: not among the options of linear_cross_entropy, which are "
            f"{', '.join(sorted(LOSS_OPTIONS))}"
        )
    for name, value in options.items():
        if isinstance(value, jax.Array | np.ndarray):
            raise TypeError(
                f"{name}={value!r} is an array, and an option is a constant of the layer; pass a "
                f"Python number, such as {name}=float(...)"
            )
    return tuple(sorted(options.items()))


def logits_of_head(
    x: Float[Array, "*T D"],
    weight: Float[Array, "_ _"],
    bias: Float[Array, " V"] | None,
    layout: WeightLayout,
    softcap: float | None,
) -> Float[Array, "*T V"]:
    """The logits of the loss in float32, with operands in the dtype of `x`.

    Raises:
      TypeError: The dtype of `x` is not floating or has less than 16 bits.
      ValueError: `x` and `weight` disagree in D.
    """
    (x,) = floating_arrays(x=x, least_bits=BITS_OF_PRODUCTS)
    check_hidden_size("", x, weight, layout)
    z = jnp.einsum(
        f"...d,{layout}->...v", x, weight.astype(x.dtype), preferred_element_type=jnp.float32
    )
    return softcapped(with_bias(z, bias), softcap)
