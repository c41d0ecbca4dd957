"""Quantization of a device's own tokens with the scales of all tokens, as a recipe says.

On a mesh a scale that spans tokens comes from the maxima of all devices. So a result does not
depend on the number of devices.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.fp8 import amax, mosaic_gpu, reference
from pallas_kernels.fp8.quantize import maxima_of, quantize, quantize_both, quantize_transposed
from pallas_kernels.fp8.recipes import Cast
from pallas_kernels.fp8.types import BlockwiseInt8, Quantized
from pallas_kernels.gpu.device import reason_not_here
from pallas_kernels.layout import Place, Split


def cast_one(
    a: jax.Array, cast: Cast, place: Place, *, maxima: jax.Array | None = None
) -> Quantized:
    """A device's tokens `[T, K]`, quantized along K; the scale is that of all tokens.

    `maxima` are largest magnitudes of parts of `a`, from the kernel that made `a`. They save a pass
    over `a` if it has one scale.
    """
    if cast.scaling == "tensor" and (place.tokens or maxima is not None):
        return cast_part(a, cast, column_axes=place.tokens, transposed=False, maxima=maxima)[0]
    return quantize(a, cast.dtype, scaling=cast.scaling)


def cast_both(a: jax.Array, cast: Cast, place: Place) -> tuple[Quantized, Quantized]:
    """`cast_one` in both memory orders, the second `[K, T]`."""
    if place.tokens:
        return cast_part(a, cast, column_axes=place.tokens)
    return quantize_both(a, cast.dtype, scaling=cast.scaling)


def cast_transposed(a: jax.Array, cast: Cast, place: Place) -> Quantized:
    """The second result of `cast_both` alone."""
    if place.tokens:
        return cast_part(a, cast, column_axes=place.tokens, row_major=False)[1]
    return quantize_transposed(a, cast.dtype, scaling=cast.scaling)


def cast_part(
    a: jax.Array,
    cast: Cast,
    *,
    row_axes: Split = (),
    column_axes: Split = (),
    row_major: bool = True,
    transposed: bool = True,
    maxima: jax.Array | None = None,
) -> tuple[Any, Any]:
    """`(row-major copy, transposed copy)` of a device's part, with the scales of the whole array.

    A copy that is not wanted is None.

    Args:
      a: Part of this device, `[M, K]`.
      cast: Cast.
      row_axes: Mesh axes over whose devices a row extends.
      column_axes: Mesh axes over whose devices a column extends.
      row_major: Whether to make the copy `[M, K]`.
      transposed: Whether to make the copy `[K, M]`.
      maxima: As for `cast_one`.
    """
    in_kernel = why_no_kernel(a) is None
    if cast.scaling == "tensor":
        largest = reference.amax_of(a if maxima is None else maxima, axis=None)
        largest = _largest(largest, (*row_axes, *column_axes))
        of_copies = (largest if row_major else None, largest if transposed else None)
    else:
        by_row, by_column = maxima_of(
            a, row_major=row_major, transposed=transposed, in_kernel=in_kernel
        )
        of_copies = (_largest(by_row, row_axes), _largest(by_column, column_axes))
    scale_of = functools.partial(reference.scale_of, dtype=cast.dtype)
    scales = jax.tree.map(scale_of, of_copies)  # None is no leaf
    values_of = mosaic_gpu.quantize if in_kernel else reference.values_of_both
    return jax.tree.map(Quantized, values_of(a, *scales, dtype=cast.dtype), scales)


def why_no_kernel(a: jax.Array) -> str | None:
    """Why no kernel quantizes the array on the default device, or None if one does."""
    return mosaic_gpu.unsupported_reason(a) or reason_not_here()


def _largest(maxima: jax.Array | None, axes: Split) -> jax.Array | None:
    """The maxima over all devices of mesh axes; NaN where one of them is, None for None."""
    if maxima is None or not axes:
        return maxima
    # `pmax` of floats may lose a NaN. Without signs, the bits of floats as integers are in the
    # order of the numbers, and those of a NaN are the largest. So one `pmax` of integers keeps it.
    bits = jax.lax.bitcast_convert_type(jnp.abs(maxima), jnp.int32)
    return jax.lax.bitcast_convert_type(jax.lax.pmax(bits, axes), jnp.float32)


def cast_computed(
    arrays: Sequence[jax.Array | BlockwiseInt8],
    compute: Callable[..., Sequence[jax.Array]],
    casts: Sequence[Cast],
    wanted: Sequence[tuple[bool, bool]],
    place: Place,
    *,
    name: str,
) -> list[tuple[Quantized | None, Quantized | None]]:
    """`cast_both` of tensors that an elementwise function makes of arrays, by two kernels.

    The first kernel finds the maxima of the tensors, and the second one writes the FP8 copies. Both
    compute the tensors from the arrays, so no tensor is written in 16 bits. The caller has asked
    `why_no_kernel`, which is None.

    Args:
      arrays: Arguments of the function, `[T, K]`. One of them at least is not in int8; all that are
        not have one dtype.
      compute: Function of pieces of the arrays, in float32 where they are in int8; it returns
        pieces of the tensors in the dtype of the other arrays.
      casts: Cast of each tensor.
      wanted: Whether to make the row-major copy of each tensor, and the transposed copy.
      place: Place of the device in the mesh.
      name: Beginning of the kernels' names.
    """
    # The maximum of a tensor comes from those of its columns, which lanes compare once a block.
    axes = tuple(
        (False, any(copies)) if cast.scaling == "tensor" else copies
        for cast, copies in zip(casts, wanted, strict=True)
    )
    maxima = amax.amax_of_computed(arrays, compute, axes, name=f"{name}_amax")
    scales = []
    for (by_row, by_column), cast, copies in zip(maxima, casts, wanted, strict=True):
        if by_column is not None and cast.scaling == "tensor":
            largest = _largest(reference.amax_of(by_column, axis=None), place.tokens)
            by_row, by_column = (largest if is_wanted else None for is_wanted in copies)
        else:
            by_column = _largest(by_column, place.tokens)
        scale_of = functools.partial(reference.scale_of, dtype=cast.dtype)
        scales.append(jax.tree.map(scale_of, (by_row, by_column)))  # None is no leaf
    to_make = [mosaic_gpu.Wanted(*s, dtype=c.dtype) for s, c in zip(scales, casts, strict=True)]
    values = mosaic_gpu.quantize_computed(arrays, compute, to_make, name=f"{name}_quantize")
    return jax.tree.map(Quantized, values, scales)
