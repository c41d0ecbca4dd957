"""Recipes: the tensors that a linear layer rounds to FP8, their scales, and the products' sums.

The names are torchao's (https://github.com/pytorch/ao, `torchao.float8`). A linear layer
`y = x @ w` has three products: the forward, `dx = dy @ w.T` (*dgrad*), and `dw = x.T @ dy`
(*wgrad*). A recipe says for each operand the FP8 dtype and its scales, and for each product the
accumulation of `fp8_matmul`.

| name | x, w | dy | scales | forward | dgrad | wgrad |
|---|---|---|---|---|---|---|
| `tensorwise` | e4m3 | e5m2 | one a tensor | fast | promoted | promoted |
| `rowwise` | e4m3 | e4m3 | one a row | fast | fast | fast |
| `rowwise_with_gw_hp` | e4m3 | e4m3 | one a row | fast | fast | in the dtype of `x` |

"Fast" is the tensor cores' own accumulation; "promoted" adds to float32 sums at intervals
(`products.py`). All scales are current: they come from the tensor that they scale, and no state is
kept between steps. "A row" lies along the axis that the product contracts. So each memory order of
a tensor has scales of its own.

A small product stays in the dtype of `x`. FP8 saves time that grows with `T·K·N`, and quantizing
`x` and `dy` takes time that grows with `T·(K + N)`. So a weight `[K, N]` gains if
`K·N / (K + N) >= least_size`. At the `least_size` of each recipe both times were equal on an H100.
They were measured for the forward with both gradients of four layers, from 2048 x 2048 to
8192 x 2048, and 16384 tokens (docs/lab/2026-11-25-fp8-layers.md).
"""

import dataclasses
from typing import Literal

from jax.typing import DTypeLike

from pallas_kernels.arguments import check_choice, check_integer
from pallas_kernels.fp8.products import Accumulation
from pallas_kernels.fp8.quantize import Scaling
from pallas_kernels.fp8.types import E4M3, E5M2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cast:
    """How a tensor is quantized.

    Attributes:
      dtype: `float8_e4m3fn` or `float8_e5m2`.
      scaling: `"tensor"` for one scale, `"row"` for one scale for each row along the axis that the
        product contracts.
    """

    dtype: DTypeLike
    scaling: Scaling


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The casts and products of a linear layer `y = x @ w`, with gradients `dx` and `dw`.

    `RECIPES` has three by name, with the names of torchao (https://github.com/pytorch/ao,
    `torchao.float8`). `fp8_matmul` explains the accumulations `"fast"` and `"promoted"`.

    Attributes:
      name: Name for flags and tables.
      inputs: Cast of the input `x`.
      weights: Cast of the weight.
      gradients: Cast of the output's gradient `dy`.
      forward: Accumulation of the forward `y`.
      dgrad: Accumulation of the input's gradient `dx = dy @ w.T`.
      wgrad: Accumulation of the weight's gradient `dw = x.T @ dy`, or None to compute it in the
        dtype of `x`.
      least_size: Least `K·N / (K + N)` of a weight `[K, N]` whose products run in FP8; 0 takes FP8
        for every weight.

    Raises:
      ValueError: An accumulation is unknown.
      TypeError: `least_size` is no integer.
    """

    name: str
    inputs: Cast
    weights: Cast
    gradients: Cast
    forward: Accumulation
    dgrad: Accumulation
    wgrad: Accumulation | None
    least_size: int

    def __post_init__(self):
        check_choice("forward", self.forward, Accumulation)
        check_choice("dgrad", self.dgrad, Accumulation)
        if self.wgrad is not None:
            check_choice("wgrad", self.wgrad, Accumulation)
        check_integer("least_size", self.least_size, remedy="0 takes FP8 for every weight")

    def gains(self, shape: tuple[int, ...]) -> bool:
        """Whether products with a weight of this shape, `[K, N]`, run in FP8."""
        k, n = shape
        return k * n >= self.least_size * (k + n)


_E4M3_BY_ROW = Cast(dtype=E4M3, scaling="row")
_BY_ROW = {
    "inputs": _E4M3_BY_ROW,
    "weights": _E4M3_BY_ROW,
    "gradients": _E4M3_BY_ROW,
    "forward": "fast",
    "dgrad": "fast",
}

TENSORWISE = Recipe(
    name="tensorwise",
    inputs=Cast(dtype=E4M3, scaling="tensor"),
    weights=Cast(dtype=E4M3, scaling="tensor"),
    gradients=Cast(dtype=E5M2, scaling="tensor"),
    forward="fast",
    dgrad="promoted",
    wgrad="promoted",
    least_size=750,
)
ROWWISE = Recipe(name="rowwise", **_BY_ROW, wgrad="fast", least_size=690)
ROWWISE_WITH_GW_HP = Recipe(name="rowwise_with_gw_hp", **_BY_ROW, wgrad=None, least_size=450)

RECIPES: dict[str, Recipe] = {r.name: r for r in (TENSORWISE, ROWWISE, ROWWISE_WITH_GW_HP)}

type RecipeName = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def find_recipe(recipe: Recipe | RecipeName) -> Recipe:
    """The recipe, or that of a name.

    Raises:
      ValueError: There is no recipe of that name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"{recipe=} must be a Recipe or one of {tuple(RECIPES)}")
    return RECIPES[recipe]
