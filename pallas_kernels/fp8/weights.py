"""Weights of FP8 products with their copies, as callers make them and as operations take them."""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Float

from pallas_kernels.arguments import BITS_OF_PRODUCTS, floating_arrays
from pallas_kernels.choices import inside_of, record
from pallas_kernels.fp8.casts import cast_part
from pallas_kernels.fp8.product_kernel import OUT_DTYPES
from pallas_kernels.fp8.quantize import quantize_both, quantize_both_on_a_mesh
from pallas_kernels.fp8.recipes import Recipe, RecipeName, find_recipe
from pallas_kernels.fp8.types import Quantized
from pallas_kernels.implementation import Implementation, check_implementation
from pallas_kernels.layout import Split, Weight
from pallas_kernels.logs import log_once
from pallas_kernels.mapping import Mask
from pallas_kernels.partition import axes_of_kind, mesh_of
from pallas_kernels.protocol import Arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight `[K, N]` and its FP8 copies, which `quantize_weight` makes.

    It is a pytree. A gradient with respect to the weight passes through it unchanged.

    Attributes:
      weight: Weight that was quantized, `[K, N]`, in its own dtype.
      forward: FP8 copy `[N, K]`; None if the recipe leaves this weight in its dtype.
      dgrad: FP8 copy `[K, N]`; None where `forward` is None.
    """

    # JAX's transformations put shapes, axes and other leaves into pytrees, too.
    weight: jax.Array | Any
    forward: Quantized | Any
    dgrad: Quantized | Any


@inside_of("quantize_weight")
def quantize_weight(
    weight: Float[Array, "K N"],
    recipe: Recipe | RecipeName,
    *,
    implementation: Implementation | None = None,
    split: tuple[Split, Split] = ((), ()),
) -> QuantizedWeight:
    """The weight with its FP8 copies, for several calls of `fp8_linear` in a step.

    Call it outside of `jax.checkpoint`; inside, the backward would quantize again. For the stacked
    weights of several layers, `[L, K, N]`, use `jax.vmap`. The two FP8 copies together take two
    bytes for each element of the weight.

    Args:
      weight: Weight in the layout of Flax's kernels, of a floating dtype of 16 or 32 bits.
      recipe: Recipe, or its name. It also decides whether the weight is too small to gain from FP8.
      implementation: Name, as in `quantize`; None with `split`. On a mesh with Auto or Explicit
        axes None takes `"reference"`, which XLA splits as the weight. With `"mosaic_gpu"` XLA
        gathers a weight that Auto axes split.
      split: Mesh axes that split K, and mesh axes that split N, inside of `jax.shard_map`. The
        scales are then those of the whole weight, so that devices may gather the FP8 copies.

    Raises:
      ValueError: The weight does not have two axes, a name is unknown, or `split` comes with an
        `implementation`.
      TypeError: The weight is not of such a dtype.
      NotImplementedError: The caller asked for the kernel or requires it, and it does not run.
    """
    recipe = find_recipe(recipe)
    check_implementation(implementation)
    if any(split) and implementation is not None:
        raise ValueError(f"{implementation=} is for a whole weight; with {split=} leave it at None")
    weight = operand("weight", weight)
    if weight.ndim != 2:
        raise ValueError(f"weight must be [K, N], got {weight.shape}; use jax.vmap for a stack")
    parts = [math.prod(jax.lax.axis_size(name) for name in axes) for axes in split]
    if not recipe.gains(tuple(map(operator.mul, weight.shape, parts))):
        return QuantizedWeight(weight, None, None)
    cast = recipe.weights
    values = jax.lax.stop_gradient(weight)
    if any(split):
        of_k, of_n = split
        dgrad, forward = cast_part(values, cast, row_axes=of_n, column_axes=of_k)
    elif implementation is None and _may_be_split(values):
        dgrad, forward = quantize_both_on_a_mesh(values, cast.dtype, cast.scaling)
    else:
        dgrad, forward = quantize_both(
            values, cast.dtype, scaling=cast.scaling, implementation=implementation
        )
    return QuantizedWeight(weight, forward, dgrad)


def _may_be_split(weight: jax.Array) -> bool:
    """Whether the mesh has axes over which XLA may split a weight."""
    mesh = mesh_of((weight,))
    return bool(axes_of_kind(mesh, AxisType.Auto) or axes_of_kind(mesh, AxisType.Explicit))


def note_too_small(operation: str, name: str, weight: jax.Array, x: jax.Array) -> None:
    """Tells the log, once for a shape, and `explain` that a weight stays in the dtype of `x`."""
    shape = weight.shape
    reason = (
        f"its K·N / (K + N), {math.prod(shape) // sum(shape)}, is below the least_size of the "
        "recipe that quantized it, from which FP8 saves time; least_size=0 in that recipe takes FP8"
    )
    what = f"{name} {shape} is multiplied in {jnp.dtype(x.dtype).name}"
    log_once(f"{operation}: {what}, because {reason}")
    # By design there is no kernel, so `require_kernels` does not raise.
    record(operation, (x, weight), "reference", "reference", f"{what}, because {reason}")


def as_quantized(weight: Any, recipe: Recipe) -> QuantizedWeight:
    """The weight with its FP8 copies, made now unless the caller has made them.

    Raises:
      ValueError: The caller has made them by a recipe that quantizes weights in another way.
    """
    if not isinstance(weight, QuantizedWeight):
        return quantize_weight(weight, recipe)
    if weight.forward is not None:
        is_by_row = weight.forward.scale.ndim > 0
        found = (jnp.dtype(weight.forward.values.dtype), "row" if is_by_row else "tensor")
        wanted = (jnp.dtype(recipe.weights.dtype), recipe.weights.scaling)
        if found != wanted:
            raise ValueError(
                f"a weight is quantized to {found[0]} with scaling={found[1]!r}, and the recipe "
                f"{recipe.name!r} has {wanted[0]} with scaling={wanted[1]!r}; give quantize_weight "
                "the same recipe"
            )
    return weight


def arguments(weights: Sequence[QuantizedWeight]) -> list[jax.Array]:
    """The arrays of weights, as operations take them: weights, forward copies, dgrad copies."""
    copies = [*(w.forward for w in weights), *(w.dgrad for w in weights)]
    return [*(w.weight for w in weights), *(a for q in copies for a in (q.values, q.scale))]


def pairs(arrays: Arrays) -> list[Quantized]:
    """Tensors from their values and scales in turn."""
    return [Quantized(v, s) for v, s in zip(arrays[::2], arrays[1::2], strict=True)]


def zeros_of_copies(dgrad: Sequence[Quantized], wanted: Mask) -> list[jax.Array]:
    """The wanted gradients of copies, forward copies first: 0, because the weight has them all."""
    shapes = []
    for q in dgrad:
        shapes += [q.values.shape[::-1], (q.values.shape[1], 1)[: q.scale.ndim]]
    shapes += [a.shape for a in jax.tree.leaves(list(dgrad))]
    return [jnp.zeros(s) for s, is_wanted in zip(shapes, wanted, strict=True) if is_wanted]


def roles_of_copies(copies: Sequence[Quantized], axes: Sequence[tuple[str, str]]) -> list[Weight]:
    """The roles of the values and scales of weights."""
    roles = []
    for q, names in zip(copies, axes, strict=True):
        roles += [Weight(names), Weight((names[0], f"one_{names[1]}")[: q.scale.ndim])]
    return roles


def operand(name: str, a: Any) -> jax.Array:
    """An argument as an array, whose dtype a product may have as its result.

    Raises:
      TypeError: It is no array, or not of a floating dtype of 16 or 32 bits.
    """
    (a,) = floating_arrays(**{name: a}, least_bits=BITS_OF_PRODUCTS)
    if a.dtype not in OUT_DTYPES:
        raise TypeError(f"{name} is {a.dtype}, which no product in FP8 returns; cast it to float32")
    return a
