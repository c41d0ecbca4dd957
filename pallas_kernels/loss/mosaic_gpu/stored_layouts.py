"""Layouts in device memory of exponentials of logits, or of dlogits, other than `[T, V]`.

The memory of a `dweight` can hold the values of many tokens before `dweight` itself is made there
(`in_place.py`). `Transposed` is the layout for a `dweight` `[V, D]`, and `Interleaved` the one for
a `dweight` `[D, V]`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.gpu.hopper_gemm import TILE_M

PIECE = 64  # columns that the kernel stores at a time: 128 bytes of a row


class Transposed(NamedTuple):
    """Layout of exponentials with a row for each column of the vocabulary.

    Attributes:
      width: Width of the rows, a multiple of 64. A row begins with the tokens. Padding follows up
        to the next multiple of 64: the kernel makes its values from zeros for `x` and scale. The
        rest of the row is not written.
      shift: Number of rows by which each column lies above the row of its number, a multiple of 64.
        The first columns lie at the end.
    """

    width: int
    shift: int

    is_transposed = True

    def shape(self, num_columns: int) -> tuple[int, int]:
        """Shape of the array."""
        return num_columns, self.width

    def place(self, token: Any, column: Any, num_rows: int) -> tuple[Any, Any]:
        """Row and column in the array."""
        row = jnp.where(column < self.shift, column + num_rows, column) - self.shift
        return row, token


class Interleaved(NamedTuple):
    """Layout of exponentials in the memory of `[height, V]`, where each tile of columns stays.

    The bytes of `tile` columns of `[height, V]` hold exponentials in the same columns: for
    `2 · height` tokens if the array is float32. A row of the array holds, for each tile of columns
    in turn, the exponentials of each of its tokens.

    Attributes:
      height: Number of rows, a multiple of 128. Row r holds the tokens r, r + height and so on. Up
        to the next multiple of 64 tokens follow values that the kernel makes of zeros for `x` and
        scale. Rows after them are not written.
      tokens_of_row: Number of tokens that a row holds.
      tile: Number of columns of a tile, a multiple of 64 that divides V.
    """

    height: int
    tokens_of_row: int
    tile: int

    is_transposed = False

    def shape(self, num_columns: int) -> tuple[int, int]:
        """Shape of the array."""
        return self.height, self.tokens_of_row * num_columns

    def place(self, token: Any, column: Any, num_rows: int | None = None) -> tuple[Any, Any]:
        """Row and column in the array."""
        del num_rows
        turn, row = _divided(token, self.height)
        tile, inside = _divided(column, self.tile)
        return row, (tile * self.tokens_of_row + turn) * self.tile + inside

    def aligned(self, token: Any, column: Any) -> tuple[Any, Any]:
        """The result of `place` for multiples of 64, in a kernel."""
        row, place = self.place(token, column)
        return pl.multiple_of(row, TILE_M), pl.multiple_of(place, PIECE)


def _divided(a: Any, divisor: int) -> tuple[Any, Any]:
    """Quotient and remainder in the dtype of `a`, also where a Python number would have 64 bits."""
    number = np.asarray(divisor, a.dtype)[()]
    return jax.lax.div(a, number), jax.lax.rem(a, number)


type Stored = Transposed | Interleaved
