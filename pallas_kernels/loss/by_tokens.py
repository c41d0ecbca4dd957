"""Losses and gradients of some tokens at a time: three GEMMs.

*Chunks.* A loop walks over chunks of tokens. While a chunk's logits exist, it forms its loss, its
`dx` and its share of `dweight` from them. Liger-Kernel's fused linear cross-entropy introduced
gradients in the forward (https://arxiv.org/abs/2410.10989). The first chunk's product starts the
sum of `dweight`. The GEMMs of the other chunks add to it in place: each reads and writes `dweight`
once, which is why chunks should be large.

*In place.* The first chunk does not have to be small: as long as nothing is in `dweight`, its
memory can hold exponentials (`mosaic_gpu/in_place.py`). A float32 `dweight` has room for `2D`
tokens, and one of 16 bits for `D`. If no more than a chunk of tokens is left over, there is no sum
at all.

Numerics. The GEMMs take operands of `x.dtype` (a weight of another dtype is rounded to it once) and
accumulate in float32. With `xla` logits are float32. With `mosaic_gpu` logits in memory are rounded
to `x.dtype`, as in PyTorch. Logits whose exponentials are stored stay float32 and are never in
memory. Softmax and losses are float32. Coefficients, which include a mean's 1/N, are multiplied in
float32 before dlogits are rounded once, to `x.dtype`, as the operand of two GEMMs
(`mosaic_gpu/exponentials.py` has its own order). With `mosaic_gpu`, `dbias` sums the rounded
dlogits. `dweight` accumulates in `accum_dtype` and is rounded once, and `dx` is rounded once.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.loss.chunks import over_tokens
from pallas_kernels.loss.columns import (
    Columns,
    Gradients,
    loss_of_logits,
    over_axes,
    place_in_vocabulary,
    product,
    rescaled,
    rows_that_count,
    scaled_coefficients,
    statistics_of_linear,
    weight_product,
)
from pallas_kernels.loss.layout import Embedding
from pallas_kernels.loss.mosaic_gpu import exponentials, in_place
from pallas_kernels.loss.plan import InPlace, Settings, TokenChunks
from pallas_kernels.loss.token_loss import TokenLosses, losses_of


def losses(
    settings: Settings,
    plan: TokenChunks | InPlace,
    x: Float[Array, "T D"],
    weight: Embedding,
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " T"],
) -> TokenLosses:
    """The losses alone: one GEMM."""
    first_column, vocab_size = place_in_vocabulary(settings, weight)
    found = statistics_of_linear(
        settings,
        x,
        weight.astype(x.dtype),
        bias,
        labels - first_column,
        plan.without_dweight.chunk_size,
    )
    return losses_of(over_axes(settings, found), labels, settings.options, vocab_size)


def losses_and_gradients(
    settings: Settings,
    plan: TokenChunks | InPlace,
    x: Float[Array, "T D"],
    weight: Embedding,
    bias: Float[Array, " V"] | None,
    coefficients: Float[Array, " T"],
    labels: Int[Array, " T"],
) -> tuple[TokenLosses, Gradients]:
    """Losses and gradients of `sum(coefficients · loss)`, before the last rounding of `dweight`."""
    place = place_in_vocabulary(settings, weight)
    columns = Columns.make(settings, weight.astype(x.dtype), bias)
    coefficients, scale = scaled_coefficients(x, coefficients, labels, place[1])
    one_chunk = functools.partial(_chunk_by_exponentials, settings, columns)
    if not plan.by_exponentials:
        dx_dtype = x.dtype if scale is None else jnp.float32
        one_chunk = functools.partial(_chunk_by_logits, settings, columns, place, dx_dtype)
    first = functools.partial(_first_in_place, settings, columns)
    sums, (losses, dx) = over_tokens(one_chunk, first, (x, labels, coefficients), plan)
    dx = rescaled(dx, scale)
    dweight, dbias = columns.finished(sums, scale)
    return losses, Gradients(dx, dweight, dbias)


# Bodies of `over_tokens`: `((dweight, dbias), (losses, dx))` of a chunk.


def _chunk_by_logits(settings: Settings, columns: Columns, place, dx_dtype, chunk, _):
    x, labels, coefficients = chunk
    first_column, vocab_size = place
    logits = columns.logits(x)
    local = labels - first_column
    if not settings.vocab_axes:
        found, dlogits = loss_of_logits(settings, columns, logits, local, coefficients)
    else:
        found, _ = loss_of_logits(settings, columns, logits, local)
        found = over_axes(settings, found)
        _, dlogits = loss_of_logits(
            settings, columns, logits, local, coefficients, found.lse, vocab_size
        )
    losses = losses_of(found, labels, settings.options, vocab_size)
    dz = dlogits.astype(x.dtype)
    dx = product(f"tv,{columns.layout}->td", dz, columns.weight, dx_dtype)
    dbias = None if columns.bias is None else jnp.sum(dlogits.astype(jnp.float32), axis=0)
    counted = rows_that_count(x, coefficients)
    dweight = weight_product(dz, counted, columns.weight, columns.layout, settings.accum_dtype)
    return (dweight, dbias), (losses, dx)


def _chunk_by_exponentials(settings: Settings, columns: Columns, chunk, _):
    x, labels, coefficients = chunk
    found, dz, factor = exponentials.loss_of_linear(
        x,
        columns.weight,
        labels,
        coefficients,
        num_columns=columns.num_columns,
        z_loss=settings.options.z_loss,
        weight_layout=columns.layout,
        config=settings.config.linear,
    )
    losses = losses_of(found, labels, settings.options, columns.num_columns)
    dx = product(f"tv,{columns.layout}->td", dz, columns.weight, jnp.float32)
    dx = (dx * factor[:, None]).astype(x.dtype)
    scaled_x = exponentials.scaled(x, factor)
    dweight = weight_product(dz, scaled_x, columns.weight, columns.layout, settings.accum_dtype)
    return (dweight, None), (losses, dx)


def _first_in_place(settings: Settings, columns: Columns, plan: InPlace, chunk):
    x, labels, coefficients = chunk
    found, dx, dweight = in_place.loss_and_gradients(
        x,
        columns.weight,
        labels,
        coefficients,
        extent=plan.extent,
        num_columns=columns.num_columns,
        z_loss=settings.options.z_loss,
        weight_layout=columns.layout,
        config=settings.config,
    )
    losses = losses_of(found, labels, settings.options, columns.num_columns)
    return (dweight, None), (losses, dx)
