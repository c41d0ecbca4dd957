"""Finds modules that may be RMSNorms or gated MLPs, by the shapes of their parameters."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from pallas_kernels.patching.rules import Matrix, MLPRule, Path, name_of

type Shape = tuple[int, ...]

# Axes along which the parameters of several layers may be stacked. None is a single layer.
STACK_AXES = (None, 0, 1)


def parameters(module: nnx.Module) -> dict[Path, Any]:
    """The variables of the module that are parameters of a floating dtype, by path."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {path: v for path, v in flat if jnp.issubdtype(v.dtype, jnp.floating)}


def without_axis(shape: Shape, axis: int | None) -> Shape:
    """The shape of one layer's parameter."""
    return shape if axis is None else shape[:axis] + shape[axis + 1 :]


def unstacked(shapes: Mapping[Path, Shape], axis: int | None) -> dict[Path, Shape] | None:
    """The shapes of one layer's parameters, or None if the axis cannot be that of the layers."""
    if axis is None:
        return dict(shapes)
    if any(len(shape) <= axis for shape in shapes.values()):
        return None
    if len({shape[axis] for shape in shapes.values()}) != 1:
        return None
    return {path: without_axis(shape, axis) for path, shape in shapes.items()}


def readings_as_mlp(shapes: Mapping[Path, Shape]) -> list[tuple[int, MLPRule]]:
    """All gated MLPs that parameters of these shapes may be, each with D, the likely ones first."""
    found = []
    if len(shapes) == 3 and all(len(shape) == 2 for shape in shapes.values()):
        for *others, down_path in itertools.permutations(shapes):
            for size, columns in _sizes(shapes[down_path]):
                choices = [_plain(path, shapes[path], size, columns) for path in others]
                downs = _plain(down_path, shapes[down_path], columns, size)
                for gate, up, down in itertools.product(*choices, downs):
                    found.append((size, MLPRule(gate, up, down)))
    elif len(shapes) == 2:
        for fused, down_path in itertools.permutations(shapes):
            if len(shapes[down_path]) != 2:
                continue
            for size, columns in _sizes(shapes[down_path]):
                downs = _plain(down_path, shapes[down_path], columns, size)
                for pair, down in itertools.product(
                    _fused(fused, shapes[fused], size, columns), downs
                ):
                    found += [(size, MLPRule(a, b, down)) for a, b in (pair, pair[::-1])]
    # Most models store kernels as [in, out], and the gate before the other projection.
    num_transposed = lambda r: r.gate.is_transposed + r.up.is_transposed + r.down.is_transposed
    return sorted(found, key=lambda reading: num_transposed(reading[1]))


def _sizes(shape: Shape) -> list[tuple[int, int]]:
    """Both `(D, F)` that a matrix `[F, D]` may have, itself or transposed."""
    columns, size = shape
    return [(size, columns)] if size == columns else [(size, columns), (columns, size)]


def _plain(path: Path, shape: Shape, rows: int, columns: int) -> list[Matrix]:
    found = []
    if shape == (rows, columns):
        found.append(Matrix(path))
    if shape == (columns, rows):
        found.append(Matrix(path, is_transposed=True))
    return found


def _fused(path: Path, shape: Shape, size: int, columns: int) -> Iterator[tuple[Matrix, Matrix]]:
    """Two matrices `[D, F]` in one array: along an axis of size 2, or one behind the other."""
    for axis in range(len(shape)):
        if len(shape) == 3 and shape[axis] == 2:
            rest = without_axis(shape, axis)
        elif len(shape) == 2 and shape[axis] == 2 * columns:
            rest = tuple(n // 2 if i == axis else n for i, n in enumerate(shape))
        else:
            continue
        for one in _plain(path, rest, size, columns):
            first, second = (dataclasses.replace(one, axis=axis, part=part) for part in (0, 1))
            yield first, second


def describe(shapes: Mapping[Path, Shape]) -> str:
    """The parameters of a module, for the reason why it was left."""
    return ", ".join(f"{name_of(p)} {list(s)}" for p, s in shapes.items())


def looks_like_a_norm(shapes: Mapping[Path, Shape]) -> bool:
    """Whether all parameters are vectors of one size, so that a reason is of interest."""
    different = {*shapes.values()}
    return len(shapes) <= 2 and len(different) == 1 and len(different.pop()) == 1


def looks_like_an_mlp(shapes: Mapping[Path, Shape]) -> bool:
    """Whether three matrices of an MLP have biases or other vectors beside them."""
    matrices = {path: shape for path, shape in shapes.items() if len(shape) > 1}
    vectors = len(shapes) - len(matrices)
    return 0 < vectors <= 3 and bool(readings_as_mlp(matrices))
