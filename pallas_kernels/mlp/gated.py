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
match what kernels compute, so the kernels need no barrier. In a `lax.scan` over layers a barrier
would copy gate and up, which the backward kernel reads from the stack of all layers.

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
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.choices import fall_back_on_a_part
from pallas_kernels.folding import fold_chunks
from pallas_kernels.gpu.arrays import apart_from_stacks
from pallas_kernels.gpu.device import target_device
from pallas_kernels.layout import GradientOf, Place, Roles, Tokens, Weight
from pallas_kernels.logs import log_once
from pallas_kernels.mapping import Mask
from pallas_kernels.mlp import gated_matmul
from pallas_kernels.mlp.config import MLPConfig
from pallas_kernels.mlp.reference import matmul, swiglu, swiglu_gradients
from pallas_kernels.partition import partitioned
from pallas_kernels.protocol import Arrays, Cotangents, Operation

type Save = Literal["all", "gate_up", "x"]

_NAMES_KEPT: dict[Save, tuple[str, ...]] = {
    "x": (),
    "gate_up": ("gate", "up"),
    "all": ("gate", "up", "mlp_product"),
}
_X, _H = Tokens(("d",)), Tokens(("f",))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MLP:
    """The MLP of `(x, w_gate, w_up, w_down)`; the columns F may be split over devices.

    Attributes:
      name: Function that the user called, for errors.
      save: Arrays that the backward finds.
      chunk_size: Positions whose gate and up exist at a time; None for all.
      has_kernels: Whether a kernel makes gate, up and the product.
      min_tokens_of_backward: Number of tokens at a time from which, with `has_kernels`, a kernel
        also makes dgate, dup and the product again.
      config: Launch parameters of the kernels.
      required_by: Who demands the kernels, also for a device's part of the arrays; None if nobody.
    """

    name: str
    save: Save
    chunk_size: int | None
    has_kernels: bool
    min_tokens_of_backward: int
    config: MLPConfig
    required_by: str | None

    def forward(self, wanted: Mask | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        """`(y, *kept)`."""
        num_kept = 0 if wanted is None else self.num_residuals(wanted)
        roles = _roles((_X,), args[0].dtype, (_X, *(_H,) * num_kept))
        return partitioned(_forward_of, (self, num_kept > 0), roles, *args)

    def num_residuals(self, wanted: Mask) -> int:
        """The number of arrays that the forward keeps beside its arguments."""
        return len(_NAMES_KEPT[self.save])

    def saved(
        self, wanted: Mask, args: Arrays, results: Arrays, residuals: Arrays
    ) -> tuple[Arrays, Arrays]:
        """`y`, and what the backward reads: arguments, and kept arrays under their names."""
        names = _NAMES_KEPT[self.save]
        kept = [checkpoint_name(a, n) for a, n in zip(residuals, names, strict=True)]
        return results, (*args, *kept)

    def backward(self, wanted: Mask, saved: Arrays, cotangents: Cotangents) -> Arrays:
        """The wanted of `(dx, dw_gate, dw_up, dw_down)`."""
        (dy,) = cotangents
        assert dy is not None  # JAX asks for no gradient of a result without one
        x, *weights = saved[:4]
        kept = saved[4:]
        tokens = _X, _X, *(_H,) * len(kept)
        gradients = _X, *(GradientOf(len(tokens) + i) for i in range(3))
        roles = _roles(tokens, x.dtype, tuple(itertools.compress(gradients, wanted)))
        key = self, wanted, tuple(w.dtype for w in weights)
        return partitioned(_backward_of, key, roles, dy, x, *kept, *weights)

    def fold(
        self, wanted: Mask | None, args: Arrays, is_batched: Mask
    ) -> tuple[Operation, Arrays] | None:
        """The same MLP, to which a batch of `x` is more tokens; None for batches of weights."""
        return None if any(is_batched[1:]) else (self, args)


def _roles(tokens: Sequence[Tokens], dtype: Any, results: tuple[Tokens | GradientOf, ...]) -> Roles:
    """The roles of arrays of tokens, followed by the three weights."""
    weights = [Weight(axes, dtype) for axes in (("d", "f"), ("d", "f"), ("f", "d"))]
    return Roles((*tokens, *weights), results, parts=("f",))


def _forward_of(key: tuple[MLP, bool], place: Place) -> Callable[..., tuple[jax.Array, ...]]:
    """The forward of a device's arrays: `(y, *kept)`."""
    mlp, keep = key

    def run(x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        w_gate, w_up, w_down = weights

        def one_chunk(x: jax.Array, _: Any) -> tuple[Any, jax.Array]:
            return None, matmul(_project(mlp, x, w_gate, w_up, keep=False)[0], w_down)

        if mlp.chunk_size is not None:
            size = min(mlp.chunk_size, x.shape[-2])
            return (_sum_of_parts(fold_chunks(one_chunk, x, size, axis=x.ndim - 2)[1], place),)
        activated, *kept = _project(mlp, x, w_gate, w_up, keep=keep)
        if keep and mlp.save == "all":
            kept.append(activated)
        return _sum_of_parts(matmul(activated, w_down), place), *kept

    return run


def _backward_of(key: tuple[MLP, Mask, tuple[Any, ...]], place: Place) -> Callable[..., Arrays]:
    """The backward of a device's arrays: the wanted of `(dx, dw_gate, dw_up, dw_down)`."""
    mlp, wanted, dtypes = key

    def run(dy: jax.Array, x: jax.Array, *kept_and_weights: jax.Array) -> Arrays:
        *kept, w_gate, w_up, w_down = kept_and_weights
        num_tokens, size = math.prod(x.shape[:-1]), 0
        if mlp.chunk_size is not None:
            size = min(mlp.chunk_size, x.shape[-2])
            num_tokens = num_tokens // x.shape[-2] * size
        has_kernel = _kernels_run(mlp, dy, w_down)
        if has_kernel and num_tokens < mlp.min_tokens_of_backward:
            has_kernel = False
            if place.tokens:  # the choice of the implementation knew the tokens of all devices
                reason = few_tokens("a device", num_tokens, mlp.min_tokens_of_backward)
                log_once(f"swiglu_mlp: XLA makes the backward, because {reason}")
        if not has_kernel:  # see the module's docstring
            x, kept, dy = jax.lax.optimization_barrier((x, kept, dy))

        def differentiate(x: Any, kept: Arrays, dy: Any, dtypes: Sequence[Any]) -> Any:
            """`dx` and the gradients of weights, of these dtypes, as far as they are wanted."""
            gate, up, *product = kept or (matmul(x, w_gate), matmul(x, w_up))
            needs_product = wanted[3] and not product
            dgate, dup, *made_again = _differentiate(
                mlp, has_kernel, dy, w_down, gate, up, with_product=needs_product
            )
            (product,) = product or made_again or (None,)
            operands = (x, dgate), (x, dup), (product, dy)
            dx = matmul(dgate, w_gate.T) + matmul(dup, w_up.T) if wanted[0] else None
            return dx, [
                jnp.einsum("...i,...j->ij", a, b, preferred_element_type=dtype)
                for (a, b), dtype in itertools.compress(
                    zip(operands, dtypes, strict=True), wanted[1:]
                )
            ]

        if mlp.chunk_size is None:
            dx, dw = differentiate(x, kept, dy, dtypes)
        else:

            def one_chunk(chunk: Any, _: Any) -> Any:
                dx, summands = differentiate(chunk[0], [], chunk[1], [jnp.float32] * 3)
                return summands, dx

            dw, dx = fold_chunks(one_chunk, (x, dy), size, axis=x.ndim - 2)
            of_wanted = itertools.compress(dtypes, wanted[1:])
            dw = [a.astype(dtype) for a, dtype in zip(dw, of_wanted, strict=True)]
        if dw and target_device().capability is None:
            # XLA for CPUs merges the transpose of a gradient, as of weights `[F, D]`, into its
            # product, and then cannot run bfloat16 operands with a float32 result.
            dw = jax.lax.optimization_barrier(dw)
        return dw if dx is None else [_sum_of_parts(dx, place), *dw]

    return run


def _sum_of_parts(a: jax.Array, place: Place) -> jax.Array:
    """The sum over the devices that share the tokens, each of which has a part of the columns."""
    (axes,) = place.parts
    return jax.lax.psum(a, axes)


def _project(
    mlp: MLP, x: jax.Array, w_gate: jax.Array, w_up: jax.Array, *, keep: bool
) -> tuple[jax.Array, ...]:
    """`(product, gate, up)`, or the product alone."""
    if _kernels_run(mlp, x, w_gate):
        found = gated_matmul.gated_matmul(
            _rows(x),
            w_gate.astype(x.dtype),
            w_up.astype(x.dtype),
            keep=keep,
            config=mlp.config.forward,
        )
        product, *kept = (a.reshape(*x.shape[:-1], -1) for a in found)
        return *apart_from_stacks([product]), *kept
    gate, up = matmul(x, w_gate), matmul(x, w_up)
    return (swiglu(gate, up), gate, up)[: 3 if keep else 1]


def _differentiate(
    mlp: MLP,
    has_kernel: bool,
    dy: jax.Array,
    w_down: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    *,
    with_product: bool,
) -> tuple[jax.Array, ...]:
    """`(dgate, dup, product)`; without the product if the kernel need not write it."""
    if has_kernel:
        found = gated_matmul.gated_matmul_backward(
            _rows(dy),
            w_down.astype(dy.dtype),
            _rows(gate),
            _rows(up),
            with_product=with_product,
            config=mlp.config.backward,
        )
        return tuple(a.reshape(gate.shape) for a in found)
    return swiglu_gradients(gate, up, matmul(dy, w_down.T))


def few_tokens(owner: str, num_tokens: int, least: int) -> str:
    """The reason why XLA makes the backward: its owner has fewer tokens at a time than `least`."""
    return (
        f"{owner} has {num_tokens=} at a time, and its kernel is faster than XLA from {least} on; "
        "implementation='mosaic_gpu' takes the kernel"
    )


def _kernels_run(mlp: MLP, tokens: jax.Array, weight: jax.Array) -> bool:
    """Whether the kernels run on a device's part of the tokens and of the columns."""
    if not (mlp.has_kernels and tokens.size):  # no kernel has a grid of no blocks
        return False
    operand = jax.ShapeDtypeStruct(weight.shape, tokens.dtype)
    reason = gated_matmul.unsupported_reason([tokens], [operand])
    if reason is None:
        return True
    fall_back_on_a_part(
        "swiglu_mlp",
        mlp.required_by,
        f"on each device {reason}",
        instead="XLA runs in place of the kernels",
    )
    return False


def _rows(a: jax.Array) -> jax.Array:
    # For kernels only: XLA would have to gather arrays that are split in a later axis.
    return a.reshape(-1, a.shape[-1])
