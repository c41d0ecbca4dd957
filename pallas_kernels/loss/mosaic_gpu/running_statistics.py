"""Running statistics of the logits of a row, and how a piece of a tile changes them; in a kernel.

A kernel sees the logits of a row piece by piece, 64 columns at a time. All arithmetic is float32.

The statistics take four instructions an element: a maximum, one fma that scales by log2(e) and
subtracts the maximum, exp2, and an addition. exp2 is the slow one, with 16 a clock and
multiprocessor.

Logits of columns after the vocabulary become -inf before any statistic. Running maxima start at
-1e30 and not at -inf, because -inf minus itself is NaN. So logits of -inf count as nothing.
`lowest_to_inf` puts -inf back at the end. Every logit is taken to be -inf or above -1e30.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.math import LOG2_E
from pallas_kernels.gpu.wgmma import ROW, TILE, over, splat
from pallas_kernels.loss.mosaic_gpu.stored_layouts import PIECE

LEAST_EXPONENT = -1e4  # finite exponent whose power of 2 is 0, as that of -inf
_LOWEST = -1e30


class Running(NamedTuple):
    """Statistics of the columns of each row that were seen so far; None for what is not kept.

    The kernel writes those that are kept in the order of the fields, as `jax.tree.leaves` gives
    them. "Label's column" is the column of the row's label.

    Attributes:
      sum_exp: Sum of `2^u` over the logits z. The exponent u is `z · log2(e) - offset`, or
        `(z - largest) · log2(e)` for a kernel without offsets.
      largest: Largest logit.
      label_logit: Logit of the label's column; -1e30 if it was not seen.
      largest_before: Largest logit before the label's column.
      total: Sum of the logits.
      weighted: Sum of `2^u · u`.
      argmax: Lowest column with the largest logit, as float32, exact up to 2^24.
      of_label: `2^u` of the label's column, set after the last piece of each tile.
    """

    sum_exp: Any
    largest: Any
    label_logit: Any
    largest_before: Any
    total: Any = None
    weighted: Any = None
    argmax: Any = None
    of_label: Any = None

    @classmethod
    def start(
        cls,
        *,
        with_total: bool = False,
        with_weighted: bool = False,
        with_argmax: bool = False,
        with_of_label: bool = False,
    ) -> "Running":
        """The numbers before the first column, as numbers of Python."""
        zero_if = lambda is_kept: 0.0 if is_kept else None
        return cls(
            sum_exp=0.0,
            largest=_LOWEST,
            label_logit=_LOWEST,
            largest_before=_LOWEST,
            total=zero_if(with_total),
            weighted=zero_if(with_weighted),
            argmax=zero_if(with_argmax),
            of_label=zero_if(with_of_label),
        )


def lowest_to_inf(maximum: jax.Array) -> jax.Array:
    """A running maximum, with -inf where no logit was above -inf."""
    return jnp.where(maximum == _LOWEST, -jnp.inf, maximum)


def with_piece(
    running: Running,
    logits: Any,
    label: Any,
    label_here: Any,
    *,
    first_column: Any,
    num_columns: Any,
    offset: Any,
    use_exp: Callable[[Any, Any, Any], None] | None,
) -> Running:
    """The running statistics after one more piece of a tile.

    Args:
      running: Statistics before the piece.
      logits: Logits of the piece, `[64, 64]` in the layout `TILE`.
      label: Label of each row, counted from the piece's first column.
      label_here: Whether a label may be one of the piece's columns, a scalar.
      first_column: First column of the piece.
      num_columns: Number of columns of the vocabulary from the piece's first column on; None if
        they fill the piece.
      offset: Offset of each row's exponents; None keeps the sums relative to the maximum.
      use_exp: Function that takes the exponentials, exponents and logits of the piece.
    """
    total, weighted, argmax = running.total, running.weighted, running.argmax
    if total is not None:
        total += jnp.sum(_without_padding(logits, num_columns, 0.0), axis=1)
    logits = _without_padding(logits, num_columns, -jnp.inf)
    piece_largest = jnp.max(logits, axis=1)
    if argmax is not None:
        argmax = _argmax(argmax, running.largest, logits, piece_largest, first_column)
    at_label, before = _around_label(logits, piece_largest, label, label_here)
    largest = jnp.maximum(running.largest, piece_largest)
    sum_exp = running.sum_exp
    if offset is None:
        # Subtracts before it multiplies: for -1e30, an fma as below would leave the rounding error
        # of the product.
        change = (running.largest - largest) * LOG2_E
        if weighted is not None:
            weighted = (weighted + sum_exp * change) * jnp.exp2(change)
        sum_exp *= jnp.exp2(change)
        offset = largest * LOG2_E
    exponent = logits * LOG2_E - over(offset, logits)
    exp = jnp.exp2(exponent)
    sum_exp += jnp.sum(exp, axis=1)
    if weighted is not None:
        # An exponent of -inf adds nothing.
        weighted += jnp.sum(exp * jnp.maximum(exponent, LEAST_EXPONENT), axis=1)
    if use_exp is not None:
        use_exp(exp, exponent, logits)
    label_logit = jnp.maximum(running.label_logit, at_label)
    largest_before = jnp.maximum(running.largest_before, before)
    return Running(sum_exp, largest, label_logit, largest_before, total, weighted, argmax)


def _without_padding(logits: Any, num_columns: Any, fill: float) -> Any:
    """The logits, with `fill` in columns after the vocabulary."""
    if num_columns is None:
        return logits
    return jax.lax.cond(
        num_columns < PIECE,
        lambda: jnp.where(_columns(logits.shape) < num_columns, logits, splat(fill, logits.shape)),
        lambda: logits,
    )


def _argmax(before: Any, largest: Any, logits: Any, piece_largest: Any, first_column: Any) -> Any:
    """The lowest column with the largest logit, from the one before this piece and this piece."""
    is_largest = logits == over(piece_largest, logits)
    none = plgpu.layout_cast(jnp.full(logits.shape, PIECE, jnp.int32), TILE)
    here = first_column + jnp.min(jnp.where(is_largest, _columns(logits.shape), none), axis=1)
    here = here.astype(jnp.float32)
    # A piece of -inf alone is below _LOWEST, and changes nothing. The tiles of a row come in rising
    # or falling order of columns, so of equal logits the lower column is chosen by comparison.
    lower = jnp.where(piece_largest == largest, jnp.minimum(here, before), before)
    return jnp.where(piece_largest > largest, here, lower)


def _around_label(
    logits: Any, piece_largest: Any, label: Any, label_here: Any
) -> tuple[jax.Array, jax.Array]:
    """Each row's logit in the label's column, and the largest before it; -1e30 for none."""

    def with_label():
        lowest = lambda: splat(_LOWEST, logits.shape)
        columns = lambda: _columns(logits.shape)
        labels = lambda: over(label, logits)
        at_label = jnp.where(columns() == labels(), logits, lowest())
        before = jnp.where(columns() < labels(), logits, lowest())
        return jnp.max(at_label, axis=1), jnp.max(before, axis=1)

    def without_label():
        none = splat(_LOWEST, label.shape, ROW)
        return none, jnp.where(label >= PIECE, piece_largest, none)

    return jax.lax.cond(label_here, with_label, without_label)


def _columns(shape: tuple[int, ...]) -> jax.Array:
    """The number of each column of a piece."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE)
