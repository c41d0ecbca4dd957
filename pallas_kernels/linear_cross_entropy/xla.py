"""Linear cross-entropy in token chunks, by XLA: one chunk of logits, gradients in the forward.

Why this exists. `x @ weight.T` for a 128k vocabulary is the largest buffer of a training step: 8192
tokens need 4.2 GB in float32, again for its gradient, and automatic differentiation computes it a
second time or keeps it. Here a `lax.scan` walks over chunks of tokens; while a chunk's logits
exist, its loss, its `dx` and its share of `dweight` are formed from them, so a loss with its
gradients takes three GEMMs and one chunk of logits, and the backward only multiplies by the
cotangent. (Liger-Kernel's fused linear cross-entropy, https://arxiv.org/abs/2410.10989, introduced
computing the gradients in the forward.)

Numerics. The GEMMs take operands of `x.dtype` (a weight of another dtype is rounded to it once) and
accumulate in float32; logits, softmax and losses are float32; dlogits are rounded once, to
`x.dtype`, as the operand of two GEMMs. `dx` is kept in float32 and `dweight` accumulates in
`accum_dtype` until the cotangent (which carries 1/num_tokens) has been applied in float32; then
each is rounded once.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.linear_cross_entropy.token_loss import (
    LossOptions,
    TokenLosses,
    dlogits,
    token_losses,
)

# On an H100 at V = 128256 (NOTES.md, 2026-11-21), against chunks of 2048 tokens, which is what
# 1 GiB makes of it: 512 take 38 % longer, 1024 take 6 %, 4096 save 2 %.
_LOGITS_BYTES = 2**30
_MIN_CHUNK = 1024


def default_chunk_size(num_tokens: int, vocab_size: int) -> int:
    """Tokens in a chunk: float32 logits of at most 1 GiB, but at least 1024 tokens, spread evenly.

    1024 tokens keep the GEMMs at their full speed; sizes are multiples of 128, the GEMM tile.
    """
    limit = max(_LOGITS_BYTES // (4 * vocab_size), _MIN_CHUNK)
    num_chunks = max(1, math.ceil(num_tokens / limit))
    return 128 * max(1, math.ceil(num_tokens / num_chunks / 128))


class _Gradients(NamedTuple):
    """Gradients of the coefficient-weighted sum of the losses; `dbias` is None without a bias."""

    dx: Float[Array, "T D"]
    dweight: Float[Array, "V D"]
    dbias: Float[Array, " V"] | None


def _logits(x, weight, bias):
    logits = jnp.einsum("td,vd->tv", x, weight, preferred_element_type=jnp.float32)
    return logits if bias is None else logits + bias.astype(jnp.float32)


def _scan_chunks(body, carry, arrays, chunk_size):
    """`lax.scan` of `body` over chunks of the leading axis, the last as short as it has to be."""
    num_tokens = jax.tree.leaves(arrays)[0].shape[0]
    split = num_tokens // chunk_size * chunk_size
    to_chunks = lambda a: a[:split].reshape(-1, chunk_size, *a.shape[1:])
    carry, outs = jax.lax.scan(body, carry, jax.tree.map(to_chunks, arrays))
    outs = jax.tree.map(lambda a: a.reshape(split, *a.shape[2:]), outs)
    if split < num_tokens:
        carry, tail = body(carry, jax.tree.map(lambda a: a[split:], arrays))
        outs = jax.tree.map(lambda *parts: jnp.concatenate(parts), outs, tail)
    return carry, outs


def _forward(x, weight, bias, labels, options, chunk_size) -> TokenLosses:
    weight = weight.astype(x.dtype)

    def body(carry, chunk):
        x, labels = chunk
        return carry, token_losses(_logits(x, weight, bias), labels, options)

    return _scan_chunks(body, None, (x, labels), chunk_size)[1]


def _forward_and_gradients(
    x, weight, bias, labels, coefficients, options, chunk_size, accum_dtype
) -> tuple[TokenLosses, _Gradients]:
    """Losses and gradients of `sum(coefficients · loss)`; coefficients of ignored tokens are 0."""
    weight = weight.astype(x.dtype)
    # Coefficients are powers of ten apart from 1 when a caller normalizes through `token_weights`;
    # divided by their maximum, the dlogits of a float16 model stay clear of its smallest number.
    finite = jnp.where(jnp.isfinite(coefficients), jnp.abs(coefficients), 0.0)
    largest = jnp.max(finite, initial=0.0)
    scale = jnp.where(largest > 0, largest, 1.0)

    def body(carry, chunk):
        dweight, dbias = carry
        x, labels, coefficients = chunk
        logits = _logits(x, weight, bias)
        losses = token_losses(logits, labels, options)
        dlogits_f32 = dlogits(logits, losses.lse, labels, coefficients, options)
        dz = dlogits_f32.astype(x.dtype)
        dx = jnp.einsum("tv,vd->td", dz, weight, preferred_element_type=jnp.float32)
        dweight += jnp.einsum("tv,td->vd", dz, x, preferred_element_type=accum_dtype)
        if dbias is not None:
            dbias += jnp.sum(dlogits_f32, axis=0)
        return (dweight, dbias), (losses, dx)

    dweight = jnp.zeros(weight.shape, accum_dtype)
    dbias = None if bias is None else jnp.zeros(bias.shape, jnp.float32)
    (dweight, dbias), (losses, dx) = _scan_chunks(
        body, (dweight, dbias), (x, labels, coefficients / scale), chunk_size
    )
    return losses, _scaled(_Gradients(dx, dweight, dbias), scale)


def _scaled(gradients: _Gradients, scale) -> _Gradients:
    return jax.tree.map(lambda g: (g.astype(jnp.float32) * scale).astype(g.dtype), gradients)


def _cast(gradients: _Gradients, x, weight, bias):
    dbias = None if gradients.dbias is None else gradients.dbias.astype(bias.dtype)
    return gradients.dx.astype(x.dtype), gradients.dweight.astype(weight.dtype), dbias


# The two differentiable functions. Only the losses carry a gradient; the other fields of
# `TokenLosses` are metrics, which the caller must not differentiate.


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def weighted_loss_sum(
    x: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    token_weights: Float[Array, " T"],
    labels: Int[Array, " T"],
    options: LossOptions,
    chunk_size: int,
    accum_dtype: jnp.dtype,
) -> tuple[Float[Array, ""], TokenLosses]:
    """`sum(token_weights · loss)`, float32, and the losses; weights of ignored tokens must be 0.

    Differentiated, the forward takes three GEMMs and the backward none.
    """
    del accum_dtype
    losses = _forward(x, weight, bias, labels, options, chunk_size)
    return jnp.sum(token_weights * losses.loss), losses


def _weighted_loss_sum_fwd(
    x, weight, bias, token_weights, labels, options, chunk_size, accum_dtype
):
    losses, gradients = _forward_and_gradients(
        x, weight, bias, labels, token_weights, options, chunk_size, accum_dtype
    )
    # Empty arrays carry the dtypes that the backward rounds to.
    empty = jax.tree.map(lambda a: a[:0], (x, weight, bias))
    out = jnp.sum(token_weights * losses.loss), losses
    return out, (gradients, losses.loss, empty)


def _weighted_loss_sum_bwd(options, chunk_size, accum_dtype, residuals, cotangents):
    del options, chunk_size, accum_dtype
    gradients, loss, empty = residuals
    cotangent = cotangents[0]
    return *_cast(_scaled(gradients, cotangent), *empty), cotangent * loss, None


weighted_loss_sum.defvjp(_weighted_loss_sum_fwd, _weighted_loss_sum_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def linear_token_losses(
    x: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " T"],
    options: LossOptions,
    chunk_size: int,
    accum_dtype: jnp.dtype,
) -> TokenLosses:
    """The loss of every token, for any cotangent; the backward recomputes logits (four GEMMs)."""
    del accum_dtype
    return _forward(x, weight, bias, labels, options, chunk_size)


def _linear_token_losses_fwd(x, weight, bias, labels, options, chunk_size, accum_dtype):
    del accum_dtype
    losses = _forward(x, weight, bias, labels, options, chunk_size)
    return losses, (x, weight, bias, labels)


def _linear_token_losses_bwd(options, chunk_size, accum_dtype, residuals, cotangents):
    x, weight, bias, labels = residuals
    coefficients = jnp.where(labels == options.ignore_index, 0.0, cotangents.loss)
    _, gradients = _forward_and_gradients(
        x, weight, bias, labels, coefficients, options, chunk_size, accum_dtype
    )
    return *_cast(gradients, x, weight, bias), None


linear_token_losses.defvjp(_linear_token_losses_fwd, _linear_token_losses_bwd)
