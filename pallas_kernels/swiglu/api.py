"""The public SwiGLU."""

from typing import Literal, get_args

from jaxtyping import Array, Float

from pallas_kernels.swiglu import reference

type Implementation = Literal["reference"]


def swiglu(
    gate: Float[Array, "*T F"],
    up: Float[Array, "*T F"],
    *,
    implementation: Implementation | None = None,
    config: None = None,
) -> Float[Array, "*T F"]:
    """The gated activation of Llama's MLP (https://arxiv.org/abs/2002.05202).

    `silu(gate) · up` with `silu(z) = z · sigmoid(z)`, computed in float32 and rounded once to
    `gate.dtype`. Differentiable in both arguments. `gate = -inf` gives NaN, as `jax.nn.silu` does.

    Args:
      gate: the gate projection; the leading axes are tokens.
      up: the up projection, of the same shape.
      implementation: `None` picks the fastest one that runs here. `"reference"` is plain JAX.
      config: launch parameters of a kernel; the implementations here have none.

    Raises:
      ValueError: the shapes disagree, or a name is unknown.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate and up must have one shape, got {gate.shape} and {up.shape}")
    if config is not None:
        raise ValueError(f"{config=}: the plain-JAX implementation has no launch parameters")
    match implementation:
        case None | "reference":
            return reference.swiglu(gate, up)
        case _:
            raise ValueError(
                f"{implementation=} must be None or one of {get_args(Implementation.__value__)}"
            )
