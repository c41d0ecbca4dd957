"""dlogits as a factor of each token times exponentials that the GEMM of the logits stores.

The gradient of a token's loss in its logits is `coefficient · (softmax - onehot)`, and the softmax
needs the sum over the row, which is there only when the whole row is: a pass over the stored logits
after their GEMM, of one read and one write (on an H100 0.40 ms for 2048 tokens and V=128256, for
which each of the three GEMMs takes 1.3 ms at D=2048). Here the GEMM stores `e = exp(logit - o)`
with an offset `o` that is known before it, the sum S of a row is there after it, and

    dlogits = (coefficient / S) · (e - S·onehot)

so that dlogits are never formed: the factor multiplies the rows of `dx` after their GEMM, and those
of `x` before that of `dweight`, and the label's entry is one element of a row. A z-loss multiplies
the softmax by `a = 1 + 2 · z_loss · lse`, so the factor by `a`, and divides what the label's entry
loses, `S / a`.

The offset is the label's logit, from a dot product of two rows, so that S is at least 1. Where a
logit is more than 44 nats above it (2^64), or is no number, the GEMM runs once more over the chunk,
with the largest logit for offset; a kernel finds out on the device, and without need ends at once.
With S up to 2^64 times the size of the vocabulary, `coefficient / S · x` stays a normal number of
bfloat16 for coefficients down to 1e-13.

Where the logsumexp is known before, as it is for vocabulary chunks, it is the offset, and what the
GEMM stores, times the coefficient, are dlogits (`dlogits_of_linear`), but for the label's entry.

Rounding. Exponentials are float32 and rounded to bfloat16 once, as dlogits would be. The factor
takes back what rounding has done to the label's entry, which is most of the gradient, at the price
of as much in the others. `dx` is float32 until it is multiplied by the factor. `x` times its factor
is rounded to bfloat16 for the GEMM of `dweight`, which leaves there the error of one rounding.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.gpu.hopper_gemm import TILE_K, Operand
from pallas_kernels.loss.mosaic_gpu import statistics as linear_statistics
from pallas_kernels.loss.mosaic_gpu.statistics import (
    Config,
    Repetition,
    Transposed,
    linear_exponentials,
)
from pallas_kernels.loss.token_loss import LogitStatistics, LossOptions

_LOG2_E = math.log2(math.e)
_LARGEST = 64  # exponent of 2, of an exponential that is not made again


def unsupported_reason(x: Operand, weight: Operand, options: LossOptions) -> str | None:
    """Why dlogits have no such form, or None if they have."""
    if x.dtype != jnp.bfloat16:
        return f"{x.dtype} has not the exponents of bfloat16"
    if options.label_smoothing or options.logit_softcap is not None:
        return f"{options} change entries of dlogits other than the label's, each in its own way"
    return linear_statistics.unsupported_reason(x, weight)


# A program calls it for the first chunk and for the others; a jitted function is lowered once.
@functools.partial(jax.jit, static_argnames=("num_columns", "z_loss", "transposed", "config"))
def loss_of_linear(
    x: Float[Array, "T D"],
    weight: Float[Array, "Vp D"],
    labels: Int[Array, " T"],
    coefficients: Float[Array, " T"],
    *,
    num_columns: int,
    z_loss: float = 0.0,
    transposed: Transposed | None = None,
    config: Config | None = None,
) -> tuple[LogitStatistics, Float[Array, "rows columns"], Float[Array, " T"]]:
    """`(statistics, dz, factor)` of `x @ weight.T`, with dlogits `factor[:, None] * dz`.

    `dz` is `[T, Vp]`, unless `transposed` says what it is.

    A coefficient of 0 gives a row of finite numbers with the factor 0, whatever the logits are.

    Args:
      x: bfloat16.
      weight: bfloat16; `Vp`, a multiple of 128, is `num_columns` with padding.
      labels: columns; a label outside of `[0, num_columns)` is none of these.
      coefficients: of the losses.
      num_columns: that count.
      z_loss: weight of the squared logsumexp.
      transposed: how `dz` is stored instead.
      config: launch parameters; chosen if None.
    """
    # Else XLA slices a chunk out of all tokens for the first kernel, and again for the second.
    x, labels, coefficients = jax.lax.optimization_barrier((x, labels, coefficients))
    is_column = _is_column(labels, num_columns)
    row_of_label = weight.at[jnp.where(is_column, labels, 0)].get(mode="promise_in_bounds")
    label_logit = jnp.sum(x.astype(jnp.float32) * row_of_label.astype(jnp.float32), axis=1)
    offset = label_logit * _LOG2_E
    exponentials = functools.partial(
        linear_exponentials,
        x,
        weight,
        labels,
        num_columns=num_columns,
        transposed=transposed,
        config=config,
    )
    scale = (coefficients != 0).astype(jnp.float32)
    # What follows the tokens in rows of exponentials is multiplied with zeros, and must be finite.
    # With a scale it is 0; without, an infinite element of the weight makes NaN of zeros for x.
    has_scale = transposed is not None and len(x) % TILE_K != 0
    found = exponentials(offset, scale=scale if has_scale else None)
    largest = found.largest * _LOG2_E
    # Also where one of these is NaN, or infinite in another order of the products.
    is_wrong = ~((largest - offset <= _LARGEST) & (found.total > 0))
    offset = jnp.where(is_wrong, largest, offset)
    found = exponentials(
        offset,
        scale=scale,
        repetition=Repetition(found, jnp.any(is_wrong)),
    )
    # The loss is their difference, and small where the label has nearly all of the sum.
    from_label = found.label_logit + jnp.log(found.total / found.of_label)
    lse = jnp.where(found.of_label > 0, from_label, (offset + jnp.log2(found.total)) / _LOG2_E)
    slope = _slope(z_loss, lse)
    has_gradient = is_column & (coefficients != 0)
    at_label = found.of_label - found.total / slope
    # XLA drops a cast to 16 bits and back.
    bits = jnp.finfo(x.dtype)
    rounded = jax.lax.reduce_precision(at_label, bits.nexp, bits.nmant)
    dz = _with_labels(
        found.values, labels, rounded, has_gradient, num_columns=num_columns, transposed=transposed
    )
    factor = coefficients * slope / found.total
    factor *= jnp.where(has_gradient & (rounded != 0), at_label / rounded, 1.0)
    statistics = LogitStatistics(
        lse=lse,
        label_logit=found.label_logit,
        largest=found.largest,
        largest_before=found.largest_before,
        total=jnp.zeros_like(label_logit),
    )
    return statistics, dz, jnp.where(coefficients == 0, 0.0, factor)


class KnownSum(NamedTuple):
    """What gradients take of the logsumexp; made once, outside of a loop over columns.

    Attributes:
      offset: in units of log 2.
      slope: `a`.
      scale: `scale · 2^(logit · log2(e) - offset)` is `coefficient · a · softmax`; 0 where the
        coefficient is.
    """

    offset: Float[Array, " T"]
    slope: Float[Array, " T"]
    scale: Float[Array, " T"]

    @classmethod
    def make(
        cls, lse: Float[Array, " T"], coefficients: Float[Array, " T"], z_loss: float
    ) -> "KnownSum":
        """For the coefficients of the losses, and the weight of a z-loss."""
        slope = jnp.broadcast_to(_slope(z_loss, lse), lse.shape)
        # Not 0 · NaN.
        scale = jnp.where(coefficients == 0, 0.0, coefficients * slope)
        return cls(lse * _LOG2_E, slope, scale)


@functools.partial(jax.jit, static_argnames=("num_columns", "config"))
def dlogits_of_linear(
    x: Float[Array, "T D"],
    weight: Float[Array, "Vp D"],
    labels: Int[Array, " T"],
    coefficients: Float[Array, " T"],
    known: KnownSum,
    *,
    num_columns: int,
    config: Config | None = None,
) -> Float[Array, "T Vp"]:
    """`coefficients · (a · softmax - onehot)` of `x @ weight.T`, where the logsumexp is known.

    `a` is that of the z-loss, 1 without one. In float32, rounded once. A row whose coefficient is 0
    is 0, whatever the logits are.

    Args:
      x: see `loss_of_linear`, and so the others but one.
      weight: columns of the vocabulary, all or some.
      labels: likewise.
      coefficients: likewise.
      known: of the logsumexp over the whole vocabulary, and these coefficients.
      num_columns: of `weight` without padding.
      config: launch parameters; chosen if None.
    """
    found = linear_exponentials(
        x,
        weight,
        labels,
        known.offset,
        num_columns=num_columns,
        scale=known.scale,
        config=config,
    )
    has_gradient = _is_column(labels, num_columns) & (coefficients != 0)
    at_label = coefficients * (known.slope * found.of_label - 1)
    return _with_labels(found.values, labels, at_label, has_gradient, num_columns=num_columns)


def scaled(x: Float[Array, "T D"], factor: Float[Array, " T"]) -> Float[Array, "T D"]:
    """`x` times the factor of each token, rounded once; 0 where that is 0, and not 0 · NaN."""
    product = x.astype(jnp.float32) * factor[:, None]
    return jnp.where(factor[:, None] == 0, 0.0, product).astype(x.dtype)


def _slope(z_loss: float, lse: Float[Array, " T"]) -> Any:
    """`a`, the derivative of `lse + z_loss · lse²`; never 0, for a label's entry is divided by it.

    Below 1e-6 what it multiplies is lost beside the label's 1.
    """
    if not z_loss:
        return 1.0
    slope = 1 + 2 * z_loss * lse
    return jnp.where(jnp.abs(slope) < 1e-6, 1e-6, slope)


def _is_column(labels: Int[Array, " T"], num_columns: int) -> Bool[Array, " T"]:
    return (labels >= 0) & (labels < num_columns)


def _with_labels(
    values: Float[Array, "rows columns"],
    labels: Int[Array, " T"],
    at_label: Float[Array, " T"],
    where: Bool[Array, " T"],
    *,
    num_columns: int,
    transposed: Transposed | None = None,
) -> Float[Array, "rows columns"]:
    """The values with those of the labels replaced."""
    tokens = jnp.arange(len(labels))
    if transposed is None:
        place = tokens, jnp.where(where, labels, values.shape[1])
    else:
        row = transposed.row_of(labels, num_columns)
        place = jnp.where(where, row, len(values)), tokens
    return values.at[place].set(at_label.astype(values.dtype), mode="drop", unique_indices=True)
