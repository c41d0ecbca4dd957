"""FP8 in the layers of Flax: a product for linear layers, and the choice of a gated MLP."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.arguments import check_unused
from pallas_kernels.fp8.linear import fp8_linear
from pallas_kernels.fp8.mlp import fp8_swiglu_mlp
from pallas_kernels.fp8.recipes import Recipe, RecipeName, find_recipe
from pallas_kernels.implementation import Implementation
from pallas_kernels.layout import Splits, to_spec
from pallas_kernels.logs import log_once
from pallas_kernels.mlp import Save, swiglu_mlp
from pallas_kernels.partition import axes_of_kind, explicit_splits, split_as

type _DimensionNumbers = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]


@dataclasses.dataclass(frozen=True, slots=True)
class Fp8DotGeneral:
    """`fp8_linear` with the arguments of `jax.lax.dot_general`, for the linear layers of Flax.

    Give it as `dot_general` to `nnx.Linear` and `nnx.LinearGeneral`, or to Linen's `nn.Dense` and
    `nn.DenseGeneral`. The left operand is the input. Its contracted axes are K of `fp8_linear`, and
    its other axes are tokens. The right operand is the weight. Its contracted axes are K, and its
    other axes are N. Each call quantizes the weight. A weight that is too small to gain from FP8 is
    multiplied in the dtype of the input, as in `fp8_linear`, and the log says so once.

    Args:
      recipe: Recipe, or its name, as in `fp8_linear`.

    Raises:
      ValueError: There is no recipe of that name. Calls raise it for contracted axes of different
        sizes, for batch axes, for a `precision` other than the default, and for a
        `preferred_element_type` other than the dtype of the input.
      TypeError, NotImplementedError: Calls raise them as `fp8_linear` does.
    """

    recipe: Recipe | RecipeName

    def __post_init__(self):
        find_recipe(self.recipe)

    def __call__(
        self,
        lhs: Float[Array, "..."],
        rhs: Float[Array, "..."],
        dimension_numbers: _DimensionNumbers,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> Float[Array, "..."]:
        """The product in the dtype of `lhs`, with the axes of tokens and then those of N."""
        (of_input, of_weight), batch = dimension_numbers
        if any(batch):
            raise ValueError(
                f"{dimension_numbers=} has batch axes, so it is no product with one weight; give "
                "this layer jax.lax.dot_general"
            )
        sizes = [
            tuple(a.shape[axis] for axis in axes) for a, axes in ((lhs, of_input), (rhs, of_weight))
        ]
        if sizes[0] != sizes[1]:  # merged axes could have one size all the same
            raise ValueError(
                f"the contracted axes have the sizes {sizes[0]} in the input {lhs.shape}, and "
                f"{sizes[1]} in the weight {rhs.shape}; give both the same sizes in the same order"
            )
        if precision not in (None, "default", jax.lax.Precision.DEFAULT):
            raise ValueError(f"{precision=}, but the operands are in FP8; leave it at None")
        if preferred_element_type not in (None, lhs.dtype):
            raise ValueError(
                f"{preferred_element_type=}, but the result has the dtype of the input, "
                f"{lhs.dtype}; leave it at None"
            )
        tokens = [axis for axis in range(lhs.ndim) if axis not in of_input]
        columns = [axis for axis in range(rhs.ndim) if axis not in of_weight]
        x = _merged(lhs, *([axis] for axis in tokens), of_input)
        y = fp8_linear(x, _merged(rhs, of_weight, columns), recipe=self.recipe)
        shape = *y.shape[:-1], *(rhs.shape[axis] for axis in columns)
        whole = ((),) * (len(columns) - 1)
        y = _reshaped(y, shape, (*explicit_splits(y), *whole)[: len(shape)])
        return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


@dataclasses.dataclass(frozen=True, slots=True)
class Fp8Einsum:
    """`fp8_linear` with the arguments of `jnp.einsum`, for `nnx.Einsum`.

    Give it as `einsum_op` to `nnx.Einsum`. The first operand is the input, and the second one the
    weight. Subscripts that both have are contracted. All is as for `Fp8DotGeneral` otherwise.

    Args:
      recipe: Recipe, or its name, as in `fp8_linear`.

    Raises:
      ValueError: There is no recipe of that name. Calls raise it for subscripts that are no product
        of an input and one weight, such as those with batch axes or an ellipsis, and where
        `Fp8DotGeneral` does.
      TypeError, NotImplementedError: Calls raise them as `fp8_linear` does.
    """

    recipe: Recipe | RecipeName

    def __post_init__(self):
        find_recipe(self.recipe)

    def __call__(
        self,
        subscripts: str,
        x: Float[Array, "..."],
        weight: Float[Array, "..."],
        *,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> Float[Array, "..."]:
        """The product in the dtype of `x`, with the axes in the order of the subscripts."""
        operands, _, result = subscripts.replace(" ", "").partition("->")
        of_x, _, of_weight = operands.partition(",")
        contracted = [name for name in of_x if name in of_weight]
        free = [name for name in of_x + of_weight if name not in contracted]
        names = {*of_x, *of_weight}
        repeats = len(of_x) + len(of_weight) - len(contracted) > len(names)
        fits = (len(of_x), len(of_weight)) == (x.ndim, weight.ndim) and names.isdisjoint(".")
        if repeats or not fits or sorted(result) != sorted(free):
            raise ValueError(
                f"{subscripts=} is no product of an input {x.shape} and a weight {weight.shape}, "
                "as 'btd,dnh->btnh' is; give this layer jnp.einsum"
            )
        axes = [[letters.index(name) for name in contracted] for letters in (of_x, of_weight)]
        dimension_numbers = (axes[0], axes[1]), ((), ())
        multiply = Fp8DotGeneral(self.recipe)
        y = multiply(x, weight, dimension_numbers, precision, preferred_element_type)
        y = jnp.transpose(y, [free.index(name) for name in result])
        return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


def gated_mlp(
    x: Float[Array, "*T D"],
    weights: Sequence[Float[Array, "_ _"]],
    *,
    fp8: Recipe | RecipeName | None,
    save: Save,
    chunk_size: int | None,
    implementation: Implementation | None,
) -> Float[Array, "*T D"]:
    """The gated MLP of a layer: `fp8_swiglu_mlp` if it has a recipe, and else `swiglu_mlp`."""
    if fp8 is not None:
        return fp8_swiglu_mlp(x, *weights, recipe=fp8)
    return swiglu_mlp(x, *weights, save=save, chunk_size=chunk_size, implementation=implementation)


def check_mlp_options(
    fp8: Recipe | RecipeName | None,
    save: Save,
    chunk_size: int | None,
    implementation: Implementation | None,
) -> None:
    """Raises a ValueError if a gated MLP in FP8 has an option of `swiglu_mlp`."""
    if fp8 is None:
        return
    find_recipe(fp8)
    kind = "MLPs without FP8"
    check_unused(kind, save=(save, "gate_up"), chunk_size=(chunk_size, None))
    if implementation is not None:
        raise ValueError(
            f"{implementation=} is for {kind}; leave it at None; pallas_kernels.require_kernels "
            "demands kernels"
        )


def _merged(a: jax.Array, *groups: Sequence[int]) -> jax.Array:
    """The array with one axis for each group of its axes.

    Explicit axes may split the first axis of a group. The array is gathered over those that split
    another axis, because a device could not have a contiguous part of the merged one. A warning
    names such an axis.
    """
    sizes, splits = a.shape, list(explicit_splits(a))
    several = axes_of_kind(jax.typeof(a).sharding.mesh, AxisType.Explicit)
    for first, axis in ((group[0], axis) for group in groups for axis in group[1:]):
        if names := tuple(name for name in splits[axis] if name in several):
            log_once(
                f"each device gathers axis {axis} of {sizes}, which the mesh axes {names} split, "
                f"because a product in FP8 merges it with axis {first}; split axis {first} instead"
            )
        splits[axis] = ()
    a = jnp.transpose(split_as(tuple(splits), a), [axis for group in groups for axis in group])
    shape = [math.prod(sizes[axis] for axis in group) for group in groups]
    return _reshaped(a, shape, tuple(splits[group[0]] if group else () for group in groups))


def _reshaped(a: jax.Array, shape: Sequence[int], splits: Splits) -> jax.Array:
    """The array in another shape, whose axes are split by Explicit axes as given."""
    mesh = jax.typeof(a).sharding.mesh
    is_explicit = AxisType.Explicit in mesh.axis_types
    sharding = NamedSharding(mesh, to_spec(splits)) if is_explicit else None
    return jax.lax.reshape(a, tuple(shape), out_sharding=sharding)
