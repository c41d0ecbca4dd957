"""RMSNorm in plain JAX, differentiated by JAX: tests compare with it, and XLA fuses it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels.layout import Place, Roles, Tokens, Weight
from pallas_kernels.partition import split_over_explicit_axes

type Casting = Literal["float32", "llama", "gemma"]


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The numbers and the rounding of a norm, as `pallas_kernels.rms_norm` describes them.

    Attributes:
      eps: Number added to the mean square.
      weight_offset: Number added to the weight.
      casting: Place where the result is rounded.
    """

    eps: float
    weight_offset: float
    casting: Casting


_TOKENS, _WEIGHT = Tokens(("d",)), Weight(("d",))


def norm(
    x: Float[Array, "*T D"],
    residual: Float[Array, "*T D"] | None,
    weight: Float[Array, " D"],
    options: Options,
) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"] | None]:
    """`(y, residual_out)` of `pallas_kernels.add_rms_norm`, or `(y, None)` without a residual."""
    if residual is None:
        roles = Roles((_TOKENS, _WEIGHT), (_TOKENS,))
        return split_over_explicit_axes(_norm_of, options, roles, x, weight)[0], None
    roles = Roles((_TOKENS, _TOKENS, _WEIGHT), (_TOKENS, _TOKENS))
    y, residual_out = split_over_explicit_axes(_add_norm_of, options, roles, x, residual, weight)
    return y, residual_out


def _norm_of(options: Options, place: Place) -> Callable[..., tuple[jax.Array, ...]]:
    """The norm of a device's tokens."""

    def run(x: Any, weight: Any) -> tuple[jax.Array, ...]:
        x_f32 = x.astype(jnp.float32)
        rstd = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True) + options.eps)
        # 4 bytes a token: a remat policy that keeps it saves the backward one reduction over x.
        x_hat = x_f32 * checkpoint_name(rstd, "rstd")
        if options.casting == "llama":
            # The product of two 16-bit numbers is exact in float32, so rounding it once below gives
            # the bits of a 16-bit multiplication, whatever the dtype of the weight.
            x_hat = _rounded(x_hat, x.dtype).astype(jnp.float32)
        scale = weight.astype(jnp.float32) + options.weight_offset
        scale = jax.lax.broadcast_to_rank(scale, x.ndim)
        y = (x_hat * scale).astype(x.dtype)
        return (checkpoint_name(y, "normed"),)

    return run


def _add_norm_of(options: Options, place: Place) -> Callable[..., tuple[jax.Array, ...]]:
    """The sum and the norm of a device's tokens."""

    def run(x: Any, residual: Any, weight: Any) -> tuple[jax.Array, ...]:
        total = x.astype(jnp.float32) + residual.astype(jnp.float32)
        # Tagged here and not by the caller, because the backward of the norm reads it.
        residual_out = checkpoint_name(_rounded(total, x.dtype), "residual")
        return *_norm_of(options, place)(residual_out, weight), residual_out

    return run


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(x_f32: Float[Array, "*T D"], dtype: jnp.dtype) -> Float[Array, "*T D"]:
    """`x_f32` in `dtype`, so that a reader in float32 sees the rounded values."""
    if dtype in (jnp.bfloat16, jnp.float16):
        # In a compiled program XLA for GPUs drops the rounding of a cast to 16 bits and back
        # (https://github.com/openxla/xla/issues/41605). It keeps `reduce_precision`, which has no
        # subnormal numbers. The subnormal numbers of float16 are left to the cast, or they would be
        # rounded twice.
        info = jnp.finfo(dtype)
        reduced = jax.lax.reduce_precision(x_f32, exponent_bits=8, mantissa_bits=info.nmant)
        x_f32 = jnp.where(jnp.abs(x_f32) < float(info.tiny), x_f32, reduced)
    return x_f32.astype(dtype)


@_rounded.defjvp
def _rounded_jvp(dtype, primals, tangents):
    # The derivative of the cast. A derivative of the selection would read its operand once more,
    # and the backward took 40 % longer on an H100.
    return _rounded(*primals, dtype), tangents[0].astype(dtype)
