"""Linear layers whose products run in FP8, with their gradients.

A linear layer is `y = x @ w` for `x [..., K]` and `w [K, N]`. Its three products are calls of
`fp8_matmul`, which reads both operands with the contracted axis last. So every tensor is needed in
two memory orders:

| product | operands |
|---|---|
| forward, `y = x @ w` | `x [T, K]`, `w.T [N, K]` |
| dgrad, `dx = dy @ w.T` | `dy [T, N]`, `w [K, N]` |
| wgrad, `dw = x.T @ dy` | `x.T [K, T]`, `dy.T [N, T]` |

Each tensor is quantized once, in both orders. The forward keeps `x.T` in FP8 for the backward, half
the bytes of `x`, under the name `fp8_x` of `jax.checkpoint` policies. If the recipe's wgrad is not
in FP8, the backward reads `x`. Weights are quantized by `quantize_weight`, once a step. The
gradient goes to the weight before quantization, as if quantization were the identity.

On a mesh each device computes its own tokens, and weights are gathered in FP8 over the mesh axes
that split tokens. Over other axes K or N may stay split (tensor parallelism). With a part of K a
device has a partial sum of `y`, and with a part of N one of `dx`. Devices add up the partial sums
in the dtype of `x`.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jaxtyping import Array, Float

from pallas_kernels.choices import called, inside_of, required_by
from pallas_kernels.fp8.casts import Axes, cast_both, cast_one
from pallas_kernels.fp8.products import Accumulation, choose_fp8_matmul, fp8_matmul
from pallas_kernels.fp8.recipes import Recipe, RecipeName, find_recipe
from pallas_kernels.fp8.types import Quantized
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
from pallas_kernels.gpu.arrays import apart_from_stacks
from pallas_kernels.gpu.device import target_device
from pallas_kernels.layout import (
    GradientOf,
    Place,
    Replicated,
    Roles,
    Split,
    Tokens,
    TokensLast,
    Weight,
    to_spec,
)
from pallas_kernels.mapping import Mask
from pallas_kernels.mlp.reference import matmul
from pallas_kernels.operation import call
from pallas_kernels.partition import explicit_splits, mesh_of, partitioned
from pallas_kernels.protocol import Arrays, Cotangents


@inside_of("fp8_linear")
def fp8_linear(
    x: Float[Array, "*T K"],
    weight: Float[Array, "K N"] | QuantizedWeight,
    *,
    recipe: Recipe | RecipeName,
) -> Float[Array, "*T N"]:
    """`x @ weight`, whose products in the forward and in the backward are in FP8.

    The forward is `y = x @ w`, and the gradients are `dx = dy @ w.T` and `dw = x.T @ dy`. Their
    operands are quantized as the recipe says. `dw` is computed in the dtype of `x` if the recipe's
    `wgrad` is None. `y` and `dx` are each rounded once to the dtype of `x`, and `dw` to that of the
    weight. The derivative of quantization counts as the identity. A weight that is too small to
    gain from FP8 (`Recipe.gains`) is multiplied in the dtype of `x`, and the log says so once.

    In an FP8 product, a NaN or an infinity in an operand makes all results NaN that are computed
    with the same scale. A product in the dtype of `x` keeps infinities.

    On a mesh each device computes its own tokens. K or N may be split over mesh axes that split no
    tokens. On Auto and Explicit axes the devices add up the result over the axes of K, and the
    gradient of `x` over those of N. Row scales are then for a device's part of a row. Inside of
    `jax.shard_map` a device with a part of K returns a partial sum: add the partial sums up with
    `jax.lax.psum`.

    Under `jax.vmap` the elements of the mapped axis are computed one after the other, each with its
    own scales. For a single call, put the batch into the leading axes of `x`.

    Args:
      x: Input, of a floating dtype of 16 or 32 bits; the leading axes are tokens.
      weight: Weight in the layout of Flax's kernels, of a floating dtype of 16 or 32 bits; or the
        result of `quantize_weight` for it with the same recipe.
      recipe: Recipe, or its name: `"tensorwise"`, `"rowwise"` or `"rowwise_with_gw_hp"`.

    Raises:
      ValueError: The shapes disagree, there is no recipe of that name, or the weight was quantized
        by a recipe with another cast of weights.
      TypeError: An array is not of such a dtype.
      NotImplementedError: Kernels are required and do not run; or it is differentiated twice or in
        forward mode (`jax.jvp`).
    """
    return fp8_linears(x, (weight,), recipe=recipe)[0]


@inside_of("fp8_linears")
def fp8_linears(
    x: Float[Array, "*T K"],
    weights: Sequence[Float[Array, "K _"] | QuantizedWeight],
    *,
    recipe: Recipe | RecipeName,
) -> tuple[Float[Array, "*T _"], ...]:
    """`x @ weight` for several weights, as `fp8_linear`: `x` is quantized and kept once.

    The gradient of `x` is the sum of one product for each weight, each rounded to the dtype of `x`.

    Args:
      x: Input, as in `fp8_linear`.
      weights: Weights `[K, N]` with one K, each as in `fp8_linear`.
      recipe: Recipe of all weights, or its name.

    Returns:
      The products in the order of the weights, each `[..., N]` in the dtype of `x`.

    Raises:
      ValueError, TypeError, NotImplementedError: As in `fp8_linear`.
    """
    recipe = find_recipe(recipe)
    x = operand("x", x)
    if x.ndim == 0:
        raise ValueError("x must be [..., K], got a scalar")
    if x.ndim == 1:
        return tuple(y[0] for y in fp8_linears(x[None], weights, recipe=recipe))
    quantized = [as_quantized(w, recipe) for w in weights]
    for q in quantized:
        if q.weight.shape[0] != x.shape[-1]:
            raise ValueError(f"weight must be [K, N], got {q.weight.shape} for x {x.shape}")
        if q.forward is None:
            note_too_small(called("fp8_linears"), "a weight", q.weight, x)
    in_fp8 = [q for q in quantized if q.forward is not None]
    results = iter(())
    if in_fp8:
        dtypes = tuple(jnp.dtype(q.weight.dtype) for q in in_fp8)
        operation = _Linears(recipe, dtypes, required_by(None))
        results = iter(call(operation, x, *arguments(in_fp8)))
    return tuple(
        _without_fp8(x, q.weight) if q.forward is None else next(results) for q in quantized
    )


def _without_fp8(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight` in the dtype of `x`. Explicit axes split it as the product in FP8."""
    mesh = mesh_of((x, weight))
    if AxisType.Explicit not in mesh.axis_types:
        return matmul(x, weight)
    of_x, of_weight = explicit_splits(x), explicit_splits(weight)
    used = {name for split in of_x[:-1] for name in split}
    of_n = tuple(name for name in of_weight[1] if name not in used)
    return matmul(x, weight, NamedSharding(mesh, to_spec((*of_x[:-1], of_n))))


def roles_of_kept(recipe: Recipe, feature: str) -> tuple[TokensLast, Replicated]:
    """The roles of an input that the forward has quantized for wgrad."""
    of_scale = () if recipe.inputs.scaling == "tensor" else (feature, "one")
    return TokensLast((feature,)), Replicated(of_scale)


def roles_of_x(kept: Arrays, feature: str) -> list[Tokens | TokensLast | Weight]:
    """The roles of what the backward reads of the input: nothing, `x`, or `x.T` and its scale."""
    if len(kept) < 2:
        return [Tokens((feature,))] * len(kept)
    return [TokensLast((feature,)), Weight((feature, "one")[: kept[1].ndim])]


def rows(a: jax.Array) -> jax.Array:
    """`[..., K]` as `[T, K]`."""
    return a.reshape(math.prod(a.shape[:-1]), a.shape[-1])


def with_tokens_of(x: jax.Array, a: jax.Array) -> jax.Array:
    """`[N, T]` with the axes of tokens that `x` has."""
    return a.reshape(a.shape[0], *x.shape[:-1])


def columns_of(a: jax.Array) -> jax.Array:
    """`[N, ...]` as `[N, T]`."""
    return a.reshape(a.shape[0], math.prod(a.shape[1:]))


def product_in_layer(
    a: Quantized, b: Quantized, out_dtype: Any, accumulation: Accumulation
) -> jax.Array:
    """`fp8_matmul(a, b)` of a forward, whose result the backward of the next operation may read."""
    y = fp8_matmul(a, b, out_dtype=out_dtype, accumulation=accumulation)
    if choose_fp8_matmul(a, b, None, None)[0] == "mosaic_gpu":
        (y,) = apart_from_stacks([y])
    return y  # of XLA, which may fuse the scales with what reads `y`


def sum_of_parts(a: jax.Array, axes: Split, *, like: jax.Array) -> jax.Array:
    """The sum of the devices' `[T, N]`, with the axes of tokens that `like` has.

    It is added up with these axes. So XLA can make it a reduce-scatter if the caller then splits
    the sequence over `axes`.
    """
    return jax.lax.psum(a.reshape(*like.shape[:-1], a.shape[-1]), axes)


def gradient_of_weight(
    a: Quantized | jax.Array,
    b: Quantized | jax.Array,
    accumulation: Accumulation | None,
    dtype: Any,
) -> jax.Array:
    """`a.T @ b` for tokens `[T, K]` and `[T, N]`, or of their FP8 copies `[K, T]` and `[N, T]`."""
    if isinstance(a, Quantized) and isinstance(b, Quantized):
        assert accumulation is not None
        return fp8_matmul(a, b, out_dtype=dtype, accumulation=accumulation)
    dw = jnp.einsum("ti,tj->ij", a, b, preferred_element_type=dtype)
    if target_device().capability is None:
        # XLA for CPUs merges a transpose that follows into the product, and then cannot run
        # bfloat16 operands with a float32 result.
        dw = jax.lax.optimization_barrier(dw)
    return dw


# The operation.


@dataclasses.dataclass(frozen=True, slots=True)
class _Linears:
    """`x @ w` for each weight, of `(x, *weights, *forward copies, *dgrad copies)`.

    Each copy is two arguments, values and scale.

    Attributes:
      recipe: Recipe.
      dtypes: Dtypes of the weights.
      required_by: Who demands the kernels; None if nobody. A trace without the demand has not
        checked it, so a call with the demand is another operation.
    """

    recipe: Recipe
    dtypes: tuple[Any, ...]
    required_by: str | None

    name = "fp8_linear"

    @property
    def number(self) -> int:
        """The number of weights."""
        return len(self.dtypes)

    def forward(self, wanted: Mask | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        n = self.number
        copies = pairs(args[1 + n : 1 + 3 * n])
        keep = wanted is not None and self.num_residuals(wanted) > 0
        results = [Tokens((f"n{i}",)) for i in range(n)]
        roles = Roles(
            (Tokens(("k",)), *roles_of_copies(copies, [(f"n{i}", "k") for i in range(n)])),
            (*results, *(roles_of_kept(self.recipe, "k") if keep else ())),
            self._parts,
            apart=True,
        )
        arrays = jax.tree.leaves(copies)
        return partitioned(_forward_of, (self, keep), roles, args[0], *arrays)

    @property
    def _parts(self) -> tuple[str, ...]:
        return "k", *(f"n{i}" for i in range(self.number))

    def num_residuals(self, wanted: Mask) -> int:
        needs_x = any(wanted[1 : 1 + self.number])
        return 2 if needs_x and self.recipe.wgrad is not None else 0

    def saved(
        self, wanted: Mask, args: Arrays, results: Arrays, residuals: Arrays
    ) -> tuple[Arrays, Arrays]:
        kept = [checkpoint_name(a, "fp8_x") for a in residuals]
        if any(wanted[1 : 1 + self.number]) and self.recipe.wgrad is None:
            kept = [args[0]]
        return results, (*args[1 + 3 * self.number :], *kept)

    def backward(self, wanted: Mask, saved: Arrays, cotangents: Cotangents) -> Arrays:
        n = self.number
        copies, kept = pairs(saved[: 2 * n]), saved[2 * n :]
        given = next(c for c in cotangents if c is not None)
        dys = [
            jnp.zeros((*given.shape[:-1], q.values.shape[1]), given.dtype) if c is None else c
            for c, q in zip(cotangents, copies, strict=True)
        ]
        of_tokens = *(Tokens((f"n{i}",)) for i in range(n)), *roles_of_x(kept, "k")
        gradients = Tokens(("k",)), *(GradientOf(len(of_tokens) + 2 * i) for i in range(n))
        asked_for = tuple(g for g, w in zip(gradients, wanted[: 1 + n], strict=True) if w)
        of_copies = roles_of_copies(copies, [("k", f"n{i}") for i in range(n)])
        arrays = *dys, *kept, *jax.tree.leaves(copies)
        roles = Roles((*of_tokens, *of_copies), asked_for, self._parts, apart=True)
        gradients = partitioned(_backward_of, (self, wanted[: 1 + n]), roles, *arrays)
        return [*gradients, *zeros_of_copies(copies, wanted[1 + n :])]

    def fold(self, wanted: Mask | None, args: Arrays, is_batched: Mask) -> None:
        # Members of a batch have scales of their own.
        return None


def _forward_of(key: tuple[_Linears, bool], place: Place) -> Callable[..., tuple[jax.Array, ...]]:
    """The forward of a device's tokens: `(*ys, *kept)`."""
    operation, keep = key
    recipe, of_k = operation.recipe, place.parts[0]
    axes = Axes(place.tokens, of_k)

    @inside_of("fp8_linear")
    def run(x: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        if keep:
            quantized, transposed = cast_both(rows(x), recipe.inputs, axes)
            kept = with_tokens_of(x, transposed.values), transposed.scale
        else:
            quantized, kept = cast_one(rows(x), recipe.inputs, axes), ()
        ys = [product_in_layer(quantized, w, x.dtype, recipe.forward) for w in pairs(arrays)]
        return *(sum_of_parts(y, of_k, like=x) for y in ys), *kept

    return run


def _backward_of(key: tuple[_Linears, Mask], place: Place) -> Callable[..., Arrays]:
    """The backward of a device's tokens: the wanted of `(dx, *dweights)`."""
    operation, wanted = key
    recipe, n = operation.recipe, operation.number
    all_axes = [Axes(place.tokens, of_n) for of_n in place.parts[1:]]

    @inside_of("fp8_linear")
    def run(*arrays: jax.Array) -> Arrays:
        # Without the barrier XLA repeats the operations that make dy to find its maximum.
        dys, rest = jax.lax.optimization_barrier(arrays[:n]), arrays[n:]
        kept, copies = rest[: -2 * n], pairs(rest[-2 * n :])
        operands = [
            operands_of_gradient(dy, recipe, w, axes)
            for dy, w, axes in zip(dys, wanted[1:], all_axes, strict=True)
        ]
        return gradients(
            operands, copies, kept, recipe, wanted, operation.dtypes, place.parts[1:], like=dys[0]
        )

    return run


def gradients(
    operands: Sequence[tuple[Quantized, Quantized | jax.Array]],
    copies: Sequence[Quantized],
    kept: Arrays,
    recipe: Recipe,
    wanted: Mask,
    dtypes: Sequence[Any],
    columns: Sequence[Split],
    *,
    like: jax.Array,
) -> list[jax.Array]:
    """The wanted of `(dx, *dweights)` for products `x @ w` of one `x`, of a device's own tokens.

    `dx` is the sum of one product for each weight, over all columns.

    Args:
      operands: Operands of dgrad and of wgrad for each result, from `operands_of_gradient`.
      copies: Copies of the weights for dgrad, `[K, N]`.
      kept: Arrays of the input that the forward kept: nothing, `x`, or `x.T` and its scale.
      recipe: Recipe.
      wanted: Whether the gradients of `x` and of each weight are wanted.
      dtypes: Dtypes of the weights.
      columns: Mesh axes that split the columns N of each weight.
      like: An array with the axes of tokens and the dtype of `x`.
    """
    x = None
    if len(kept) == 1:
        x = rows(kept[0])
    elif kept:
        x = Quantized(columns_of(kept[0]), kept[1])
    sums, dweights = {}, []  # sums by the mesh axes over which they are partial
    for (of_dx, of_dw), copy, of_weight, of_n, is_wanted in zip(
        operands, copies, dtypes, columns, wanted[1:], strict=True
    ):
        if wanted[0]:
            part = fp8_matmul(of_dx, copy, out_dtype=like.dtype, accumulation=recipe.dgrad)
            sums[of_n] = sums[of_n] + part if of_n in sums else part
        if is_wanted:
            assert x is not None  # the forward has kept it
            dweights.append(gradient_of_weight(x, of_dw, recipe.wgrad, of_weight))
    if not sums:
        return dweights
    parts = [sum_of_parts(a, axes, like=like) for axes, a in sums.items()]
    return [functools.reduce(operator.add, parts), *dweights]


def operands_of_gradient(
    dy: jax.Array, recipe: Recipe, dw_is_wanted: bool, axes: Axes
) -> tuple[Quantized, Quantized | jax.Array]:
    """The operands of dgrad and of wgrad, from the gradient of a product's result."""
    dy = rows(dy)
    if recipe.wgrad is not None and dw_is_wanted:
        return cast_both(dy, recipe.gradients, axes)
    return cast_one(dy, recipe.gradients, axes), dy
