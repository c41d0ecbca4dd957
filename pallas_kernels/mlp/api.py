"""The public SwiGLU."""

from typing import get_args

from jaxtyping import Array, Float

from pallas_kernels.arguments import check_config, floating_arrays
from pallas_kernels.implementation import Implementation
from pallas_kernels.mlp import mosaic_gpu, reference
from pallas_kernels.mlp.config import Config


def swiglu(
    gate: Float[Array, "*T F"],
    up: Float[Array, "*T F"],
    *,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Float[Array, "*T F"]:
    """The gated activation of Llama's MLP (https://arxiv.org/abs/2002.05202).

    `silu(gate) · up` with `silu(z) = z · sigmoid(z)`, computed in float32 and rounded once to
    `gate.dtype`. Differentiable in both arguments. `gate = -inf` gives NaN, as `jax.nn.silu` does.

    Args:
      gate: the gate projection, of any floating dtype; the leading axes are tokens.
      up: the up projection, of the same shape.
      implementation: `"reference"` and `"xla"` are plain JAX for XLA to fuse. `"mosaic_gpu"` is a
        kernel for NVIDIA GPUs since Ampere that keeps `gate` and `up` and nothing else, and takes
        them in one dtype; XLA cannot split it, so on a mesh call it inside of `jax.shard_map`.
        `None` picks `"reference"`, which is as fast alone and can be fused. A name is binding.
      config: launch parameters of the kernel; `None` takes measured ones, or a guess from the
        device and the dtype.

    Raises:
      ValueError: the shapes disagree, a name is unknown, or there are launch parameters for plain
        JAX.
      TypeError: an array is not of a floating dtype, or `config` is no `Config`.
      NotImplementedError: the kernel was asked for by name and does not take the arguments; also on
        differentiating it twice.
    """
    gate, up = floating_arrays(gate=gate, up=up)
    if gate.shape != up.shape:
        raise ValueError(f"gate and up must have one shape, got {gate.shape} and {up.shape}")
    if gate.ndim == 0:
        raise ValueError("gate and up must be [..., F], got scalars")
    names = get_args(Implementation.__value__)
    if implementation is not None and implementation not in names:
        raise ValueError(f"{implementation=} must be None or one of {names}")
    if implementation is None:
        # On an H100 XLA's fusion is as fast, 1.02 of a copy forward and 1.00 backward against 1.01
        # and 1.00, and inside of a model it takes in what is around it, which a kernel cannot.
        implementation = "reference"
    if implementation == "mosaic_gpu":
        check_config(config, Config)
        return mosaic_gpu.swiglu(gate, up, config=config)
    if config is not None:
        raise ValueError(f"{config=}: {implementation=} has no launch parameters")
    return reference.swiglu(gate, up)
