"""Losses and gradients of many tokens at once, by exponentials in the memory of `dweight`.

A float32 `dweight` of `[V, D]` has as much memory as a bfloat16 `[V, 2D]`, and holds nothing until
the first chunk's share is written. So this memory can first hold the exponentials of up to `2D`
tokens (`exponentials.py`), transposed. The loss then takes three GEMMs, no sum over chunks, and no
logits in other memory. A `dweight` of 16 bits has room for `D` tokens.

1. The GEMM of the logits stores the exponentials, with a row for each column of the vocabulary.
2. One GEMM of all exponentials makes `dx`.
3. GEMMs make `dweight` in bands of rows, each from the exponentials of its rows. A GEMM cannot
   write where its other blocks still read. So the exponentials of row v lie in row
   `v - num_copied`, and `num_copied` is at least a band. The first `num_copied` rows have no place
   above them. Their exponentials lie in the last rows, and are copied from there first. Then the
   bands are made from the last one upwards. Each writes over exponentials of rows below it, which
   are done. The first rows are made last, from the copies.

XLA knows one array both as bfloat16 and as float32 (a bitcast), and a band's GEMM reads from it and
writes into it. It reads other rows than it writes, so the result is right whether XLA works in
place or makes copies. `tests/aot` checks that there are no copies (JAX 0.11.2 and 0.12).

One loop makes all bands, and a second loop of two steps makes the first rows. The reason: XLA has a
kernel write into a part of an array only where a computation, such as a loop's body, returns that
array. Elsewhere XLA copies, and looks for other work to do beside the copy. For such a copy its
scheduler reordered the whole training step of a Llama of 1B, which then took 2.1 GiB more.

Memory beside arguments and results holds the copied exponentials, `x` times its factors, and
statistics: 154 MiB at 8192 x 4096 x 128256, where chunks of 2048 tokens take 581.

A `dweight` of `[D, V]` is made in bands of columns instead. `columns_in_place.py` says how.

The price: if the loss of one token is above 44 nats, the first GEMM runs again for all tokens, and
not only for a chunk.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu.device import Device
from pallas_kernels.gpu.hopper_gemm import BLOCK_M, Operand
from pallas_kernels.loss.config import Config
from pallas_kernels.loss.layout import Embedding, OneArray, WeightLayout, padding, sizes
from pallas_kernels.loss.low_rank import TwoParts
from pallas_kernels.loss.mosaic_gpu import columns_in_place, exponentials, products
from pallas_kernels.loss.mosaic_gpu.columns_in_place import Part
from pallas_kernels.loss.mosaic_gpu.stored_layouts import Interleaved, Stored, Transposed
from pallas_kernels.loss.token_loss import LogitStatistics


class Bands(NamedTuple):
    """How the rows of a `dweight [V, D]` are made, or the columns of a `dweight [D, V]`.

    Attributes:
      size: Number of rows of a band, a multiple of 128, or of columns, a multiple of 256; all of
        them if there are no bands.
      number: Number of bands. They cover the rows or columns after the first `num_copied`. It is 0
        or at least 2, because XLA makes no loop of a single step.
      num_copied: Number of rows or columns before the bands, which are made last, from copied
        exponentials. It is a multiple of 128 or 256, as `size` is, and at least `size`; 0 without
        bands. In `[D, V]` each band is made from a copy, too.
    """

    size: int
    number: int
    num_copied: int


class Extent(NamedTuple):
    """The tokens that are done without a sum over chunks.

    Attributes:
      num_inside: Number of tokens whose exponentials are in the memory of `dweight`.
      num_beside: Number of tokens after them whose exponentials are in other memory. If it is not
        0, no tokens are left, and the tokens inside fill the memory of `dweight`, because the
        products read all of it. Otherwise the tokens beside would be a single chunk, in a loop of
        one step, which XLA unrolls. XLA then does not sum `dweight` in place: at 8192 x 3584 x
        152064 on an H100 that took another array of this size, and 2 of 39 ms.
      dtype: Dtype of `dweight`.
      bands: Bands of rows in which `dweight` is made.
    """

    num_inside: int
    num_beside: int
    dtype: jnp.dtype
    bands: Bands

    @property
    def num_tokens(self) -> int:
        """Number of tokens inside and beside."""
        return self.num_inside + self.num_beside


def row_width(hidden_size: int, dtype: jnp.dtype) -> int:
    """Number of 16-bit exponentials that a row of `dweight` has the memory for."""
    return hidden_size * dtype.itemsize // 2


def unsupported_reason(
    x: Operand, weight: Operand, dtype: jnp.dtype, weight_layout: WeightLayout
) -> str | None:
    """Why `dweight`, of this dtype, cannot hold exponentials, or None if it can."""
    vocab_size, hidden_size = sizes(weight, weight_layout)
    width = row_width(hidden_size, dtype)
    if weight_layout == "vd":
        values = jax.ShapeDtypeStruct((vocab_size + padding(vocab_size), width), x.dtype)
        return products.unsupported_reason(values, weight, dtype)
    if vocab_size % columns_in_place.TILE:
        return (
            f"a vocabulary of {vocab_size} in [D, V] is not a multiple of {columns_in_place.TILE}"
        )
    if hidden_size % BLOCK_M:
        return f"weight is [D, V], and D = {hidden_size} is no multiple of {BLOCK_M}"
    values = jax.ShapeDtypeStruct((hidden_size, vocab_size * width // hidden_size), x.dtype)
    return products.unsupported_reason(values, weight, dtype)


def columns_of_block(weight_layout: WeightLayout) -> int:
    """Number that the columns of the vocabulary in a band are a multiple of."""
    return BLOCK_M if weight_layout == "vd" else columns_in_place.TILE


def time_of_bands(
    bands: Bands, hidden_size: int, weight_layout: WeightLayout, device: Device
) -> int:
    """Estimate of the time to make `dweight`, in columns of the tiles of one multiprocessor."""
    if weight_layout == "vd":
        cost = lambda n: products.best_tile(n, hidden_size, device)[0] + products.STORE_COST
        return bands.number * cost(bands.size) + 2 * cost(bands.num_copied // 2)
    tiles = lambda n: columns_in_place.num_tiles(hidden_size, n, device)
    per_tile = columns_in_place.TILE + products.STORE_COST
    of_bands = bands.number * (tiles(bands.size) * per_tile + products.STORE_COST)
    return of_bands + tiles(bands.num_copied) * per_tile + products.STORE_COST


def parts_of(
    extent: Extent, hidden_size: int, weight_layout: WeightLayout
) -> list[tuple[slice, Stored]]:
    """The tokens inside with the layout of their exponentials, and those beside if any are."""
    width = row_width(hidden_size, extent.dtype)
    lines = extent.num_beside + -extent.num_beside % BLOCK_M
    inside: Stored = Transposed(width, extent.bands.num_copied)
    beside: Stored = Transposed(lines, 0)
    if weight_layout == "dv":
        tile = columns_in_place.TILE
        inside = Interleaved(hidden_size, width // hidden_size, tile)
        beside = Interleaved(lines, 1, tile)
    parts = [(slice(0, extent.num_inside), inside)]
    if extent.num_beside:
        parts.append((slice(extent.num_inside, extent.num_tokens), beside))
    return parts


def loss_and_gradients(
    x: Float[Array, "T D"],
    weight: Embedding,
    labels: Int[Array, " T"],
    coefficients: Float[Array, " T"],
    *,
    extent: Extent,
    num_columns: int,
    z_loss: float,
    weight_layout: WeightLayout = "vd",
    config: Config,
) -> tuple[LogitStatistics, Float[Array, "T D"], OneArray]:
    """`(statistics, dx, dweight)` of the sum of `coefficients · loss`.

    Args:
      x: Hidden states of the tokens of `extent`, bfloat16.
      weight: Output embedding, bfloat16; V, a multiple of 128, or of 256 in `[D, V]`, is
        `num_columns` with padding.
      labels: Column of each token. A label outside of `[0, num_columns)` is no column.
      coefficients: Factor of each token's loss. Where it is 0, `dx` is 0, whatever the logits are.
      extent: Tokens inside and beside, dtype and bands of `dweight`.
      num_columns: Number of columns without padding.
      z_loss: Weight of the squared logsumexp.
      weight_layout: Layout of `weight` and `dweight`.
      config: Launch parameters.
    """
    made = [
        exponentials.loss_of_linear(
            x[tokens],
            weight,
            labels[tokens],
            coefficients[tokens],
            num_columns=num_columns,
            z_loss=z_loss,
            stored=place,
            weight_layout=weight_layout,
            config=config.linear,
        )
        for tokens, place in parts_of(extent, x.shape[1], weight_layout)
    ]
    found, values, factor = zip(*made, strict=True)
    found, factor = joined(found), joined(factor)
    dx, dweight = gradients(
        values, factor, x, weight, extent=extent, weight_layout=weight_layout, config=config
    )
    return found, dx, dweight


def joined(of_parts: Sequence[Any]) -> Any:
    """Arrays of all tokens, from those of each part."""
    if len(of_parts) == 1:
        return of_parts[0]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *of_parts)


def gradients(
    values: Sequence[Float[Array, "_ _"]],
    factor: Float[Array, " T"] | None,
    x: Float[Array, "T D"],
    weight: Embedding,
    *,
    extent: Extent,
    weight_layout: WeightLayout,
    config: Config,
) -> tuple[Float[Array, "T D"], OneArray]:
    """`(dx, dweight)` of dlogits `factor · values`.

    Args:
      values: Exponentials or dlogits inside of `dweight`'s memory, and beside if there are any.
      factor: Factor of each token; None for 1. Without factors, the `x` of tokens that do not count
        must be finite.
      x: Hidden states of the tokens of `extent`.
      weight: As for `loss_and_gradients`.
      extent: Tokens inside and beside, dtype and bands of `dweight`.
      weight_layout: Layout of `weight` and `dweight`.
      config: Launch parameters.
    """
    assert not isinstance(weight, TwoParts), "no dweight, no memory"
    width = row_width(x.shape[1], extent.dtype)
    assert not extent.num_beside or extent.num_inside == width, "products read all of the memory"
    parts = parts_of(extent, x.shape[1], weight_layout)
    dx = joined(
        [
            products.product(
                part,
                weight,
                a_layout="KM" if weight_layout == "vd" else "MK",
                b_layout="KN" if weight_layout == "vd" else "NK",
                a_stored=place if isinstance(place, Interleaved) else None,
                num_rows=tokens.stop - tokens.start,
                row_factor=None if factor is None else factor[tokens],
                first_row_of_b=place.shift if isinstance(place, Transposed) else 0,
                dtype=x.dtype,
                kernel_name="input_gradient",
                config=config.dx,
            )
            for part, (tokens, place) in zip(values, parts, strict=True)
        ]
    )
    scaled_x = x if factor is None else exponentials.scaled(x, factor)
    # All reads of whole exponentials end before a band writes over some. Otherwise XLA copies.
    values, dx, scaled_x = jax.lax.optimization_barrier((list(values), dx, scaled_x))
    inside, beside = values if len(values) == 2 else (values[0], None)
    by_bands = _by_rows if weight_layout == "vd" else _by_columns
    return dx, by_bands(inside, beside, scaled_x, extent, config)


def _by_rows(
    values: Float[Array, "V width"],
    beside: Float[Array, "V lines"] | None,
    scaled_x: Float[Array, "T D"],
    extent: Extent,
    config: Config,
) -> Float[Array, "V D"]:
    """`dweight` in bands of rows."""
    dtype, bands = extent.dtype, extent.bands
    (vocab_size, width), hidden_size = values.shape, scaled_x.shape[1]

    def rows_of(inside: jax.Array, start) -> jax.Array:
        """The rows of `dweight` from `start` on, from their exponentials inside and beside."""
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
        return rows_of(values, 0)

    copied = jax.lax.slice_in_dim(values, vocab_size - bands.num_copied, vocab_size)
    values, copied = jax.lax.optimization_barrier((values, copied))
    if dtype.itemsize > scaled_x.dtype.itemsize:
        values = values.reshape(vocab_size, hidden_size, -1)
    dweight = jax.lax.bitcast_convert_type(values, dtype)

    def with_rows(dweight: jax.Array, inside: jax.Array, start) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(dweight, rows_of(inside, start), start, 0)

    def with_band(i, dweight: jax.Array) -> jax.Array:
        start = vocab_size - (i + 1) * bands.size
        # The slice comes before the change of dtype. Otherwise the GEMM reads a copy of it.
        inside = jax.lax.dynamic_slice_in_dim(dweight, start - bands.num_copied, bands.size)
        inside = jax.lax.bitcast_convert_type(inside, scaled_x.dtype).reshape(bands.size, width)
        return with_rows(dweight, inside, start)

    def with_copied(i, dweight: jax.Array) -> jax.Array:
        half = bands.num_copied // 2
        inside = jax.lax.dynamic_slice_in_dim(copied, i * half, half)
        return with_rows(dweight, inside, i * half)

    dweight = jax.lax.fori_loop(0, bands.number, with_band, dweight)
    return jax.lax.fori_loop(0, 2, with_copied, dweight)


def _by_columns(
    values: Float[Array, "D width"],
    beside: Float[Array, "lines V"] | None,
    scaled_x: Float[Array, "T D"],
    extent: Extent,
    config: Config,
) -> Float[Array, "D V"]:
    """`dweight` in bands of columns, each from a copy of its exponentials."""
    dtype, bands = extent.dtype, extent.bands
    hidden_size, width = values.shape
    places: list[Any] = [place for _, place in parts_of(extent, hidden_size, "dv")]
    vocab_size = width // places[0].tokens_of_row
    if dtype.itemsize > values.dtype.itemsize:
        values = values.reshape(hidden_size, vocab_size, -1)
    dweight = jax.lax.bitcast_convert_type(values, dtype)

    def with_columns(dweight: jax.Array, start, num_columns: int) -> jax.Array:
        inside = jax.lax.dynamic_slice_in_dim(dweight, start, num_columns, axis=1)
        inside = jax.lax.bitcast_convert_type(inside, scaled_x.dtype).reshape(hidden_size, -1)
        # The copy ends before the kernel writes. Otherwise XLA would copy all of `dweight`.
        dweight, inside = jax.lax.optimization_barrier((dweight, inside))
        parts = [Part(inside, places[0], 0)]
        if beside is not None:
            parts.append(Part(beside, places[1], start))
        return columns_in_place.with_columns(
            dweight, parts, scaled_x, start, num_columns=num_columns, config=config.dweight
        )

    def with_band(i, dweight: jax.Array) -> jax.Array:
        return with_columns(dweight, vocab_size - (i + 1) * bands.size, bands.size)

    if bands.number:
        dweight = jax.lax.fori_loop(0, bands.number, with_band, dweight)
    return with_columns(dweight, 0, bands.num_copied or vocab_size)
