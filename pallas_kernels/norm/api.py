"""The public RMSNorm and residual-add RMSNorm."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments import check_choice, check_config, check_number, floating_arrays
from pallas_kernels.choices import record, required_by
from pallas_kernels.implementation import (
    Chosen,
    Implementation,
    check_config_has_kernel,
    check_implementation,
    choose_implementation,
    symbolic_reason,
)
from pallas_kernels.logs import log_once
from pallas_kernels.norm import mosaic_gpu, reference
from pallas_kernels.norm.config import Config
from pallas_kernels.norm.reference import Casting, Options


def rms_norm(
    x: Float[Array, "*T D"],
    weight: Float[Array, " D"],
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    casting: Casting = "float32",
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Float[Array, "*T D"]:
    """Root mean square normalization over the last axis (https://arxiv.org/abs/1910.07467).

    `y = x · rstd · (weight + weight_offset)` with `rstd = 1 / sqrt(mean(x²) + eps)`. The statistics
    are float32 whatever the dtypes, and `y` has the dtype of `x`. The norm is differentiable in `x`
    and `weight`. Each gradient has the dtype of its argument. `dweight` is summed over the tokens
    in float32.

    The sum of squares is float32. A row whose Euclidean norm exceeds 1.8e19 overflows, and gives
    `y = 0` (in bfloat16 and float32; float16 has no such numbers). The gradients of such a row are
    0, or NaN if the sum of `dy · weight · x` overflows, too.

    Args:
      x: Activations, of any floating dtype; the leading axes are tokens.
      weight: Scale, one number a channel, of any floating dtype.
      eps: Number added to the mean square, in units of x²; at least 0. With 0, a row of zeros gives
        NaN.
      weight_offset: Number added to the weight in float32. Gemma stores the scale minus one, so its
        offset is 1.0.
      casting: Place where the result is rounded. `"float32"` and `"gemma"` mean the same: all
        arithmetic is float32, and the result is rounded once, at the end. Other libraries call this
        `"gemma"`; it sets no offset. With `"llama"`, `x · rstd` is rounded to `x.dtype` before the
        multiplication by the weight, as in Hugging Face.
      implementation: Name of the program. `None`, the default, runs the kernel if JAX's default
        device and the arguments allow it, and plain JAX otherwise. `"mosaic_gpu"` is a kernel for
        NVIDIA GPUs since Ampere. It takes bfloat16, float16 and float32. D may be any multiple of
        64 up to 16384, any power of two from 64 to 65536, and other sizes that
        `docs/dtypes_and_sizes.md` lists. `"reference"` is plain JAX, which XLA fuses; `"xla"` is
        the same. `"require"` runs the kernel, or raises. On a mesh each device normalizes its own
        tokens. XLA cannot partition a kernel inside of a `jax.shard_map` whose `axis_names` omit an
        Auto axis of the mesh. There `None` runs plain JAX, and `"mosaic_gpu"` raises. With `None`,
        plain JAX also computes forward mode and second derivatives, which no kernel has.
      config: Launch parameters of the kernel. `None` takes measured parameters, or a guess from
        the device and the sizes.

    Returns:
      `y`, of the shape and dtype of `x`.

    Raises:
      ValueError: The shapes disagree, a name is unknown, a number is out of range, or `config` does
        not fit.
      TypeError: An array is not of a floating dtype, or an option is of a wrong type.
      NotImplementedError: The caller asked for the kernel or requires it, and it does not run. Or
        the result is differentiated twice or in forward mode (`jax.jvp`), and the caller asked for
        the kernel or requires kernels.
    """
    x, weight = floating_arrays(x=x, weight=weight)
    options = checked_options(eps, weight_offset, casting)
    return _norm("rms_norm", x, None, weight, options, implementation, config)[0]


def add_rms_norm(
    x: Float[Array, "*T D"],
    residual: Float[Array, "*T D"],
    weight: Float[Array, " D"],
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    casting: Casting = "float32",
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"]]:
    """Residual addition, then RMSNorm: `residual_out = x + residual`, `y = rms_norm(residual_out)`.

    The sum is taken in float32 and rounded to `x.dtype`. If `residual` has more bits, the log says
    once that it is rounded. The norm reads the rounded sum. So the results equal those of an
    addition and a separate `rms_norm`, up to the last bit of `rstd`, which depends on the order of
    a sum. The operation is differentiable in all three arrays. The gradients of `x` and `residual`
    are equal up to their dtypes.

    Args:
      x: Output of a sublayer; the leading axes are tokens.
      residual: Residual stream, of the shape of `x`.
      weight: Scale of the norm, one number a channel.
      eps: Number added to the mean square, as in `rms_norm`.
      weight_offset: Number added to the weight, as in `rms_norm`.
      casting: Place where the result is rounded, as in `rms_norm`.
      implementation: Name, as in `rms_norm`.
      config: Launch parameters, as in `rms_norm`.

    Returns:
      `(y, residual_out)`, both of the shape and dtype of `x`.

    Raises:
      ValueError: The same as in `rms_norm`.
      TypeError: The same as in `rms_norm`.
      NotImplementedError: The same as in `rms_norm`.
    """
    x, residual, weight = floating_arrays(x=x, residual=residual, weight=weight)
    log_rounding_of_residual("add_rms_norm", "x", x, residual)
    options = checked_options(eps, weight_offset, casting)
    y, residual_out = _norm("add_rms_norm", x, residual, weight, options, implementation, config)
    assert residual_out is not None
    return y, residual_out


def _norm(
    name: str,
    x: Array,
    residual: Array | None,
    weight: Array,
    options: Options,
    implementation: Implementation | None,
    config: Config | None,
) -> tuple[Array, Array | None]:
    """`(y, residual_out)` of arrays, by the implementation that the caller asks for."""
    check_shapes(x, residual, weight)
    chosen, reason = choose_norm(x, residual, weight, implementation, config)
    record(name, (x, residual, weight), implementation, chosen, reason)
    if chosen != "mosaic_gpu":
        return reference.norm(x, residual, weight, options)
    # Plain JAX may compute what has no kernel if the caller has not asked for kernels.
    has_tangent = implementation is None and required_by(implementation) is None
    return mosaic_gpu.norm(x, residual, weight, options, config, has_tangent=has_tangent)


def choose_norm(
    x: Array,
    residual: Array | None,
    weight: Array,
    implementation: Implementation | None,
    config: Config | None,
) -> tuple[Chosen, str | None]:
    """The implementation that a norm runs, and the reason why it is not the kernel.

    Raises:
      ValueError: The name is unknown, or there are launch parameters for plain JAX.
      TypeError: `config` is no `Config`.
      NotImplementedError: The caller asked for the kernel, which does not take the arguments.
    """
    check_implementation(implementation)
    check_config(config, Config)
    unsupported = symbolic_reason(x) or mosaic_gpu.unsupported_reason(x, weight, residual)
    chosen, reason = choose_implementation(implementation, unsupported, fallback="reference")
    check_config_has_kernel(config, implementation, chosen, reason)
    return chosen, reason


def log_rounding_of_residual(operation: str, name: str, summand: Array, residual: Array) -> None:
    """Logs once that the sum is rounded to fewer bits than the residual stream has."""
    if jnp.finfo(residual.dtype).bits > jnp.finfo(summand.dtype).bits:
        log_once(
            f"{operation} rounds the residual stream to {summand.dtype}, the dtype of {name}, "
            f"because the residual is {residual.dtype}; cast {name} to {residual.dtype} to keep "
            "the stream in this dtype"
        )


def checked_options(eps: float, weight_offset: float, casting: Casting) -> Options:
    """The options of a norm.

    Raises:
      ValueError: A number is out of range, or the casting is unknown.
      TypeError: A number is none.
    """
    check_number("eps", eps, least=0.0, remedy="models have 1e-5 or 1e-6")
    check_number("weight_offset", weight_offset, remedy="0.0 is none, Gemma has 1.0")
    check_choice("casting", casting, Casting)
    return Options(float(eps), float(weight_offset), casting)


def norm_options(layer: Any, eps: float) -> dict[str, Any]:
    """The keyword arguments of the operation, from the attributes of a layer of any framework."""
    return {
        "eps": eps,
        "weight_offset": layer.weight_offset,
        "casting": layer.casting,
        "implementation": layer.implementation,
    }


def check_shapes(x: Array, residual: Array | None, weight: Array) -> None:
    """Raises ValueError if the shapes disagree."""
    if x.ndim == 0:
        raise ValueError("weight must have shape [D] and x [..., D], got an x of shape ()")
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight must have shape {x.shape[-1:]} (x is {x.shape}), got {weight.shape}"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must have the shape of x, {x.shape}, got {residual.shape}")
