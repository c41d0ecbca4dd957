"""Quantization of a device's part of a tensor, as a recipe says.

On a mesh a scale that spans tokens comes from the maxima of all devices, and so does the scale of a
tensor. With row scales a device that has only some columns scales its own part of each row: its
product is a partial sum, to which its own scales apply. So a scale spans a row or less.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels.choices import fall_back_on_a_part
from pallas_kernels.fp8 import amax, mosaic_gpu, reference
from pallas_kernels.fp8.quantize import (
    over_devices,
    quantize,
    quantize_both,
    quantize_transposed,
    quantized_part,
)
from pallas_kernels.fp8.recipes import Cast
from pallas_kernels.fp8.types import BlockwiseInt8, Quantized
from pallas_kernels.gpu.device import reason_not_here
from pallas_kernels.layout import Split


class Axes(NamedTuple):
    """The mesh axes that split a tensor of tokens.

    Attributes:
      tokens: Axes that split its tokens.
      columns: Axes that split its other axis.
    """

    tokens: Split = ()
    columns: Split = ()

    def of_scales(self, cast: Cast) -> Split:
        """The axes over whose devices the scale of a tensor, or of a column, extends."""
        return self.tokens + (self.columns if cast.scaling == "tensor" else ())


def cast_one(a: jax.Array, cast: Cast, axes: Axes, *, maxima: jax.Array | None = None) -> Quantized:
    """A device's part `[T, K]` of a tensor, quantized along K.

    `maxima` are largest magnitudes of parts of `a`, from the kernel that made `a`. They save a pass
    over `a` if it has one scale.
    """
    shared = axes.of_scales(cast)
    if cast.scaling == "tensor" and (shared or maxima is not None):
        return cast_part(a, cast, column_axes=shared, transposed=False, maxima=maxima)[0]
    return quantize(a, cast.dtype, scaling=cast.scaling)


def cast_both(a: jax.Array, cast: Cast, axes: Axes) -> tuple[Quantized, Quantized]:
    """`cast_one` in both memory orders, the second `[K, T]`."""
    if shared := axes.of_scales(cast):
        return cast_part(a, cast, column_axes=shared)
    return quantize_both(a, cast.dtype, scaling=cast.scaling)


def cast_transposed(a: jax.Array, cast: Cast, axes: Axes) -> Quantized:
    """The second result of `cast_both` alone."""
    if shared := axes.of_scales(cast):
        return cast_part(a, cast, column_axes=shared, row_major=False)[1]
    return quantize_transposed(a, cast.dtype, scaling=cast.scaling)


def cast_part(a: jax.Array, cast: Cast, **options: Any) -> tuple[Any, Any]:
    """`quantized_part` with these options, by the kernels if they take the device's part."""
    reason = why_no_kernel(a)
    if reason is not None and reason_not_here() is None:
        fall_back_on_a_part("quantize", None, reason, "XLA quantizes a device's part")
    return quantized_part(a, cast.dtype, cast.scaling, in_kernel=reason is None, **options)


def why_no_kernel(a: jax.Array) -> str | None:
    """Why no kernel quantizes the array on the default device, or None if one does."""
    return mosaic_gpu.unsupported_reason(a) or reason_not_here()


def cast_computed(
    arrays: Sequence[jax.Array | BlockwiseInt8],
    compute: Callable[..., Sequence[jax.Array]],
    casts: Sequence[Cast],
    wanted: Sequence[tuple[bool, bool]],
    split: Axes,
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
      split: Mesh axes that split the tensors.
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
        shared = split.of_scales(cast)
        if by_column is not None and cast.scaling == "tensor":
            largest = over_devices(reference.amax_of(by_column, axis=None), shared)
            by_row, by_column = (largest if is_wanted else None for is_wanted in copies)
        else:
            by_column = over_devices(by_column, shared)
        scale_of = functools.partial(reference.scale_of, dtype=cast.dtype)
        scales.append(jax.tree.map(scale_of, (by_row, by_column)))  # None is no leaf
    dtypes = tuple(cast.dtype for cast in casts)
    values = mosaic_gpu.quantize_computed(arrays, compute, scales, dtypes, name=f"{name}_quantize")
    return jax.tree.map(Quantized, values, scales)
