"""Gradients of tokens whose logsumexp is known, for any cotangents: three GEMMs.

The forward keeps the logsumexp of each token. So the backward computes the logits again and forms
the gradient in the logits at once (`gradient_terms.py`), without another pass: a kernel stores
dlogits and never logits. They lie in the memory of `dweight`, for all tokens or for the first ones,
or in chunks of tokens, as `plan.py` chooses. `by_columns.py` is the same for chunks of columns.

With `xla` logits and dlogits of a chunk are float32. Dlogits are rounded once, to `x.dtype`, as the
operand of two GEMMs. `dx` is rounded once. `dweight` accumulates in `accum_dtype`.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.loss.chunks import over_tokens
from pallas_kernels.loss.columns import (
    Columns,
    Gradients,
    place_in_vocabulary,
    product,
    rescaled,
    scale_for,
    scaled_coefficients,
    weight_product,
)
from pallas_kernels.loss.gradient_terms import GradientTerms, dlogits_of_logits
from pallas_kernels.loss.layout import Embedding
from pallas_kernels.loss.mosaic_gpu import exponentials, in_place
from pallas_kernels.loss.plan import InPlace, Settings, TokenChunks
from pallas_kernels.loss.token_loss import with_bias


def gradients(
    settings: Settings,
    plan: TokenChunks | InPlace,
    x: Float[Array, "T D"],
    weight: Embedding,
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " T"],
    terms: GradientTerms,
    *,
    temperature: float = 1.0,
) -> Gradients:
    """The gradients that follow from the gradient in the logits, which `terms` describes.

    A row that does not count adds nothing, whatever `x` holds, and its `dx` is 0. The dtype of
    `dweight` is the one before its last rounding.

    Args:
      settings: Settings; of the options only the softcap is read.
      plan: Tokens whose dlogits are in memory at a time.
      x: Hidden states.
      weight: Output embedding; this device's part of a split one.
      bias: Bias of the logits, if there is one.
      labels: Column of each token in the whole vocabulary. Another number is no column.
      terms: Terms of each token's gradient. The factor `1 / temperature` is a part of them.
      temperature: Divisor of the logits after the softcap.
    """
    first_column, _ = place_in_vocabulary(settings, weight)
    columns = Columns.make(settings, weight.astype(x.dtype), bias)
    scale = scale_for(x.dtype, *jax.tree.leaves(terms[1:]))
    arrays = x, labels - first_column, terms.divided(scale)
    dx_dtype = x.dtype if scale is None else jnp.float32
    one_chunk = functools.partial(_one_chunk, settings, columns, temperature, dx_dtype)
    first = functools.partial(_first_in_place, settings, columns, temperature)
    sums, dx = over_tokens(one_chunk, first, arrays, plan)
    dweight, dbias = columns.finished(sums, scale)
    return Gradients(rescaled(dx, scale).astype(x.dtype), dweight, dbias)


def gradients_of_losses(
    settings: Settings,
    plan: TokenChunks | InPlace,
    x: Float[Array, "T D"],
    weight: Embedding,
    bias: Float[Array, " V"] | None,
    coefficients: Float[Array, " T"],
    labels: Int[Array, " T"],
    lse: Float[Array, " T"],
) -> Gradients:
    """Gradients of `sum(coefficients · loss)`, for a plan that stores exponentials."""
    _, vocab_size = place_in_vocabulary(settings, weight)
    coefficients, scale = scaled_coefficients(x, coefficients, labels, vocab_size)
    assert scale is None  # exponentials are bfloat16
    terms = exponentials.terms_of_loss(lse, coefficients, settings.options.z_loss)
    return gradients(settings, plan, x, weight, bias, labels, terms)


def _one_chunk(settings: Settings, columns: Columns, temperature, dx_dtype, chunk, _):
    x, labels, terms = chunk
    x = jnp.where(terms.counts[:, None], x, 0)
    if settings.implementation == "mosaic_gpu":
        dlogits = exponentials.dlogits_of_linear(
            x,
            columns.weight,
            columns.bias,
            labels,
            terms,
            num_columns=columns.num_columns,
            softcap=settings.options.logit_softcap,
            temperature=temperature,
            weight_layout=columns.layout,
            config=settings.config.linear,
        )
    else:
        dlogits = dlogits_of_logits(
            with_bias(columns.logits(x), columns.bias),
            labels,
            terms,
            softcap=settings.options.logit_softcap,
            temperature=temperature,
        )
    dz = dlogits.astype(x.dtype)
    dx = product(f"tv,{columns.layout}->td", dz, columns.weight, dx_dtype)
    dweight = weight_product(dz, x, columns.weight, columns.layout, settings.accum_dtype)
    dbias = None if columns.bias is None else jnp.sum(dlogits.astype(jnp.float32), axis=0)
    return (dweight, dbias), dx


def _first_in_place(settings: Settings, columns: Columns, temperature, plan: InPlace, chunk):
    x, labels, terms = chunk
    # The GEMM of dweight multiplies every row of x, and 0 · NaN is NaN.
    x = jnp.where(terms.counts[:, None], x, 0)

    values = [
        exponentials.dlogits_of_linear(
            x[tokens],
            columns.weight,
            None,
            labels[tokens],
            terms.of(tokens),
            num_columns=columns.num_columns,
            softcap=settings.options.logit_softcap,
            temperature=temperature,
            stored=place,
            weight_layout=columns.layout,
            config=settings.config.linear,
        )
        for tokens, place in in_place.parts_of(plan.extent, x.shape[1], columns.layout)
    ]
    dx, dweight = in_place.gradients(
        values,
        None,
        x,
        columns.weight,
        extent=plan.extent,
        weight_layout=columns.layout,
        config=settings.config,
    )
    return (dweight, None), dx
