"""The public RMSNorm and residual-add RMSNorm."""

from typing import Literal, get_args

from jaxtyping import Array, Float

from pallas_kernels.arguments import check_config, check_number, floating_arrays
from pallas_kernels.gpu.device import runs_here
from pallas_kernels.implementation import Implementation
from pallas_kernels.norm import mosaic_gpu, reference
from pallas_kernels.norm.config import Config
from pallas_kernels.sharding import sharded_over_devices

type Casting = Literal["float32", "llama", "gemma"]


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
    are float32 whatever the dtypes, and `y` has the dtype of `x`. Differentiable in `x` and
    `weight`; each gradient has the dtype of its argument, `dweight` is summed over the tokens in
    float32.

    The sum of squares is float32: a row whose Euclidean norm exceeds 1.8e19 overflows to `y = 0`
    with zero gradients (bfloat16 and float32 inputs; float16 cannot get there).

    Args:
      x: activations, of any floating dtype; the leading axes are tokens.
      weight: scale, one per channel, of any floating dtype.
      eps: added to the mean square, so in units of x²; at least 0.
      weight_offset: added to the weight in float32; Gemma stores the scale minus one and uses 1.0.
      casting: where the result is rounded. `"float32"` and `"gemma"`: everything in float32,
        rounded once at the end (`"gemma"` is the name other libraries give it; it implies no
        offset). `"llama"`: `x · rstd` is rounded to `x.dtype` before the scale, as Hugging Face
        does.
      implementation: `"mosaic_gpu"` is a kernel for NVIDIA GPUs since Ampere, `"reference"` and
        `"xla"` are plain JAX for XLA to fuse. `None` picks the kernel if JAX's default device is
        such a GPU, the kernel takes the arguments, and they are whole on one device: XLA cannot
        split a kernel, so on a mesh call it inside of `jax.shard_map`. (Arguments that only
        `jax.jit(in_shardings=)` splits cannot be told from whole ones; XLA gathers these.) A name
        is binding.
      config: launch parameters of the kernel; `None` takes measured ones, or a guess from the
        device and the sizes.

    Raises:
      ValueError: the shapes disagree, a name is unknown, a number is out of range, or `config` does
        not fit.
      TypeError: an array is not of a floating dtype, or an option is of a wrong type.
      NotImplementedError: the kernel was asked for by name and does not take the arguments; also on
        differentiating it twice.
    """
    x, weight = floating_arrays(x=x, weight=weight)
    check_norm_options(eps, weight_offset, casting)
    implementation = _check_and_choose(x, None, weight, implementation, config)
    if implementation == "reference":
        return reference.rms_norm(x, weight, eps=eps, weight_offset=weight_offset, casting=casting)
    return mosaic_gpu.norm(
        x, None, weight, eps=eps, weight_offset=weight_offset, casting=casting, config=config
    )[0]


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

    The sum is taken in float32 and rounded to `x.dtype`; the norm is that of `residual_out` as
    stored, so that the pair equals the addition and the norm done one after the other (up to the
    last bit of `rstd`, which the order of the sum decides).
    Differentiable in all three arrays; the gradients of `x` and `residual` are equal up to their
    dtypes.

    Args:
      x: the output of a sublayer; the leading axes are tokens.
      residual: the residual stream, of the shape of `x`.
      weight: scale of the norm, one per channel.
      eps: as in `rms_norm`, like all that follow.
      weight_offset: see `rms_norm`.
      casting: see `rms_norm`.
      implementation: see `rms_norm`.
      config: see `rms_norm`.

    Returns:
      `(y, residual_out)`, both of the shape and dtype of `x`.

    Raises:
      ValueError: see `rms_norm`, like the next two.
      TypeError: see `rms_norm`.
      NotImplementedError: see `rms_norm`.
    """
    x, residual, weight = floating_arrays(x=x, residual=residual, weight=weight)
    check_norm_options(eps, weight_offset, casting)
    implementation = _check_and_choose(x, residual, weight, implementation, config)
    if implementation == "reference":
        return reference.add_rms_norm(
            x, residual, weight, eps=eps, weight_offset=weight_offset, casting=casting
        )
    y, residual_out = mosaic_gpu.norm(
        x, residual, weight, eps=eps, weight_offset=weight_offset, casting=casting, config=config
    )
    assert residual_out is not None
    return y, residual_out


def check_norm_options(eps: float, weight_offset: float, casting: Casting) -> None:
    """Raises if a norm has no such options."""
    check_number("eps", eps, least=0.0, remedy="models have 1e-5 or 1e-6")
    check_number("weight_offset", weight_offset, remedy="0.0 is none, Gemma has 1.0")
    if casting not in get_args(Casting.__value__):
        raise ValueError(f"{casting=} must be one of {get_args(Casting.__value__)}")


def _check_and_choose(
    x: Array,
    residual: Array | None,
    weight: Array,
    implementation: Implementation | None,
    config: Config | None,
) -> Implementation:
    """The implementation to run."""
    if x.ndim == 0:
        raise ValueError("weight must have shape [D] and x [..., D], got an x of shape ()")
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight must have shape {x.shape[-1:]} (x is {x.shape}), got {weight.shape}"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must have the shape of x, {x.shape}, got {residual.shape}")
    names = get_args(Implementation.__value__)
    if implementation is not None and implementation not in names:
        raise ValueError(f"{implementation=} must be None or one of {names}")
    if implementation is None:
        fallback = (
            runs_here() is not None
            or sharded_over_devices(x)
            or mosaic_gpu.unsupported_reason(x, weight, residual) is not None
        )
        implementation = "reference" if fallback else "mosaic_gpu"
    if implementation == "xla":  # plain JAX, which XLA fuses
        implementation = "reference"
    if implementation == "reference" and config is not None:
        raise ValueError(f"{config=}: {implementation=} has no launch parameters")
    check_config(config, Config)
    return implementation
