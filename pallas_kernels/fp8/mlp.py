"""The gated MLP with its nine products in FP8.

`y = product @ w_down` with `product = silu(gate) · up`, `gate = x @ w_gate` and `up = x @ w_up`.
Names that begin with d are gradients. The operands of the FP8 products are quantized as in
`linear.py`. But `product` is quantized twice: in the forward, and transposed in the backward. A
recipe may leave the three gradients of weights in the dtype of `x`. The forward's gate and up,
`dproduct`, dgate and dup are rounded to the dtype of `x`.

On Hopper one kernel makes gate, up and `product` (`gated_kernel.py`). In the backward two kernels
compute dgate, dup and `product`: the first one for their maxima, the second one for their FP8
copies (`casts.cast_computed`). So none of the three is written in 16 bits. Where the kernels do not
run, XLA computes the three in a pass of its own.

Kept for the backward beside the weights: `x.T` in FP8 under the name `fp8_x`, and gate and up under
the names `gate` and `up` of `jax.checkpoint` policies. Gate and up are in int8, with a scale for
each 128 columns of a row. The error of int8 in a gradient is 0.06 to 0.23 of the recipe's own
error, and that of e4m3 would be up to 0.7 (docs/lab/2026-11-25-fp8-saved-tensors.md). `product` is
made again from gate and up, in the pass that makes dgate and dup.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels.choices import inside_of, record, required_by
from pallas_kernels.fp8 import gated_kernel, reference
from pallas_kernels.fp8.casts import (
    Axes,
    cast_both,
    cast_computed,
    cast_one,
    cast_transposed,
    why_no_kernel,
)
from pallas_kernels.fp8.linear import (
    columns_of,
    gradient_of_weight,
    gradients,
    operands_of_gradient,
    product_in_layer,
    roles_of_kept,
    roles_of_x,
    rows,
    sum_of_parts,
    with_tokens_of,
)
from pallas_kernels.fp8.products import fp8_matmul
from pallas_kernels.fp8.recipes import Recipe, RecipeName, find_recipe
from pallas_kernels.fp8.types import BLOCK, BlockwiseInt8, Quantized
from pallas_kernels.fp8.weights import (
    QuantizedWeight,
    arguments,
    as_quantized,
    note_too_small,
    operand,
    pairs,
    roles_of_copies,
    zeros_of_copies,
)
from pallas_kernels.gpu.math import logistic
from pallas_kernels.layout import GradientOf, Place, Roles, Tokens, TokensLast
from pallas_kernels.mapping import Mask
from pallas_kernels.mlp.api import check_shapes, swiglu_mlp
from pallas_kernels.mlp.reference import swiglu, swiglu_gradients
from pallas_kernels.operation import call
from pallas_kernels.partition import partitioned
from pallas_kernels.protocol import Arrays, Cotangents

_X = Tokens(("d",))
_KEPT = Tokens(("f",)), TokensLast(("blocks",))  # values and scales of gate, and those of up
_FORWARD_AXES = ("f", "d"), ("f", "d"), ("d", "f")  # of the copies [N, K]
_DGRAD_AXES = ("d", "f"), ("d", "f"), ("f", "d")


@inside_of("fp8_swiglu_mlp")
def fp8_swiglu_mlp(
    x: Float[Array, "*T D"],
    w_gate: Float[Array, "D F"] | QuantizedWeight,
    w_up: Float[Array, "D F"] | QuantizedWeight,
    w_down: Float[Array, "F D"] | QuantizedWeight,
    *,
    recipe: Recipe | RecipeName,
) -> Float[Array, "*T D"]:
    """The gated MLP `(silu(x @ w_gate) · (x @ w_up)) @ w_down`, whose products are in FP8.

    Products of weight gradients are in FP8 unless the recipe's `wgrad` is None. Operands of FP8
    products are quantized as the recipe says, and each product is rounded once to the dtype of `x`.
    `silu(gate) · up` and its gradients are float32, and rounded to the dtype of `x` before they are
    quantized. The forward computes from gate and up in the dtype of `x`. The backward reads both in
    int8, with a float32 scale for each 128 columns of a row. Gradients of weights have the dtypes
    of the weights. If a weight is too small to gain from FP8 (`Recipe.gains`), all of the MLP runs
    in the dtype of `x`, by `swiglu_mlp`, and the log says so once. Under `jax.vmap` each element of
    the mapped axis has its own scales, as in `fp8_linear`.

    On a mesh each device computes its own tokens. F may be split over mesh axes that split no
    tokens, into multiples of 128 columns. On Auto and Explicit axes the devices add up the result
    and the gradient of `x` over these axes. Row scales are then for a device's part of a row.
    Inside of `jax.shard_map` a device with a part of F returns a partial sum, as in `swiglu_mlp`.

    Args:
      x: Input, of a floating dtype of 16 or 32 bits; the leading axes are tokens.
      w_gate: First projection, in the layout of Flax's kernels; or the result of `quantize_weight`
        for it with the same recipe.
      w_up: Second projection.
      w_down: Projection of the product.
      recipe: Recipe, or its name.

    Raises:
      ValueError: The shapes disagree, there is no recipe of that name, or a weight was quantized by
        a recipe with another cast of weights.
      TypeError: An array is not of such a dtype.
      NotImplementedError: Kernels are required and do not run; or it is differentiated twice or in
        forward mode (`jax.jvp`).
    """
    recipe = find_recipe(recipe)
    x = operand("x", x)
    weights = [as_quantized(w, recipe) for w in (w_gate, w_up, w_down)]
    unquantized = [q.weight for q in weights]
    check_shapes(x, *unquantized)
    if any(q.forward is None for q in weights):
        note_too_small("fp8_swiglu_mlp", "w_gate", unquantized[0], x)
        return swiglu_mlp(x, *unquantized)
    if x.ndim == 1:
        return fp8_swiglu_mlp(x[None], *weights, recipe=recipe)[0]
    dtypes = tuple(jnp.dtype(w.dtype) for w in unquantized)
    operation = _MLP(recipe, dtypes, required_by(None))
    return call(operation, x, *arguments(weights))[0]


@dataclasses.dataclass(frozen=True, slots=True)
class _MLP:
    """The MLP of `(x, *weights, *forward copies, *dgrad copies)`; a copy is two arrays.

    Attributes:
      recipe: Recipe.
      dtypes: Dtypes of the weights.
      required_by: Who demands the kernels, as for `fp8_linear`.
    """

    recipe: Recipe
    dtypes: tuple[Any, ...]
    required_by: str | None

    name = "fp8_swiglu_mlp"

    def forward(self, wanted: Mask | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        copies = pairs(args[4:10])
        keep = wanted is not None
        keep_transposed = wanted is not None and self._keeps_transposed(wanted)
        kept = (
            *(2 * _KEPT if keep else ()),
            *(roles_of_kept(self.recipe, "d") if keep_transposed else ()),
        )
        of_args = _X, *roles_of_copies(copies, _FORWARD_AXES)
        roles = _roles(of_args, (_X, *kept), copies[2].values.shape[1], has_blocks=keep)
        key = self, keep, keep_transposed
        return partitioned(_forward_of, key, roles, args[0], *jax.tree.leaves(copies))

    def _keeps_transposed(self, wanted: Mask) -> bool:
        return any(wanted[1:3]) and self.recipe.wgrad is not None

    def num_residuals(self, wanted: Mask) -> int:
        return 6 if self._keeps_transposed(wanted) else 4

    def saved(
        self, wanted: Mask, args: Arrays, results: Arrays, residuals: Arrays
    ) -> tuple[Arrays, Arrays]:
        names = ("gate", "gate", "up", "up", "fp8_x", "fp8_x")[: len(residuals)]
        kept = [checkpoint_name(a, n) for a, n in zip(residuals, names, strict=True)]
        if any(wanted[1:3]) and self.recipe.wgrad is None:
            kept.append(args[0])
        return results, (*args[10:], *kept)

    def backward(self, wanted: Mask, saved: Arrays, cotangents: Cotangents) -> Arrays:
        (dy,) = cotangents
        assert dy is not None  # JAX asks for no gradient of a result without one
        copies, kept = pairs(saved[:6]), saved[6:]
        of_tokens = _X, *_KEPT, *_KEPT, *roles_of_x(kept[4:], "d")
        gradients = _X, *(GradientOf(len(of_tokens) + 2 * i) for i in range(3))
        asked_for = tuple(g for g, w in zip(gradients, wanted[:4], strict=True) if w)
        of_args = *of_tokens, *roles_of_copies(copies, _DGRAD_AXES)
        roles = _roles(of_args, asked_for, copies[2].values.shape[0], has_blocks=True)
        arrays = dy, *kept, *jax.tree.leaves(copies)
        found = partitioned(_backward_of, (self, wanted[:4]), roles, *arrays)
        return [*found, *zeros_of_copies(copies, wanted[4:])]

    def fold(self, wanted: Mask | None, args: Arrays, is_batched: Mask) -> None:
        # Members of a batch have scales of their own.
        return None


def _roles(args: Any, results: Any, num_columns: int, *, has_blocks: bool) -> Roles:
    """The roles. Parts of F have whole blocks of columns, each with a scale of gate and of up."""
    several = num_columns > BLOCK and num_columns % BLOCK == 0  # Shardy refuses a single block
    blocks = ("blocks",) if has_blocks and several else ()
    return Roles(args, results, ("f",), unit=BLOCK, blocks=blocks)


def _forward_of(key: tuple[_MLP, bool, bool], place: Place) -> Callable[..., tuple[jax.Array, ...]]:
    """The forward of a device's tokens: `y`, then values and scales of what is kept."""
    operation, keep, keep_transposed = key
    recipe = operation.recipe
    (of_f,) = place.parts
    of_x, of_product = Axes(place.tokens), Axes(place.tokens, of_f)

    @inside_of("fp8_swiglu_mlp")
    def run(x: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        of_gate, of_up, of_down = pairs(arrays)

        def multiply(a: Quantized, w: Quantized) -> jax.Array:
            return product_in_layer(a, w, x.dtype, recipe.forward)

        kept = ()
        if keep_transposed:
            quantized, transposed = cast_both(rows(x), recipe.inputs, of_x)
            kept = with_tokens_of(x, transposed.values), transposed.scale
        else:
            quantized = cast_one(rows(x), recipe.inputs, of_x)
        # The kernel has no sums but the fast ones.
        if recipe.forward == "fast" and gated_kernel.runs(x, of_gate):
            activated, gate_and_up, maxima = gated_kernel.gated(
                quantized,
                of_gate,
                of_up,
                out_dtype=x.dtype,
                keep=keep,
                find_amax=recipe.inputs.scaling == "tensor",
            )
        else:
            pair = [multiply(quantized, w) for w in (of_gate, of_up)]
            activated, maxima = swiglu(*pair), None
            gate_and_up = map(reference.blockwise_int8, pair) if keep else ()
        product = cast_one(activated, recipe.inputs, of_product, maxima=maxima)
        y = sum_of_parts(multiply(product, of_down), of_f, like=x)
        like_x = lambda values: values.reshape(*x.shape[:-1], values.shape[-1])
        scaled = ((like_x(q.values), with_tokens_of(x, q.scale)) for q in gate_and_up)
        return y, *(a for pair in scaled for a in pair), *kept

    return run


def _backward_of(key: tuple[_MLP, Mask], place: Place) -> Callable[..., Arrays]:
    """The backward of a device's tokens: the wanted of `(dx, dw_gate, dw_up, dw_down)`."""
    operation, wanted = key
    recipe, dtypes = operation.recipe, operation.dtypes
    (of_f,) = place.parts
    of_y, of_gate = Axes(place.tokens), Axes(place.tokens, of_f)

    @inside_of("fp8_swiglu_mlp")
    def run(dy: jax.Array, *rest: jax.Array) -> Any:
        kept, copies = rest[4:-6], pairs(rest[-6:])
        gate, up = (BlockwiseInt8(rows(v), columns_of(s)) for v, s in (rest[:2], rest[2:4]))
        of_dy, dy_of_dw = operands_of_gradient(dy, recipe, wanted[3], of_y)
        dproduct = fp8_matmul(of_dy, copies[2], out_dtype=dy.dtype, accumulation=recipe.dgrad)
        *operands, activated = swiglu_backward(gate, up, dproduct, recipe, wanted, of_gate)
        found = gradients(
            operands, copies[:2], kept, recipe, wanted[:3], dtypes[:2], (of_f, of_f), like=dy
        )
        if wanted[3]:
            found.append(gradient_of_weight(activated, dy_of_dw, recipe.wgrad, dtypes[2]))
        return found

    return run


def swiglu_backward(
    gate: BlockwiseInt8,
    up: BlockwiseInt8,
    dproduct: jax.Array,
    recipe: Recipe,
    wanted: Mask,
    axes: Axes,
) -> tuple[Any, Any, Any]:
    """The operands of dgrad and wgrad for dgate and for dup, and the product as one of wgrad."""
    reason = why_no_kernel(dproduct)
    is_in_fp8 = recipe.wgrad is not None  # otherwise wgrad reads what the kernels do not write
    if is_in_fp8:
        chosen = "xla" if reason else "mosaic_gpu"
        record("fp8_swiglu_mlp.backward", (gate.values, up.values, dproduct), None, chosen, reason)
    if is_in_fp8 and reason is None:
        of_dgate, of_dup, (_, transposed) = cast_computed(
            (gate, up, dproduct),
            _gradients_in_kernels,
            (recipe.gradients, recipe.gradients, recipe.inputs),
            ((wanted[0], wanted[1]), (wanted[0], wanted[2]), (False, wanted[3])),
            axes,
            name="fp8_swiglu_bwd",
        )
        return of_dgate, of_dup, transposed
    dgate, dup, activated = swiglu_gradients(gate.dequantize(), up.dequantize(), dproduct)
    if is_in_fp8 and wanted[3]:
        activated = cast_transposed(activated, recipe.inputs, axes)
    of_dgate, of_dup = (
        operands_of_gradient(d, recipe, w, axes)
        for d, w in zip((dgate, dup), wanted[1:3], strict=True)
    )
    return of_dgate, of_dup, activated


def _gradients_in_kernels(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return swiglu_gradients(*arrays, logistic=logistic)
