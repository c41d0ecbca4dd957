"""Dlogits as stored exponentials of the logits, times one factor for each token.

The gradient of a token's loss in its logits is `coefficient · (softmax - onehot)`. The softmax
needs the sum over the row, which is known only after the whole row. So a GEMM that stores logits
needs a pass after it that reads and writes them once. For 2048 tokens and V=128256 on an H100 the
pass takes 0.40 ms, and each of the three GEMMs 1.3 ms at D=2048. Here the GEMM stores
`e = exp(logit - o)`, with an offset `o` that is known before it. The sum S of a row is known after
it, and

    dlogits = (coefficient / S) · (e - S·onehot)

So dlogits are never formed. The factor `coefficient / S` multiplies the rows of `dx` after the GEMM
of `dx`, and the rows of `x` before the GEMM of `dweight`. The label's entry is one element of a
row. A z-loss multiplies the softmax by `a = 1 + 2 · z_loss · lse`. The factor is then
`a · coefficient / S`, and the label's entry is `e - S / a`.

The offset is the label's logit, from a dot product of two rows, so S is at least 1. A token whose
label is ignored has an offset above all logits, and exponentials of 0. If a logit of another token
is more than 44 nats (2^64) above the offset, or any logit is NaN, the GEMM runs once more over the
chunk, with the largest logit as the offset. The second kernel finds on the device whether it is
needed, and otherwise ends at once. With S up to 2^64 times the size of the vocabulary, `coefficient
/ S · x` stays a normal number of bfloat16 for coefficients down to 1e-13.

A backward that computes the logits again knows the logsumexp before its GEMM
(`dlogits_of_linear`). The logsumexp is then the offset, and the GEMM stores dlogits themselves,
except for the label's entry. A gradient of the entropy, a bias and a softcap change only what the
GEMM does with a logit before it is stored.

Rounding. Exponentials are float32 and rounded to bfloat16 once, as dlogits would be. Most of the
gradient is in the label's entry. The factor corrects the error of this entry's rounding, and gives
the other entries an error of the same size. `dx` stays float32 until the factor multiplies it. `x`
times its factor is rounded to bfloat16 for the GEMM of `dweight`, which adds one rounding error.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.gpu.hopper_gemm import TILE_K, Config, Operand
from pallas_kernels.gpu.math import LOG2_E
from pallas_kernels.loss.gradient_terms import GradientTerms
from pallas_kernels.loss.layout import Embedding, WeightLayout, entries
from pallas_kernels.loss.mosaic_gpu import linear_launch
from pallas_kernels.loss.mosaic_gpu.linear_exponentials import (
    Exponentials,
    Repetition,
    linear_exponentials,
)
from pallas_kernels.loss.mosaic_gpu.stored_layouts import Interleaved, Stored
from pallas_kernels.loss.token_loss import IGNORED, LogitStatistics, LossOptions, is_column

_LARGEST = 64  # log2 of the largest exponential that needs no second GEMM
_ABOVE_ALL = 1e30  # offset with which the exponential of each finite logit is 0


def unsupported_reason(
    x: Operand, weight: Operand, options: LossOptions, weight_layout: WeightLayout = "vd"
) -> str | None:
    """Why dlogits cannot have this form, or None if they can."""
    if x.dtype != jnp.bfloat16:
        return (
            f"x is {x.dtype}, and stored exponentials need the range of bfloat16; cast x to "
            "bfloat16"
        )
    # LossOptions has no defaults: a new option fails here until somebody decides about it.
    known = LossOptions(label_smoothing=0.0, z_loss=options.z_loss, logit_softcap=None)
    if options.label_smoothing:
        return (
            f"label_smoothing={options.label_smoothing} adds to every entry of the gradient; 0.0 "
            "allows stored exponentials"
        )
    if options.logit_softcap is not None:
        return (
            f"logit_softcap={options.logit_softcap} scales every entry of the gradient in its own "
            "way; None allows stored exponentials"
        )
    assert options == known
    return linear_launch.unsupported_reason(x, weight, weight_layout)


_STATIC = "num_columns", "z_loss", "stored", "weight_layout", "config"


# A program calls this for the first chunk and for the others. JAX lowers a jitted function once.
@functools.partial(jax.jit, static_argnames=_STATIC)
def loss_of_linear(
    x: Float[Array, "T D"],
    weight: Embedding,
    labels: Int[Array, " T"],
    coefficients: Float[Array, " T"],
    *,
    num_columns: int,
    z_loss: float = 0.0,
    stored: Stored | None = None,
    weight_layout: WeightLayout = "vd",
    config: Config | None = None,
) -> tuple[LogitStatistics, Float[Array, "rows columns"], Float[Array, " T"]]:
    """`(statistics, dz, factor)` of the logits, with dlogits `factor[:, None] * dz`.

    `dz` is `[T, V]`, or as `stored` says.

    A coefficient of 0 gives a row of finite numbers with the factor 0, whatever the logits are.

    Args:
      x: Hidden states, bfloat16.
      weight: Output embedding, bfloat16; V, a multiple of 128, is `num_columns` with padding.
      labels: Column of each token. A label outside of `[0, num_columns)` is no column.
      coefficients: Factor of each token's loss.
      num_columns: Number of columns without padding.
      z_loss: Weight of the squared logsumexp.
      stored: Layout of `dz`; None for `[T, V]`.
      weight_layout: Layout of `weight`.
      config: Launch parameters; chosen if None.
    """
    found, lse = exponentials_of_linear(
        x,
        weight,
        labels,
        coefficients != 0,
        num_columns=num_columns,
        stored=stored,
        weight_layout=weight_layout,
        config=config,
    )
    dz, factor = dlogits_and_factor(
        found,
        labels,
        coefficients,
        slope_of_softmax(z_loss, lse),
        num_columns=num_columns,
        stored=stored,
    )
    statistics = LogitStatistics(
        lse=lse,
        label_logit=found.label_logit,
        largest=found.largest,
        largest_before=found.largest_before,
        total=jnp.zeros_like(lse),
    )
    return statistics, dz, factor


def exponentials_of_linear(
    x: Float[Array, "T D"],
    weight: Embedding,
    labels: Int[Array, " T"],
    counts: Bool[Array, " T"],
    *,
    num_columns: int,
    temperature: float = 1.0,
    with_weighted: bool = False,
    stored: Stored | None = None,
    weight_layout: WeightLayout = "vd",
    config: Config | None = None,
) -> tuple[Exponentials, Float[Array, " T"]]:
    """`(exponentials, lse)` of the logits, relative to an offset that the module chooses.

    A token that does not count may have exponentials of 0.

    Args:
      x: Hidden states, bfloat16.
      weight: As for `loss_of_linear`.
      labels: As for `loss_of_linear`.
      counts: Whether each token counts.
      num_columns: Number of columns without padding.
      temperature: Divisor of the logits.
      with_weighted: Whether to compute `Exponentials.weighted`.
      stored: Layout of the exponentials; None for `[T, V]`.
      weight_layout: Layout of `weight`.
      config: Launch parameters; chosen if None.
    """
    # Without the barrier XLA slices a chunk out of all tokens twice, once for each kernel.
    x, labels, counts = jax.lax.optimization_barrier((x, labels, counts))
    column = jnp.where(is_column(labels, num_columns), labels, 0)
    of_label = entries(weight, column, weight_layout)
    label_logit = jnp.sum(x.astype(jnp.float32) * of_label.astype(jnp.float32), axis=1)
    # An ignored token has no label whose logit could be the offset, and it does not count.
    is_ignored = labels == IGNORED
    offset = jnp.where(is_ignored, _ABOVE_ALL, label_logit * (LOG2_E / temperature))
    exponentials = functools.partial(
        linear_exponentials,
        x,
        weight,
        labels,
        num_columns=num_columns,
        temperature=temperature,
        with_weighted=with_weighted,
        stored=stored,
        weight_layout=weight_layout,
        config=config,
    )
    scale = counts.astype(jnp.float32)
    # The GEMM of dweight multiplies the padding after the tokens with zeros, so the padding must be
    # finite. A scale makes it 0. Without one, an infinite weight times the zeros for x makes NaN.
    has_scale = stored is not None and len(x) % TILE_K != 0
    found = exponentials(offset, scale=scale if has_scale else None)
    largest = found.largest * LOG2_E
    # Also true where a number is NaN. The offset adds up the same products as the GEMM in another
    # order, and may overflow alone. Where it is infinity, the sum of exponentials is 0.
    is_wrong = ~((largest - offset <= _LARGEST) & (found.sum_exp > 0))
    is_wrong = jnp.where(is_ignored, found.sum_exp != 0, is_wrong)
    offset = jnp.where(is_wrong, largest, offset)
    found = exponentials(
        offset,
        scale=scale,
        repetition=Repetition(found, jnp.any(is_wrong)),
    )
    # The loss is `lse - label_logit`, and small where the label has nearly all of the sum. A small
    # loss keeps its digits in this form. It has a difference of logarithms, because a quotient of
    # the two sums overflows where the label is 88 nats below the largest logit.
    from_label = found.label_logit + (jnp.log(found.sum_exp) - jnp.log(found.of_label))
    lse = jnp.where(found.of_label > 0, from_label, (offset + jnp.log2(found.sum_exp)) / LOG2_E)
    return found, lse


def dlogits_and_factor(
    found: Exponentials,
    labels: Int[Array, " T"],
    coefficients: Float[Array, " T"],
    slope: Any,
    *,
    num_columns: int,
    stored: Stored | None,
) -> tuple[Float[Array, "rows columns"], Float[Array, " T"]]:
    """`(dz, factor)`, whose product is `coefficients · (slope · softmax - onehot)`."""
    has_gradient = is_column(labels, num_columns) & (coefficients != 0)
    at_label = found.of_label - found.sum_exp / slope
    # `reduce_precision`, because XLA drops a cast to 16 bits and back.
    bits = jnp.finfo(found.values.dtype)
    rounded = jax.lax.reduce_precision(at_label, bits.nexp, bits.nmant)
    dz = _with_labels(found.values, labels, rounded, has_gradient, stored=stored)
    factor = coefficients * slope / found.sum_exp
    factor *= jnp.where(has_gradient & (rounded != 0), at_label / rounded, 1.0)
    return dz, jnp.where(coefficients == 0, 0.0, factor)


def dlogits_of_exponentials(
    found: Exponentials,
    labels: Int[Array, " T"],
    terms: GradientTerms,
    *,
    num_columns: int,
    stored: Stored | None,
) -> Float[Array, "rows columns"]:
    """Dlogits made of stored exponentials, by a pass over all of them in place.

    A gradient of the entropy multiplies each probability with a number of its own, so one factor
    for each token is not enough. The logarithms are those of the rounded exponentials.
    """
    assert terms.softmax_log is not None, "`dlogits_and_factor` needs no pass"
    log_sum = jnp.log(found.sum_exp)
    # With p = e / S, p · (a + b · log p) is e · (a' + b' · log e).
    factors = (terms.softmax - terms.softmax_log * log_sum, terms.softmax_log)
    factors = [jnp.where(terms.counts, a / found.sum_exp, 0.0) for a in factors]
    factors = jax.lax.optimization_barrier(factors)  # or XLA divides for each logit

    def without_labels(values, factors):
        factor, of_log = (_spread(stored, a, values) for a in factors)
        # 0 · log(tiny) is 0. With a select where e is 0, XLA writes a boolean of each logit to
        # memory first, which takes as long as the pass.
        e = values.astype(jnp.float32)
        gradient = e * (factor + of_log * jnp.log(jnp.maximum(e, jnp.finfo(e.dtype).tiny)))
        has_gradient = (factor != 0) | (of_log != 0)
        return jnp.where(has_gradient, gradient, 0.0).astype(values.dtype)

    # In a loop that returns the array, XLA works in place. Otherwise it takes an array for the
    # results of the pass over a chunk: 501 MiB at 2048 x 128256.
    axis, half = int(stored is not None), len(labels) // 2
    if isinstance(stored, Interleaved) or len(labels) % 2:
        values = without_labels(found.values, factors)
    else:

        def of_half(i, values):
            part = lambda a, axis=0: jax.lax.dynamic_slice_in_dim(a, i * half, half, axis)
            of_part = without_labels(part(values, axis), jax.tree.map(part, factors))
            return jax.lax.dynamic_update_slice_in_dim(values, of_part, i * half, axis)

        values = jax.lax.fori_loop(0, 2, of_half, found.values)
    p = found.of_label / found.sum_exp
    at_label = terms.at_label(p, jnp.log(found.of_label) - log_sum)
    has_gradient = is_column(labels, num_columns) & terms.counts
    return _with_labels(values, labels, at_label, has_gradient, stored=stored)


def _spread(stored: Stored | None, of_tokens: jax.Array, values: jax.Array) -> jax.Array:
    """A number of each token at the places of its exponentials, to broadcast with `values`."""
    if stored is None:
        return of_tokens[:, None]
    if not isinstance(stored, Interleaved):
        return jnp.pad(of_tokens, (0, values.shape[1] - len(of_tokens)))[None]
    places = stored.height * stored.tokens_of_row
    of_rows = jnp.pad(of_tokens, (0, places - len(of_tokens))).reshape(-1, stored.height).T
    of_tile = jnp.repeat(of_rows, stored.tile, axis=1)
    return jnp.tile(of_tile, (1, values.shape[1] // of_tile.shape[1]))


_STATIC_OF_DLOGITS = "num_columns", "softcap", "temperature", "stored", "weight_layout", "config"


@functools.partial(jax.jit, static_argnames=_STATIC_OF_DLOGITS)
def dlogits_of_linear(
    x: Float[Array, "T D"],
    weight: Embedding,
    bias: Float[Array, " _"] | None,
    labels: Int[Array, " T"],
    terms: GradientTerms,
    *,
    num_columns: int,
    softcap: float | None = None,
    temperature: float = 1.0,
    stored: Stored | None = None,
    weight_layout: WeightLayout = "vd",
    config: Config | None = None,
) -> Float[Array, "rows columns"]:
    """The gradient in the logits that `terms` describes, where the logsumexp is known.

    Dlogits are computed in float32 and rounded once. A row that does not count is 0, whatever the
    logits are.

    Args:
      x: Hidden states, bfloat16 or float16.
      weight: Entries of the output embedding, all or some, in the dtype of `x`; V, a multiple of
        128, is `num_columns` with padding.
      bias: Bias of the logits, without padding.
      labels: Column of each token. A label outside of `[0, num_columns)` is no column.
      terms: Terms of each token's gradient.
      num_columns: Number of entries of `weight` without padding.
      softcap: Bound c of `c · tanh(z / c)`.
      temperature: Divisor of the logits after the softcap.
      stored: Layout of the result; None for `[T, V]`.
      weight_layout: Layout of `weight`.
      config: Launch parameters; chosen if None.
    """
    slope = terms.softmax_log
    found = linear_exponentials(
        x,
        weight,
        labels,
        terms.lse * LOG2_E,
        num_columns=num_columns,
        bias=bias,
        softcap=softcap,
        temperature=temperature,
        scale=terms.softmax,
        slope=None if slope is None else slope / LOG2_E,
        stored=stored,
        weight_layout=weight_layout,
        config=config,
    )
    at_label = terms.at_label(found.of_label, found.label_logit - terms.lse)
    if softcap is not None:
        at_label *= 1 - jnp.square(found.label_logit * (temperature / softcap))
    has_gradient = is_column(labels, num_columns) & terms.counts
    return _with_labels(found.values, labels, at_label, has_gradient, stored=stored)


def scaled(x: Float[Array, "T D"], factor: Float[Array, " T"]) -> Float[Array, "T D"]:
    """`x` times the factor of each token, rounded once; 0 where the factor is 0, even for a NaN."""
    product = x.astype(jnp.float32) * factor[:, None]
    return jnp.where(factor[:, None] == 0, 0.0, product).astype(x.dtype)


def terms_of_loss(
    lse: Float[Array, " T"], coefficients: Float[Array, " T"], z_loss: float
) -> GradientTerms:
    """The terms of the gradient of `coefficients · loss`, for a loss of these kernels."""
    # Not a product alone, because 0 · NaN is NaN.
    scale = jnp.where(coefficients == 0, 0.0, coefficients * slope_of_softmax(z_loss, lse))
    return GradientTerms(lse, scale, None, -coefficients)


def slope_of_softmax(z_loss: float, lse: Float[Array, " T"]) -> Any:
    """`a`, the derivative of `lse + z_loss · lse²`; never 0, as the label's entry is `e - S / a`.

    Where |a| is below 1e-6, it becomes 1e-6. The product of such an a with the softmax is lost
    beside the label's 1.
    """
    if not z_loss:
        return 1.0
    slope = 1 + 2 * z_loss * lse
    return jnp.where(jnp.abs(slope) < 1e-6, 1e-6, slope)


def _with_labels(
    values: Float[Array, "rows columns"],
    labels: Int[Array, " T"],
    at_label: Float[Array, " T"],
    where: Bool[Array, " T"],
    *,
    stored: Stored | None = None,
) -> Float[Array, "rows columns"]:
    """The values, with `at_label` in the label's entry of each token that `where` selects."""
    tokens = jnp.arange(len(labels), dtype=labels.dtype)
    place = (tokens, labels) if stored is None else stored.place(tokens, labels, len(values))
    # An entry that is dropped gets a row after the last, one for each, because indices are unique.
    place = jnp.where(where, place[0], len(values) + tokens), place[1]
    return values.at[place].set(at_label.astype(values.dtype), mode="drop", unique_indices=True)
