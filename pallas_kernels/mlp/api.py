"""The public SwiGLU and gated MLP."""

import jax
from jaxtyping import Array, Float

from pallas_kernels.arguments import (
    BITS_OF_PRODUCTS,
    check_choice,
    check_config,
    check_integer,
    floating_arrays,
)
from pallas_kernels.choices import called, record, required_by
from pallas_kernels.implementation import (
    Chosen,
    Implementation,
    by_name,
    check_config_has_name,
    check_implementation,
    choose_implementation,
    symbolic_reason,
)
from pallas_kernels.mlp import gated, gated_matmul, mosaic_gpu, reference
from pallas_kernels.mlp.config import Config, MLPConfig
from pallas_kernels.mlp.gated import Save
from pallas_kernels.operation import call

# Tokens from which the backward kernel of the MLP is faster than XLA. Times on an H100, divided by
# XLA's, for sizes T x D x F (the second row: a forward that also writes gate and up):
#                     64x4096x14336  512x2048x8192  2048x2048x8192  16384x2048x8192  8192x4096x14336
#   forward           0.89           0.47           0.73            0.91             0.95
#   ... and gate, up  0.91           0.54           0.80            0.98             0.99
#   backward          1.18           1.03           0.96            0.94             0.94
_MIN_TOKENS_OF_BACKWARD = 2048


def swiglu(
    gate: Float[Array, "*T F"],
    up: Float[Array, "*T F"],
    *,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Float[Array, "*T F"]:
    """The gated activation of Llama's MLP (https://arxiv.org/abs/2002.05202).

    `silu(gate) · up` with `silu(z) = z · sigmoid(z)`, computed in float32 and rounded once. The
    result has the shape and dtype of `gate`. The function is differentiable in both arguments, and
    each gradient has the dtype of its argument. `gate = -inf` gives NaN, as `jax.nn.silu` does.

    Args:
      gate: Gate projection, of any floating dtype; the leading axes are tokens.
      up: Up projection, of the same shape.
      implementation: Name of the program. `None`, the default, runs `"reference"`, plain JAX. It is
        as fast as the kernel, and XLA can also fuse it with the operations around it. `"xla"` is
        the same. `"mosaic_gpu"` is a kernel for NVIDIA GPUs since Ampere. It keeps only `gate` and
        `up` for the backward, and needs both in the same dtype. On a mesh each device computes its
        own part. The kernel cannot run inside of a `jax.shard_map` whose `axis_names` omit an Auto
        axis of the mesh. `"require"` always raises, because `None` runs no kernel.
      config: Launch parameters of the kernel. `None` takes measured parameters, or a guess from
        the device and the dtype.

    Raises:
      ValueError: The shapes disagree, a name is unknown, or there are launch parameters for plain
        JAX.
      TypeError: An array is not of a floating dtype, or `config` is no `Config`.
      NotImplementedError: The caller asked for the kernel, and it does not take the arguments; or
        `implementation="require"`; or the kernel is differentiated twice or in forward mode
        (`jax.jvp`).
    """
    gate, up = floating_arrays(gate=gate, up=up)
    if gate.shape != up.shape:
        raise ValueError(f"gate and up must have one shape, got {gate.shape} and {up.shape}")
    if gate.ndim == 0:
        raise ValueError("gate and up must be [..., F], got scalars")
    chosen, reason = choose_swiglu(gate, up, implementation, config)
    record("swiglu", (gate, up), implementation or "reference", chosen, reason)
    if chosen == "mosaic_gpu":
        return mosaic_gpu.swiglu(gate, up, config=config)
    return reference.swiglu(gate, up)


def choose_swiglu(
    gate: Array, up: Array, implementation: Implementation | None, config: Config | None
) -> tuple[Chosen, str | None]:
    """The implementation that `swiglu` runs, and the reason why it is not the kernel.

    Raises:
      ValueError: The name is unknown, or there are launch parameters for plain JAX.
      TypeError: `config` is no `Config`.
      NotImplementedError: The caller asked for the kernel, which does not take the arguments.
    """
    check_implementation(implementation)
    check_config(config, Config)
    check_config_has_name(config, implementation)
    if implementation == "mosaic_gpu":
        unsupported = symbolic_reason(gate) or mosaic_gpu.unsupported_reason(gate, up)
        return choose_implementation(implementation, unsupported, fallback="reference")
    # On an H100 XLA's fusion is as fast: 1.02 of a copy forward and 1.00 backward, where the kernel
    # has 1.01 and 1.00. Inside of a model the fusion takes in operations around it, too. A kernel
    # cannot.
    if implementation == "reference" or implementation == "xla":
        return implementation, by_name(implementation, "'mosaic_gpu' takes the kernel")
    return "reference", (
        "XLA's fusion is as fast as the kernel and can take in the operations around it; "
        "implementation='mosaic_gpu' takes the kernel"
    )


def swiglu_mlp(
    x: Float[Array, "*T D"],
    w_gate: Float[Array, "D F"],
    w_up: Float[Array, "D F"],
    w_down: Float[Array, "F D"],
    *,
    save: Save = "gate_up",
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
    config: MLPConfig | None = None,
) -> Float[Array, "*T D"]:
    """The gated MLP (https://arxiv.org/abs/2002.05202), `(silu(gate) · up) @ w_down`.

    Here `gate = x @ w_gate` and `up = x @ w_up`. The MLP is differentiable in all four arrays. The
    result has the shape and dtype of `x`, and each gradient the dtype of its argument. Products
    take operands in the dtype of `x`, to which weights are rounded, and accumulate in float32.
    `gate`, `up`, their product `silu(gate) · up` and the result are each rounded once, to the dtype
    of `x`. Gradients of weights are rounded once, to their dtype; `"reference"` rounds them to the
    dtype of `x` first. `pallas_kernels/mlp/gated.py` has the algorithm and the other roundings.

    `save` says which arrays the forward keeps for the backward beside `x` and the weights:

    - `"gate_up"`: gate and up.
    - `"all"`: gate, up and the product `silu(gate) · up`.
    - `"x"`: nothing more. Two of the nine GEMMs (matrix products) then run again.

    Under `jax.checkpoint` the policy decides, by the names `gate`, `up` and `mlp_product`. `save`
    should then be `"gate_up"` or `"all"`.

    On a mesh each device computes its own tokens. F may be split over mesh axes that split no
    tokens. On Auto and Explicit axes the MLP adds up its result over these axes, and `dx` in the
    backward. Inside of `jax.shard_map` the MLP takes a device's columns of `w_gate` and `w_up` and
    rows of `w_down`, and returns that device's partial sum of the result: add the partial sums up
    with `jax.lax.psum`.

    Args:
      x: Input, of a floating dtype of 16 bits or more; the leading axes are tokens.
      w_gate: First projection, in the layout of Flax's kernels. All weights may have any floating
        dtype of 16 bits or more.
      w_up: Second projection.
      w_down: Projection of the product.
      save: Arrays that the forward keeps: `"gate_up"`, `"all"` or `"x"`.
      chunk_size: Number of a device's positions, along the second-last axis of `x`, that the MLP
        computes at a time; `None` means all. It is for sequences so long that gate and up are the
        largest arrays of the step. It needs `save="x"`. Under `jax.checkpoint` no array of the MLP
        is then kept, whatever the policy says.
      implementation: Name of the program.

        - `None`, the default: the kernels where they take the arguments, and `"xla"` elsewhere, for
          example inside of a `jax.shard_map` whose `axis_names` omit an Auto axis. Below 2048
          tokens the backward is `"xla"`, which is then faster.
        - `"mosaic_gpu"`: GEMM kernels that compute the activation in their epilogues. They run on
          Hopper, for an `x` of 16 bits, and for D and F that are multiples of 64. Elsewhere the
          call raises, with two exceptions. `"xla"` computes an empty `x`. If F is split and the
          kernels do not take a device's part, XLA computes the part, and a warning is logged.
        - `"require"`: the same as `None`, but the call raises where `"xla"` would run in place of
          the kernels, also for a device's part. A backward below 2048 tokens does not raise.
        - `"xla"`: the algorithm of the kernels in plain JAX.
        - `"reference"`: the formula, differentiated by JAX. JAX keeps all arrays for the backward,
          so `save` and `chunk_size` have no effect.
      config: Launch parameters of the kernels. They need `implementation="mosaic_gpu"`.

    Raises:
      ValueError: The shapes disagree, a name is unknown, or there are launch parameters for plain
        JAX.
      TypeError: An array is of another dtype, or an option is of a wrong type.
      NotImplementedError: The caller names the kernels or requires them, and they do not run. Or
        another implementation than `"reference"` is differentiated twice or in forward mode
        (`jax.jvp`).
    """
    x, w_gate, w_up, w_down = floating_arrays(
        x=x, w_gate=w_gate, w_up=w_up, w_down=w_down, least_bits=BITS_OF_PRODUCTS
    )
    weights = w_gate, w_up, w_down
    check_shapes(x, *weights)
    _check_options(x, save, chunk_size)
    if chunk_size is not None:
        # An integer of JAX has no hash, which the operation needs.
        chunk_size = int(chunk_size) if chunk_size < x.shape[-2] else None
    chosen, reason = choose_swiglu_mlp(x, weights, chunk_size, implementation, config)
    record("swiglu_mlp", (x, *weights), implementation, chosen, reason)
    if chosen == "reference":
        return reference.swiglu_mlp(x, *weights)
    mlp = gated.MLP(
        name=called("swiglu_mlp"),
        save=save,
        chunk_size=chunk_size,
        has_kernels=chosen == "mosaic_gpu",
        min_tokens_of_backward=0 if implementation == "mosaic_gpu" else _MIN_TOKENS_OF_BACKWARD,
        required_by=required_by(implementation),
        config=config or MLPConfig(),
    )
    return call(mlp, x, *weights)[0]


def choose_swiglu_mlp(
    x: Array,
    weights: tuple[Array, Array, Array],
    chunk_size: int | None,
    implementation: Implementation | None,
    config: MLPConfig | None,
) -> tuple[Chosen, str | None]:
    """The implementation that `swiglu_mlp` runs, and the reason why it is not the kernels.

    `"mosaic_gpu"` with a reason is the kernel in the forward alone.

    Raises:
      ValueError: The name is unknown, or there are launch parameters for plain JAX.
      TypeError: `config` is no `MLPConfig`.
      NotImplementedError: The caller asked for the kernels, which do not take the arguments.
    """
    check_implementation(implementation)
    check_config(config, MLPConfig)
    check_config_has_name(config, implementation)
    if x.size == 0 and implementation != "reference":
        return "xla", f"x has shape {x.shape}, so there is nothing to launch a kernel for"
    operands = [jax.ShapeDtypeStruct(w.shape, x.dtype) for w in weights]
    unsupported = symbolic_reason(x) or gated_matmul.unsupported_reason([x], operands)
    chosen, reason = choose_implementation(implementation, unsupported, fallback="xla")
    if chosen == "mosaic_gpu" and implementation in (None, "require"):
        num_tokens = x.size // x.shape[-1]
        if chunk_size is not None:
            num_tokens = num_tokens // x.shape[-2] * chunk_size
        if num_tokens < _MIN_TOKENS_OF_BACKWARD:
            reason = gated.few_tokens("the backward", num_tokens, _MIN_TOKENS_OF_BACKWARD)
    return chosen, reason


def check_shapes(x: Array, w_gate: Array, w_up: Array, w_down: Array) -> None:
    """Raises ValueError unless the arrays are those of a gated MLP."""
    if x.ndim == 0 or w_gate.ndim != 2 or w_gate.shape[0] != x.shape[-1]:
        raise ValueError(f"w_gate must be [D, F], got {w_gate.shape} for x {x.shape}")
    if w_up.shape != w_gate.shape or w_down.shape != w_gate.shape[::-1]:
        raise ValueError(
            f"w_up must be {w_gate.shape}, like w_gate, and w_down {w_gate.shape[::-1]}, got "
            f"{w_up.shape} and {w_down.shape}"
        )


def _check_options(x: Array, save: Save, chunk_size: int | None) -> None:
    check_choice("save", save, Save)
    if chunk_size is None:
        return
    check_integer("chunk_size", chunk_size, remedy="None takes all positions at once")
    if chunk_size < 1 or save != "x" or x.ndim < 2:
        raise ValueError(
            f"{chunk_size=} must be at least 1, and needs save='x' and x [..., S, D]; got {save=} "
            f"and x {x.shape}"
        )
    if not isinstance(x.shape[-2], int):
        raise ValueError(
            f"{chunk_size=} needs a number of positions, got x {x.shape}; export numbers, or leave "
            "chunk_size at None"
        )
