"""SwiGLU and the gated MLP in plain JAX, differentiated by JAX.

Tests compare with these formulas, and XLA fuses them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from pallas_kernels.layout import Place, Roles, Tokens, Weight
from pallas_kernels.mlp import formula
from pallas_kernels.partition import split_over_explicit_axes


def swiglu(gate: Float[Array, "*T F"], up: Float[Array, "*T F"]) -> Float[Array, "*T F"]:
    """`silu(gate) · up`, in float32, rounded once to `gate.dtype`."""
    return formula.product(gate.astype(jnp.float32), up.astype(jnp.float32)).astype(gate.dtype)


def swiglu_mlp(
    x: Float[Array, "*T D"],
    w_gate: Float[Array, "D F"],
    w_up: Float[Array, "D F"],
    w_down: Float[Array, "F D"],
) -> Float[Array, "*T D"]:
    """`(silu(x @ w_gate) · (x @ w_up)) @ w_down`, each step rounded once to the dtype of `x`."""
    tokens, across, down = Tokens(("d",)), Weight(("d", "f"), x.dtype), Weight(("f", "d"), x.dtype)
    roles = Roles((tokens, across, across, down), (tokens,))
    return split_over_explicit_axes(_mlp_of, None, roles, x, w_gate, w_up, w_down)[0]


def _mlp_of(key: None, place: Place) -> Callable[..., tuple[jax.Array, ...]]:
    """The MLP of a device's tokens."""

    def run(x: Any, w_gate: Any, w_up: Any, w_down: Any) -> tuple[jax.Array, ...]:
        gate, up = matmul(x, w_gate), matmul(x, w_up)
        return (matmul(swiglu(gate, up), w_down),)

    return run


def swiglu_gradients(
    gate: jax.Array,
    up: jax.Array,
    dproduct: jax.Array,
    *,
    logistic: formula.Logistic = jax.lax.logistic,
) -> tuple[jax.Array, ...]:
    """`(dgate, dup, product)` in float32, rounded to the dtype of `dproduct`."""
    in_float32 = (a.astype(jnp.float32) for a in (gate, up, dproduct))
    found = formula.gradients(*in_float32, logistic=logistic)
    return tuple(a.astype(dproduct.dtype) for a in found)


def matmul(x: jax.Array, weight: jax.Array, out_sharding: NamedSharding | None = None) -> jax.Array:
    """`x @ weight`, accumulated in float32 and rounded once, to the dtype of `x`."""
    weight = weight.astype(x.dtype)
    return jnp.matmul(x, weight, preferred_element_type=x.dtype, out_sharding=out_sharding)
