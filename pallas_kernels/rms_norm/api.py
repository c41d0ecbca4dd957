"""The public RMSNorm and residual-add RMSNorm."""

from typing import Literal, get_args

from jaxtyping import Array, Float

from pallas_kernels.rms_norm import reference

type Casting = Literal["float32", "llama", "gemma"]
type Implementation = Literal["reference"]


def rms_norm(
    x: Float[Array, "*T D"],
    weight: Float[Array, " D"],
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    casting: Casting = "float32",
    implementation: Implementation | None = None,
    config: None = None,
) -> Float[Array, "*T D"]:
    """Root mean square normalization over the last axis (https://arxiv.org/abs/1910.07467).

    `y = x · rstd · (weight + weight_offset)` with `rstd = 1 / sqrt(mean(x²) + eps)`. The statistics
    are float32 whatever the dtypes, and `y` has the dtype of `x`. Differentiable in `x` and
    `weight`; each gradient has the dtype of its argument, `dweight` is summed over the tokens in
    float32.

    The sum of squares is float32: a row whose Euclidean norm exceeds 1.8e19 overflows to `y = 0`
    with zero gradients (bfloat16 and float32 inputs; float16 cannot get there).

    Args:
      x: activations; the leading axes are tokens.
      weight: scale, one per channel, of any floating dtype.
      eps: added to the mean square, so in units of x².
      weight_offset: added to the weight in float32; Gemma stores the scale minus one and uses 1.0.
      casting: where the result is rounded. `"float32"` and `"gemma"`: everything in float32,
        rounded once at the end (`"gemma"` is the name other libraries give it; it implies no
        offset). `"llama"`: `x · rstd` is rounded to `x.dtype` before the scale, as Hugging Face
        does.
      implementation: `None` picks the fastest one that runs here. `"reference"` is plain JAX.
      config: launch parameters of a kernel; the implementations here have none.

    Raises:
      ValueError: the shapes disagree, or a name is unknown.
    """
    _check(x, weight, casting, config)
    match implementation:
        case None | "reference":
            return reference.rms_norm(
                x, weight, eps=eps, weight_offset=weight_offset, casting=casting
            )
        case _:
            raise ValueError(_unknown_implementation(implementation))


def add_rms_norm(
    x: Float[Array, "*T D"],
    residual: Float[Array, "*T D"],
    weight: Float[Array, " D"],
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    casting: Casting = "float32",
    implementation: Implementation | None = None,
    config: None = None,
) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"]]:
    """Residual addition, then RMSNorm: `residual_out = x + residual`, `y = rms_norm(residual_out)`.

    The sum is taken in float32 and rounded to `x.dtype`; the norm is that of `residual_out` as
    stored, so that the pair equals the addition and the norm done one after the other.
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
      ValueError: the shapes disagree, or a name is unknown.
    """
    _check(x, weight, casting, config)
    if residual.shape != x.shape:
        raise ValueError(f"residual must have the shape of x, {x.shape}, got {residual.shape}")
    match implementation:
        case None | "reference":
            return reference.add_rms_norm(
                x, residual, weight, eps=eps, weight_offset=weight_offset, casting=casting
            )
        case _:
            raise ValueError(_unknown_implementation(implementation))


def _check(x, weight, casting, config) -> None:
    if x.ndim == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight must have shape {x.shape[-1:]} (x is {x.shape}), got {weight.shape}"
        )
    if casting not in get_args(Casting.__value__):
        raise ValueError(f"{casting=} must be one of {get_args(Casting.__value__)}")
    if config is not None:
        raise ValueError(f"{config=}: the plain-JAX implementation has no launch parameters")


def _unknown_implementation(implementation) -> str:
    return f"{implementation=} must be None or one of {get_args(Implementation.__value__)}"
