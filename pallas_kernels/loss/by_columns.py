"""Losses and gradients of some columns of the vocabulary at a time: four GEMMs.

The forward keeps the logsumexp of each token. The backward computes the logits of a slice of the
vocabulary again, for all tokens, so it takes any cotangent. It writes each row of `dweight` once,
in its final dtype. With `mosaic_gpu` a GEMM writes the rows where they belong
(`mosaic_gpu/products.py`). `dx` is the sum over the chunks, in float32. A float32 weight is rounded
a chunk at a time and never as a whole.

The numerics are the same as in `by_tokens.py`, except that `dweight` needs no sum over chunks.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.folding import fold_chunks
from pallas_kernels.gpu.arrays import at_aligned_addresses
from pallas_kernels.loss.columns import (
    Columns,
    Gradients,
    loss_of_logits,
    over_axes,
    place_in_vocabulary,
    rescaled,
    rows_that_count,
    scaled_coefficients,
    statistics_of_linear,
)
from pallas_kernels.loss.gradient_terms import GradientTerms
from pallas_kernels.loss.layout import Embedding, sizes
from pallas_kernels.loss.mosaic_gpu import exponentials, products
from pallas_kernels.loss.plan import ColumnChunks, Settings
from pallas_kernels.loss.token_loss import TokenLosses, combine, losses_of

_COLUMNS_AGAIN = 512  # 4 MiB of a weight with D = 4096
_WIDTH = 128  # columns of x at a time, the narrowest tile of our GEMM of dweight


def losses(
    settings: Settings,
    plan: ColumnChunks,
    x: Float[Array, "T D"],
    weight: Embedding,
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " T"],
) -> TokenLosses:
    """The losses alone: one GEMM."""
    first_column, vocab_size = place_in_vocabulary(settings, weight)
    local_labels = labels - first_column

    def statistics(part, start):
        weight, bias = part
        weight = weight.astype(x.dtype)
        labels = local_labels - start
        return None, statistics_of_linear(settings, x, weight, bias, labels, max(1, len(x)))

    axis = settings.column_axis
    parts = fold_chunks(statistics, (weight, bias), plan.num_columns, axis=axis, stack=True)[1]
    parts = jax.tree.map(lambda a: jnp.moveaxis(a, axis, 0), parts)
    found = over_axes(settings, combine(parts))
    return losses_of(found, labels, settings.options, vocab_size)


class _Tokens(NamedTuple):
    """Arrays of the tokens that all chunks share.

    Attributes:
      x: Hidden states.
      labels: Columns of this device's part of the vocabulary.
      coefficients: Coefficients of the losses, divided by `scale`.
      scale: Factor taken out of the coefficients; None if it is 1.
      terms: Terms of the gradient in the logits, with the logsumexp over the whole vocabulary.
      vocab_size: Size of the whole vocabulary.
    """

    x: Float[Array, "T D"]
    labels: Int[Array, " T"]
    coefficients: Float[Array, " T"]
    scale: Float[Array, ""] | None
    terms: GradientTerms
    vocab_size: int


def gradients(
    settings: Settings,
    plan: ColumnChunks,
    x: Float[Array, "T D"],
    weight: Embedding,
    bias: Float[Array, " V"] | None,
    coefficients: Float[Array, " T"],
    labels: Int[Array, " T"],
    lse: Float[Array, " T"],
    *,
    dweight_dtype: jnp.dtype,
) -> Gradients:
    """Gradients of `sum(coefficients · loss)`: three GEMMs.

    `dx` and `dbias` have the dtypes of `x` and `bias`.
    """
    first_column, vocab_size = place_in_vocabulary(settings, weight)
    coefficients, scale = scaled_coefficients(x, coefficients, labels, vocab_size)
    tokens = _Tokens(
        x=x,
        labels=labels - first_column,
        coefficients=coefficients,
        scale=scale,
        terms=exponentials.terms_of_loss(lse, coefficients, settings.options.z_loss),
        vocab_size=vocab_size,
    )

    def one_chunk(part, start):
        columns, dlogits = _dlogits(settings, plan, tokens, part, start)
        dbias = None
        if bias is not None:
            dbias = rescaled(jnp.sum(dlogits.astype(jnp.float32), axis=0), scale)
            dbias = columns.without_padding(dbias).astype(bias.dtype)
        dz = dlogits.astype(x.dtype)
        subscripts = f"tv,{settings.weight_layout}->td"
        dx = jnp.einsum(subscripts, dz, columns.weight, preferred_element_type=jnp.float32)
        return dx, (dweight_of(columns, dz, x), dbias)

    def dweight_of(columns, dz, x):
        dtype = dweight_dtype if scale is None else jnp.float32
        dweight = rescaled(_weight_gradient(settings, dz, x, dtype), scale)
        return columns.without_padding(dweight).astype(dweight_dtype)

    # `fold_chunks` writes zeros into dweight first: 0.64 ms of 47 at 8192 x 4096 x 128256 on an
    # H100. Without them XLA would round a float32 weight as a whole (1002 MiB) and not by chunks.
    dx, (dweight, dbias) = fold_chunks(
        one_chunk, (weight, bias), plan.num_columns, axis=settings.column_axis
    )
    dweight = _without_rows_that_do_not_count(
        settings, plan, tokens, weight, bias, dweight, dweight_of
    )
    return Gradients(rescaled(dx, scale).astype(x.dtype), dweight, dbias)


def _dlogits(settings: Settings, plan: ColumnChunks, tokens: _Tokens, part, start):
    """`(columns, dlogits)` of the columns from `start` on, whose weight and bias are `part`."""
    weight, bias = part
    columns = Columns.make(settings, weight.astype(tokens.x.dtype), bias)
    labels = tokens.labels - start
    if plan.by_exponentials:
        return columns, exponentials.dlogits_of_linear(
            tokens.x,
            columns.weight,
            None,
            labels,
            tokens.terms,
            num_columns=columns.num_columns,
            weight_layout=settings.weight_layout,
            config=settings.config.linear,
        )
    logits = columns.logits(tokens.x)
    _, dlogits = loss_of_logits(
        settings, columns, logits, labels, tokens.coefficients, tokens.terms.lse, tokens.vocab_size
    )
    return columns, dlogits


def _weight_gradient(settings: Settings, dz, x, dtype) -> jax.Array:
    """`dz.T @ x`, or its transpose `x.T @ dz`, rounded once."""
    is_kernel = settings.implementation == "mosaic_gpu"
    operands = (dz, x) if settings.weight_layout == "vd" else (x, dz)
    if is_kernel and products.unsupported_reason(*operands, dtype) is None:
        return products.product(
            *operands,
            a_layout="KM",
            dtype=dtype,
            kernel_name="weight_gradient",
            config=settings.config.dweight,
        )
    product = jnp.einsum(
        f"tv,td->{settings.weight_layout}", dz, x, preferred_element_type=jnp.float32
    )
    return product.astype(dtype)


def _without_rows_that_do_not_count(
    settings: Settings,
    plan: ColumnChunks,
    tokens: _Tokens,
    weight,
    bias,
    dweight,
    dweight_of: Callable[..., Any],
):
    """`dweight`, made again if a row of `x` that does not count is not finite.

    The GEMM of such a row would multiply 0 with NaN or infinity. `rows_that_count` would copy all
    tokens here: 64 MiB beside 43 at 8192 x 4096 x 128256 in 16 bits. So a loop makes `dweight`
    again, a few columns of x at a time. Where all rows are finite, the loop has no iteration. XLA
    copies the slices of the weight in this loop, so they are small.
    """
    x, coefficients = tokens.x, tokens.coefficients
    layout, axis = settings.weight_layout, settings.column_axis
    vocab_size, _ = sizes(weight, layout)
    size = min(plan.num_columns, vocab_size, _COLUMNS_AGAIN)
    width = _WIDTH if x.shape[1] % _WIDTH == 0 else x.shape[1]

    def again(i, dweight):
        start = jnp.minimum(i * size, vocab_size - size)
        part = (weight, bias)
        part = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, size, axis), part)
        columns, dlogits = _dlogits(settings, plan, tokens, at_aligned_addresses(part), start)
        dz = dlogits.astype(x.dtype)

        def some_columns(j, dweight):
            some_x = jax.lax.dynamic_slice_in_dim(x, j * width, width, axis=1)
            found = dweight_of(columns, dz, rows_that_count(some_x, coefficients))
            place = (start, j * width) if layout == "vd" else (j * width, start)
            return jax.lax.dynamic_update_slice(dweight, found, place)

        return jax.lax.fori_loop(0, x.shape[1] // width, some_columns, dweight)

    is_broken = (coefficients == 0) & ~jnp.all(jnp.isfinite(x), axis=1)
    times = jnp.where(jnp.any(is_broken), math.ceil(vocab_size / size), 0)
    return jax.lax.fori_loop(0, times, again, dweight)
