"""The gated MLP of Llama as one differentiable function that chooses what it keeps.

`y = (silu(gate) · up) @ w_down` with `gate = x @ w_gate` and `up = x @ w_up`. Its intermediates are
the largest of a layer, three arrays `[T, F]`: at T=16384 and F=8192 in 16 bits 268 MB each, in 16
layers 12.9 GB. The backward needs all three, and can make some of them again:

| `save` | kept beside `x` and the weights | made again | GEMMs, forward and backward |
|---|---|---|---|
| `"all"` | gate, up, product | | 3 + 6 |
| `"gate_up"` | gate, up | the product, where gate and up are read anyway | 3 + 6 |
| `"x"` | | gate, up, product | 3 + 8 |

With `chunk_size`, `"x"` works on a part of the sequence at a time: neither forward nor backward has
an array `[T, F]`. Each part reads and writes the sums of the weight gradients, in float32, so parts
should be long. (Sequence tiling of the MLP: https://arxiv.org/abs/2506.13996.)

Backward: `dproduct = dy @ w_down.T`. One pass makes dgate, dup and the product from `dproduct`,
gate and up. Then `dw_down = product.T @ dy`, `dw_gate = x.T @ dgate`, `dw_up = x.T @ dup` and
`dx = dgate @ w_gate.T + dup @ w_up.T`.

XLA's backward takes its operands through an `optimization_barrier`. Without it XLA would find that
the forward has computed the same values, projections or a sigmoid, and would keep them. XLA cannot
match what kernels compute, so the kernels need no barrier; in a `lax.scan` over layers it would
copy gate and up, which the backward kernel reads where they are stacked.

The weights of gate and up are two arrays, as in checkpoints. In one, `[D, 2, F]`, `dx` would be one
GEMM; but stacking dgate and dup keeps XLA from making them with the product in one pass (it wrote
the sigmoid to memory instead), and every step would have to stack the parameters.

Rounding: the operands of all GEMMs have the dtype of `x`; weights of another dtype are rounded to
it. Sums are float32. Rounded once, to the dtype of `x`: gate, up, the product (of the rounded gate
and up), y, dgate, dup; in `"xla"` also dproduct. The two products that make up `dx` are rounded,
and their sum. Weight gradients are rounded once, to the dtype of their weight. With `"xla"` the
bits do not depend on `save`.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels.derivatives import not_differentiable
from pallas_kernels.folding import fold_chunks
from pallas_kernels.mlp import formula, gated_matmul
from pallas_kernels.mlp.config import MLPConfig
from pallas_kernels.mlp.reference import matmul, product

type Save = Literal["all", "gate_up", "x"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that is static.

    Attributes:
      save: Arrays that the backward finds.
      chunk_size: Positions whose gate and up exist at a time; None for all.
      forward_kernel: Whether a kernel makes gate, up and the product.
      backward_kernel: Whether a kernel makes dgate, dup and the product again; needs
        `forward_kernel`.
      config: Launch parameters of the kernels.
    """

    save: Save
    chunk_size: int | None
    forward_kernel: bool
    backward_kernel: bool
    config: MLPConfig


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mlp(
    plan: Plan,
    x: Float[Array, "*T D"],
    w_gate: Float[Array, "D F"],
    w_up: Float[Array, "D F"],
    w_down: Float[Array, "F D"],
) -> Float[Array, "*T D"]:
    """The gated MLP, as the plan says."""
    return _forward(plan, x, w_gate, w_up, w_down)


def _forward(plan: Plan, x, w_gate, w_up, w_down):
    """The result alone; nothing is kept for a backward."""

    def one_chunk(x, _):
        activated, *_ = _project(plan, x, w_gate, w_up, keep=False)
        return None, matmul(activated, w_down)

    if plan.chunk_size is None:
        return one_chunk(x, 0)[1]
    return fold_chunks(one_chunk, x, plan.chunk_size, axis=x.ndim - 2)[1]


def _mlp_fwd(plan, x, w_gate, w_up, w_down):
    if plan.save == "x":
        return _forward(plan, x, w_gate, w_up, w_down), (x, w_gate, w_up, w_down, [])
    activated, *kept = _project(plan, x, w_gate, w_up, keep=True)
    if plan.save == "all":
        activated = checkpoint_name(activated, "mlp_product")
        kept.append(activated)
    return matmul(activated, w_down), (x, w_gate, w_up, w_down, kept)


def _mlp_bwd(plan, saved, dy):
    x, w_gate, w_up, w_down, kept = saved
    weights = w_gate, w_up, w_down
    if not plan.backward_kernel:  # see the module's docstring
        x, kept, dy = jax.lax.optimization_barrier((x, kept, dy))
    if plan.chunk_size is None:
        return _backward(plan, x, weights, kept, dy, [w.dtype for w in weights])

    def one_chunk(chunk, _):
        dx, *summands = _backward(plan, chunk[0], weights, [], chunk[1], [jnp.float32] * 3)
        return summands, dx

    sums, dx = fold_chunks(one_chunk, (x, dy), plan.chunk_size, axis=x.ndim - 2)
    return dx, *(a.astype(w.dtype) for a, w in zip(sums, weights, strict=True))


mlp.defvjp(_mlp_fwd, _mlp_bwd)


def _backward(plan: Plan, x, weights, kept, dy, gradient_dtypes):
    """`(dx, dw_gate, dw_up, dw_down)`; `gradient_dtypes` are for the weights."""
    w_gate, w_up, w_down = weights
    gate, up, *activated = kept or (matmul(x, w_gate), matmul(x, w_up))
    dgate, dup, made_again = _differentiate(plan, dy, w_down, gate, up)
    operands = (x, dgate), (x, dup), (activated[0] if activated else made_again, dy)
    return (
        matmul(dgate, w_gate.T) + matmul(dup, w_up.T),
        *(
            jnp.einsum("...i,...j->ij", a, b, preferred_element_type=dtype)
            for (a, b), dtype in zip(operands, gradient_dtypes, strict=True)
        ),
    )


def _project(plan: Plan, x, w_gate, w_up, *, keep: bool) -> tuple[jax.Array, ...]:
    """`(product, gate, up)`, or the product alone."""
    if plan.forward_kernel:
        x, *weights = _once((x, w_gate.astype(x.dtype), w_up.astype(x.dtype)))
        found = gated_matmul.gated_matmul(_rows(x), *weights, keep=keep, config=plan.config.forward)
        activated, *gate_and_up = (a.reshape(*x.shape[:-1], -1) for a in found)
        return activated, *_tagged(*gate_and_up)
    # From the named arrays, so that a policy that keeps gate and up can make the product again.
    gate, up = _tagged(matmul(x, w_gate), matmul(x, w_up))
    return (product(gate, up), gate, up)[: 3 if keep else 1]


def _tagged(*gate_and_up: jax.Array) -> list[jax.Array]:
    """The arrays with their names for the policies of `jax.checkpoint`."""
    return [checkpoint_name(a, name) for a, name in zip(gate_and_up, ("gate", "up"), strict=False)]


def _differentiate(plan: Plan, dy, w_down, gate, up) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(dgate, dup, product)`."""
    if plan.backward_kernel:
        dy, w_down, gate, up = _once((dy, w_down.astype(dy.dtype), gate, up))
        found = gated_matmul.gated_matmul_backward(
            _rows(dy), w_down, _rows(gate), _rows(up), config=plan.config.backward
        )
        dgate, dup, activated = (a.reshape(gate.shape) for a in found)
        return dgate, dup, activated
    dproduct = matmul(dy, w_down.T)
    found = formula.gradients(*(a.astype(jnp.float32) for a in (gate, up, dproduct)))
    dgate, dup, activated = (a.astype(dy.dtype) for a in found)
    return dgate, dup, activated


def _once(arrays):
    return not_differentiable(
        "implementation='mosaic_gpu' of the gated MLP has no second derivative; differentiate "
        "implementation='reference' twice",
        arrays,
    )


def _rows(a: jax.Array) -> jax.Array:
    # For kernels only: XLA would have to gather arrays that are split in a later axis.
    return a.reshape(-1, a.shape[-1])
