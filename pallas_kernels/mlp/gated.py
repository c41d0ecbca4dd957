"""The gated MLP of Llama as one differentiable function that chooses what it keeps.

`y = (silu(gate) · up) @ w_down` with `gate = x @ w_gate` and `up = x @ w_up`. Its intermediates are
the largest of a layer, three arrays `[T, F]`: at T=16384 and F=8192 in 16 bits 268 MB each, in 16
layers 12.9 GB. What the backward needs of them can be made again:

| `save` | kept beside `x` and the weights | made again | GEMMs, forward and backward |
|---|---|---|---|
| `"all"` | gate, up, product | | 3 + 6 |
| `"gate_up"` | gate, up | the product, where gate and up are read anyway | 3 + 6 |
| `"x"` | | gate, up, product | 3 + 8 |

With `chunk_size`, `"x"` does so for a part of the sequence at a time: neither forward nor backward
has an array `[T, F]`. Each part reads and writes the sums of the weight gradients, in float32, so
parts should be long. (Sequence tiling of the MLP: https://arxiv.org/abs/2506.13996.)

Backward: `dproduct = dy @ w_down.T`, then dgate, dup and the product from it and gate and up in one
pass, then `dw_down = product.T @ dy`, `dw_gate = x.T @ dgate`, `dw_up = x.T @ dup` and
`dx = dgate @ w_gate.T + dup @ w_up.T`.

XLA's backward takes its operands through an `optimization_barrier`. It would else find that the
forward has computed the same, be it the projections or a sigmoid, and keep it. What kernels compute
cannot be matched, and in a `lax.scan` over layers the barrier would copy gate and up, which theirs
reads where they are stacked.

The weights of gate and up are two arrays, as in checkpoints. In one, `[D, 2, F]`, `dx` would be one
GEMM; but stacking dgate and dup keeps XLA from making them with the product in one pass (it wrote
the sigmoid to memory instead), and the parameters would have to be stacked in every step.

Rounding: the operands of all GEMMs have the dtype of `x`, weights of another are rounded to it;
sums are float32. Rounded once, to the dtype of `x`: gate, up, the product (of the rounded gate and
up), y, dgate, dup; in `"xla"` also dproduct. The two products that make up `dx` are rounded, and
their sum. Weight gradients are rounded once, to the dtype of their weight. With `"xla"` the bits do
not depend on `save`.
"""

import dataclasses
import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels.arguments import (
    BITS_OF_PRODUCTS,
    check_config,
    check_integer,
    floating_arrays,
)
from pallas_kernels.derivatives import not_differentiable
from pallas_kernels.folding import fold_chunks
from pallas_kernels.gpu import hopper_gemm
from pallas_kernels.gpu.device import runs_here
from pallas_kernels.mlp import formula, gated_matmul
from pallas_kernels.sharding import sharded_over_devices

# On an H100, times over XLA's by tokens, D and F:
#                     64x4096x14336  512x2048x8192  2048x2048x8192  16384x2048x8192  8192x4096x14336
#   forward           0.89           0.47           0.73            0.91             0.95
#   ... and gate, up  0.91           0.54           0.80            0.98             0.99
#   backward          1.18           1.03           0.96            0.94             0.94
_MIN_TOKENS_OF_BACKWARD = 2048

type MLPImplementation = Literal["reference", "xla", "mosaic_gpu"]
type Save = Literal["all", "gate_up", "x"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MLPConfig:
    """Launch parameters of `implementation="mosaic_gpu"`; None is a guess from device and sizes.

    Attributes:
      forward: of the GEMM of gate and up.
      backward: of the GEMM of `dproduct`.
    """

    forward: hopper_gemm.Config | None = None
    backward: hopper_gemm.Config | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """All that is static: what to keep, how much at a time, which of the GEMMs are our kernels."""

    save: Save
    chunk_size: int | None
    forward_kernel: bool
    backward_kernel: bool
    config: MLPConfig


def swiglu_mlp(
    x: Float[Array, "*T D"],
    w_gate: Float[Array, "D F"],
    w_up: Float[Array, "D F"],
    w_down: Float[Array, "F D"],
    *,
    save: Save = "gate_up",
    chunk_size: int | None = None,
    implementation: MLPImplementation | None = None,
    config: MLPConfig | None = None,
) -> Float[Array, "*T D"]:
    """The gated MLP (https://arxiv.org/abs/2002.05202), `(silu(gate) · up) @ w_down`.

    `gate = x @ w_gate` and `up = x @ w_up`. Differentiable in all four arrays. Algorithm and
    rounding: `pallas_kernels/mlp/gated.py`.

    `save` is what the backward finds: `"gate_up"` these two (and `x`); `"x"` only the input, so
    that two of nine GEMMs run again; `"all"` the product as well. Under `jax.checkpoint` its policy
    decides, by the names `gate`, `up` and `mlp_product`; `save` should then be `"gate_up"` or
    `"all"`.

    Args:
      x: the input, of a floating dtype of 16 bits or more; the leading axes are tokens.
      w_gate: in the layout of Flax's kernels, and of such a dtype, like all weights.
      w_up: the second projection.
      w_down: the projection of the product.
      save: see above.
      chunk_size: positions, along the axis before the last, whose gate and up exist at a time, for
        sequences so long that these are the largest arrays of the step; needs `save="x"` and keeps
        nothing under `jax.checkpoint` either. `None`: all.
      implementation: `"mosaic_gpu"` runs the elementwise work in the epilogues of GEMMs, on Hopper
        and in 16 bits, for D and F that are multiples of 128; XLA cannot split the kernels, so on a
        mesh call it inside of `jax.shard_map`. `"xla"` is the same algorithm, `"reference"` the
        formula, differentiated by JAX, which keeps everything. `None` takes the kernels where they
        run, that of the backward from 2048 tokens on, and else is `"xla"`. A name is binding.
      config: launch parameters of the kernels, for `"mosaic_gpu"`.

    Raises:
      ValueError: shapes disagree, or a name is unknown.
      TypeError: an array is not of such a dtype, or an option is of a wrong type.
      NotImplementedError: the kernels were asked for and do not take the arguments, or they are
        differentiated twice.
    """
    x, w_gate, w_up, w_down = floating_arrays(
        x=x, w_gate=w_gate, w_up=w_up, w_down=w_down, least_bits=BITS_OF_PRODUCTS
    )
    weights = w_gate, w_up, w_down
    _check(x, weights, save, chunk_size, implementation, config)
    if implementation == "reference":
        return _reference(x, *weights)
    return _mlp(_plan(x, weights, save, chunk_size, implementation, config), x, *weights)


def _check(
    x: jax.Array,
    weights: tuple[jax.Array, jax.Array, jax.Array],
    save: Save,
    chunk_size: int | None,
    implementation: MLPImplementation | None,
    config: MLPConfig | None,
) -> None:
    """Refuses what no implementation takes."""
    w_gate, w_up, w_down = weights
    if x.ndim == 0 or w_gate.ndim != 2 or w_gate.shape[0] != x.shape[-1]:
        raise ValueError(f"w_gate must be [D, F], got {w_gate.shape} for x {x.shape}")
    if w_up.shape != w_gate.shape or w_down.shape != w_gate.shape[::-1]:
        raise ValueError(
            f"w_up must be {w_gate.shape}, like w_gate, and w_down {w_gate.shape[::-1]}, got "
            f"{w_up.shape} and {w_down.shape}"
        )
    if save not in get_args(Save.__value__):
        raise ValueError(f"{save=} must be one of {get_args(Save.__value__)}")
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, remedy="None takes all positions at once")
    if chunk_size is not None and (chunk_size < 1 or save != "x" or x.ndim < 2):
        raise ValueError(
            f"{chunk_size=} must be at least 1, and needs save='x' and x [..., S, D]; got {save=} "
            f"and x {x.shape}"
        )
    names = get_args(MLPImplementation.__value__)
    if implementation is not None and implementation not in names:
        raise ValueError(f"{implementation=} must be None or one of {names}")
    if config is not None and implementation != "mosaic_gpu":
        raise ValueError(f"{config=}: {implementation=} has no launch parameters")
    check_config(config, MLPConfig)


def _plan(
    x: jax.Array,
    weights: tuple[jax.Array, jax.Array, jax.Array],
    save: Save,
    chunk_size: int | None,
    implementation: MLPImplementation | None,
    config: MLPConfig | None,
) -> _Plan:
    """What to run."""
    if chunk_size is not None and chunk_size >= x.shape[-2]:
        chunk_size = None
    plan = functools.partial(_Plan, save=save, chunk_size=chunk_size, config=config or MLPConfig())
    if implementation == "xla" or x.size == 0:
        return plan(forward_kernel=False, backward_kernel=False)
    reason = gated_matmul.unsupported_reason([x], [w.astype(x.dtype) for w in weights])
    if implementation == "mosaic_gpu":
        if reason is not None:
            raise NotImplementedError(f"{implementation=}: {reason}")
        return plan(forward_kernel=True, backward_kernel=True)
    if reason is not None or runs_here() is not None or sharded_over_devices(x):
        return plan(forward_kernel=False, backward_kernel=False)
    num_tokens = x.size // x.shape[-1]
    if chunk_size is not None:
        num_tokens = num_tokens // x.shape[-2] * chunk_size
    return plan(forward_kernel=True, backward_kernel=num_tokens >= _MIN_TOKENS_OF_BACKWARD)


def _reference(x, w_gate, w_up, w_down):
    gate, up = _matmul(x, w_gate), _matmul(x, w_up)
    return _matmul(_product(gate, up), w_down)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(
    plan: _Plan,
    x: Float[Array, "*T D"],
    w_gate: Float[Array, "D F"],
    w_up: Float[Array, "D F"],
    w_down: Float[Array, "F D"],
) -> Float[Array, "*T D"]:
    return _forward(plan, x, w_gate, w_up, w_down)


def _forward(plan: _Plan, x, w_gate, w_up, w_down):
    """The result, without what a backward could keep."""

    def one_chunk(x, _):
        product, *_ = _project(plan, x, w_gate, w_up, keep=False)
        return None, _matmul(product, w_down)

    if plan.chunk_size is None:
        return one_chunk(x, 0)[1]
    return fold_chunks(one_chunk, x, plan.chunk_size, axis=x.ndim - 2)[1]


def _mlp_fwd(plan, x, w_gate, w_up, w_down):
    if plan.save == "x":
        return _forward(plan, x, w_gate, w_up, w_down), (x, w_gate, w_up, w_down, [])
    product, *kept = _project(plan, x, w_gate, w_up, keep=True)
    if plan.save == "all":
        product = checkpoint_name(product, "mlp_product")
        kept.append(product)
    return _matmul(product, w_down), (x, w_gate, w_up, w_down, kept)


def _mlp_bwd(plan, saved, dy):
    x, w_gate, w_up, w_down, kept = saved
    weights = w_gate, w_up, w_down
    if not plan.backward_kernel:  # with it the forward has one too
        x, kept, dy = jax.lax.optimization_barrier((x, kept, dy))
    if plan.chunk_size is None:
        return _backward(plan, x, weights, kept, dy, [w.dtype for w in weights])

    def one_chunk(chunk, _):
        dx, *summands = _backward(plan, chunk[0], weights, [], chunk[1], [jnp.float32] * 3)
        return summands, dx

    sums, dx = fold_chunks(one_chunk, (x, dy), plan.chunk_size, axis=x.ndim - 2)
    return dx, *(a.astype(w.dtype) for a, w in zip(sums, weights, strict=True))


_mlp.defvjp(_mlp_fwd, _mlp_bwd)


def _backward(plan: _Plan, x, weights, kept, dy, gradient_dtypes):
    """`(dx, dw_gate, dw_up, dw_down)`, the latter three in these dtypes."""
    w_gate, w_up, w_down = weights
    gate, up, *product = kept or (_matmul(x, w_gate), _matmul(x, w_up))
    dgate, dup, made_again = _differentiate(plan, dy, w_down, gate, up)
    product = product[0] if product else made_again
    operands = (x, dgate), (x, dup), (product, dy)
    return (
        _matmul(dgate, w_gate.T) + _matmul(dup, w_up.T),
        *(
            jnp.einsum("...i,...j->ij", a, b, preferred_element_type=dtype)
            for (a, b), dtype in zip(operands, gradient_dtypes, strict=True)
        ),
    )


def _project(plan: _Plan, x, w_gate, w_up, *, keep: bool) -> tuple[jax.Array, ...]:
    """`(product, gate, up)`, or the product alone."""
    if plan.forward_kernel:
        x, *weights = _once((x, w_gate.astype(x.dtype), w_up.astype(x.dtype)))
        found = gated_matmul.gated_matmul(_rows(x), *weights, keep=keep, config=plan.config.forward)
        product, *gate_and_up = (a.reshape(*x.shape[:-1], -1) for a in found)
        return product, *_tagged(*gate_and_up)
    # The product of the tagged, so that a policy that keeps these can make it again from them.
    gate, up = _tagged(_matmul(x, w_gate), _matmul(x, w_up))
    return (_product(gate, up), gate, up)[: 3 if keep else 1]


def _tagged(*gate_and_up: jax.Array) -> list[jax.Array]:
    """With their names for the policies of `jax.checkpoint`."""
    return [checkpoint_name(a, name) for a, name in zip(gate_and_up, ("gate", "up"), strict=False)]


def _differentiate(plan: _Plan, dy, w_down, gate, up) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(dgate, dup, product)`."""
    if plan.backward_kernel:
        dy, w_down, gate, up = _once((dy, w_down.astype(dy.dtype), gate, up))
        found = gated_matmul.gated_matmul_backward(
            _rows(dy), w_down, _rows(gate), _rows(up), config=plan.config.backward
        )
        dgate, dup, product = (a.reshape(gate.shape) for a in found)
        return dgate, dup, product
    dproduct = _matmul(dy, w_down.T)
    dgate, dup, product = formula.gradients(*(a.astype(jnp.float32) for a in (gate, up, dproduct)))
    return dgate.astype(dy.dtype), dup.astype(dy.dtype), product.astype(dy.dtype)


def _once(arrays):
    return not_differentiable(
        "implementation='mosaic_gpu' of the gated MLP has no second derivative; differentiate "
        "implementation='reference' twice",
        arrays,
    )


def _rows(a: jax.Array) -> jax.Array:
    # Not outside of the kernels: XLA would have to gather arrays that are split in a later axis.
    return a.reshape(-1, a.shape[-1])


def _product(gate: jax.Array, up: jax.Array) -> jax.Array:
    return formula.product(gate.astype(jnp.float32), up.astype(jnp.float32)).astype(gate.dtype)


def _matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight`, accumulated in float32 and rounded once, to the dtype of `x`."""
    return jnp.matmul(x, weight.astype(x.dtype), preferred_element_type=x.dtype)
