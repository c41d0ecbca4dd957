"""RMSNorm with a quantized result: one kernel normalizes a row and quantizes it."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.arguments import floating_arrays
from pallas_kernels.choices import record
from pallas_kernels.derivatives import not_differentiable
from pallas_kernels.fp8 import reference, row_kernel
from pallas_kernels.fp8.types import E4M3, Quantized, check_dtype
from pallas_kernels.gpu.device import target_device
from pallas_kernels.implementation import Implementation, choose_implementation
from pallas_kernels.norm import api, mosaic_gpu
from pallas_kernels.norm import reference as norm_reference
from pallas_kernels.norm.api import Casting
from pallas_kernels.norm.config import config_of
from pallas_kernels.norm.forward_kernel import forward
from pallas_kernels.norm.reference import Options


def rms_norm_quantized(
    x: Float[Array, "*T D"],
    weight: Float[Array, " D"],
    dtype: DTypeLike = E4M3,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    casting: Casting = "float32",
    implementation: Implementation | None = None,
) -> tuple[Quantized, Float[Array, "*T"]]:
    """`quantize(rms_norm(x, weight), dtype, scaling="row")`, in one pass where the kernel runs.

    The kernel does not write the norm to memory in 16 bits. It rounds the norm to the dtype of `x`
    before it quantizes, so the values are those of the two functions. In the kernel the reciprocal
    of a scale may err in the last bit, so a value within one part in 2^23 of a tie may be rounded
    the other way.

    The function has no gradient. Write a `jax.custom_vjp` around it; its backward needs `rstd`. The
    kernel is not split over a mesh. Call it inside of `jax.shard_map`.

    Args:
      x: Activations, of a floating dtype of 16 bits or more; the leading axes are tokens.
      weight: Scale of the norm, one number a channel, of a floating dtype of 16 bits or more.
      dtype: Dtype of the values: `float8_e4m3fn` or `float8_e5m2`.
      eps: Number added to the mean square.
      weight_offset: Number added to the weight in float32.
      casting: Place where the norm is rounded, as in `rms_norm`.
      implementation: Name, as in `pallas_kernels.rms_norm`; the kernel needs Ada, Hopper or later,
        and at least 4 rows.

    Returns:
      `(y, rstd)`, with `y` of values `[*T, D]` and scales `[*T, 1]`, and
      `rstd = 1 / sqrt(mean(x²) + eps)` in float32.

    Raises:
      ValueError: The same as in `rms_norm` and `quantize`.
      TypeError: An array is not of a floating dtype of 16 bits or more, or an option is of a wrong
        type.
      NotImplementedError: The caller asked for the kernel or requires it, and it does not run; or
        the function is differentiated.
    """
    options = api.checked_options(eps, weight_offset, casting)
    name = "rms_norm_quantized"
    y, _, rstd = _quantized(name, x, None, weight, dtype, implementation, options)
    return y, rstd


def add_rms_norm_quantized(
    x: Float[Array, "*T D"],
    residual: Float[Array, "*T D"],
    weight: Float[Array, " D"],
    dtype: DTypeLike = E4M3,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    casting: Casting = "float32",
    implementation: Implementation | None = None,
) -> tuple[Quantized, Float[Array, "*T D"], Float[Array, "*T"]]:
    """`rms_norm_quantized` of the rounded sum `x + residual`, and that sum.

    Arguments and errors are as in `rms_norm_quantized` and `pallas_kernels.add_rms_norm`.

    Returns:
      `(y, residual_out, rstd)`; `residual_out` has the dtype of `x`, and `rstd` is that of
      `residual_out`.
    """
    options = api.checked_options(eps, weight_offset, casting)
    name = "add_rms_norm_quantized"
    y, residual_out, rstd = _quantized(name, x, residual, weight, dtype, implementation, options)
    assert residual_out is not None
    return y, residual_out, rstd


def _quantized(
    name: str,
    x: Any,
    residual: Any,
    weight: Any,
    dtype: DTypeLike,
    implementation: Implementation | None,
    options: Options,
) -> tuple[Quantized, Array | None, Array]:
    """`(y, residual_out, rstd)`."""
    x, weight = floating_arrays(least_bits=16, x=x, weight=weight)
    if residual is not None:
        (residual,) = floating_arrays(least_bits=16, residual=residual)
    x, residual, weight = not_differentiable(
        f"{name} has no gradient; write a jax.custom_vjp around it, for which it has rstd",
        (x, residual, weight),
    )
    check_dtype(dtype)
    api.check_shapes(x, residual, weight)
    chosen, reason = api.choose_norm(x, residual, weight, implementation, None)
    if chosen == "mosaic_gpu" and (unsupported := _unsupported_reason(x)) is not None:
        chosen, reason = choose_implementation(implementation, unsupported, fallback="reference")
    record(name, (x, residual, weight), implementation, chosen, reason)
    if chosen == "mosaic_gpu":
        return _kernel(x, residual, weight, dtype, options)
    y, total = norm_reference.norm(x, residual, weight, options)
    source = x if total is None else total
    squares = jnp.mean(jnp.square(source.astype(jnp.float32)), axis=-1)
    scale = reference.scale_of(reference.amax_of(y, axis=-1), dtype)
    values = reference.values_of(y, scale, dtype)
    return Quantized(values, scale), total, jax.lax.rsqrt(squares + options.eps)


def _unsupported_reason(x: Array) -> str | None:
    """Why the kernel cannot quantize these rows, or None if it can."""
    device = target_device()
    if not device.has_fp8:
        return f"FP8 needs compute capability (8, 9), {device.kind} has {device.capability}"
    if math.prod(x.shape[:-1]) < 4 or x.size == 0:
        return (
            f"x of shape {x.shape} has fewer than 4 rows; pad it to 4, or take "
            "implementation='reference'"
        )
    return None


def _kernel(
    x: Array, residual: Array | None, weight: Array, dtype: DTypeLike, options: Options
) -> tuple[Quantized, Array | None, Array]:
    """`_quantized` by the kernel of the norm's forward."""
    leading, width = x.shape[:-1], x.shape[-1]
    config = config_of(x, residual)
    # Rows stay in registers for the maximum, so there is nothing to read again.
    config = dataclasses.replace(config, fwd_reread=False)
    mosaic_gpu.check_config(config, x, residual)
    rows = lambda a: a.reshape(math.prod(leading), width)
    (values, scale), residual_out, rstd = forward(
        options,
        config,
        rows(x),
        None if residual is None else rows(residual),
        weight,
        row_kernel.Quantizer(jnp.dtype(dtype)),
    )
    y = Quantized(values.reshape(x.shape), scale.reshape(*leading, 1))
    total = None if residual_out is None else residual_out.reshape(x.shape)
    return y, total, rstd.reshape(leading)
