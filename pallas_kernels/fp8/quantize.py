"""The public functions that quantize a tensor to FP8."""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.arguments import check_choice, floating_arrays
from pallas_kernels.choices import record
from pallas_kernels.derivatives import not_differentiable
from pallas_kernels.fp8 import amax, mosaic_gpu, reference, row_kernel
from pallas_kernels.fp8.types import E4M3, Quantized, check_dtype
from pallas_kernels.implementation import (
    Implementation,
    check_implementation,
    choose_implementation,
    symbolic_reason,
)
from pallas_kernels.layout import Split

type Scaling = Literal["tensor", "row"]

_NO_GRADIENT = (
    "quantization to FP8 has no gradient; use fp8_linear or fp8_swiglu_mlp, write a jax.custom_vjp "
    "around it, or take jax.lax.stop_gradient of its input"
)


def quantize(
    x: Float[Array, "*T K"],
    dtype: DTypeLike = E4M3,
    *,
    scaling: Scaling = "tensor",
    implementation: Implementation | None = None,
) -> Quantized:
    """Rounds `x` to 8-bit floating-point values with float32 scales.

    `scale = amax · (1 / max_finite(dtype))` in float32, where `amax` is the largest magnitude in
    the tensor or in a row. `values = x · (1 / scale)`, computed in float32 and rounded to the
    nearest number of `dtype`, ties to even. With `scaling="row"` the kernel's reciprocal may err in
    the last bit, so a value within 2^-23 of a tie may be rounded the other way. The largest
    magnitude becomes 448 (`float8_e4m3fn`) or 57344 (`float8_e5m2`), so no value overflows.

    - An `amax` below 2^-90 counts as 0: the scale is 1 and all values are 0.
    - If there is a NaN, `amax`, the scale and all values of the tensor or row are NaN.
    - If there is an infinity and no NaN, the scale is infinity. The values are NaN in the place of
      infinities and 0 elsewhere. So `values · scale` is NaN everywhere.

    Hence a product with a NaN or an infinity is NaN, and a training step can be skipped for it.
    Both dtypes follow this rule, although `float8_e5m2` has infinities.

    The function has no gradient: differentiating it raises an error. Write a `jax.custom_vjp`
    around the product that reads the values. On a mesh, call it inside of `jax.shard_map`, where
    the scale is that of the device's part: no kernel of this function is split over a mesh.

    Args:
      x: Array of any floating dtype of at least 16 bits. The last axis is the one that products
        contract.
      dtype: Dtype of the values: `float8_e4m3fn` or `float8_e5m2`.
      scaling: `"tensor"` for one scale, `"row"` for one scale for each row.
      implementation: Name of the program. `None`, the default, runs the kernel if JAX's default
        device is a Hopper GPU and the kernel takes `x`, and plain JAX otherwise. `"mosaic_gpu"` is
        a kernel for Hopper; the number of rows and the last axis must be multiples of 64.
        `"reference"` is plain JAX, which XLA fuses; `"xla"` is the same. `"require"` runs the
        kernel, or raises.

    Raises:
      ValueError: A name is unknown, `dtype` is no dtype of FP8, or `x` has no axis.
      TypeError: `x` is no array, or not of a floating dtype of at least 16 bits.
      NotImplementedError: The caller asked for a kernel, and it does not take the arguments; or the
        function is differentiated.
    """
    x = _checked(x, dtype, scaling, axes=None)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    found, _ = _quantize("quantize", rows, dtype, scaling, implementation, transposed=False)
    scale = found.scale.reshape(*x.shape[:-1], 1) if scaling == "row" else found.scale
    return Quantized(found.values.reshape(x.shape), scale)


def quantize_transposed(
    x: Float[Array, "M K"],
    dtype: DTypeLike = E4M3,
    *,
    scaling: Scaling = "tensor",
    implementation: Implementation | None = None,
) -> Quantized:
    """`quantize(x.T, ...)`: values `[K, M]` in memory order, whose rows are the columns of `x`.

    Arguments and errors are as in `quantize`; another number of axes than two is a ValueError.
    """
    x = _checked(x, dtype, scaling, axes=2)
    name = "quantize_transposed"
    return _quantize(name, x, dtype, scaling, implementation, row_major=False)[1]


def quantize_both(
    x: Float[Array, "M K"],
    dtype: DTypeLike = E4M3,
    *,
    scaling: Scaling = "tensor",
    implementation: Implementation | None = None,
) -> tuple[Quantized, Quantized]:
    """`(quantize(x, ...), quantize_transposed(x, ...))`.

    With `scaling="tensor"` both have the same scale. With `"row"` the second has one scale for each
    column of `x`. Arguments and errors are as in `quantize`; another number of axes than two is a
    ValueError.
    """
    x = _checked(x, dtype, scaling, axes=2)
    return _quantize("quantize_both", x, dtype, scaling, implementation)


def quantize_both_on_a_mesh(x: Float[Array, "M K"], dtype: DTypeLike, scaling: Scaling) -> Any:
    """`quantize_both` by XLA, which splits it over the mesh as it splits `x`."""
    reason = (
        "on Auto and Explicit axes XLA quantizes each device's part, and would gather the whole "
        "array for a kernel; inside of a jax.shard_map over all axes a kernel runs"
    )
    x = _checked(x, dtype, scaling, axes=2)
    return _quantize("quantize_both", x, dtype, scaling, "reference", reason=reason)


def _quantize(
    name: str,
    x: Float[Array, "M K"],
    dtype: DTypeLike,
    scaling: Scaling,
    implementation: Implementation | None,
    *,
    row_major: bool = True,
    transposed: bool = True,
    reason: str | None = None,
) -> Any:
    """`(row-major copy, transposed copy)`, each a `Quantized`, or None if it is not wanted.

    The row-major copy is `quantize(x)`, and the transposed copy is `quantize(x.T)`. `reason` says
    why `implementation` has a name, if the user has not given it.
    """
    check_implementation(implementation)
    unsupported = symbolic_reason(x) or _split_reason(x) or mosaic_gpu.unsupported_reason(x)
    chosen, why = choose_implementation(implementation, unsupported, fallback="reference")
    record(name, (x,), implementation, chosen, reason or why)
    if scaling == "row" and chosen == "mosaic_gpu" and not transposed and row_kernel.fits(x):
        return Quantized(*row_kernel.quantize_rows(x, dtype)), None
    return quantized_part(
        x,
        dtype,
        scaling,
        in_kernel=chosen == "mosaic_gpu",
        row_major=row_major,
        transposed=transposed,
    )


def quantized_part(
    x: Float[Array, "M K"],
    dtype: DTypeLike,
    scaling: Scaling,
    *,
    in_kernel: bool,
    row_axes: Split = (),
    column_axes: Split = (),
    row_major: bool = True,
    transposed: bool = True,
    maxima: Array | None = None,
) -> tuple[Any, Any]:
    """`(row-major copy, transposed copy)` of a device's part, with the scales of the whole array.

    A copy that is not wanted is None.

    Args:
      x: Part of this device.
      dtype: Dtype of the values.
      scaling: Scaling, as in `quantize`.
      in_kernel: Whether a kernel makes the copies; it must take `x`.
      row_axes: Mesh axes over whose devices a row extends.
      column_axes: Mesh axes over whose devices a column extends.
      row_major: Whether to make the copy `[M, K]`.
      transposed: Whether to make the copy `[K, M]`.
      maxima: Largest magnitudes of parts of `x`, if they are known. They save a pass over `x` if it
        has one scale.
    """
    if scaling == "tensor":
        largest = reference.amax_of(x if maxima is None else maxima, axis=None)
        largest = over_devices(largest, (*row_axes, *column_axes))
        by_row, by_column = (largest if row_major else None, largest if transposed else None)
    else:
        if in_kernel and row_major and transposed:
            by_row, by_column = amax.amax_of_both(x)  # XLA would read `x` twice
        else:
            by_row = reference.amax_of(x, axis=1) if row_major else None
            by_column = reference.amax_of(x, axis=0).reshape(-1, 1) if transposed else None
        by_row, by_column = over_devices(by_row, row_axes), over_devices(by_column, column_axes)
    scale_of = functools.partial(reference.scale_of, dtype=dtype)
    scales = jax.tree.map(scale_of, (by_row, by_column))  # None is no leaf
    values_of = mosaic_gpu.quantize if in_kernel else reference.values_of_both
    return jax.tree.map(Quantized, values_of(x, *scales, dtype=dtype), scales)


def over_devices(maxima: Array | None, axes: Split) -> Array | None:
    """The maxima over all devices of mesh axes; NaN where one of them is, None for None."""
    if maxima is None or not axes:
        return maxima
    # `pmax` of floats may lose a NaN. Without signs, the bits of floats as integers are in the
    # order of the numbers, and those of a NaN are the largest. So one `pmax` of integers keeps it.
    bits = jax.lax.bitcast_convert_type(jnp.abs(maxima), jnp.int32)
    return jax.lax.bitcast_convert_type(jax.lax.pmax(bits, axes), jnp.float32)


def _split_reason(x: Array) -> str | None:
    """Why no kernel takes an array that Explicit axes split, or None."""
    spec = jax.typeof(x).sharding.spec
    if all(names is None for names in spec):
        return None
    return f"Explicit axes split it as {spec}; call it inside of a jax.shard_map over these axes"


def _checked(x: Array, dtype: DTypeLike, scaling: Scaling, *, axes: int | None) -> Array:
    """`x` as an array. Raises if an argument is wrong."""
    (x,) = floating_arrays(least_bits=16, x=x)
    check_dtype(dtype)
    check_choice("scaling", scaling, Scaling)
    if x.ndim == 0 or (axes is not None and x.ndim != axes):
        raise ValueError(
            f"x must have {'at least one axis' if axes is None else f'{axes} axes'}, got shape "
            f"{x.shape}; reshape it"
        )
    return not_differentiable(_NO_GRADIENT, x)
