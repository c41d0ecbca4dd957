"""The operation that runs in the place of a module, and its arguments. Rules are hashable."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from flax import nnx

from pallas_kernels.arguments import common_dtype
from pallas_kernels.fp8 import Recipe, fp8_swiglu_mlp
from pallas_kernels.mlp import Save, swiglu_mlp
from pallas_kernels.norm import Casting, rms_norm

type Path = tuple[Any, ...]


def value_at(module: nnx.Module, path: Path) -> jax.Array:
    """The array of the parameter at a path."""

    def inside(node: Any, key: Any) -> Any:
        is_attribute = isinstance(key, str) and not isinstance(node, dict)
        return getattr(node, key) if is_attribute else node[key]

    return functools.reduce(inside, path, module)[...]


def name_of(path: Path) -> str:
    """The path in print."""
    return ".".join(map(str, path)) or "(the model)"


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix that is a parameter, or a half of one.

    Attributes:
      path: Path of the parameter in its module.
      is_transposed: Whether the parameter has the axes in the other order.
      axis: Axis of the parameter along which its halves lie; None if all of it is the matrix.
      part: Number of the half.
    """

    path: Path
    is_transposed: bool = False
    axis: int | None = None
    part: int = 0

    def of(self, array: Any) -> Any:
        """The matrix in the array of the parameter."""
        if self.axis is not None:
            half = array.shape[self.axis] // 2
            part = self.part if array.ndim == 3 else slice(self.part * half, (self.part + 1) * half)
            array = array[(slice(None),) * self.axis + (part,)]
        return array.T if self.is_transposed else array

    def __str__(self) -> str:
        text = name_of(self.path)
        if self.axis is not None:
            text += f"[{'first' if self.part == 0 else 'second'} half of axis {self.axis}]"
        return text + (".T" if self.is_transposed else "")


@dataclasses.dataclass(frozen=True)
class NormRule:
    """Arguments of `rms_norm`.

    Attributes:
      scale: Path of the scale in the module.
      eps: As in `rms_norm`.
      weight_offset: As in `rms_norm`.
      casting: As in `rms_norm`.
    """

    scale: Path
    eps: float
    weight_offset: float = 0.0
    casting: Casting = "float32"

    name = "rms_norm"

    def run(self, module: nnx.Module, x: jax.Array, dtype: np.dtype) -> jax.Array:
        """The norm of `x` in `dtype`, computed in the common one of both dtypes."""
        y = rms_norm(
            x.astype(common_dtype(x.dtype, dtype)),
            value_at(module, self.scale),
            eps=self.eps,
            weight_offset=self.weight_offset,
            casting=self.casting,
        )
        return y.astype(dtype)

    def exact(self, arrays: dict[Path, np.ndarray], x: np.ndarray) -> np.ndarray:
        """The formula in float64."""
        # Without an epsilon, a row of zeros gives NaN.
        with np.errstate(divide="ignore", invalid="ignore"):
            rstd = 1 / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + self.eps)
            return x * rstd * (arrays[self.scale] + self.weight_offset)

    def __str__(self) -> str:
        text = f"rms_norm(weight={name_of(self.scale)}, eps={self.eps:g}"
        if self.weight_offset:
            text += f", weight_offset={self.weight_offset:g}"
        return text + (")" if self.casting == "float32" else f", casting={self.casting!r})")


@dataclasses.dataclass(frozen=True)
class MLPRule:
    """Arguments of `swiglu_mlp`, or of `fp8_swiglu_mlp`.

    Attributes:
      gate: Matrix `[D, F]`.
      up: Matrix `[D, F]`.
      down: Matrix `[F, D]`.
      save: As in `swiglu_mlp`; `"x"` puts `fp8_swiglu_mlp` into a `jax.checkpoint`.
      recipe: Recipe of `fp8_swiglu_mlp`; None for `swiglu_mlp`.
    """

    gate: Matrix
    up: Matrix
    down: Matrix
    save: Save = "gate_up"
    recipe: Recipe | None = None

    @property
    def name(self) -> str:
        """Name of the operation."""
        return "swiglu_mlp" if self.recipe is None else "fp8_swiglu_mlp"

    def run(self, module: nnx.Module, x: jax.Array, dtype: np.dtype) -> jax.Array:
        """The MLP of `x`, computed in `dtype`."""
        matrices = (m.of(value_at(module, m.path)) for m in (self.gate, self.up, self.down))
        if self.recipe is not None:
            mlp = functools.partial(fp8_swiglu_mlp, recipe=self.recipe)
            return (jax.checkpoint(mlp) if self.save == "x" else mlp)(x.astype(dtype), *matrices)
        return swiglu_mlp(x.astype(dtype), *matrices, save=self.save)

    def exact(self, arrays: dict[Path, np.ndarray], x: np.ndarray) -> np.ndarray:
        """The formula in float64."""
        gate, up, down = (m.of(arrays[m.path]) for m in (self.gate, self.up, self.down))
        z = x @ gate
        # exp(-|z|) does not overflow.
        small = np.exp(-np.abs(z))
        sigmoid = np.where(z >= 0, 1, small) / (1 + small)
        return (z * sigmoid * (x @ up)) @ down

    def __str__(self) -> str:
        recipe = "" if self.recipe is None else f", recipe={self.recipe.name!r}"
        save = "" if self.save == "gate_up" else f", save={self.save!r}"
        return f"{self.name}({self.gate}, {self.up}, {self.down}{recipe}{save})"


@dataclasses.dataclass(frozen=True)
class Call:
    """A kind of call of a module.

    Attributes:
      dtype: Dtype of the input.
      rank: Rank of the input.
      parameters: Dtypes of the parameters, in the order of `Rule.ranks`.
    """

    dtype: np.dtype
    rank: int
    parameters: tuple[np.dtype, ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """The operation of one module, and when it runs.

    Attributes:
      operation: Operation and its arguments.
      calls: Kinds of calls that were compared, each with the dtype of the module's result.
      ranks: Path and rank of each parameter of the module.
      ignored: Names of arguments of the module's call that change no result if they are bools.
    """

    operation: NormRule | MLPRule
    calls: tuple[tuple[Call, np.dtype], ...]
    ranks: tuple[tuple[Path, int], ...]
    ignored: frozenset[str] = frozenset()
