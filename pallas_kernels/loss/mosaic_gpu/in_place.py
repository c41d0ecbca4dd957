"""Losses and gradients of many tokens at once, with their exponentials where `dweight` will be.

A float32 `dweight` of `[V, D]` has the memory of `[V, 2D]` in bfloat16, and nothing is in it until
the first chunk's share is written. So the exponentials of up to `2D` tokens (`exponentials.py`) can
be kept there, all of them, transposed: three GEMMs, nothing is added up over chunks, and there are
no logits in memory beside. (A `dweight` of 16 bits has place for `D` tokens.)

1. The GEMM of the logits stores exponentials, with a row for each column of the vocabulary.
2. `dx` is one GEMM with all of them.
3. `dweight` is made a band of rows at a time from the exponentials of these rows. A GEMM cannot
   write where others of its blocks still read, so the exponentials of each row are some rows above
   its place, at least a band's; those of the first rows are at the end. From there they are copied,
   the bands are made from the last on upwards, and each writes where rows below it, which are done,
   had their exponentials. What is left in the end is made from the copies.

XLA knows one array as bfloat16 and as float32 (a bitcast), and a band's GEMM reads from it and
writes into it in place: the rows are others, so the order of XLA's operations is kept whether it
does so or makes copies. `tests/aot` checks that there are none (JAX 0.11.2 and 0.12).

All of this is in loops, the rows from copies in one of two steps, for XLA has a kernel write into a
part of an array only where that array is what a computation returns. Elsewhere it copies, and does
so beside other work; the scheduler that looks for such work then ordered the whole step of a Llama
of 1B for it, which took 2.1 GiB more.

Memory beside arguments and results: the copied exponentials, `x` times its factors, and statistics:
154 MiB at 8192 x 4096 x 128256, where chunks of 2048 tokens take 581.

What it costs: if the loss of one token is above 44 nats, the first GEMM runs again for all tokens
and not for those of a chunk.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu.hopper_gemm import BLOCK_M
from pallas_kernels.loss.config import Config
from pallas_kernels.loss.mosaic_gpu import exponentials, products
from pallas_kernels.loss.mosaic_gpu.statistics import Transposed
from pallas_kernels.loss.token_loss import LogitStatistics


class Bands(NamedTuple):
    """How the rows of `dweight` are made.

    Attributes:
      size: rows of a band, a multiple of 128; all rows, if there are no bands.
      number: of bands, the last rows; 0 or at least 2, because of one step XLA makes no loop.
      num_copied: rows above the bands, whose exponentials are copied, a multiple of 128, and at
        least a band; 0 without bands.
    """

    size: int
    number: int
    num_copied: int


class Extent(NamedTuple):
    """The tokens that are done without adding anything up.

    Attributes:
      num_inside: tokens whose exponentials are in the memory of `dweight`.
      num_beside: tokens after these, whose exponentials are in memory of their own, if that makes
        all tokens. (A chunk to be added would be a loop of one step, which XLA unrolls; the sum of
        `dweight` is then not in place. That was another array of its size, and 2 of 39 ms, at
        8192 x 3584 x 152064 on an H100.)
      dtype: dtype of `dweight`.
      bands: how the rows of `dweight` are made.
    """

    num_inside: int
    num_beside: int
    dtype: jnp.dtype
    bands: Bands

    @property
    def num_tokens(self) -> int:
        """Tokens inside and beside."""
        return self.num_inside + self.num_beside


def row_width(hidden_size: int, dtype: jnp.dtype) -> int:
    """Number of 16-bit exponentials that a row of `dweight` has the memory for."""
    return hidden_size * dtype.itemsize // 2


def loss_and_gradients(
    x: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    labels: Int[Array, " T"],
    coefficients: Float[Array, " T"],
    *,
    extent: Extent,
    z_loss: float,
    config: Config,
) -> tuple[LogitStatistics, Float[Array, "T D"], Float[Array, "V D"]]:
    """`(statistics, dx, dweight)` of the sum of `coefficients · loss`.

    Args:
      x: bfloat16, of the tokens of `extent`.
      weight: bfloat16; V is a multiple of 128.
      labels: columns; a label outside of `[0, V)` is none of these.
      coefficients: of the losses; where one is 0, so is `dx`, whatever the logits are.
      extent: see there.
      z_loss: weight of the squared logsumexp.
      config: launch parameters.
    """
    num_inside, dtype, bands = extent.num_inside, extent.dtype, extent.bands
    vocab_size, hidden_size = weight.shape
    width = row_width(hidden_size, dtype)

    def loss_and_dx(tokens: slice, place: Transposed) -> tuple[LogitStatistics, *tuple[Any, ...]]:
        found, values, factor = exponentials.loss_of_linear(
            x[tokens],
            weight,
            labels[tokens],
            coefficients[tokens],
            num_columns=vocab_size,
            z_loss=z_loss,
            transposed=place,
            config=config.linear,
        )
        dx = products.product(
            values,
            weight,
            a_layout="KM",
            num_rows=len(factor),
            row_factor=factor,
            first_row_of_b=place.shift,
            dtype=x.dtype,
            kernel_name="input_gradient",
            config=config.dx,
        )
        return found, values, factor, dx

    found, values, factor, dx = loss_and_dx(
        slice(num_inside), Transposed(width=width, shift=bands.num_copied)
    )
    beside = None
    if extent.num_beside:
        lines = extent.num_beside + -extent.num_beside % BLOCK_M
        found_beside, beside, *of_tokens = loss_and_dx(
            slice(num_inside, None), Transposed(width=lines, shift=0)
        )
        found, factor, dx = jax.tree.map(
            lambda *parts: jnp.concatenate(parts),
            (found, factor, dx),
            (found_beside, *of_tokens),
        )
    scaled_x = exponentials.scaled(x, factor)
    # What reads all of the exponentials has done so before any are written over; else XLA copies.
    values, beside, dx, scaled_x = jax.lax.optimization_barrier((values, beside, dx, scaled_x))

    def rows_of(inside: jax.Array, start) -> jax.Array:
        """Of `dweight`, from one on, whose exponentials inside of it these are."""
        parts = [inside]
        if beside is not None:
            parts.append(jax.lax.dynamic_slice_in_dim(beside, start, len(inside)))
        return products.product(
            parts,
            scaled_x,
            a_layout="MK",
            dtype=dtype,
            kernel_name="weight_gradient_rows",
            config=config.dweight,
        )

    if not bands.number:
        return found, dx, rows_of(values, 0)

    copied = jax.lax.slice_in_dim(values, vocab_size - bands.num_copied, vocab_size)
    values, copied = jax.lax.optimization_barrier((values, copied))
    if dtype.itemsize > x.dtype.itemsize:
        values = values.reshape(vocab_size, hidden_size, -1)
    dweight = jax.lax.bitcast_convert_type(values, dtype)

    def with_rows(dweight: jax.Array, inside: jax.Array, start) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(dweight, rows_of(inside, start), start, 0)

    def with_band(i, dweight: jax.Array) -> jax.Array:
        start = vocab_size - (i + 1) * bands.size
        # XLA has the GEMM read it where it is only if it is sliced before its dtype is changed.
        inside = jax.lax.dynamic_slice_in_dim(dweight, start - bands.num_copied, bands.size)
        inside = jax.lax.bitcast_convert_type(inside, x.dtype).reshape(bands.size, width)
        return with_rows(dweight, inside, start)

    def with_copied(i, dweight: jax.Array) -> jax.Array:
        half = bands.num_copied // 2
        inside = jax.lax.dynamic_slice_in_dim(copied, i * half, half)
        return with_rows(dweight, inside, i * half)

    dweight = jax.lax.fori_loop(0, bands.number, with_band, dweight)
    return found, dx, jax.lax.fori_loop(0, 2, with_copied, dweight)
